"""The ceiling of the hand-off: decoding replaced by a batch that is there already, by batches and bytes a second.

    python benchmarks/hand_off.py

Two workers. rfstream in both assemblies reads samples (small ones) and does not decode them. torch's DataLoader ships
the same packed batch, with and without the copy into the training process's own memory that rfstream's batches have
had; and a dict of tensors an image, as training code commonly does. Of a batch are counted: objects (tensors or
buffers) that cross, their bytes, and file descriptors that the training process holds for it.
"""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from common import RESULTS, cpu_seconds, in_turn, reading, report
from peers.ready import OBJECTS, Across, Ready, arrays_of, dataloader, stream

from rfstream.stream.wire import WireBatch, to_row
from rfstream.tools.scenes import make_scenes

WORKERS = 2
WARM_UP = 8
"""Batches before the clock runs."""
HELD = 4
"""Batches that are kept beside another, to count what each of them holds."""
SCENES = 256

Way = Callable[[Ready, str], Iterator[Across]]
WAYS: dict[str, Way] = {
    "rfstream-fused": lambda ready, pack: stream(ready, WORKERS, pack, "fused"),
    "rfstream-staged": lambda ready, pack: stream(ready, WORKERS, pack, "staged"),
    "dataloader-packed": lambda ready, _: dataloader(ready, WORKERS, packed=True, copied=False),
    "dataloader-packed-copied": lambda ready, _: dataloader(ready, WORKERS, packed=True, copied=True),
    "dataloader-per-image": lambda ready, _: dataloader(ready, WORKERS, packed=False, copied=False),
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a batch."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in tensors_in(item)]


def across(way: str, ready: Ready, batch: Across) -> dict[str, float]:
    """Objects and bytes of a batch that cross from worker to training process."""
    if way.startswith("rfstream"):
        row = to_row([WireBatch(0, 0, [str(i) for i in range(ready.batch_size)], arrays_of(ready))])
        return {"objects": row.num_columns, "MB a batch": row.nbytes / 1e6}
    tensors = tensors_in(batch)
    return {"objects": len(tensors), "MB a batch": sum(tensor.nbytes for tensor in tensors) / 1e6}


def measure(way: str, ready: Ready, pack: str, seconds: float) -> dict[str, float]:
    """Batches for ``seconds``, then a few to keep."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor a tensor soon passes the usual 1024
    batches = WAYS[way](ready, pack)
    for _ in itertools.islice(batches, WARM_UP):
        pass
    began, spent, taken = time.perf_counter(), cpu_seconds(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        next(batches)["images"][:, :, ::64, ::64].sum()
        taken += 1
    spent = cpu_seconds() - spent
    held = [next(batches)]
    counted = across(way, ready, held[0])
    before = psutil.Process().num_fds()
    held += itertools.islice(batches, HELD)
    return {
        "batches/s": taken / elapsed,
        "GB/s": taken / elapsed * counted["MB a batch"] / 1e3,
        "CPU-ms a batch": spent / taken * 1e3,
        **counted,
        "descriptors": (psutil.Process().num_fds() - before) / HELD,
    }


def main(
    batch_sizes: str = "16,64",
    seconds: Annotated[float, typer.Option(help="of one reading")] = 4.0,
    repetitions: int = 3,
    out: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure every way, for detection and segmentation and each batch size, in turn."""
    if child:
        way, task, size, pack = json.loads(child)
        typer.echo(json.dumps(measure(way, Ready(task, size), pack, seconds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        scenes = make_scenes(Path(folder) / "scenes", train=SCENES, val=1, seed=0)
        pack = f"{folder}/pack"
        subprocess.run([sys.executable, "-m", "rfstream.cli", "pack", str(scenes), pack], check=True)
        variants = {
            f"{task} {size}: {way}": partial(
                reading, __file__, f"--child={json.dumps([way, task, size, pack])}", f"--seconds={seconds}"
            )
            for task in OBJECTS
            for size in map(int, batch_sizes.split(","))
            for way in WAYS
        }
        title = "hand off: a ready batch of 576 px through two workers"
        report(title, in_turn(variants, repetitions), {"seconds": seconds, "workers": WORKERS}, out)


if __name__ == "__main__":
    typer.run(main)

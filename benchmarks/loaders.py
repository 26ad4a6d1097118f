"""Loaders side by side: images a second, CPU-seconds and memory of all processes, in turn, with what the machine could
give at most.

    python benchmarks/loaders.py ../shared/data/cards
    python benchmarks/loaders.py ../shared/data/cards --images 208 --repetitions 1 --workers 2
    python benchmarks/loaders.py ../shared/data/cards --rows rfdetr-stream,rfdetr-loose,rfdetr-tar

SOURCE is in Roboflow's layout. Every row delivers the same images, augmented alike, as batches of tensors in the
training process, and a checksum over an epoch says so; those of RF-DETR have its own augmentation, and their shape is
looked at. Each reading is an epoch in a process of its own. Peers take the best of ``--workers``; rfstream has an actor
a core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import typer
from common import RESULTS, Readings, cpu_seconds, in_turn, object_store, reading, report, tree_memory
from peers import bounds
from peers.work import Delivered, Job, checksum, repeat

SHARDS = 24
"""Of the tar pack: who deals whole shards to workers needs many."""
STORE_EVERY_S = 0.5


@dataclass(frozen=True)
class Row:
    """A loader: the module of ``peers`` and what its ``batches`` is given beside the job."""

    module: str
    arguments: tuple[Any, ...] = ()
    peer: bool = True
    """Takes the best of several numbers of workers."""
    same: bool = True
    """Delivers the same pixels as all others."""


BOUNDS: dict[str, Callable[[Job, int], bounds.Part]] = {"decode": bounds.decode, "in-process": bounds.in_process}
LOADERS = {
    "ready-batch": Row("mock", peer=False, same=False),
    "rfstream-fused": Row("stream", ("fused",), peer=False),
    "rfstream-staged": Row("stream", ("staged",), peer=False),
    "dataloader-uint8": Row("dataloader", ("uint8",)),
    "dataloader-float": Row("dataloader", ("float",)),
    "dataloader-uint8-pillow": Row("dataloader", ("uint8", "pillow")),
    "dataloader-float-pillow": Row("dataloader", ("float", "pillow")),
    "webdataset": Row("webdataset"),
    "litdata": Row("litdata"),
    "mosaicml-streaming": Row("mosaicml"),
    "ray-data": Row("ray_data"),
    "grain": Row("grain"),
    "spdl": Row("spdl"),
    "rfdetr-stream": Row("rfdetr", ("stream",), peer=False, same=False),
    "rfdetr-loose": Row("rfdetr", ("loose",), same=False),
    "rfdetr-tar": Row("rfdetr", ("tar",), same=False),
}
NAMES = [*BOUNDS, *LOADERS]


def prepare(source: Path, job: Job, images: int, rows: list[str]) -> None:
    """Loose files and a tar pack of them, and what else ``rows`` read."""
    repeat(source, job, images)
    shard = sum(file.stat().st_size for file in (job.data / "loose" / "train").iterdir()) // SHARDS
    pack = [str(job.data / "loose"), str(job.pack), "--splits=train,valid:val", f"--max-shard-bytes={shard}"]
    subprocess.run([sys.executable, "-m", "rfstream.cli", "pack", *pack], check=True)
    for module in {LOADERS[name].module for name in rows if name in LOADERS}:
        of_peer = import_module(f"peers.{module}")
        if hasattr(of_peer, "prepare"):
            of_peer.prepare(job)


def batches_of(name: str, job: Job) -> Iterator[Delivered]:
    """An epoch of the loader ``name``."""
    row = LOADERS[name]
    stream: Iterator[Delivered] = import_module(f"peers.{row.module}").batches(job, *row.arguments)
    return stream


def with_store(stream: Iterator[Delivered]) -> Iterator[tuple[Delivered, int]]:
    """Each batch, and the bytes in Ray's object store when last looked at; 0 without Ray."""
    store, looked = 0, 0.0
    for batch in stream:
        if ray.is_initialized() and time.perf_counter() - looked > STORE_EVERY_S:
            store, looked = object_store()["store"], time.perf_counter()
        yield batch, store


def measure(name: str, job: Job, images: int) -> dict[str, Any]:
    """One reading, in this process."""
    if name in BOUNDS:
        return bounds.measure(job, BOUNDS[name])
    began = time.perf_counter()
    row = LOADERS[name]
    figures = timed(batches_of(name, job), images, job.size if row.same else None, began)
    if not row.same:
        del figures["checksum"]
    return figures


def timed(stream: Iterator[Delivered], images: int, size: int | None, began: float) -> dict[str, Any]:
    """Take ``images`` images off ``stream``, which was asked for when it ``began``; see :func:`check` for ``size``.

    The clock runs from a fifth to nine tenths of them: by then workers are up, and still have work to do. Memory is
    looked at when it stops.
    """
    first = mark = spent = 0.0
    seen = total = warm = most = 0
    figures: dict[str, Any] = {}
    for batch, store in with_store(stream):
        first = first or time.perf_counter() - began
        check(batch, size)
        seen += len(batch.images)
        total += checksum(batch)
        most = max(most, store)
        if not mark and seen >= images // 5:
            warm, mark, spent = seen, time.perf_counter(), cpu_seconds()
        elif not figures and seen >= images * 9 // 10:
            seconds, spent, count = time.perf_counter() - mark, cpu_seconds() - spent, seen - warm
            figures = {"images/s": count / seconds, "CPU-s per 1000 images": spent / count * 1000}
            figures["memory, MB"] = tree_memory()[1] / 1e6
        if seen >= images:
            break
    if not figures or (size and seen < images):  # RF-DETR leaves out what its workers can't share evenly
        raise ValueError(f"{seen} images came of {images}")
    figures |= {"first batch, s": first, "checksum": total}
    return figures | ({"object store, MB": most / 1e6} if most else {})


def check(batch: Delivered, size: int | None) -> None:
    """Raise ValueError unless ``batch`` is what a row has to deliver: of any size where ``size`` is None."""
    images, boxes, labels, offsets = batch
    expected = (3, *images.shape[2:]) if size is None else (3, size, size)
    if images.dtype not in (torch.uint8, torch.float32) or images.shape[1:] != expected:
        raise ValueError(f"images are {images.dtype} of shape {tuple(images.shape)}")
    if boxes.shape != (len(labels), 4) or len(offsets) != len(images) + 1 or offsets[-1] != len(labels):
        raise ValueError(f"targets are {tuple(boxes.shape)} boxes, {len(labels)} labels, offsets {offsets.tolist()}")


class Bench:
    """Readings of rows on one prepared folder; complains of one that delivers other images than the first did."""

    def __init__(self, job: Job, images: int) -> None:
        self.checksums: dict[str, int] = {}
        self._job = job
        self._images = images

    def read(self, name: str, workers: int, images: int | None = None) -> dict[str, float]:
        """One reading of row ``name``, in a process of its own; of fewer ``images`` than all without a checksum."""
        job, count = replace(self._job, workers=workers), images or self._images
        spec = json.dumps([name, str(job.data), job.size, job.batch_size, job.workers, count])
        figures = reading(__file__, str(job.data), f"--child={spec}")
        total = figures.pop("checksum", 0)
        if total and count == self._images:
            self.checksums[name] = total
            if len(set(self.checksums.values())) > 1:
                raise ValueError(f"{name} delivers other images than the rest: {self.checksums}")
        return figures

    def sweep(self, names: list[str], workers: list[int], images: int) -> dict[str, dict[int, float]]:
        """Images a second of each row by its number of workers, from one shorter reading each."""
        return {name: {number: self.read(name, number, images)["images/s"] for number in workers} for name in names}


def versions() -> dict[str, str]:
    """Of what was measured, as far as it is installed."""
    packages = ("ray", "torch", "webdataset", "litdata", "mosaicml-streaming", "grain", "spdl", "rfdetr")
    return {each.name: each.version for each in distributions() if each.name in packages}


def main(
    source: Path,
    images: Annotated[int, typer.Option(help="repeat SOURCE to so many; a multiple of the batch size")] = 2000,
    size: Annotated[int, typer.Option(help="pixels a side")] = 576,
    batch_size: int = 16,
    cores: Annotated[int, typer.Option(help="CPU cores that all together may use")] = 2,
    workers: Annotated[str, typer.Option(help="numbers of workers that peers are tried with")] = "1,2,3,4",
    repetitions: int = 3,
    rows: Annotated[str, typer.Option(help="by comma, in this order")] = ",".join(NAMES),
    out: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Prepare SOURCE for every loader, look for the best number of workers of each, and measure them in turn."""
    if child:
        name, data, *sizes, count = json.loads(child)
        typer.echo(json.dumps(measure(name, Job(Path(data), *sizes), count)))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    names, numbers = rows.split(","), [int(number) for number in workers.split(",")]
    if unknown := set(names) - set(NAMES):
        raise typer.BadParameter(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if images % batch_size:
        raise typer.BadParameter(f"{images} images are no whole number of batches of {batch_size}")
    with tempfile.TemporaryDirectory() as made:
        job = Job(Path(made), size, batch_size, cores)
        prepare(source, job, images, names)
        bench = Bench(job, images)
        peers = [name for name in names if name in LOADERS and LOADERS[name].peer]
        sweep = bench.sweep(peers, numbers, images // 4) if len(numbers) > 1 else {}
        best = {name: max(numbers, key=lambda number: sweep[name][number]) for name in sweep}
        chosen = dict.fromkeys(names, cores) | {name: best.get(name, numbers[0]) for name in peers}
        readings: Readings = in_turn({name: partial(bench.read, name, chosen[name]) for name in names}, repetitions)
    title = f"loaders {source.name} {size}: {images} images, batch {batch_size}, {cores} cores"
    setting = {"source": source.name, "images": images, "size": size, "batch_size": batch_size, "cores": cores}
    more = {"workers": chosen, "sweep": sweep, "checksums": bench.checksums, "versions": versions()}
    report(title, readings, setting, out, **more)


if __name__ == "__main__":
    typer.run(main)

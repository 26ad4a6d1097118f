"""What one streaming execution can hand out: ready batches of three sizes, by ranks, actors, shards and nodes.

    python benchmarks/split_scale.py
    python benchmarks/split_scale.py --only "ranks .*" --repetitions 1

rfstream's own pipeline and hand-over; decoding is replaced by a batch that is there already, and a rank by a thread
that takes Arrow rows without a copy and counts them. What is left is Ray's: the coordinator (a Python process, and so
a core at most), the raylets, and the copy into shared memory in the actors. CPU-seconds are of each of these; where
cores are few they take them from each other, and ``coordinator, cores`` says how far it was from its own limit. Nodes
are simulated on this machine: each has a raylet and an object store of its own. Several executions share one cluster,
each with its own coordinator and its share of ranks and actors.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import ray
import typer
from common import RESULTS, in_turn, reading, report, tree
from pack_source import write_source
from peers.ready import SIZE, Ready
from ray.cluster_utils import Cluster
from ray.data import DataIterator

import rfstream
from rfstream import Config
from rfstream.plan.position import Position
from rfstream.session import ensure_ray
from rfstream.stream.pipeline import PREFETCHED, build_pipeline
from rfstream.stream.split import open_splits
from rfstream.stream.wire import from_row

PROCESSES = 8
"""Ranks are threads of so many processes at most: 64 of their own would be measured for their start."""
STORE = 1_000_000_000
"""Object store of a simulated node, bytes."""
POLL_S = 0.2
ROLES = {"coordinator": "ray::SplitCoordinator", "actors": "ray::MapWorker", "ranks": "ray::Ranks"}
"""Whose process has a title that begins so."""


@dataclass(frozen=True)
class Cell:
    """What is measured. A batch has ``images`` images of ``size`` pixels a side."""

    images: int = 1
    size: int = 8
    ranks: int = 4
    actors: int = 2
    shards: int = 1
    nodes: int = 1
    executions: int = 1


FEW, MEGABYTE, MEGABYTES = Cell(), Cell(size=SIZE), Cell(images=16, size=SIZE)


def cells() -> dict[str, Cell]:
    """All cells by name."""
    named = {f"ranks {n}": replace(FEW, ranks=n) for n in (1, 2, 4, 8, 16, 32, 64)}
    named |= {f"actors {n}": replace(FEW, actors=n) for n in (1, 4, 8)}
    named |= {f"shards {n}": replace(FEW, shards=n) for n in (64, 1024)}
    named |= {f"nodes {n}": replace(FEW, nodes=n) for n in (2, 4)}
    named["executions 2"] = replace(FEW, executions=2, ranks=8, actors=4)
    for what, cell in (("1 MB", MEGABYTE), ("16 MB", MEGABYTES)):
        named |= {f"{what}, ranks {n}": replace(cell, ranks=n) for n in (1, 8)}
        named[f"{what}, actors 1"] = replace(cell, actors=1)
    return named


@ray.remote(num_cpus=0)
class Ranks:
    """Some ranks: each a thread that takes what its iterator gives."""

    def __init__(self, splits: list[DataIterator]) -> None:
        self._taken = [(0, 0)] * len(splits)
        for number, split in enumerate(splits):
            threading.Thread(target=self._take, args=(number, split), daemon=True).start()

    def _take(self, number: int, split: DataIterator) -> None:
        for row in split.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=PREFETCHED):
            batches, nbytes = self._taken[number]
            self._taken[number] = (batches + len(from_row(row)), nbytes + row.nbytes)

    def taken(self) -> tuple[int, int]:
        """Batches and bytes so far."""
        batches, nbytes = zip(*self._taken, strict=True)
        return sum(batches), sum(nbytes)


def make_pack(folder: Path, samples: int, shards: int) -> str:
    """The smallest JPEG files, in about so many shards."""
    source, output = folder / "source", folder / f"pack-{shards}"
    if not source.exists():
        write_source(source, samples, 0, photos=False)
    if not output.exists():
        tar_bytes = samples * 3072  # a header and the content of an image and of its annotations, padded
        options: dict[str, Any] = {"max_shard_bytes": -(-tar_bytes // shards), "progress": False}
        rfstream.pack(str(source), str(output), splits="train", **options)
    return str(output)


def start_cluster(cell: Cell) -> None:
    """rfstream's own local Ray, or one of several nodes with the actors' CPUs dealt out to them."""
    if cell.nodes == 1:
        ensure_ray(cell.actors)
        return
    cluster = Cluster()
    for _ in range(cell.nodes):
        cluster.add_node(num_cpus=-(-cell.actors // cell.nodes), object_store_memory=STORE)
    ray.init(address=cluster.address, log_to_driver=False)


def open_ranks(cell: Cell, pack: str) -> tuple[list[Any], int]:
    """Processes that take the batches of all executions, and how many batches there are."""
    ranks, actors = cell.ranks // cell.executions, cell.actors // cell.executions
    config = Config(
        data={"path": pack},
        stream={"batch_size": cell.images, "tail": "drop"},
        decode={"actors": [actors, actors]},
    )
    ready = Ready("detection", cell.images, size=cell.size)
    pipeline = build_pipeline(config, "train", ranks, training=True, decode=ready)
    splits = list(itertools.chain(*(open_splits(pipeline, Position())[0] for _ in range(cell.executions))))
    processes = min(PROCESSES, cell.ranks)
    spread = Ranks.options(scheduling_strategy="SPREAD")
    dealt = [spread.remote(splits[first::processes]) for first in range(processes)]
    return dealt, pipeline.plan.windows.batches * pipeline.epochs_per_execution() * cell.executions


def taken(ranks: list[Any]) -> tuple[int, int]:
    """Batches and bytes that all have taken so far."""
    batches, nbytes = zip(*ray.get([each.taken.remote() for each in ranks]), strict=True)
    return sum(batches), sum(nbytes)


def spent() -> Counter[str]:
    """CPU-seconds so far of the processes that run, by role; ``all`` of all of them."""
    seconds: Counter[str] = Counter()
    for process in tree(psutil.Process()):
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
            roles = [role for role, begin in ROLES.items() if title.startswith(begin)]
            if process.pid == psutil.Process().pid:
                roles = ["driver"]
            elif process.name() == "raylet":
                roles = ["raylets"]
        except psutil.Error:
            continue
        for role in [*roles, "all"]:
            seconds[role] += times.user + times.system
    return seconds


def measure(cell: Cell, pack: str, seconds: float) -> dict[str, float]:
    """From a fifth of all batches on, for ``seconds`` or to nine tenths of them."""
    start_cluster(cell)
    ranks, count = open_ranks(cell, pack)
    while (first := taken(ranks))[0] < count / 5:
        time.sleep(POLL_S)
    began, before, last = time.perf_counter(), spent(), first
    while last[0] < count * 0.9 and time.perf_counter() - began < seconds:
        time.sleep(POLL_S)
        last = taken(ranks)
    elapsed, used = time.perf_counter() - began, spent()
    used.subtract(before)
    batches, nbytes = last[0] - first[0], last[1] - first[1]
    return {
        "batches/s": batches / elapsed,
        "GB/s": nbytes / elapsed / 1e9,
        "coordinator, cores": used["coordinator"] / cell.executions / elapsed,
        **{f"CPU-s/1000: {role}": used[role] / batches * 1000 for role in ("driver", *ROLES, "raylets", "all")},
    }


def main(
    only: Annotated[str, typer.Option(help="expression that names of cells match: 'ranks (1|64)|16 MB.*'")] = ".*",
    samples: Annotated[int, typer.Option(help="of the pack: few make a reading short")] = 6144,
    seconds: Annotated[float, typer.Option(help="of one reading at most")] = 8.0,
    repetitions: int = 3,
    out: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure every cell in a process of its own, in turn."""
    if child:
        fields, pack = json.loads(child)
        typer.echo(json.dumps(measure(Cell(**fields), pack, seconds)))
        return
    run = {name: cell for name, cell in cells().items() if re.fullmatch(only, name)}
    if not run:
        raise typer.BadParameter(f"no cell is called {only!r}; there are {'; '.join(cells())}")
    with tempfile.TemporaryDirectory() as folder:
        packs = {cell.shards: make_pack(Path(folder), samples, cell.shards) for cell in run.values()}
        ray.shutdown()
        variants = {
            name: partial(
                reading, __file__, f"--child={json.dumps([asdict(cell), packs[cell.shards]])}", f"--seconds={seconds}"
            )
            for name, cell in run.items()
        }
        title = "split scale: what one execution hands out (4 ranks, 2 actors, few bytes where not said)"
        setting = {"seconds": seconds, "samples": samples, "cores": psutil.cpu_count()}
        report(title, in_turn(variants, repetitions), setting, out)


if __name__ == "__main__":
    typer.run(main)

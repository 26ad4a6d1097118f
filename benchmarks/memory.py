"""Memory of a stream over time, with a consumer that takes all it can get and with one that stands still.

    python benchmarks/memory.py ../shared/data/facade --plot docs/images/memory.png

Bytes used in the object store stand beside what ``rfstream plan`` announced; private memory and open files are those of
the training process and of the decode actors. Each consumer has a process and a Ray of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import psutil
import ray
import typer
from common import RESULTS, object_store
from rich.console import Console
from rich.table import Table

import rfstream
from rfstream import Config, RankLoader
from rfstream.session import ensure_ray
from rfstream.stream.pipeline import build_pipeline
from rfstream.tools.report import batches_held, try_batches

EPOCHS = 10
EVERY_S = 0.5
STALL_AFTER = 5
STALL_S = 30.0
CONSUMERS = ("fast", "stalled")
Reading = dict[str, float]


def config_of(pack: str) -> Config:
    return Config(data={"path": pack}, stream={"batch_size": 4}, decode={"actors": [2, 2]})


def announced(config: Config) -> dict[str, int]:
    """The most that ``rfstream plan`` says of the object store and of a decode actor, in bytes."""
    pipeline = build_pipeline(config, "train", 1, training=True)
    trial = try_batches(pipeline, pipeline.plan.order(0))
    return {"store": batches_held(pipeline) * trial.batch_bytes, "actor": trial.actor_bytes, "spilled": 0}


def private(process: psutil.Process) -> int:
    """Bytes of its own: without files, and without the object store, which it has mapped."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def readings(stop: threading.Event) -> Iterator[Reading]:
    """What is held now, twice a second."""
    began = time.monotonic()
    me = psutil.Process()
    while not stop.wait(EVERY_S):
        actors = [held for held in map(of_actor, me.children(recursive=True)) if held is not None]
        yield {
            "s": time.monotonic() - began,
            **object_store(),
            "trainer": private(me),
            "trainer_files": me.num_fds(),
            "actor": max((nbytes for nbytes, _ in actors), default=0),
            "actor_files": max((files for _, files in actors), default=0),
        }


def of_actor(process: psutil.Process) -> tuple[int, int] | None:
    """Bytes and open files of a decode actor; ``None`` for other processes, and those that have ended by now."""
    with suppress(psutil.NoSuchProcess):
        if process.name().startswith("ray::MapWorker"):
            return private(process), process.num_fds()
    return None


def consume(name: str, pack: str, out: Path) -> None:
    """Stream ten epochs, or stand still inside the first; readings to ``out``."""
    config = config_of(pack)
    ensure_ray(2)
    stop, taken = threading.Event(), []
    watch = threading.Thread(target=lambda: taken.extend(readings(stop)))
    watch.start()
    try:
        loader = rfstream.ray_loader(config)
        assert isinstance(loader, RankLoader)
        with loader:
            for _ in range(EPOCHS if name == "fast" else 1):
                for batch in loader:
                    if name == "stalled" and batch.step == STALL_AFTER:
                        time.sleep(STALL_S)
    finally:
        stop.set()
        watch.join()
    out.write_text(json.dumps(taken))


def measure(name: str, pack: str, out: Path) -> list[Reading]:
    process = multiprocessing.get_context("spawn").Process(target=consume, args=(name, pack, out))
    process.start()
    process.join()
    taken: list[Reading] = json.loads(out.read_text())
    return taken


def draw(curves: dict[str, list[Reading]], bound: int, file: Path) -> None:
    figure, (store, private) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, curve in curves.items():
        seconds = [reading["s"] for reading in curve]
        store.plot(seconds, [reading["store"] / 1e6 for reading in curve], label=f"{name} consumer")
        for who, style in (("trainer", "-"), ("actor", "--")):
            label = f"{name} consumer: {'training process' if who == 'trainer' else 'a decode actor'}"
            private.plot(seconds, [reading[who] / 1e6 for reading in curve], style, label=label)
    store.axhline(bound / 1e6, color="black", linestyle=":", label="announced by rfstream plan")
    for axes, title in ((store, "object store"), (private, "private memory")):
        axes.set(title=title, xlabel="seconds", ylabel="MB", ylim=(0, None))
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=110)


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}"


def main(source: str, plot: Annotated[Path | None, typer.Option(help="draw the curves here")] = None) -> None:
    """Pack SOURCE's train split and watch both consumers."""
    with tempfile.TemporaryDirectory() as folder:
        pack = f"{folder}/pack"
        rfstream.pack(source, pack, splits="train", progress=False)
        ray.shutdown()
        bounds = announced(config_of(pack))
        curves = {name: measure(name, pack, Path(folder) / f"{name}.json") for name in CONSUMERS}
    table = Table("MB at most", *CONSUMERS, "announced")
    for what in ("store", "spilled", "actor", "trainer"):
        most = [_mb(max(reading[what] for reading in curves[name])) for name in CONSUMERS]
        table.add_row(what, *most, _mb(bounds[what]) if what in bounds else "")
    for who in ("trainer_files", "actor_files"):
        halves = [(curves[name][len(curves[name]) // 2][who], curves[name][-1][who]) for name in CONSUMERS]
        table.add_row(f"{who}, from half time on", *(f"{before:g} to {after:g}" for before, after in halves))
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.json").write_text(json.dumps({"source": source, "announced": bounds, "curves": curves}) + "\n")
    if plot is not None:
        draw(curves, bounds["store"], plot)


if __name__ == "__main__":
    typer.run(main)

"""What the benchmarks share: variants run in turn, medians with ranges, CPU-seconds of every process involved."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from rfstream.dataset.shards import sha256

T = TypeVar("T")
RESULTS = Path(__file__).resolve().parent / "results"


def cpu_seconds() -> float:
    """CPU-seconds so far of this process and all its descendants, Ray's daemons and workers included."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 in hex of every file in ``folder``, by name."""
    return {path.name: sha256(path) for path in sorted(folder.iterdir())}


@contextmanager
def sampled(read: Callable[[], T], every_s: float) -> Iterator[list[T]]:
    """What ``read`` returns, again and again while the block runs."""
    over, readings = threading.Event(), []

    def watch() -> None:
        while not over.wait(every_s):
            readings.append(read())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield readings
    finally:
        over.set()
        thread.join()


def in_turn(variants: dict[str, Callable[[], dict[str, float]]], repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Run the variants one after the other, ``repetitions`` times, so that a drifting machine treats all alike."""
    readings: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    for _ in range(repetitions):
        for name, run in variants.items():
            for figure, value in run().items():
                readings[name].setdefault(figure, []).append(value)
    return readings


def report(title: str, readings: dict[str, dict[str, list[float]]], setting: dict[str, Any]) -> None:
    """Print medians with ranges, and keep all readings as JSON."""
    figures = list(next(iter(readings.values())))
    table = Table("", *figures, title=title)
    for name, values in readings.items():
        table.add_row(name, *(_cell(values[figure]) for figure in figures))
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{title.split(':')[0].replace(' ', '_')}.json"
    path.write_text(json.dumps({"title": title, "setting": setting, "readings": readings}, indent=1) + "\n")


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"

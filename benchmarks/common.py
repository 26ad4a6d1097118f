"""What the benchmarks share: variants run in turn, each in a process of its own; medians with ranges; CPU-seconds and
memory of every process involved."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
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
Readings = dict[str, dict[str, list[float]]]
"""Variant -> figure -> one value a repetition."""


def tree(process: psutil.Process) -> Iterator[psutil.Process]:
    """``process`` and all its descendants, Ray's daemons and workers included."""
    yield process
    yield from process.children(recursive=True)


def cpu_seconds() -> float:
    """CPU-seconds so far of this process and all its descendants, those that have ended included."""
    total = 0.0
    for process in tree(psutil.Process()):
        try:
            total += sum(process.cpu_times()[:4])  # user and system, its own and of children it has waited for
        except psutil.NoSuchProcess:
            continue
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


def memory() -> int:
    """Bytes that this process and all its descendants have in memory; a page that several share counts once.

    Takes tens of milliseconds a process: nothing to do while a clock runs.
    """
    total = 0
    for process in tree(psutil.Process()):
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def object_store() -> dict[str, int]:
    """Bytes in this node's object store now, and spilled so far."""
    import ray
    from ray._private.internal_api import node_stats

    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats
    return {"store": stats.object_store_bytes_used, "spilled": stats.spilled_bytes_total}


def reading(script: str, *arguments: str) -> dict[str, Any]:
    """What ``script`` (or ``-c`` and code) prints as JSON on its last line, run in a process of its own.

    Raises:
        RuntimeError: with the end of what it said, if it fails.
    """
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    read: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return read


def in_turn(variants: dict[str, Callable[[], dict[str, float]]], repetitions: int) -> Readings:
    """Run the variants one after the other, ``repetitions`` times, so that a drifting machine treats all alike."""
    readings: Readings = {name: {} for name in variants}
    for _ in range(repetitions):
        for name, run in variants.items():
            for figure, value in run().items():
                readings[name].setdefault(figure, []).append(value)
    return readings


def report(title: str, readings: Readings, setting: dict[str, Any], out: Path = RESULTS, **more: Any) -> None:
    """Print medians with ranges, and keep all readings as JSON in the folder ``out``, beside ``more``."""
    figures = list(dict.fromkeys(figure for values in readings.values() for figure in values))
    table = Table("", *figures, title=title)
    for name, values in readings.items():
        table.add_row(name, *(cell(values.get(figure, ())) for figure in figures))
    Console().print(table)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{title.split(':')[0].replace(' ', '_')}.json"
    path.write_text(json.dumps({"title": title, "setting": setting, "readings": readings, **more}, indent=1) + "\n")


def cell(values: Sequence[float]) -> str:
    """Median and range to three digits; empty where nothing was read."""
    if not values:
        return ""
    low, middle, high = map(figure_text, (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low}-{high})"


def figure_text(value: float) -> str:
    """Three digits, and all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

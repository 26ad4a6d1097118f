"""Readers in processes of their own, other Pythons' too: their result, and the memory that they take."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
LIMIT_S = 900
"""The longest that one may run."""


class ReaderError(Exception):
    """A reader ended with another status than 0; the last line that it wrote."""


def run(
    python: str,
    script: str,
    what: str,
    arguments: dict[str, Any],
    heard: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The result of ``what`` in ``script``, with ``peak bytes`` of its processes; ``heard`` is called at each line.

    Raises:
        ReaderError: if it fails, or takes more than :data:`LIMIT_S`.
    """
    command = [python, str(HERE / script), what, json.dumps(arguments)]
    lines: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        peak_memory(process.pid) as peak,
    ):
        timer = threading.Timer(LIMIT_S, end, [process.pid])
        timer.start()
        for line in process.stdout or ():
            if line.startswith("{"):
                lines.append(line)
                heard()
        timer.cancel()
        if process.wait():
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()]
            raise ReaderError(said[-1] if said else f"status {process.returncode}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result | {"peak bytes": max(peak)}


def end(pid: int) -> None:
    """End a process that takes too long, and all that it started."""
    for process in family(pid):
        with suppress(psutil.NoSuchProcess):
            process.terminate()


@contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Memory of a process and all that it started, once a second: PSS, in bytes."""
    stop, taken = threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(1):
            taken.append(sum(map(shared_evenly, family(pid))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield taken
    finally:
        stop.set()
        thread.join()


def family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def shared_evenly(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0

"""Readers in processes of their own, other Pythons' too: their result, and the memory that they take."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from common import sampled, tree_memory

HERE = Path(__file__).resolve().parent
LIMIT_S = 900
"""The longest that one may run."""
EVERY_S = 3.0
"""Between two looks at memory: they cost tenths of a second where many processes share much."""


class ReaderError(Exception):
    """A reader ended with another status than 0 (the last line that it wrote), or took too long."""


def run(
    python: str,
    script: str,
    what: str,
    arguments: dict[str, Any],
    heard: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The result of ``what`` in ``script``, with the most ``RSS`` and ``PSS`` of its processes, in bytes.

    ``heard`` is called at each line that it writes.

    Raises:
        ReaderError: if it fails, or takes more than :data:`LIMIT_S`.
    """
    command = [python, str(HERE / script), what, json.dumps(arguments)]
    lines: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        sampled(partial(tree_memory, process.pid), EVERY_S) as held,
    ):
        began = time.monotonic()
        timer = threading.Timer(LIMIT_S, end, [process.pid])
        timer.start()
        try:
            for line in process.stdout or ():
                if line.startswith("{"):
                    lines.append(line)
                    heard()
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                end(process.pid)
        if status and time.monotonic() - began >= LIMIT_S:
            raise ReaderError(f"it took more than {LIMIT_S} s")
        if status:
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()]
            raise ReaderError(said[-1] if said else f"status {status}")
    result: dict[str, Any] = json.loads(lines[-1])
    rss, pss = (max(figures) for figures in zip((0, 0), *held, strict=True))
    return result | {"RSS": rss, "PSS": pss}


def end(pid: int) -> None:
    """End a process and all that it started."""
    for process in processes_of(pid):
        with suppress(psutil.NoSuchProcess):
            process.terminate()


def processes_of(pid: int) -> list[psutil.Process]:
    """A process after all that it started; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [*process.children(recursive=True), process]
    return []

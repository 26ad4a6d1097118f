"""SIGKILL for Ray's workers, by what they run, and for packing, by how far it is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import psutil

Victim = Literal["driver", "worker"]


def kill_worker(title: str, within_s: float) -> bool:
    """Kill one of this process's Ray workers that runs ``title``, if there is one ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            try:
                if process.cmdline() and process.cmdline()[0].startswith(f"ray::{title}"):
                    process.kill()
                    return True
            except psutil.Error:  # it ended meanwhile
                continue
        time.sleep(0.01)
    return False


def pack_killed(
    start: Callable[[], subprocess.Popen[str]], output: Path, kills: Iterable[tuple[Victim, int]], within_s: float
) -> None:
    """Pack into the local folder ``output``; kill each victim once so many shards are begun; go on until all is done.

    ``start`` begins to pack. It is started again where the driver was killed; a worker is Ray's to replace.
    """
    job, dead = start(), _staging(output)
    for victim, shards in kills:
        deadline = time.monotonic() + within_s
        while sum(len(list(folder.iterdir())) for folder in _staging(output) - dead) < shards:
            assert job.poll() is None, job.communicate()[1]
            assert time.monotonic() < deadline, f"{shards} shards were not begun in {within_s} s"
            time.sleep(0.005)
        if victim == "worker":
            assert kill_worker("_write", within_s), "no worker was writing"
            continue
        job.kill()
        job.wait()
        dead = _staging(output)
        job = start()
    assert job.wait(within_s) == 0, job.communicate()[1]


def _staging(output: Path) -> set[Path]:
    """The folders in which packing has begun."""
    return set(output.glob(".rfstream-pack-*"))

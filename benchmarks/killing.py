"""SIGKILL for Ray's workers, by what they run."""

from __future__ import annotations

import time

import psutil


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

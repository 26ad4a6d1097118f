"""Seconds from ``ray_loader(config)`` to the first batch in a new process: with Ray to start, and with Ray up.

The imports come before, as in any script, and are a column of their own.

python benchmarks/first_batch.py ../shared/data/bccd
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import typer
from common import in_turn, reading, report

SCRIPT = """
import time
before = time.perf_counter()
import json, sys
from rfstream import Config, ray_loader
imports = time.perf_counter() - before
if {warm}:
    from rfstream.session import ensure_ray
    ensure_ray(2)
config = Config(data={{"path": sys.argv[1]}}, stream={{"batch_size": 16}})
before = time.perf_counter()
loader = ray_loader(config)
loader.load_state_dict(loader.state_at(*divmod({step}, len(loader))))
next(iter(loader))
print(json.dumps({{"first batch, s": time.perf_counter() - before, "imports before, s": imports}}))
loader.close()
"""


def seconds(folder: str, *, warm: bool, step: int = 0) -> dict[str, float]:
    """Time to the first batch in a fresh process that goes on after ``step`` steps."""
    return reading("-c", SCRIPT.format(warm=warm, step=step), folder)


def main(source: str, repetitions: int = 5) -> None:
    """Pack SOURCE's train split and measure."""
    os.environ["RAY_ADDRESS"] = "local"  # whatever cluster runs here: this is about one's own
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, so that its Ray is gone when the clock runs.
        subprocess.run([sys.executable, "-m", "rfstream.cli", "pack", source, folder], check=True)
        variants = {
            "cold: Ray started too": lambda: seconds(folder, warm=False),
            "warm: Ray was up": lambda: seconds(folder, warm=True),
            "warm, resumed after 10,000 steps": lambda: seconds(folder, warm=True, step=10_000),
        }
        report("first batch: from ray_loader to the first batch", in_turn(variants, repetitions), {"source": source})


if __name__ == "__main__":
    typer.run(main)

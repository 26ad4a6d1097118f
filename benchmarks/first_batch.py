"""Seconds from ``ray_loader(config)`` to the first batch in a new process: with Ray to start, and with Ray up.

python benchmarks/first_batch.py ../shared/data/bccd
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import typer
from common import in_turn, report

import rfstream

COLD = """
import time, sys
import rfstream
if {warm}:
    rfstream.session.ensure_ray(2)
config = rfstream.Config(data={{"path": sys.argv[1]}}, stream={{"batch_size": 16}})
before = time.perf_counter()
loader = rfstream.ray_loader(config)
next(iter(loader))
print(time.perf_counter() - before)
loader.close()
"""


def seconds(folder: str, *, warm: bool) -> dict[str, float]:
    """Time to the first batch in a fresh process."""
    code = "import rfstream.session\n" + COLD.format(warm=warm)
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    return {"first batch, s": float(done.stdout.split()[-1])}


def main(source: str, repetitions: int = 5) -> None:
    """Pack SOURCE's train split and measure."""
    with tempfile.TemporaryDirectory() as folder:
        rfstream.pack(source, folder, splits="train", progress=False)
        variants = {
            "cold: Ray started too": lambda: seconds(folder, warm=False),
            "warm: Ray was up": lambda: seconds(folder, warm=True),
        }
        report("first batch: from ray_loader to the first batch", in_turn(variants, repetitions), {"source": source})


if __name__ == "__main__":
    typer.run(main)

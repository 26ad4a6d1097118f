"""Pack 20,000 images, killed with SIGKILL three times on the way, and compare every file with an undisturbed pack's.

    python benchmarks/pack_kills.py [--images 20000] [--seed 0]

The driver is killed twice, and then begins again; a worker that writes a shard once, and Ray begins that shard again.
The seed says how many shards are begun when that happens.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import typer
from common import RESULTS, digests
from killing import Victim, pack_killed
from pack_source import write_source

PER_IMAGE = 7  # annotations
VICTIMS: list[Victim] = ["driver", "worker", "driver"]
LIMIT_S = 300.0


def main(images: int = 20_000, seed: int = 0, shard_bytes: int = 20_000_000) -> None:
    """Write a source and pack it twice."""
    with tempfile.TemporaryDirectory() as name:
        source, whole, killed = (Path(name) / part for part in ("source", "whole", "killed"))
        write_source(source, images, images * PER_IMAGE)

        def start(output: Path) -> subprocess.Popen[str]:
            options = ["--splits=train", f"--max-shard-bytes={shard_bytes}", "--no-progress"]
            command = [sys.executable, "-m", "rfstream.cli", "pack", str(source), str(output), *options]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        assert start(whole).wait(LIMIT_S) == 0
        expected = digests(whole)
        shards = sum(name.endswith(".tar") for name in expected)
        kills = list(zip(VICTIMS, random.Random(seed).sample(range(2, shards - 4), len(VICTIMS)), strict=True))
        pack_killed(lambda: start(killed), killed, kills, LIMIT_S)
        outcome = {"shards": shards, "killed at": kills, "equal": digests(killed) == expected, "files": expected}
    typer.echo(f"{shards} shards, killed at {kills}: {'equal' if outcome['equal'] else 'NOT EQUAL'}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "pack_kills.json").write_text(json.dumps({"images": images, "seed": seed} | outcome, indent=1) + "\n")
    sys.exit(not outcome["equal"])


if __name__ == "__main__":
    typer.run(main)

"""Peak memory and time of planning a pack from one large COCO file, beside what ``json.load`` alone takes.

    python benchmarks/pack_planning.py [--annotations 1000000] [--repetitions 3]

Planning is all that ``rfstream pack`` does before the first shard is begun: reading, checking, joining, grouping by
image and cutting into shards; it runs in one process. Memory is the highest that the process ever held (VmHWM), and the
same without what it held when all modules were imported.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from common import in_turn, report
from pack_source import write_source

from rfstream.dataset.layouts import find_splits, read_split
from rfstream.dataset.pack import MAX_SHARD_BYTES
from rfstream.dataset.shard_plan import plan_shards

PER_IMAGE = 7.3  # annotations, as in COCO


def memory(field: str) -> int:
    """A figure of this process in bytes; that of getrusage counts what was held before the program began."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(source: Path, file: Path, variant: str) -> dict[str, float]:
    baseline, began = memory("VmRSS"), time.perf_counter()
    if variant == "json.load":
        with file.open() as text:
            json.load(text)
    else:
        split = read_split(find_splits(source)["train"], "remap")
        plan_shards(split, MAX_SHARD_BYTES, "parquet" if variant == "parquet" else "tar", None)
    seconds, peak, size = time.perf_counter() - began, memory("VmHWM"), file.stat().st_size
    return {
        "seconds": seconds,
        "peak, MB": peak / 1e6,
        "peak / file": peak / size,
        "peak without modules / file": (peak - baseline) / size,
    }


def main(
    annotations: int = 1_000_000, repetitions: int = 3, child: Annotated[str, typer.Option(hidden=True)] = ""
) -> None:
    if child:
        variant, folder, file = child.split(",")
        typer.echo(json.dumps(measure(Path(folder), Path(file), variant)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = write_source(Path(folder), int(annotations / PER_IMAGE), annotations, photos=False)

        def variant(name: str) -> dict[str, float]:
            command = [sys.executable, __file__, f"--child={name},{folder},{file}"]
            reading: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            return reading

        variants = {
            "planning, tar": lambda: variant("tar"),
            "planning, Parquet": lambda: variant("parquet"),
            "json.load alone": lambda: variant("json.load"),
        }
        title = f"pack planning: {annotations:,} annotations in {file.stat().st_size / 1e6:.0f} MB"
        report(title, in_turn(variants, repetitions), {"annotations": annotations, "file bytes": file.stat().st_size})


if __name__ == "__main__":
    typer.run(main)

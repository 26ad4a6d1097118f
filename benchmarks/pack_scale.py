"""Packing 20,000 images beside RF-DETR's own packer, in turn; and the same pack killed three times on the way.

    python benchmarks/pack_scale.py [--images 20000] [--repetitions 3]

Each packer has a process of its own and writes the same tar shards, byte for byte, from files in the page cache: what
is measured is the packers, and the disk that is written to. The clock and the CPU-seconds begin when all modules are
imported; rfstream's contain the start of a Ray cluster of 2 CPUs. Memory is the highest sum over the process and all
its descendants, Ray's daemons included: of RSS, which counts what they share once for each, and of PSS, which does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from common import cpu_seconds, in_turn, report, sampled
from killing import Victim, pack_killed
from pack_source import write_source
from rfdetr.datasets.webdataset.pack import pack_coco_to_shards

import rfstream
from rfstream.dataset.index import PackFormat
from rfstream.dataset.pack import MAX_SHARD_BYTES
from rfstream.session import ensure_ray

CPUS = 2
EVERY_S = 0.2
PER_IMAGE = 7  # annotations
KILLED: list[Victim] = ["driver", "worker", "driver"]
LIMIT_S = 600.0


def memory() -> tuple[int, int]:
    """RSS and PSS of this process and its descendants, in bytes."""
    held = [_memory(process) for process in [psutil.Process(), *psutil.Process().children(recursive=True)]]
    return sum(rss for rss, _ in held), sum(pss for _, pss in held)


def _memory(process: psutil.Process) -> tuple[int, int]:
    try:
        memory = process.memory_full_info()
    except psutil.Error:  # it ended meanwhile
        return 0, 0
    return memory.rss, memory.pss


def pack_ours(source: Path, output: Path, format: PackFormat, shard_bytes: int) -> int:
    ensure_ray(CPUS)
    options: dict[str, Any] = {"format": format, "max_shard_bytes": shard_bytes, "progress": False}
    (index,) = rfstream.pack(str(source), str(output), splits="train", **options)
    return index.num_samples


def measure(source: Path, output: Path, variant: str, shard_bytes: int) -> dict[str, float]:
    file = source / "annotations" / "instances_train.json"
    with sampled(memory, EVERY_S) as held:
        spent, began = cpu_seconds(), time.perf_counter()
        if variant == "RF-DETR":
            options: dict[str, Any] = {"split": "train", "max_shard_bytes": shard_bytes}
            count = pack_coco_to_shards(source / "train", file, output, **options).num_samples
        else:
            count = pack_ours(source, output, "parquet" if variant == "parquet" else "tar", shard_bytes)
        seconds, spent = time.perf_counter() - began, cpu_seconds() - spent
    rss, pss = (max(figures) / 1e6 for figures in zip(*held, strict=True))
    return {"images/s": count / seconds, "seconds": seconds, "CPU-s": spent, "RSS, MB": rss, "PSS, MB": pss}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in ``folder`` that is one of a pack."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def child(variant: str, source: Path, output: Path, shard_bytes: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, f"--child={variant},{source},{output}", f"--shard-bytes={shard_bytes}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main(
    images: int = 20_000,
    repetitions: int = 3,
    shard_bytes: int = MAX_SHARD_BYTES,
    seed: Annotated[int, typer.Option(help="of where packing is killed")] = 0,
    child_of: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    if child_of:
        variant, source, output = child_of.split(",")
        typer.echo(json.dumps(measure(Path(source), Path(output), variant, shard_bytes)))
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        write_source(source, images, images * PER_IMAGE)
        written: dict[str, dict[str, str]] = {}

        def variant(name: str) -> dict[str, float]:
            output = Path(folder) / "pack"
            out, errors = (job := child(name, source, output, shard_bytes)).communicate(timeout=LIMIT_S)
            assert job.returncode == 0, errors
            written[name] = digests(output)
            shutil.rmtree(output)
            os.sync()  # or the next one waits for what this one wrote
            reading: dict[str, float] = json.loads(out)
            return reading

        variants = {
            "rfstream, tar": lambda: variant("tar"),
            "rfstream, Parquet": lambda: variant("parquet"),
            "RF-DETR, tar": lambda: variant("RF-DETR"),
        }
        readings = in_turn(variants, repetitions)
        shards = sum(name.endswith(".tar") for name in written["tar"])
        kills = list(zip(KILLED, random.Random(seed).sample(range(2, shards - 1), len(KILLED)), strict=True))
        killed = Path(folder) / "killed"
        pack_killed(lambda: child("tar", source, killed, shard_bytes), killed, kills, LIMIT_S)
        outcome = {
            "as RF-DETR": written["RF-DETR"].items() <= written["tar"].items(),
            "killed": kills,
            "killed as undisturbed": digests(killed) == written["tar"],
        }
    typer.echo(json.dumps(outcome))
    setting = {"images": images, "annotations": images * PER_IMAGE, "cpus": CPUS, "shards": shards} | outcome
    report(f"pack scale: {images:,} images in {shards} tar shards, {CPUS} CPUs", readings, setting)


if __name__ == "__main__":
    typer.run(main)

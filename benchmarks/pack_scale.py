"""Packing 20,000 images beside RF-DETR's own packer, in turn.

    python benchmarks/pack_scale.py [--images 20000] [--repetitions 3]

Each packer has a process of its own and writes the same tar shards, byte for byte, from files in the page cache: what
is measured is the packers, and the disk that is written to. The clock and the CPU-seconds begin when all modules are
imported; rfstream's contain the start of a Ray cluster of 2 CPUs. Memory is the highest sum over the process and all
its descendants, Ray's daemons included: of RSS, which counts what they share once for each, and of PSS, which does not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from common import cpu_seconds, digests, in_turn, report, sampled
from pack_source import write_source

import rfstream
from rfstream.dataset.pack import MAX_SHARD_BYTES
from rfstream.session import ensure_ray

CPUS = 2
EVERY_S = 0.5
PER_IMAGE = 7  # annotations


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


def packer(variant: str) -> Callable[[Path, Path, int], int]:
    """What packs a source into a folder with shards of a size, and returns how many images; imports only its own."""
    if variant == "RF-DETR":
        from rfdetr.datasets.webdataset.pack import pack_coco_to_shards

        def theirs(source: Path, output: Path, shard_bytes: int) -> int:
            file = source / "annotations" / "instances_train.json"
            packed = pack_coco_to_shards(source / "train", file, output, split="train", max_shard_bytes=shard_bytes)
            return int(packed.num_samples)

        return theirs

    def ours(source: Path, output: Path, shard_bytes: int) -> int:
        ensure_ray(CPUS)
        options: dict[str, Any] = {"format": variant, "max_shard_bytes": shard_bytes, "progress": False}
        (index,) = rfstream.pack(str(source), str(output), splits="train", **options)
        return index.num_samples

    return ours


def measure(source: Path, output: Path, variant: str, shard_bytes: int) -> dict[str, float]:
    pack = packer(variant)
    with sampled(memory, EVERY_S) as held:
        spent, began = cpu_seconds(), time.perf_counter()
        count = pack(source, output, shard_bytes)
        seconds, spent = time.perf_counter() - began, cpu_seconds() - spent
    rss, pss = (max(figures) / 1e6 for figures in zip(*held, strict=True))
    return {"images/s": count / seconds, "seconds": seconds, "CPU-s": spent, "RSS, MB": rss, "PSS, MB": pss}


def main(
    images: int = 20_000,
    repetitions: int = 3,
    shard_bytes: int = MAX_SHARD_BYTES,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if child:
        variant, source, output = child.split(",")
        typer.echo(json.dumps(measure(Path(source), Path(output), variant, shard_bytes)))
        return
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "source", Path(folder) / "pack"
        write_source(source, images, images * PER_IMAGE)
        written: dict[str, dict[str, str]] = {}

        def variant(name: str) -> dict[str, float]:
            command = [sys.executable, __file__, f"--child={name},{source},{output}", f"--shard-bytes={shard_bytes}"]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            written[name] = digests(output)
            shutil.rmtree(output)
            os.sync()  # or the next one waits for what this one wrote
            reading: dict[str, float] = json.loads(out.splitlines()[-1])
            return reading

        variants = {
            "rfstream, tar": lambda: variant("tar"),
            "rfstream, Parquet": lambda: variant("parquet"),
            "RF-DETR, tar": lambda: variant("RF-DETR"),
        }
        readings = in_turn(variants, repetitions)
    assert written["RF-DETR"].items() <= written["tar"].items(), "not the same bytes"
    setting = {"images": images, "annotations": images * PER_IMAGE, "cpus": CPUS, "shard bytes": shard_bytes}
    report(f"pack scale: {images:,} images, {CPUS} CPUs", readings, setting)


if __name__ == "__main__":
    typer.run(main)

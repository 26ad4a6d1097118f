"""Loose files against shards over a slow line: images per second and requests, by the number of readers.

    python benchmarks/storage.py ../shared/data/coco_cc

Every answer takes 30 ms and all together 200 MB/s. A reader is a process. With loose files it fetches one image after
the other, as a DataLoader's worker does; from shards it reads the split as one shuffle block. Nothing is decoded.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import typer
from bad_storage import BadStorage, Line
from common import in_turn, report

import rfstream
from rfstream.dataset.index import PackFormat
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.reader import SampleReader
from rfstream.dataset.tar import TarReader

FORMATS: dict[PackFormat, type[SampleReader]] = {"tar": TarReader, "parquet": ParquetReader}
READERS = (1, 2, 4, 8)
PASSES = 8
"""Times that the split is read, by all readers together."""
LINE = Line(latency_s=0.03, bytes_per_s=200_000_000)


def read_loose(url: str, names: list[str], passes: int) -> int:
    """Fetch every image, ``passes`` times; the bytes read."""
    fs, _ = fsspec.core.url_to_fs(url)
    return sum(len(fs.cat_file(f"{url}/{name}")) for _ in range(passes) for name in names)


def read_shards(kind: type[SampleReader], url: str, digest: str, samples: int, passes: int) -> int:
    """Read every sample in a shuffled order, ``passes`` times; the images' bytes."""
    reader = readers.setdefault(url, kind(url, "train", digest))
    rows = np.random.default_rng(0).permutation(samples)
    return sum(len(sample.image) for _ in range(passes) for sample in reader.read(rows))


readers: dict[str, SampleReader] = {}
"""Of this process: the index is opened once."""


def main(source: str, repetitions: int = 3) -> None:
    """Measure on SOURCE's train split."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(max(READERS), get_context("spawn")) as pool:
        packs = {
            form: rfstream.pack(source, f"{folder}/{form}", splits="train", format=form, progress=False)[0]
            for form in FORMATS
        }
        samples = packs["tar"].num_samples
        names = sorted(path.name for path in Path(source, "train").iterdir() if path.suffix in (".jpg", ".png"))
        Path(folder, "loose").mkdir()
        for name in names:
            shutil.copy(Path(source, "train", name), Path(folder, "loose", name))
        with BadStorage(Path(folder)) as storage:
            reads: dict[str, Any] = {"loose files": partial(read_loose, f"{storage.url}/loose", names)}
            for form, kind in FORMATS.items():
                reads[form] = partial(read_shards, kind, f"{storage.url}/{form}", packs[form].digest, samples)
            for read in reads.values():  # every process starts, imports and opens the index before the clock does
                list(pool.map(read, [1] * 4 * max(READERS)))
            storage.line = LINE

            def measure(read: Any, count: int) -> dict[str, float]:
                storage.requests.clear()
                began = time.monotonic()
                list(pool.map(read, [PASSES // count] * count))
                images = PASSES * samples
                seconds = time.monotonic() - began
                return {"images/s": images / seconds, "requests/1000": 1000 * storage.requests.total() / images}

            variants = {
                f"{name}, {count} readers": partial(measure, read, count)
                for count in READERS
                for name, read in reads.items()
            }
            setting = {"source": source, "images": samples, "passes": PASSES, "line": vars(LINE)}
            report("storage: 30 ms a request, 200 MB/s", in_turn(variants, repetitions), setting)


if __name__ == "__main__":
    typer.run(main)

"""Read speed of a tar pack and of the Parquet pack of the same source, in turns, in one process and without decoding.

    python benchmarks/pack_formats.py DATA [--rounds 9] [--split train]

DATA is a folder in COCO or Roboflow layout. Two ways of reading: as fused assembly does, 16 samples at random from all
over the split; and as staged assembly does, all of a block at once. Prints the median MB/s of each, images and
annotations together as a tar holds them. The files are in the page cache: this is what the formats cost, not the disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from rfstream.dataset.pack import pack
from rfstream.dataset.reader import SampleReader
from rfstream.stream.source import PackReaderSpec, reader_of

BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--split", default="train")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        readers, count = {}, 0
        for format in ("tar", "parquet"):
            (index,) = pack(arguments.data, f"{folder}/{format}", splits=arguments.split, format=format, progress=False)
            readers[format], count = reader_of(PackReaderSpec.of(index)), index.num_samples
        nbytes = sum(len(s.image) + len(s.sidecar) for s in readers["tar"].read(np.arange(count)))
        for way, batch in (("batches of 16", BATCH), ("whole block", count)):
            measure(way, readers, list(in_batches(count, batch)), nbytes, arguments.rounds)


def in_batches(count: int, size: int) -> Iterator[np.ndarray]:
    """All rows once, at random."""
    rows = np.random.default_rng(0).permutation(count)
    for first in range(0, count, size):
        yield rows[first : first + size]


def measure(way: str, readers: dict[str, SampleReader], batches: list[np.ndarray], nbytes: int, rounds: int) -> None:
    """Print the median speed of each reader."""
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds + 1):
        for name, reader in readers.items():
            before = time.perf_counter()
            for rows in batches:
                reader.read(rows)
            seconds[name].append(time.perf_counter() - before)
    for name, times in seconds.items():
        print(f"{way:14} {name:8} {nbytes / 1e6 / statistics.median(times[1:]):8.0f} MB/s")  # the first round warms up


if __name__ == "__main__":
    main()

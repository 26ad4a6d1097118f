"""The whole stream from a slow line beside the same stream from disk: images per second, by the number of readers.

    python benchmarks/storage_stream.py ../shared/data/cards

Every answer takes 30 ms and all together 200 MB/s. Each stream reads, decodes, resizes and hands over; from disk that
is what the decode actors can do. Readers are the read tasks of a node that run at once. A stream with a cache begins
with it full. The clock runs from the second epoch's first batch on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import albumentations as A
import typer
from bad_storage import BadStorage, Line
from common import cpu_seconds, in_turn, report

import rfstream
from rfstream import Config, RankLoader
from rfstream.session import ensure_ray
from rfstream.stream import pipeline

READERS = (1, 2, 4, 8)
ACTORS = 2
EPOCHS = 6
BATCH_SIZE = 16
RESIZE = A.to_dict(A.Compose([A.Resize(576, 576)]))
LINE = Line(latency_s=0.03, bytes_per_s=200_000_000)


def serve(folder: str, control: Connection) -> None:
    """Serve ``folder`` over the slow line; say how many requests there were whenever asked."""
    with BadStorage(Path(folder), LINE) as storage:
        control.send(storage.url)
        while control.recv():
            control.send(storage.requests.total())


@contextmanager
def served(folder: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """URL of ``folder`` behind the slow line, served from a process of its own, and what counts the requests to it."""
    control, other = get_context("spawn").Pipe()
    server = get_context("spawn").Process(target=serve, args=(folder, other))
    server.start()

    def requests() -> int:
        control.send(True)
        return int(control.recv())

    try:
        yield control.recv(), requests
    finally:
        control.send(False)
        server.join()


def measure(data: dict[str, Any], assembly: str, readers: int, requests: Callable[[], int]) -> dict[str, float]:
    """Stream ``EPOCHS`` epochs after a first one."""
    pipeline.READS_PER_NODE = readers
    config = Config(
        data=data,
        stream={"batch_size": BATCH_SIZE, "assembly": assembly},
        decode={"actors": [ACTORS, ACTORS]},
        augment={"cpu": {"albumentations": RESIZE}},
    )
    loader = rfstream.ray_loader(config)
    assert isinstance(loader, RankLoader)
    with loader:
        for _ in loader:
            pass
        images, asked, cpu, began = 0, requests(), cpu_seconds(), time.monotonic()
        for _ in range(EPOCHS):
            images += sum(len(batch.images) for batch in loader)
        seconds = time.monotonic() - began
    return {
        "images/s": images / seconds,
        "CPU-ms an image": 1000 * (cpu_seconds() - cpu) / images,
        "requests/1000": 1000 * (requests() - asked) / images,
    }


def main(source: str, repetitions: int = 3) -> None:
    """Measure on SOURCE's train split."""
    ensure_ray(ACTORS)
    with tempfile.TemporaryDirectory() as folder, served(folder) as (url, requests):
        for layout in ("tar", "parquet"):
            rfstream.pack(source, f"{folder}/{layout}", splits="train", format=layout, progress=False)
        variants = {}
        for layout in ("tar", "parquet"):
            stream = partial(measure, requests=requests)
            near, far = {"path": f"{folder}/{layout}"}, {"path": f"{url}/{layout}"}
            cached = {**far, "cache": {"folder": f"{folder}/cache", "bytes": "1GB"}}
            variants[f"{layout}, disk, fused"] = partial(stream, near, "fused", 2)
            variants[f"{layout}, disk, staged"] = partial(stream, near, "staged", 2)
            for count in READERS:
                variants[f"{layout}, line, {count} readers"] = partial(stream, far, "staged", count)
            variants[f"{layout}, cache, fused"] = partial(stream, cached, "fused", 2)
            variants[f"{layout}, cache, staged"] = partial(stream, cached, "staged", 2)
        setting = {"source": source, "epochs": EPOCHS, "batch_size": BATCH_SIZE, "actors": ACTORS, "line": vars(LINE)}
        report("storage stream: 30 ms a request, 200 MB/s", in_turn(variants, repetitions), setting)


if __name__ == "__main__":
    typer.run(main)

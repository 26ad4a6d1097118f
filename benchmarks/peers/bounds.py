"""What the machine gives without a loader: decoding alone, and all the work without a hand-off."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from peers.work import Delivered, Job, checksum, loose_files, pipeline_of
from rfstream.stream.decode import BatchDecoder
from rfstream.stream.image import decode_rgb
from rfstream.stream.source import reader_of

Part = Iterator[tuple[int, int]]
"""A worker's share of the work: images and checksum of each piece, as it is done."""
START_S = 60.0
"""Seconds that a worker waits for the others at most."""
_start: Barrier
"""Of a worker: where it meets the others."""


def decode(job: Job, worker: int) -> Part:
    """Every image file of this worker's share, decoded and thrown away."""
    for item in loose_files(job)[worker :: job.workers]:
        decode_rgb(Path(item.file).read_bytes())
        yield 1, 0


def in_process(job: Job, worker: int) -> Part:
    """This worker's share of the stream's batches: read, decoded, augmented and collated as its actors do."""
    pipeline = pipeline_of(job)
    decoder, reader = BatchDecoder.of(pipeline.decode), reader_of(pipeline.reader)
    task = pipeline.plan.task(pipeline.plan.order(0), 0, pipeline.plan.windows.batches)
    for number in range(worker, task.hi, job.workers):
        samples = reader.read(task.rows(number, number + 1))
        wire = decoder.batch(samples, 0, number, number * job.batch_size)
        batch = Delivered(*(torch.from_numpy(wire.arrays[name]) for name in Delivered._fields))
        yield job.batch_size, checksum(batch)


def measure(job: Job, share: Callable[[Job, int], Part]) -> dict[str, Any]:
    """``share`` in as many processes as there are workers, the clock running from when each has done a piece of it."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(job.workers, timeout=START_S)
    with ProcessPoolExecutor(job.workers, context, _keep, (start,)) as pool:
        done = pool.map(partial(_run, job, share), range(job.workers))
        images, sums, spent, seconds = zip(*done, strict=True)
    return {
        "images/s": sum(images) / max(seconds),
        "CPU-s per 1000 images": sum(spent) / sum(images) * 1000,
        "checksum": sum(sums),
    }


def _keep(start: Barrier) -> None:
    global _start
    _start = start


def _run(job: Job, share: Callable[[Job, int], Part], number: int) -> tuple[int, int, float, float]:
    part = share(job, number)
    _, total = next(part)  # imports, open files
    _start.wait()
    began, spent, done = time.perf_counter(), time.process_time(), 0
    for images, of_piece in part:
        done += images
        total += of_piece
    return done, total, time.process_time() - spent, time.perf_counter() - began

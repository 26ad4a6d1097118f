"""SPDL over loose files: threads of the training process, no hand-off at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from spdl.pipeline import PipelineBuilder

from peers.work import Delivered, Job, collate, load, loose_files


def batches(job: Job) -> Iterator[Delivered]:
    files = loose_files(job)
    random.Random(0).shuffle(files)
    builder = PipelineBuilder().add_source(files).pipe(partial(load, job), concurrency=job.workers)
    gathered = builder.aggregate(job.batch_size).pipe(partial(collate, job)).add_sink(3)
    pipeline = gathered.build(num_threads=job.workers)
    with pipeline.auto_stop():
        yield from pipeline

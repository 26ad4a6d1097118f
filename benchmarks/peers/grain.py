"""Grain over loose files: an index shuffled as a whole, worker processes that hand batches over in shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import grain
import torch

from peers.work import Delivered, Job, collate, load, loose_files


def _arrays(job: Job, samples: Sequence[Any]) -> dict[str, Any]:
    """NumPy's arrays cross in shared memory, tensors would be pickled."""
    return {name: tensor.numpy() for name, tensor in collate(job, samples)._asdict().items()}


def batches(job: Job) -> Iterator[Delivered]:
    samples = grain.MapDataset.source(loose_files(job)).shuffle(seed=0).map(partial(load, job))
    batched = samples.batch(job.batch_size, batch_fn=partial(_arrays, job))
    # A worker is a process with one thread: more threads would share its core.
    read = batched.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    for arrays in read.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers, per_worker_buffer_size=2)):
        yield Delivered(*(torch.from_numpy(arrays[name]) for name in Delivered._fields))

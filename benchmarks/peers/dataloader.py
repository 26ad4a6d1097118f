"""torch's DataLoader over loose files: shuffled, workers that prefetch, a batch of four tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from peers.work import Delivered, Job, Loose, collate, load, loose_files


class LooseFiles(Dataset[Any]):
    def __init__(self, job: Job) -> None:
        self._job = job
        self._files: list[Loose] = loose_files(job)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        return load(self._job, self._files[index])


def as_floats(job: Job, samples: Sequence[Any]) -> Delivered:
    """As most training code has it: floats from the worker on."""
    batch = collate(job, samples)
    return batch._replace(images=batch.images.float().div_(255))


def batches(job: Job, kind: str) -> Iterator[Delivered]:
    gather = partial(as_floats if kind == "float" else collate, job)
    dataset = LooseFiles(job)
    yield from DataLoader(dataset, job.batch_size, shuffle=True, num_workers=job.workers, collate_fn=gather)

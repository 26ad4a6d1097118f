"""mosaicml-streaming: its own shards of encoded images, torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

from peers.work import Delivered, Job, collate, loose_files, sample


class Samples(StreamingDataset):  # type: ignore[misc]
    def __init__(self, job: Job) -> None:
        super().__init__(local=str(job.data / "mds"), shuffle=True, batch_size=job.batch_size)
        self._job = job

    def __getitem__(self, at: int) -> Any:
        item = super().__getitem__(at)
        return sample(self._job, item["image"], item["sidecar"])


def prepare(job: Job) -> None:
    columns = {"image": "bytes", "sidecar": "bytes"}
    with MDSWriter(out=str(job.data / "mds"), columns=columns) as writer:
        for item in loose_files(job):
            writer.write({"image": Path(item.file).read_bytes(), "sidecar": item.sidecar})


def batches(job: Job) -> Iterator[Delivered]:
    clean_stale_shared_memory()  # of an earlier process
    gather = partial(collate, job)
    yield from DataLoader(Samples(job), job.batch_size, num_workers=job.workers, collate_fn=gather)

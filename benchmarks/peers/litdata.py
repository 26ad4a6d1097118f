"""litdata: its own chunks of encoded images, its own streaming DataLoader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import litdata

from peers.work import Delivered, Job, Loose, collate, loose_files, sample


def _encoded(item: Loose) -> dict[str, bytes]:
    return {"image": Path(item.file).read_bytes(), "sidecar": item.sidecar}


def _sample(job: Job, item: dict[str, bytes]) -> Any:
    return sample(job, item["image"], item["sidecar"])


def prepare(job: Job) -> None:
    folder = str(job.data / "litdata")
    for kind in ("", "_DATA"):  # by default it clears the folders `chunks` and `data` of the temporary folder
        os.environ[f"DATA_OPTIMIZER{kind}_CACHE_FOLDER"] = str(job.data / f"litdata_cache{kind}")
    litdata.optimize(_encoded, loose_files(job), folder, chunk_bytes="16MB", num_workers=1, verbose=False)


def batches(job: Job) -> Iterator[Delivered]:
    dataset = litdata.StreamingDataset(str(job.data / "litdata"), shuffle=True, transform=partial(_sample, job))
    gather = partial(collate, job)
    yield from litdata.StreamingDataLoader(
        dataset, batch_size=job.batch_size, num_workers=job.workers, collate_fn=gather
    )

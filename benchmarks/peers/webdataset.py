"""webdataset over the tar pack, which is one: each worker reads shards of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import webdataset as wds

from peers.work import Delivered, Job, collate, sample
from rfstream.dataset.index import IMAGE_EXTENSIONS


def _sample(job: Job, item: dict[str, Any]) -> Any:
    image = next(item[extension] for extension in IMAGE_EXTENSIONS if extension in item)
    return sample(job, image, item["json"])


def batches(job: Job) -> Iterator[Delivered]:
    shards = sorted(str(file) for file in job.pack.glob("train-*.tar"))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(200).map(partial(_sample, job))
    batched = dataset.batched(job.batch_size, collation_fn=partial(collate, job))
    yield from wds.WebLoader(batched, batch_size=None, num_workers=job.workers)

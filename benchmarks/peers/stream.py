"""rfstream, in either assembly."""

from __future__ import annotations

from collections.abc import Iterator

from peers.work import Delivered, Job, config_of
from rfstream import RankLoader, ray_loader


def batches(job: Job, assembly: str) -> Iterator[Delivered]:
    loader = ray_loader(config_of(job, assembly))
    assert isinstance(loader, RankLoader)
    with loader:
        for batch in loader:
            flat = batch.targets.flat
            yield Delivered(batch.images, flat["boxes"], flat["labels"], batch.targets.offsets)

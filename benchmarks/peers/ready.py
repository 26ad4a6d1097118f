"""A batch that is there already, in the place of decoding: what is left of a loader is its hand-off."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from rfstream import Config
from rfstream.dataset.reader import EncodedSample
from rfstream.loader import RankLoader, hand_over_of
from rfstream.stream.pipeline import build_pipeline

OBJECTS = {"detection": 7, "segmentation": 34}
"""Objects an image: of COCO on average, and of a facade."""
SIZE = 576
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Ready:
    """The ready batch of a task; also a ``DecodeSpec`` whose decoder makes it of any samples."""

    task: str
    batch_size: int
    seed: int = 0
    size: int = SIZE

    def build(self) -> Ready:
        return self

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def sample(self, sample: EncodedSample, key: int) -> None:
        """No decoding."""

    def collate(self, decoded: Sequence[None]) -> Arrays:
        return arrays_of(self)


@cache
def arrays_of(ready: Ready) -> Arrays:
    """Pixels and targets at random, laid out as rfstream lays them out; masks as bits."""
    rng, images, size = np.random.default_rng(0), ready.batch_size, ready.size
    objects = images * OBJECTS[ready.task]
    arrays: Arrays = {
        "images": rng.integers(0, 256, (images, 3, size, size), dtype=np.uint8),
        "sizes": np.full((images, 2), size, dtype=np.int64),
        "orig_sizes": np.full((images, 2), size, dtype=np.int64),
        "image_ids": np.arange(images, dtype=np.int64),
        "offsets": np.arange(0, objects + 1, OBJECTS[ready.task], dtype=np.int64),
        "boxes": rng.random((objects, 4), dtype=np.float32),
        "labels": np.ones(objects, dtype=np.int64),
        "area": rng.random(objects, dtype=np.float32),
        "iscrowd": np.zeros(objects, dtype=np.int64),
    }
    if ready.task == "segmentation":
        arrays["masks"] = rng.integers(0, 256, (objects, size * size // 8), dtype=np.uint8)
    return arrays


class Images(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """The images of the ready batch and their targets one by one, again and again: as a dataset has them."""

    def __init__(self, ready: Ready, *, packed: bool) -> None:
        self._ready = ready
        self._packed = packed

    def __len__(self) -> int:
        return self._ready.batch_size * 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.from_numpy(arrays_of(self._ready)["images"][index % self._ready.batch_size]), (
            {} if self._packed else _target(self._ready, index % self._ready.batch_size)
        )


@cache
def _targets(ready: Ready) -> list[dict[str, Tensor]]:
    tensors = {name: torch.from_numpy(values) for name, values in arrays_of(ready).items()}
    targets = []
    for i in range(ready.batch_size):
        lo, hi = int(tensors["offsets"][i]), int(tensors["offsets"][i + 1])
        target = {name: tensors[name][lo:hi] for name in ("boxes", "labels", "area", "iscrowd")}
        if "masks" in tensors:
            target["masks"] = torch.zeros(hi - lo, SIZE, SIZE, dtype=torch.bool)
        target |= {name: tensors[name][i] for name in ("image_ids", "orig_sizes", "sizes")}
        targets.append(target)
    return targets


def _target(ready: Ready, index: int) -> dict[str, Tensor]:
    """Tensors of their own, as they come out of decoding: one that has crossed before would cross for nothing."""
    return {name: tensor.clone() for name, tensor in _targets(ready)[index].items()}


Across = dict[str, Any]
"""What a consumer gets: ``images``, and targets in tensors."""


def _packed(ready: Ready, items: Sequence[tuple[Tensor, Any]]) -> Across:
    """All targets in flat tensors. ``default_collate`` writes straight into shared memory."""
    arrays = arrays_of(ready)
    flat = {name: default_collate([torch.from_numpy(v)])[0] for name, v in arrays.items() if name != "images"}
    return {"images": default_collate([image for image, _ in items]), **flat}


def _per_image(items: Sequence[tuple[Tensor, Any]]) -> Across:
    return {"images": default_collate([image for image, _ in items]), "targets": [target for _, target in items]}


def dataloader(ready: Ready, workers: int, *, packed: bool, copied: bool) -> Iterator[Across]:
    """Through torch's DataLoader; ``copied`` into memory of the training process, as for pinning."""
    gather = partial(_packed, ready) if packed else _per_image
    dataset = Images(ready, packed=packed)
    for batch in DataLoader(dataset, ready.batch_size, num_workers=workers, collate_fn=gather):
        yield {name: tensor.clone() for name, tensor in batch.items()} if copied else batch


def stream(ready: Ready, workers: int, pack: str, assembly: str) -> Iterator[Across]:
    """Through rfstream, which reads ``pack`` and does not decode it."""
    config = Config(
        data={"path": pack},
        stream={"batch_size": ready.batch_size, "assembly": assembly},
        decode={"actors": [workers, workers]},
    )
    pipeline = build_pipeline(config, "train", 1, training=True, decode=ready)
    with RankLoader(pipeline, hand_over_of(pipeline)) as loader:
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield {"images": batch.images, **batch.targets.flat}

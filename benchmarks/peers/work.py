"""The work that every loader of the bench does, and what it has to deliver.

All decode, augment and collate with the same functions (rfstream's), so that loaders are compared and not JPEG
libraries; and all do so in their own workers, in their own order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rfstream import Config, recycle
from rfstream.dataset.layouts import find_splits, read_split
from rfstream.dataset.reader import EncodedSample
from rfstream.stream.decode import DetectionDecoder
from rfstream.stream.pipeline import Pipeline, build_pipeline

from .square import GRID


@dataclass(frozen=True)
class Job:
    """Read ``data`` (loose files, and a pack of them), resize to ``size`` squared, batch, with ``workers`` workers."""

    data: Path
    size: int
    batch_size: int
    workers: int

    @property
    def pack(self) -> Path:
        return self.data / "pack"


class Delivered(NamedTuple):
    """A batch in the training process: ``images`` uint8 (B, 3, S, S), or float32 in 0..1; boxes float32 (N, 4) xyxy in
    pixels and labels int64 (N,) of all of them, and offsets int64 (B + 1,) of each image's."""

    images: Tensor
    boxes: Tensor
    labels: Tensor
    offsets: Tensor


def config_of(job: Job, assembly: str = "auto") -> Config:
    """The stream that does the job."""
    return Config(
        data={"path": str(job.pack)},
        stream={"batch_size": job.batch_size, "tail": "drop", "assembly": assembly},
        decode={"actors": [job.workers, job.workers]},
        augment={"cpu": {"transform": "peers.square:square", "args": {"size": job.size}}},
    )


@cache
def pipeline_of(job: Job) -> Pipeline:
    return build_pipeline(config_of(job), "train", 1, training=True)


@cache
def decoder_of(job: Job) -> DetectionDecoder:
    """This process's decoder: what each of rfstream's actors has."""
    recycle.keep_freed_memory()  # as they do
    decoder = pipeline_of(job).decode.build()
    assert isinstance(decoder, DetectionDecoder)
    return decoder


def sample(job: Job, image: bytes, sidecar: bytes) -> Any:
    """One image file and its annotations, decoded and augmented."""
    return decoder_of(job).sample(EncodedSample("", "", image, sidecar, 0, 0), 0)


def collate(job: Job, samples: Sequence[Any]) -> Delivered:
    """Samples as a batch of four tensors: the fewest that can cross."""
    arrays = decoder_of(job).collate(samples)
    return Delivered(*(torch.from_numpy(arrays[name]) for name in Delivered._fields))


class Loose(NamedTuple):
    """An image file, and the JSON of its annotations."""

    file: str
    sidecar: bytes


def loose_files(job: Job) -> list[Loose]:
    """The training split as it lies in a folder."""
    items = read_split(find_splits(job.data / "loose")["train"], "remap").items
    return [Loose(item.image, item.sidecar) for item in items]


def load(job: Job, item: Loose) -> Any:
    """One sample out of loose files."""
    return sample(job, Path(item.file).read_bytes(), item.sidecar)


def checksum(batch: Delivered) -> int:
    """A number of the batch's content that its order does not enter: of a grid of pixels of each image, all boxes and
    all labels. A whole checksum would cost the training process as much as a loader's hand-off does."""
    pixels = batch.images[:, :, ::GRID, ::GRID]
    if pixels.is_floating_point():
        pixels = (pixels * 255).round()
    pixels = pixels.flatten(1).long()
    boxes = (batch.boxes * 16).round().long() * torch.tensor([1, 3, 5, 7])
    of_images = pixels * torch.arange(1, pixels.shape[1] + 1)
    return int(of_images.sum() + (boxes * (batch.labels[:, None] + 1)).sum() * 1_000_003)


def repeat(source: Path, job: Job, images: int) -> None:
    """SOURCE's train and valid splits in ``job.data / "loose"``; the former lists its images as often as it takes to
    have ``images`` of them."""
    for split in ("train", "valid"):
        document = json.loads((source / split / "_annotations.coco.json").read_text())
        own, annotations = document["images"], document["annotations"]
        folder = job.data / "loose" / split
        folder.mkdir(parents=True)
        document["images"], document["annotations"] = [], []
        ids = max(image["id"] for image in own) + 1
        for number in range(images if split == "train" else len(own)):
            copy, image = number // len(own), own[number % len(own)]
            name = f"{copy}-{image['file_name']}"
            (folder / name).symlink_to((source / split / image["file_name"]).resolve())
            document["images"].append({**image, "id": image["id"] + copy * ids, "file_name": name})
            for annotation in (a for a in annotations if a["image_id"] == image["id"]):
                of = {"id": len(document["annotations"]), "image_id": image["id"] + copy * ids}
                document["annotations"].append({**annotation, **of})
        (folder / "_annotations.coco.json").write_text(json.dumps(document))

"""What RF-DETR itself makes of a dataset on loose files, seeded sample by sample, and the same through rfstream."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packing import pack_checked

from rfstream.dataset.coco import find_splits, read_split
from rfstream.dataset.index import CategoryIds, PackFormat, SplitIndex, read_index
from rfstream.plan.keys import key_of, sample_key
from rfstream.stream.decode import BatchDecoder
from rfstream.stream.source import PackReaderSpec, reader_of
from rfstream.stream.wire import from_row, to_row

SEED, EPOCH, BATCH = 5, 3, 4


def configs(dataset_dir: Path, *, dataset_file: str = "roboflow", **options: Any) -> tuple[Any, Any]:
    """A model and a training configuration of RF-DETR: those of ``options`` that name a field of either."""
    from rfdetr.config import (
        RFDETRKeypointPreviewConfig,
        RFDETRNanoConfig,
        RFDETRSegNanoConfig,
        SegmentationTrainConfig,
        TrainConfig,
    )

    kind = options.pop("kind", "detection")
    model_class, train_class = {
        "detection": (RFDETRNanoConfig, TrainConfig),
        "segmentation": (RFDETRSegNanoConfig, SegmentationTrainConfig),
        "keypoints": (RFDETRKeypointPreviewConfig, TrainConfig),
    }[kind]
    patch = model_class.model_fields["patch_size"].default
    resolution = options.pop("resolution", 128)
    model = {"pretrain_weights": None, "device": "cpu", "num_classes": 2, "resolution": resolution}
    model["positional_encoding_size"] = resolution // patch
    train = {"dataset_file": dataset_file, "dataset_dir": str(dataset_dir), "augmentation_backend": "torchvision"}
    train |= {"batch_size": BATCH, "num_workers": 0, "tensorboard": False}
    for name, value in options.items():
        (model if name in model_class.model_fields else train)[name] = value
    return model_class(**model), train_class(**train)


def pack_in_process(
    source: Path, output: Path, split: str, category_ids: CategoryIds = "remap", format: PackFormat = "tar"
) -> SplitIndex:
    """Pack one split in this process, 7 samples a shard."""
    found = find_splits(source)
    checked = read_split(found[split if split in found else "valid"], category_ids)
    return pack_checked(checked, output, 7, split, category_ids, format)


def seed_sample(key: int, pipeline: Any) -> None:
    """Seed all that RF-DETR's transforms draw from, for one sample."""
    torch.manual_seed(key & (2**63 - 1))
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)
    composes = [step.transform for step in pipeline.transforms if type(step).__name__ == "AlbumentationsWrapper"]
    for number, compose in enumerate(composes):
        compose.set_random_seed(key_of("rfstream.compose", key >> 1, number) & 0xFFFFFFFF)


def theirs(model: Any, train: Any, role: str, image_ids: list[int]) -> Iterator[tuple[Any, Any]]:
    """RF-DETR's own collated batches of the images ``image_ids`` in that order, position by position."""
    from rfdetr.training.module_data import RFDETRDataModule

    module = RFDETRDataModule(model, train)
    module.setup("fit")
    dataset: Any = module._dataset_train if role == "train" else module._dataset_val
    collate = module._collate_fn_train if role == "train" else module._collate_fn
    for first in range(0, len(image_ids), BATCH):
        pairs = []
        for position, image_id in enumerate(image_ids[first : first + BATCH], start=first):
            seed_sample(sample_key(SEED, EPOCH, position), dataset._transforms)
            pairs.append(dataset[dataset.ids.index(image_id)])
        yield collate(pairs)


def ours(pack: Path, model: Any, train: Any, role: str, count: int) -> Iterator[tuple[list[int], Any]]:
    """Our batches of the first ``count`` samples of the pack, across the wire, with their image ids."""
    from rfstream.train.rfdetr.batch import rfdetr_batch_of
    from rfstream.train.rfdetr.labels import labels_of
    from rfstream.train.rfdetr.settings import Settings
    from rfstream.train.rfdetr.spec import RFDETRSpec

    index, space = read_index(str(pack), role), read_index(str(pack), "train")
    reader = reader_of(PackReaderSpec.of(index))
    labels = labels_of(space, model)
    settings = Settings.of(model, train)
    decoder = BatchDecoder.of(RFDETRSpec(settings.to_json(), role, SEED, labels and tuple(labels.items())))
    for number, first in enumerate(range(0, min(count, index.num_samples), BATCH)):
        rows = np.arange(first, min(first + BATCH, count, index.num_samples))
        wire = from_row(to_row([decoder.batch(reader.read(rows), EPOCH, number, first)]))[0]
        normalize = not (settings.gpu_postprocess and role == "train")
        batch = rfdetr_batch_of(wire, step=number, window_end=True, normalize=normalize)
        yield [int(t["image_id"]) for t in batch.targets()], batch


class Compared:
    """Counts what was found equal."""

    def __init__(self) -> None:
        self.batches = self.pixels = self.padding = self.boxes = self.mask_bytes = self.fields = 0

    def same(self, mine: Any, its: Any) -> None:
        """Assert that two collated batches are equal bit for bit, dtype and shape included."""
        (samples, targets), (its_samples, its_targets) = mine, its
        assert samples.no_padding == its_samples.no_padding
        equal(samples.tensors, its_samples.tensors)
        equal(samples.mask, its_samples.mask)
        assert len(targets) == len(its_targets)
        for target, its_target in zip(targets, its_targets, strict=True):
            assert list(target) == sorted(its_target)
            for name, value in target.items():
                equal(value, its_target[name])
                self.fields += 1
            self.boxes += len(target["boxes"])
            self.mask_bytes += target["masks"].numel() if "masks" in target else 0
        self.batches += 1
        self.pixels += samples.tensors.numel()
        self.padding += int(samples.mask.sum())

    def __str__(self) -> str:
        return (
            f"{self.batches} batches: {self.pixels} pixel values, {self.padding} padding pixels, {self.boxes} boxes, "
            f"{self.mask_bytes} mask bytes, {self.fields} target fields"
        )


def equal(mine: torch.Tensor, its: torch.Tensor) -> None:
    """Assert equal dtype, shape and bits."""
    assert type(mine) is type(its) is torch.Tensor, (type(mine), type(its))
    assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
    assert mine.contiguous().view(-1).view(torch.uint8).equal(its.contiguous().view(-1).view(torch.uint8))

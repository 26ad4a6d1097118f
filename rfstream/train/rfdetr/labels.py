"""The label space of a pack as RF-DETR asks for it: of its data module, its evaluation and its model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rfdetr.config import ModelConfig
from rfdetr.datasets import infer_coco_keypoint_schema
from rfdetr.datasets.coco import _build_keypoint_cat2label
from torchvision.datasets import CocoDetection

from rfstream.dataset.mixture import Split
from rfstream.stream.source import reader_of, reader_spec_of
from rfstream.stream.targets import SplitIds, parse_sidecar

_READ = 64
Labels = Mapping[int, int] | None
"""Category id -> label; None where the ids are the labels."""


def labels_of(space: Split, model_config: ModelConfig) -> Labels:
    """Labels of the categories of ``space``, the training split's index.

    Raises:
        ValueError: RF-DETR's own, where a keypoint model's schema and the categories don't fit together.
    """
    if model_config.use_grouppose_keypoints:
        coco = SimpleNamespace(cats=_by_id(space), anns={})
        labels: dict[int, int] = _build_keypoint_cat2label(coco, model_config.num_keypoints_per_class)
        return labels
    return space.label_of() if space.category_ids == "remap" else None


def class_names(space: Split, labels: Labels) -> list[str]:
    """Names by label; an empty string where a label has no category."""
    if labels is None:
        return space.class_names()
    names = [""] * (max(labels.values(), default=-1) + 1)
    for category, label in labels.items():
        names[label] = str(_by_id(space)[category]["name"])
    return names


def keypoint_schema(space: Split) -> Any:
    """RF-DETR's keypoint schema (counts a class, flip pairs, sigmas), inferred from the index's categories.

    Raises:
        ValueError: RF-DETR's own, if no category names its keypoints.
    """
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "categories.json"
        document.write_text(json.dumps({"images": [], "annotations": [], "categories": list(space.categories)}))
        return infer_coco_keypoint_schema(document)


class PackedCoco:
    """What RF-DETR's evaluation reads of a COCO object, out of a pack: categories, labels and annotations.

    ``cats``: id -> category; ``label2cat``: label -> id, absent where ids are labels; ``anns``: the crowd annotations
    of the split and no other, ``imgs``: id -> width and height of their images; ``dataset``: the whole document, which
    keypoint models are scored against. Annotations are read when first asked for: training asks for none.
    """

    label2cat: dict[int, int]

    def __init__(self, index: Split, space: Split, labels: Labels) -> None:
        self.cats = _by_id(space)
        self._index = index
        self._ids = SplitIds(index.pack_ids)
        if labels is not None:
            self.label2cat = {label: category for category, label in labels.items()}

    @cached_property
    def anns(self) -> dict[int, dict[str, Any]]:
        """Crowd annotations, numbered."""
        return dict(enumerate(annotation for of_image, _ in self._crowds for annotation in of_image))

    @cached_property
    def imgs(self) -> dict[int, dict[str, Any]]:
        """Width and height of images with crowds, where the pack knows them."""
        return {int(of_image[0]["image_id"]): size for of_image, size in self._crowds if None not in size.values()}

    @cached_property
    def dataset(self) -> dict[str, Any]:
        """The split's annotations as a COCO document; reads through the whole split, images and all."""
        reader = reader_of(reader_spec_of(self._index))
        images, annotations = [], []
        for first in range(0, self._index.num_samples, _READ):
            rows = np.arange(first, min(first + _READ, self._index.num_samples))
            for sample in reader.read(rows):
                image_id, name, of_image = parse_sidecar(sample.sidecar)
                images.append({"id": self._ids.image(image_id, sample.row), "file_name": name})
                annotations += self._ids.annotations(of_image, sample.row, sample.pack)
        numbered = [{**annotation, "id": number} for number, annotation in enumerate(annotations, start=1)]
        return {"images": images, "annotations": numbered, "categories": list(self.cats.values())}

    @cached_property
    def _crowds(self) -> list[tuple[list[dict[str, Any]], dict[str, int | None]]]:
        rows = self._index.crowds().to_pylist()
        return [
            (
                self._ids.annotations(json.loads(row["crowds"]), row["row"], row.get("pack", 0)),
                {"width": row["width"], "height": row["height"]},
            )
            for row in rows
        ]


class PackedSplit(CocoDetection):  # type: ignore[misc]
    """Stands where RF-DETR's code looks for a split's dataset: its length and its COCO object, no samples."""

    def __init__(self, index: Split, space: Split, labels: Labels) -> None:
        self.coco = PackedCoco(index, space, labels)
        self.label2cat = getattr(self.coco, "label2cat", None)
        self._length = index.num_samples

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        raise TypeError("a packed split is streamed: take samples from the data module's loaders")


def _by_id(space: Split) -> dict[int, dict[str, Any]]:
    return {int(category["id"]): category for category in space.categories}

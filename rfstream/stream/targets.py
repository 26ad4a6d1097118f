"""A sample's annotations to target arrays. The format is COCO's (https://cocodataset.org/#format-data)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pycocotools import mask as coco_mask

from rfstream.stream.augment import Target


def parse_sidecar(data: bytes) -> tuple[int, str, list[dict[str, Any]]]:
    """``(image id, file name, annotations)`` of a sample's JSON member.

    Raises:
        ValueError: with what is wrong with it.
    """
    try:
        sidecar = json.loads(data)
    except ValueError as error:
        raise ValueError(f"the annotations are not valid JSON ({error})") from None
    if not isinstance(sidecar, dict) or not isinstance(sidecar.get("annotations"), list):
        raise ValueError("the annotations hold no list `annotations`")
    image_id = sidecar.get("image_id")
    return (image_id if isinstance(image_id, int) else -1), str(sidecar.get("file_name", "")), sidecar["annotations"]


def targets_of(
    annotations: list[dict[str, Any]], labels: Mapping[int, int], height: int, width: int, *, masks: bool
) -> Target:
    """Target arrays (see :data:`rfstream.stream.augment.Target`) of COCO annotations on an image of ``height`` x
    ``width``.

    Boxes xywh become xyxy, clipped to the image; objects that keep no area are left out, since no box loss is defined
    on them. ``labels`` maps category ids to labels.

    Raises:
        ValueError: naming the annotation and its field.
    """
    boxes = np.array([_box(a) for a in annotations], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    boxes = boxes.clip(0, [width, height, width, height])
    target: Target = {
        "boxes": boxes.astype(np.float32),
        "labels": np.array([_label(a, labels) for a in annotations], dtype=np.int64),
        "area": np.array([a.get("area") or (a["bbox"][2] * a["bbox"][3]) for a in annotations], dtype=np.float32),
        "iscrowd": np.array([bool(a.get("iscrowd")) for a in annotations], dtype=np.int64),
    }
    solid = (target["boxes"][:, 2:] > target["boxes"][:, :2]).all(axis=1)
    kept = {name: values[solid] for name, values in target.items()}
    if masks:
        chosen = [annotations[i] for i in np.flatnonzero(solid)]
        stack = np.array([_mask(a, height, width) for a in chosen], dtype=np.uint8)
        kept["masks"] = stack.reshape(len(chosen), height, width)
    return kept


def _name(annotation: dict[str, Any]) -> str:
    return f"annotation {annotation.get('id', '(no id)')}"


def _box(annotation: dict[str, Any]) -> list[float]:
    box = annotation.get("bbox")
    if isinstance(box, list) and len(box) == 4 and all(isinstance(v, (int, float)) and np.isfinite(v) for v in box):
        return box
    raise ValueError(f"{_name(annotation)} has bbox {box!r}, not four finite numbers x, y, width, height")


def _label(annotation: dict[str, Any], labels: Mapping[int, int]) -> int:
    category = annotation.get("category_id")
    if isinstance(category, int) and category in labels:
        return labels[category]
    raise ValueError(f"{_name(annotation)} has category_id {category!r}, which is not among the pack's categories")


def _mask(annotation: dict[str, Any], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Polygons or RLE to uint8 (height, width); without a segmentation, all zero."""
    segmentation = annotation.get("segmentation")
    if not segmentation:
        return np.zeros((height, width), dtype=np.uint8)
    try:
        if isinstance(segmentation, list):
            polygons = [p for p in segmentation if len(p) >= 6]  # fewer than three points enclose nothing
            if not polygons:
                return np.zeros((height, width), dtype=np.uint8)
            rle = coco_mask.merge(coco_mask.frPyObjects(polygons, height, width))
        elif isinstance(segmentation["counts"], list):
            rle = coco_mask.frPyObjects(segmentation, *segmentation["size"])
        else:
            rle = segmentation
        mask: npt.NDArray[np.uint8] = coco_mask.decode(rle)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{_name(annotation)} has a segmentation that is neither polygons nor RLE ({error})") from None
    if mask.shape != (height, width):
        raise ValueError(
            f"{_name(annotation)} has an RLE of {mask.shape}, the image is {(height, width)} (height, width)"
        )
    return mask

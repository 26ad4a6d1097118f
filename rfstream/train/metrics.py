"""Mean average precision over all ranks, each image counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from faster_coco_eval import COCO, COCOeval_faster
from torch import Tensor

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Judged:
    """One evaluated image: what is there and what was found.

    Boxes are float32 (n, 4) xyxy in pixels of the evaluated frame, labels and crowd int64 (n,), scores float32 (n,).
    """

    boxes: FloatArray
    labels: IntArray
    crowd: IntArray
    found_boxes: FloatArray
    found_labels: IntArray
    found_scores: FloatArray


def judged(target: Mapping[str, Tensor], boxes: Tensor, labels: Tensor, scores: Tensor) -> Judged:
    """The target of one image and its detections, on the CPU."""
    truth = (target["boxes"], target["labels"], target["iscrowd"])
    return Judged(*(value.detach().cpu().numpy() for value in (*truth, boxes, labels, scores)))


def gather(images: Mapping[int, Judged]) -> dict[int, Judged]:
    """The images of all ranks by image id. Every rank must call this once; ranks without an image take part too."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return dict(images)
    parts: list[Mapping[int, Judged]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, dict(images))
    return {image: value for part in parts for image, value in part.items()}


def mean_average_precision(images: Mapping[int, Judged], class_names: Sequence[str]) -> dict[str, float]:
    """COCO's box metrics: ``mAP50_95`` and ``mAP50``, 0..1; 0 where there is nothing to find."""
    if not any(len(value.boxes) for value in images.values()):
        return {"mAP50_95": 0.0, "mAP50": 0.0}
    truth = COCO(
        {
            "images": [{"id": image} for image in images],
            "categories": [{"id": i, "name": name} for i, name in enumerate(class_names)],
            "annotations": _annotations(images),
        }
    )
    evaluation = COCOeval_faster(truth, truth.loadRes(_detections(images)), iouType="bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return {"mAP50_95": float(evaluation.stats[0]), "mAP50": float(evaluation.stats[1])}


def _annotations(images: Mapping[int, Judged]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for image, value in images.items():
        for box, label, crowd in zip(_xywh(value.boxes), value.labels.tolist(), value.crowd.tolist(), strict=True):
            rows.append(
                {
                    "id": len(rows) + 1,
                    "image_id": image,
                    "category_id": label,
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": crowd,
                }
            )
    return rows


def _detections(images: Mapping[int, Judged]) -> list[dict[str, object]]:
    return [
        {"image_id": image, "category_id": label, "bbox": box, "score": score}
        for image, value in images.items()
        for box, label, score in zip(
            _xywh(value.found_boxes), value.found_labels.tolist(), value.found_scores.tolist(), strict=True
        )
    ]


def _xywh(boxes: FloatArray) -> list[list[float]]:
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1).astype(float).tolist()  # type: ignore[no-any-return]

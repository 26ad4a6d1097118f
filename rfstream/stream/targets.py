"""A sample's annotations to target arrays. The format is COCO's (https://cocodataset.org/#format-data)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from rfstream.dataset.index import PackIds
from rfstream.dataset.values import is_number
from rfstream.stream.augment import Target
from rfstream.stream.scaling import WHOLE, Scaling
from rfstream.stream.segmentation import check_segmentation, mask_of


def parse_sidecar(data: bytes) -> tuple[int, str, list[dict[str, Any]]]:
    """``(image id, file name, annotations)`` of a sample's JSON member.

    Raises:
        ValueError: with what is wrong with it.
    """
    try:
        sidecar = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the annotations are not valid JSON ({error})") from None
    if not isinstance(sidecar, dict) or not isinstance(sidecar.get("annotations"), list):
        raise ValueError("the annotations hold no list `annotations`")
    if not all(isinstance(annotation, dict) for annotation in sidecar["annotations"]):
        raise ValueError("the list `annotations` holds something that is no object")
    image_id = sidecar.get("image_id")
    return (
        (image_id if isinstance(image_id, int) and abs(image_id) < 2**63 else -1),
        str(sidecar.get("file_name", "")),
        sidecar["annotations"],
    )


def targets_of(
    annotations: list[dict[str, Any]],
    labels: Mapping[int, int],
    height: int,
    width: int,
    *,
    masks: bool,
    scaling: Scaling = WHOLE,
) -> Target:
    """Target arrays (see :data:`rfstream.stream.augment.Target`) of COCO annotations on an image of ``height`` x
    ``width``.

    Boxes xywh become xyxy, clipped to the image; objects that keep no area are left out, since no box loss is defined
    on them. ``labels`` maps category ids to labels. Annotations are in pixels of the whole image, targets in those that
    ``scaling`` leaves of it.

    Raises:
        ValueError: naming the annotation and its field.
    """
    boxes = np.array([_box(a) for a in annotations], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    boxes = boxes.clip(0, [width, height, width, height])
    target: Target = {
        "boxes": scaling.points(boxes).astype(np.float32),
        "labels": np.array([_label(a, labels) for a in annotations], dtype=np.int64),
        "area": np.array([_area(a) / scaling.factor**2 for a in annotations], dtype=np.float32),
        "iscrowd": np.array([bool(a.get("iscrowd")) for a in annotations], dtype=np.int64),
    }
    solid = (target["boxes"][:, 2:] > target["boxes"][:, :2]).all(axis=1)
    kept = {name: values[solid] for name, values in target.items()}
    if masks:
        chosen = [annotations[i] for i in np.flatnonzero(solid)]
        stack = np.array([_mask(a, height, width, scaling) for a in chosen], dtype=np.uint8)
        kept["masks"] = stack.reshape(len(chosen), *scaling.size(height, width))
    return kept


class SplitIds:
    """A split's own ids for those that its samples' sidecars state.

    Of one pack they are the same. Of a mixture (``pack_ids``, see ``MixedSplit``), category ids are the mixture's, and
    an image's id is its row, for packs number their images alike.
    """

    def __init__(self, pack_ids: PackIds) -> None:
        self._of_pack = [dict(ids) for ids in pack_ids]

    def image(self, stated: int, row: int) -> int:
        """Of the image at ``row``."""
        return row if self._of_pack else stated

    def annotations(self, stated: list[dict[str, Any]], row: int, pack: int) -> list[dict[str, Any]]:
        """Annotations of the image at ``row`` with its ids, as they would be were the split one dataset.

        Raises:
            ValueError: naming an annotation whose category the pack does not have.
        """
        if not self._of_pack:
            return stated
        ids = self._of_pack[pack]
        return [{**a, "category_id": _label(a, ids), "image_id": row} for a in stated]


def check_mask(annotation: dict[str, Any], height: int, width: int) -> None:
    """Look whether native code can take the annotation's segmentation on an image of ``height`` x ``width``.

    Raises:
        ValueError: naming the annotation.
    """
    with _naming(annotation):
        check_segmentation(annotation.get("segmentation"), height, width)


def _name(annotation: dict[str, Any]) -> str:
    return f"annotation {annotation.get('id', '(no id)')}"


def _box(annotation: dict[str, Any]) -> list[float]:
    box = annotation.get("bbox")
    if isinstance(box, list) and len(box) == 4 and all(map(is_number, box)):
        return box
    raise ValueError(f"{_name(annotation)} has bbox {box!r}, not four finite numbers x, y, width, height")


def _label(annotation: dict[str, Any], labels: Mapping[int, int]) -> int:
    category = annotation.get("category_id")
    if isinstance(category, int) and category in labels:
        return labels[category]
    raise ValueError(f"{_name(annotation)} has category_id {category!r}, which is not among the pack's categories")


def _area(annotation: dict[str, Any]) -> float:
    """The area; that of the box where it is absent or zero."""
    area = annotation.get("area") or annotation["bbox"][2] * annotation["bbox"][3]
    if is_number(area):
        return float(area)
    raise ValueError(f"{_name(annotation)} has area {annotation.get('area')!r}, not a finite number")


def _mask(annotation: dict[str, Any], height: int, width: int, scaling: Scaling) -> npt.NDArray[np.uint8]:
    with _naming(annotation):
        return mask_of(annotation.get("segmentation"), height, width, scaling)


@contextmanager
def _naming(annotation: dict[str, Any]) -> Iterator[None]:
    """Say whose segmentation it is that can't be used."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{_name(annotation)} has a segmentation that is neither polygons nor RLE of the image ({error})"
        ) from None

"""The annotations of a split while it is packed: on disk, because there may be more than memory holds; and checked.

Fields and units are those of COCO's detection format (https://cocodataset.org/#format-data).
"""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rfstream.dataset.retry import describe
from rfstream.dataset.values import INT64, is_int64, is_number, short
from rfstream.errors import DatasetError
from rfstream.plan.keys import IntArray


class Annotations:
    """Annotations in order, as JSON in a temporary file that has no name and goes with the process, however that ends.

    In memory is what joins them: where each lies, and the ids that it states.

    Raises:
        DatasetError: whenever the file can't be made or has no room.
    """

    def __init__(self, annotations: Iterable[Mapping[str, Any]] = ()) -> None:
        with _room_needed():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this object lives)
        self._ends = array("q", [0])
        self._ids, self._image_ids, self._category_ids = array("q"), array("q"), array("q")
        self._is_sound = True
        for annotation in annotations:
            self.append(annotation)

    def append(self, annotation: Mapping[str, Any]) -> None:
        """Add one, whatever it states."""
        data = json.dumps(annotation).encode()
        with _room_needed():
            self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))
        self._is_sound = self._is_sound and _is_sound(annotation)
        if self._is_sound:
            self._image_ids.append(annotation["image_id"])
            self._category_ids.append(annotation["category_id"])
            if annotation.get("id") is not None:
                self._ids.append(annotation["id"])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (json.loads(self.text(row)) for row in range(len(self)))

    def text(self, row: int) -> bytes:
        """One as JSON, as ``json.dumps`` writes it."""
        with _room_needed():
            self._file.flush()
        begin, end = self._ends[row], self._ends[row + 1]
        return os.pread(self._file.fileno(), end - begin, begin)

    @property
    def sizes(self) -> IntArray:
        """Bytes of the JSON of each, int64 (n,)."""
        return np.diff(np.array(self._ends))

    @property
    def ids(self) -> IntArray:
        """The ids of those that have one, in order, int64; here and below, of checked annotations."""
        return np.array(self._ids)

    @property
    def image_ids(self) -> IntArray:
        """The id of each one's image, int64 (n,)."""
        return np.array(self._image_ids)

    @property
    def category_ids(self) -> IntArray:
        """The id of each one's category, int64 (n,)."""
        return np.array(self._category_ids)

    def check(self, file: Path, categories: Collection[int], images: Collection[int]) -> None:
        """Refuse what RF-DETR's or our own targets can't be made of, given the ids of categories and images.

        Raises:
            DatasetError: naming ``file`` and the first of those at fault, and counting its like.
        """
        if self._is_sound and len(np.unique(self.ids)) == len(self.ids):
            known = ((self.category_ids, categories), (self.image_ids, images))
            if all(np.isin(np.unique(stated), np.array([*ids], dtype=np.int64)).all() for stated, ids in known):
                return
        # Something is wrong. Only now is everything read again, to say what and how often.
        distinct(file, "annotations", (annotation.get("id") for annotation in self))
        _check_all(file, self, categories, images)


@contextmanager
def _room_needed() -> Iterator[None]:
    """What the system refuses of the temporary file, in one sentence."""
    try:
        yield
    except OSError as error:
        raise DatasetError(
            f"{tempfile.gettempdir()}: annotations can't be kept here while they are packed ({describe(error)}); make "
            "room, or name another folder with TMPDIR"
        ) from None


def distinct(path: Path, what: str, ids: Iterable[object]) -> set[int]:
    """The ids that are there.

    Raises:
        DatasetError: if one is no integer, or two are the same.
    """
    found: set[int] = set()
    for position, number in enumerate(ids):
        if number is None:
            continue
        if not is_int64(number):
            raise DatasetError(f"{path}: {what}[{position}] has id {short(number)}; make it an integer")
        if number in found:
            raise DatasetError(f"{path}: two {what} have the id {number}; give each its own id")
        found.add(number)
    return found


def _check_all(path: Path, annotations: Annotations, categories: Container[int], images: Container[int]) -> None:
    """Refuse the annotations if one is at fault; names the first and counts its like."""
    faults = [(place, *fault) for place, a in enumerate(annotations) if (fault := _fault(a, categories, images))]
    if not faults:
        return
    position, field, text = faults[0]
    first = json.loads(annotations.text(position))
    like = sum(other == field for _, other, _ in faults)
    if all(annotation.get("bbox") is None for annotation in annotations):
        keys = ", ".join(map(repr, list(first)[:6]))
        raise DatasetError(
            f"{path}: no annotation of {len(annotations)} has a bbox (they have {keys}), "
            "so it is no detection dataset; convert it first"
        )
    name = f"annotation {first['id']!r}" if "id" in first else f"annotations[{position}]"
    more = f" (and {like - 1} more like it)" if like > 1 else ""
    raise DatasetError(f"{path}: {name}{more}: {field} is {short(first.get(field))}, {text}")


def _is_sound(annotation: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong with an annotation by itself."""
    return _fault(annotation, INT64, INT64) is None and (annotation.get("id") is None or is_int64(annotation["id"]))


def _fault(annotation: Mapping[str, Any], categories: Container[int], images: Container[int]) -> tuple[str, str] | None:
    """The field that is wrong with an annotation and what to do about it, or None."""
    box, crowd = annotation.get("bbox"), annotation.get("iscrowd", 0)
    if not (isinstance(box, list) and len(box) == 4 and all(map(is_number, box))):
        return "bbox", "not [x, y, width, height] in finite numbers; correct it, or take the annotation out"
    if not _is_known(annotation.get("category_id"), categories):
        return "category_id", "the id of no category; correct it, or add the category"
    if not _is_known(annotation.get("image_id"), images):
        return "image_id", "the id of no image; correct it, or take the annotation out"
    if not is_number(annotation.get("area")):
        return "area", "not a finite number; give it the object's area in pixels"
    if isinstance(crowd, float) or crowd not in (0, 1):
        return "iscrowd", "neither 0 nor 1; correct it"
    return None


def _is_known(value: object, ids: Container[int]) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in ids

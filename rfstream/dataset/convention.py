"""Samples as rows of the Hugging Face detection convention: the schema, and annotations to columns and back.

A row is ``image: struct<bytes, path>``, ``image_id``, ``width``, ``height`` and ``objects``, a struct of lists with one
entry an annotation: ``id``, ``area``, ``bbox`` (x, y, width, height), ``category`` (place in the index's categories),
``iscrowd``, ``segmentation`` (polygons) and ``other``. The features stand in the schema's metadata as the ``datasets``
library writes them (https://huggingface.co/docs/datasets/about_dataset_features).

Nothing of an annotation is lost: what a column can't hold, run lengths of a crowd or a field of the source's own, is a
field of the JSON object in ``other``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

HUGGINGFACE = b"huggingface"
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_NUMBERS = pa.list_(pa.float64())


def _integer(value: object) -> int | None:
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _number(value: object) -> float | None:
    """``value`` as a float, which is another number if it is an integer of more than 53 bits."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e308:
        return float(value)
    return None


def _numbers(value: object) -> list[float] | None:
    numbers = [_number(entry) for entry in value] if isinstance(value, list) else [None]
    return None if None in numbers else [number for number in numbers if number is not None]


def _box(value: object) -> list[float] | None:
    numbers = _numbers(value)
    return numbers if numbers is not None and len(numbers) == 4 else None


def _polygons(value: object) -> list[list[float]] | None:
    polygons = [_numbers(entry) for entry in value] if isinstance(value, list) else [None]
    return None if None in polygons else [polygon for polygon in polygons if polygon is not None]


@dataclass(frozen=True, slots=True)
class Column:
    """A field of an annotation as a list of ``objects``: the type of an entry as written, and as read; what turns a
    JSON value into an entry, None where it can't be one; and whether every annotation must have it."""

    written: pa.DataType
    read: pa.DataType
    entry: Callable[[object], Any]
    required: bool = False


COLUMNS = {
    "id": Column(pa.int64(), pa.int64(), _integer),
    "area": Column(pa.float64(), pa.float64(), _number),
    "bbox": Column(pa.list_(pa.float64(), 4), _NUMBERS, _box, required=True),
    "category": Column(pa.int64(), pa.int64(), _integer, required=True),
    "iscrowd": Column(pa.int64(), pa.int64(), _integer),
    "segmentation": Column(pa.list_(_NUMBERS), pa.list_(_NUMBERS), _polygons),
    "keypoints": Column(_NUMBERS, _NUMBERS, _numbers),
    "num_keypoints": Column(pa.int64(), pa.int64(), _integer),
    "other": Column(pa.string(), pa.string(), lambda value: value),
}
"""The lists of ``objects``, in order."""
KEYPOINTS = ("keypoints", "num_keypoints")
"""Those that are there only if the source has keypoints."""
_OWN = ("id", "area", "bbox", "iscrowd", "segmentation", *KEYPOINTS)  # those that bear the name of the COCO field


@dataclass(frozen=True)
class Convention:
    """How the samples of one split become rows: ids and names of its categories, and whether it has keypoints."""

    category_ids: tuple[int, ...]
    names: tuple[str, ...]
    keypoints: bool

    @staticmethod
    def of(categories: Sequence[Mapping[str, Any]], sidecars: Iterable[bytes]) -> Convention:
        """The convention for a split with these categories and JSON members.

        Class labels of ``datasets`` are told apart by name, so categories of one name bear their ids too.
        """
        times = Counter(category["name"] for category in categories)
        names = tuple(
            category["name"] if times[category["name"]] == 1 else f"{category['name']} (id {category['id']})"
            for category in categories
        )
        key = b'"keypoints": '  # as json.dumps writes a key; inside a text, the quotes are escaped
        keypoints = any(key in sidecar for sidecar in sidecars)
        return Convention(tuple(int(category["id"]) for category in categories), names, keypoints)

    def schema(self) -> pa.Schema:
        """The Arrow schema of a shard, with the features of ``datasets`` in its metadata."""
        lists = [(n, pa.list_(c.written)) for n, c in COLUMNS.items() if self.keypoints or n not in KEYPOINTS]
        fields = [
            ("image", _IMAGE),
            ("image_id", pa.int64()),
            ("width", pa.int64()),
            ("height", pa.int64()),
            ("objects", pa.struct(lists)),
        ]
        features = {name: _feature(kind) for name, kind in fields}
        features["image"] = {"_type": "Image"}
        features["objects"]["category"]["feature"] = {"names": list(self.names), "_type": "ClassLabel"}
        return pa.schema(fields, {HUGGINGFACE: json.dumps({"info": {"features": features}})})

    def row(self, image: bytes, sidecar: bytes, width: int | None, height: int | None) -> dict[str, Any]:
        """One sample as a row."""
        document = json.loads(sidecar)
        category_of = {number: place for place, number in enumerate(self.category_ids)}
        entries = [_entries(annotation, category_of) for annotation in document["annotations"]]
        return {
            "image": {"bytes": image, "path": document["file_name"]},
            "image_id": document["image_id"],
            "width": width,
            "height": height,
            "objects": {name: [entry[name] for entry in entries] for name in COLUMNS},
        }


def _feature(kind: pa.DataType) -> dict[str, Any]:
    """A type as ``datasets`` describes it."""
    if pa.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    if pa.types.is_fixed_size_list(kind):
        return {"feature": _feature(kind.value_type), "length": kind.list_size, "_type": "List"}
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": {pa.float64(): "float64"}.get(kind, str(kind)), "_type": "Value"}


def _entries(annotation: Mapping[str, Any], category_of: Mapping[int, int]) -> dict[str, Any]:
    """An annotation's entry in each list."""
    entries = {name: COLUMNS[name].entry(annotation.get(name)) for name in _OWN}
    exact = (name for name, entry in entries.items() if entry is not None and entry == annotation[name])
    held = {"image_id", "category_id", *exact}
    other = {name: value for name, value in annotation.items() if name not in held}
    entries["category"] = category_of[annotation["category_id"]]
    entries["other"] = json.dumps(other) if other else None
    return entries


def annotations_of(
    objects: Mapping[str, list[Any] | None], image_id: int, category_ids: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The COCO annotations of one row, from those lists of ``objects`` that it has.

    Raises:
        ValueError: naming the column that can't be understood.
    """
    counted = objects["bbox"]
    for name, entries in objects.items():
        if entries is None or counted is None:
            raise ValueError(f"column 'objects.{name if entries is None else 'bbox'}' is null")
        if len(entries) != len(counted):
            raise ValueError(f"column 'objects.{name}' has {len(entries)} entries, 'objects.bbox' {len(counted)}")
    lists = {name: entries for name, entries in objects.items() if entries is not None}
    for at in range(len(counted or ())):
        yield _annotation({name: entries[at] for name, entries in lists.items()}, image_id, category_ids)


def _annotation(entries: dict[str, Any], image_id: int, category_ids: Sequence[int]) -> dict[str, Any]:
    for name, entry in entries.items():
        if entry is None and COLUMNS[name].required:
            raise ValueError(f"column 'objects.{name}' holds a null")
    if len(entries["bbox"]) != 4 or None in entries["bbox"]:
        raise ValueError(f"column 'objects.bbox' holds {entries['bbox']!r}, not four numbers")
    category, other = entries.pop("category"), entries.pop("other", None)
    if not 0 <= category < len(category_ids):
        raise ValueError(f"column 'objects.category' holds {category}, and there are {len(category_ids)} categories")
    annotation = {name: entry for name, entry in entries.items() if entry is not None}
    annotation |= {"image_id": image_id, "category_id": category_ids[category]}
    annotation |= _others(other)
    annotation.setdefault("area", entries["bbox"][2] * entries["bbox"][3])  # others may have no areas
    return annotation


def _others(other: str | None) -> dict[str, Any]:
    """The fields in an entry of ``objects.other``."""
    if other is None:
        return {}
    try:
        fields = json.loads(other)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError("column 'objects.other' holds something that is no JSON object")
    return fields

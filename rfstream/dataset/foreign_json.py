"""The JSON members of WebDataset tars that others wrote, as the sidecars of a pack.

What a sample's JSON says stands at paths in it, keys joined by dots. Its annotations are one of two:

- a list of annotations as COCO has them (https://cocodataset.org/#format-data), which RF-DETR's packer and ours write:
  ``{"annotations": [{"bbox": [...], "category_id": 3}, ...]}``;
- lists as the Hugging Face detection convention has them (:mod:`rfstream.dataset.convention`):
  ``{"objects": {"bbox": [[...], ...], "category": [3, ...]}}``.

A category is an integer or a text there; which category of the index that is, is known when all shards were seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rfstream.dataset.convention import COLUMNS, annotations_of
from rfstream.dataset.values import is_number, pixels, short

Category = int | str
"""A category as a JSON member calls it."""

_LISTS = {f"objects.{name}": column for name, column in COLUMNS.items() if name != "other"}
_integer = COLUMNS["id"].entry
_REQUIRED = [name for name, column in _LISTS.items() if column.required]
MEMBERS = ("image", "json")
"""Names for the two members of a sample, which are told by their extensions."""
NAMES = (*MEMBERS, "annotations", "image_id", "width", "height", *_LISTS)
"""What a user may name."""


@dataclass(frozen=True)
class Described:
    """What a sample's JSON member says of it; the annotations are COCO's, with the JSON's own categories.

    ``image_id`` is None if the number of the sample's row is to be taken.
    """

    image_id: int | None
    file_name: str
    stated: tuple[int | None, int | None]
    annotations: list[dict[str, Any]]

    def sidecar(self, row: int, ids: Mapping[Category, int]) -> dict[str, Any]:
        """The JSON member that a pack has of the sample at ``row`` of the split.

        Raises:
            ValueError: if a category is not in ``ids``.
        """
        unknown = [a["category_id"] for a in self.annotations if a["category_id"] not in ids]
        if unknown:
            raise ValueError(f"category {short(unknown[0])} is not among those of the index")
        image_id = row if self.image_id is None else self.image_id
        annotations = [
            annotation | {"image_id": image_id, "category_id": ids[annotation["category_id"]]}
            for annotation in self.annotations
        ]
        return {"image_id": image_id, "file_name": self.file_name, "annotations": annotations}


def columns_of(data: bytes, named: Mapping[str, str]) -> dict[str, str]:
    """Where members like the first one, ``data``, say what: name of :data:`NAMES` -> path.

    ``named`` is what the user says of that.

    Raises:
        ValueError: if it lacks what is named, or has no annotations in either form, or in both.
    """
    document = _document(data)
    paths = {name: named.get(name, name) for name in NAMES if name not in MEMBERS}
    there = {name for name, path in paths.items() if _at(document, path) is not None}
    for name in paths:
        if name in named and name not in there:
            raise ValueError(
                f"has no field {named[name]!r}; say where {name!r} stands with --columns {name}=NAME "
                f"(it has {', '.join(document) or 'nothing'})"
            )
    coco = "annotations" in there and not any(name in named for name in _LISTS)
    listed = there.issuperset(_REQUIRED) and "annotations" not in named
    if coco == listed:
        raise ValueError(
            f"has {'both' if coco else 'not one of'} a list of annotations ('annotations') and lists of boxes and "
            "categories ('objects.bbox' and 'objects.category'); say where they stand with --columns annotations=NAME, "
            f"or objects.bbox=NAME,objects.category=NAME (it has {', '.join(document) or 'nothing'})"
        )
    wanted = {"annotations"} if coco else set(_LISTS)
    if "image_id" in named or _integer(_at(document, paths["image_id"])) is not None:
        wanted.add("image_id")  # and then every sample has to have one
    return {name: path for name, path in paths.items() if name in wanted or name in ("width", "height")}


def describe(data: bytes, columns: Mapping[str, str]) -> Described:
    """What the JSON member ``data`` says where ``columns``, as :func:`columns_of` makes them, tell.

    Raises:
        ValueError: naming the field that can't be understood.
    """
    document = _document(data)
    image_id = None
    if "image_id" in columns:
        image_id = _integer(_at(document, columns["image_id"]))
        if image_id is None:
            raise ValueError(f"field {columns['image_id']!r} is no integer, as it is in the first sample")
    width, height = (pixels(_at(document, columns[side])) for side in ("width", "height"))
    annotations = _annotations(document, columns) if "annotations" in columns else _from_lists(document, columns)
    name = document.get("file_name")
    return Described(image_id, name if isinstance(name, str) else "", (width, height), annotations)


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise ValueError("is no JSON object")
    return document


def _at(document: Mapping[str, Any], path: str) -> Any:
    """What stands at ``path``; None if there is nothing."""
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _is_category(value: object) -> bool:
    return isinstance(value, str) or _integer(value) is not None


def _annotations(document: Mapping[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    path = columns["annotations"]
    annotations = _at(document, path)
    if not isinstance(annotations, list) or not all(isinstance(annotation, dict) for annotation in annotations):
        raise ValueError(f"field {path!r} is no list of objects")
    for at, annotation in enumerate(annotations):
        if not _is_category(annotation.get("category_id")):
            said = short(annotation.get("category_id"))
            raise ValueError(f"field '{path}[{at}].category_id' is {said}, neither an integer nor a text")
    return [_with_area(annotation) for annotation in annotations]


def _with_area(annotation: dict[str, Any]) -> dict[str, Any]:
    """An annotation with its box's area where it states none: evaluation sorts objects by their size."""
    box = annotation.get("bbox")
    if annotation.get("area") is not None or not (isinstance(box, list) and len(box) == 4 and all(map(is_number, box))):
        return annotation
    return {**annotation, "area": box[2] * box[3]}


def _from_lists(document: Mapping[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    lists: dict[str, list[Any]] = {}
    for name, column in _LISTS.items():
        path = columns[name]
        found = _at(document, path)
        if found is None and not column.required:
            continue
        if not isinstance(found, list):
            raise ValueError(f"field {path!r} is {short(found)}, not a list")
        is_category = name == "objects.category"
        entries = [value if is_category and _is_category(value) else column.entry(value) for value in found]
        for entry, value in zip(entries, found, strict=True):
            if entry is None and (column.required or value is not None):
                raise ValueError(f"field {path!r} holds {short(value)}, which can't be {name!r} of an object")
        lists[name.removeprefix("objects.")] = entries
    called = list(dict.fromkeys(lists["category"]))
    lists["category"] = [called.index(category) for category in lists["category"]]
    return list(annotations_of(lists, -1, called))

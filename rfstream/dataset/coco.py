"""COCO and Roboflow folders, found and checked: what a pack is made from."""

from __future__ import annotations

import json
import stat
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from rfstream.dataset import storage
from rfstream.dataset.index import IMAGE_EXTENSIONS, CategoryIds, check_categories, check_inside
from rfstream.dataset.shards import Item
from rfstream.errors import DatasetError

ROBOFLOW_FILE = "_annotations.coco.json"
_JSON_FILES = ("*.json", "annotations/*.json")
_STAT_THREADS, _STAT_CHUNK = 16, 256


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """Where one split lies on disk: its annotation file and the folder that ``file_name`` is relative to."""

    split: str
    annotations: Path
    images: Path


@dataclass(frozen=True)
class SplitSource:
    """A checked split, ready to pack: one item an image, in the order of the annotation file."""

    split: str
    categories: list[dict[str, Any]]
    annotated_category_ids: list[int]
    items: list[Item]


def find_splits(source: Path) -> dict[str, SplitFiles]:
    """Splits in ``source`` by their name on disk.

    Roboflow: ``SPLIT/_annotations.coco.json`` beside the images. COCO: ``annotations/instances_SPLIT.json`` with the
    images in ``SPLIT/``, ``images/SPLIT/`` or ``images/``. Where a split has both, Roboflow's is taken.

    Raises:
        DatasetError: if there is neither; names what was looked for.
    """
    if not source.is_dir():
        raise DatasetError(f"{source}: no such folder; give the folder that holds the splits")
    found = {}
    for file in sorted(source.glob("annotations/instances_*.json")):
        split = file.stem.removeprefix("instances_")
        folders = [source / split, source / "images" / split, source / "images"]
        images = next((folder for folder in folders if folder.is_dir()), folders[0])
        found[split] = SplitFiles(split, file, images)
    for file in sorted(source.glob(f"*/{ROBOFLOW_FILE}")):
        found[file.parent.name] = SplitFiles(file.parent.name, file, file.parent)
    if not found:
        files = [str(file.relative_to(source)) for pattern in _JSON_FILES for file in sorted(source.glob(pattern))]
        raise DatasetError(
            f"{source}: has neither SPLIT/{ROBOFLOW_FILE} (Roboflow) nor annotations/instances_SPLIT.json (COCO); name "
            "a COCO file and its image folder with --annotations and --images "
            f"(JSON files here: {', '.join(files[:3]) or 'none'})"
        )
    return found


def read_split(files: SplitFiles, category_ids: CategoryIds) -> SplitSource:
    """Read and check one split.

    Raises:
        DatasetError: on the first thing that training could not use; names the file and the image or annotation.
    """
    document = _document(files.annotations)
    categories = _objects(files.annotations, document, "categories")
    images = _objects(files.annotations, document, "images")
    annotations = _objects(files.annotations, document, "annotations")
    if not images:
        raise DatasetError(f"{files.annotations}: lists no images, so there is nothing to pack")
    check_categories(str(files.annotations), categories, category_ids)
    for position, image in enumerate(images):
        _check_image(files.annotations, position, image)
    ids = _distinct(files.annotations, "images", images)
    _distinct(files.annotations, "annotations", annotations)
    _check_annotations(files.annotations, annotations, {category["id"] for category in categories}, ids)
    by_image: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for annotation in annotations:
        by_image[annotation["image_id"]].append(annotation)
    sizes = _sizes(files, [image["file_name"] for image in images])
    items = [
        _item(files.images, image, size, by_image.get(image["id"], []))
        for image, size in zip(images, sizes, strict=True)
    ]
    annotated = sorted({annotation["category_id"] for annotation in annotations})
    return SplitSource(files.split, categories, annotated, items)


def _document(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DatasetError(f"{path}: no such annotation file")
    document = storage.read_json(str(path))
    if isinstance(document, list):
        kind = "a list of detection results" if document and isinstance(document[0], dict) else "a list"
        raise DatasetError(
            f"{path}: {kind}, not a COCO dataset; give the file that has 'images', 'annotations' and 'categories'"
        )
    if not isinstance(document, dict) or "images" not in document:
        keys = ", ".join(map(repr, list(document)[:6])) if isinstance(document, dict) else type(document).__name__
        raise DatasetError(f"{path}: has no 'images' list (found {keys}), so it is no COCO dataset; convert it first")
    return document


def _objects(path: Path, document: dict[str, Any], field: str) -> list[dict[str, Any]]:
    value = document.get(field, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise DatasetError(f"{path}: '{field}' is not a list of objects; correct the file")
    return value


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: object) -> bool:
    """Whether ``value`` is a JSON number that a float32 tensor can hold as finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38 and value == value


def _check_image(path: Path, position: int, image: Mapping[str, Any]) -> None:
    """Refuse an image whose id or file can't be used."""
    number, name = image.get("id"), image.get("file_name")
    if not _is_int64(number):
        raise DatasetError(f"{path}: images[{position}] has id {_short(number)}; every image needs an integer id")
    if not isinstance(name, str):
        raise DatasetError(
            f"{path}: image {number} has file_name {_short(name)}; every image needs the name of its file"
        )
    check_inside(name, f"{path}: image {number}: file_name")
    if _extension(name) not in IMAGE_EXTENSIONS:
        raise DatasetError(
            f"{path}: image {number}: file_name {name!r} has no extension that the loader decodes "
            f"({', '.join(IMAGE_EXTENSIONS)}); convert the image"
        )


def _distinct(path: Path, what: str, entries: list[dict[str, Any]]) -> set[int]:
    """The ids of the entries that have one.

    Raises:
        DatasetError: if one is no integer, or two are the same.
    """
    ids: set[int] = set()
    for position, entry in enumerate(entries):
        number = entry.get("id")
        if number is None:
            continue
        if not _is_int64(number):
            raise DatasetError(f"{path}: {what}[{position}] has id {_short(number)}; make it an integer")
        if number in ids:
            raise DatasetError(f"{path}: two {what} have the id {number}; give each its own id")
        ids.add(number)
    return ids


def _extension(name: str) -> str:
    return PurePosixPath(name).suffix.lower().removeprefix(".")


def _check_annotations(path: Path, annotations: list[dict[str, Any]], categories: set[int], images: set[int]) -> None:
    """Refuse annotations that RF-DETR's or our own targets can't be made of; names the first and counts its like."""
    faults = [(a, fault) for a in enumerate(annotations) if (fault := _fault(a[1], categories, images))]
    if not faults:
        return
    (position, first), (field, text) = faults[0]
    like = sum(other == field for _, (other, _) in faults)
    if all(annotation.get("bbox") is None for annotation in annotations):
        keys = ", ".join(map(repr, list(first)[:6]))
        raise DatasetError(
            f"{path}: no annotation of {len(annotations)} has a bbox (they have {keys}), "
            "so it is no detection dataset; convert it first"
        )
    name = f"annotation {first['id']!r}" if "id" in first else f"annotations[{position}]"
    more = f" (and {like - 1} more like it)" if like > 1 else ""
    raise DatasetError(f"{path}: {name}{more}: {field} is {_short(first.get(field))}, {text}")


def _fault(annotation: Mapping[str, Any], categories: set[int], images: set[int]) -> tuple[str, str] | None:
    """The field that is wrong with an annotation and what to do about it, or None."""
    box, crowd = annotation.get("bbox"), annotation.get("iscrowd", 0)
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
        return "bbox", "not [x, y, width, height] in finite numbers; correct it, or take the annotation out"
    if not _is_known(annotation.get("category_id"), categories):
        return "category_id", "the id of no category; correct it, or add the category"
    if not _is_known(annotation.get("image_id"), images):
        return "image_id", "the id of no image; correct it, or take the annotation out"
    if not _is_number(annotation.get("area")):
        return "area", "not a finite number; give it the object's area in pixels"
    if isinstance(crowd, float) or crowd not in (0, 1):
        return "iscrowd", "neither 0 nor 1; correct it"
    return None


def _is_known(value: object, ids: set[int]) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in ids


def _short(value: object) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sizes(files: SplitFiles, names: list[str]) -> list[int]:
    """Size of every image file in bytes."""
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        parts = (names[i : i + _STAT_CHUNK] for i in range(0, len(names), _STAT_CHUNK))
        sizes = [size for part in pool.map(partial(_file_sizes, files.images), parts) for size in part]
    absent = [name for name, size in zip(names, sizes, strict=True) if size is None]
    if absent:
        raise DatasetError(
            f"{files.annotations}: {len(absent)} of {len(names)} images are not in {files.images}, the first is "
            f"{absent[0]!r}; copy them there, or take them out of the file"
        )
    empty = [name for name, size in zip(names, sizes, strict=True) if size == 0]
    if empty:
        raise DatasetError(
            f"{files.annotations}: {len(empty)} of {len(names)} images in {files.images} are empty files, the first is "
            f"{empty[0]!r}; copy them again, or take them out of the file"
        )
    return [size for size in sizes if size is not None]


def _file_sizes(folder: Path, names: list[str]) -> list[int | None]:
    """Sizes of the regular files ``names`` in ``folder`` (links followed); None where there is none."""
    sizes: list[int | None] = []
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError:
            sizes.append(None)
        else:
            sizes.append(status.st_size if stat.S_ISREG(status.st_mode) else None)
    return sizes


def _item(folder: Path, image: Mapping[str, Any], size: int, annotations: list[dict[str, Any]]) -> Item:
    name = image["file_name"]
    sidecar = {"image_id": image["id"], "file_name": name, "annotations": annotations}
    width, height = (_pixels(image.get(side)) for side in ("width", "height"))
    data = json.dumps(sidecar).encode()
    return Item(f"{folder}/{name}", _extension(name), size, data, width, height, len(annotations))


def _pixels(value: object) -> int | None:
    """A plausible image side, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None

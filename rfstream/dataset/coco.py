"""COCO and Roboflow folders, found and checked: what a pack is made from."""

from __future__ import annotations

import json
import stat
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rfstream.dataset import storage
from rfstream.dataset.index import IMAGE_EXTENSIONS, CategoryIds, check_categories, check_inside
from rfstream.dataset.shards import Item
from rfstream.errors import DatasetError

ROBOFLOW_FILE = "_annotations.coco.json"
_JSON_FILES = ("*.json", "annotations/*.json")
_STAT_THREADS = 16


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
    names = _image_names(files.annotations, images)
    known = {category["id"] for category in categories}
    _check_annotations(files.annotations, annotations, known, {image["id"] for image in images})
    by_image = _group(files.annotations, annotations)
    sizes = _sizes(files, names)
    items = [
        _item(image, str(files.images / name), size, by_image.get(image["id"], []))
        for image, name, size in zip(images, names, sizes, strict=True)
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


def _image_names(path: Path, images: list[dict[str, Any]]) -> list[str]:
    """The checked ``file_name`` of every image."""
    seen: set[int] = set()
    names = []
    for position, image in enumerate(images):
        number, name = image.get("id"), image.get("file_name")
        if not isinstance(number, int) or not _is_int64(number):
            raise DatasetError(f"{path}: images[{position}] has id {number!r}; every image needs an integer id")
        if number in seen:
            raise DatasetError(f"{path}: two images have the id {number}; give each image its own id")
        seen.add(number)
        if not isinstance(name, str):
            raise DatasetError(f"{path}: image {number} has file_name {name!r}; every image needs the name of its file")
        check_inside(name, f"{path}: image {number}: file_name")
        if _extension(name) not in IMAGE_EXTENSIONS:
            raise DatasetError(
                f"{path}: image {number}: file_name {name!r} has no extension that the loader decodes "
                f"({', '.join(IMAGE_EXTENSIONS)}); convert the image"
            )
        names.append(name)
    return names


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


def _group(path: Path, annotations: list[dict[str, Any]]) -> Mapping[int, list[dict[str, Any]]]:
    """Checked annotations by image id; no two may have one id (having none is fine)."""
    grouped: dict[int, list[dict[str, Any]]] = defaultdict(list)
    seen: set[int] = set()
    for annotation in annotations:
        number = annotation.get("id")
        if number is not None:
            if not _is_int64(number):
                raise DatasetError(f"{path}: an annotation has id {_short(number)}; make it an integer")
            if number in seen:
                raise DatasetError(f"{path}: two annotations have the id {number}; give each its own id")
            seen.add(number)
        grouped[annotation["image_id"]].append(annotation)
    return grouped


def _sizes(files: SplitFiles, names: list[str]) -> list[int]:
    """Size of every image file in bytes."""
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        sizes = list(pool.map(_file_size, (files.images / name for name in names)))
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


def _file_size(path: Path) -> int | None:
    """Size of the regular file at ``path`` (links followed), or None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _item(image: Mapping[str, Any], path: str, size: int, annotations: list[dict[str, Any]]) -> Item:
    sidecar = {"image_id": image["id"], "file_name": image["file_name"], "annotations": annotations}
    width, height = (_pixels(image.get(side)) for side in ("width", "height"))
    return Item(path, _extension(path), size, json.dumps(sidecar).encode(), width, height, len(annotations))


def _pixels(value: object) -> int | None:
    """A plausible image side, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None

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
    images in ``SPLIT/`` or ``images/SPLIT/``. Where a split has both, Roboflow's is taken.

    Raises:
        DatasetError: if there is neither; names what was looked for.
    """
    if not source.is_dir():
        raise DatasetError(f"{source}: no such folder; give the folder that holds the splits")
    found = {}
    for file in sorted(source.glob("annotations/instances_*.json")):
        split = file.stem.removeprefix("instances_")
        folders = [source / split, source / "images" / split]
        images = next((folder for folder in folders if folder.is_dir()), folders[0])
        found[split] = SplitFiles(split, file, images)
    for file in sorted(source.glob(f"*/{ROBOFLOW_FILE}")):
        found[file.parent.name] = SplitFiles(file.parent.name, file, file.parent)
    if not found:
        raise DatasetError(
            f"{source}: neither SPLIT/{ROBOFLOW_FILE} (Roboflow) nor annotations/instances_SPLIT.json (COCO) is in it; "
            "for another layout name one file and its image folder with --annotations and --images"
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
    for position, annotation in enumerate(annotations):
        _check_annotation(files.annotations, position, annotation, known)
    by_image = _group(files.annotations, annotations, {image["id"] for image in images})
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


def _check_annotation(path: Path, position: int, annotation: Mapping[str, Any], categories: set[int]) -> None:
    """Refuse an annotation that RF-DETR's or our own targets can't be made of."""
    name = f"{path}: annotation {annotation['id']!r}" if "id" in annotation else f"{path}: annotations[{position}]"
    box, category, crowd = annotation.get("bbox"), annotation.get("category_id"), annotation.get("iscrowd", 0)
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
        raise DatasetError(
            f"{name}: bbox is {_short(box)}, not [x, y, width, height]; give it a box, or take the annotation out"
        )
    if not _is_int64(category) or category not in categories:
        raise DatasetError(f"{name}: category_id {_short(category)} is none of the ids in 'categories'; correct either")
    if not _is_number(annotation.get("area")):
        raise DatasetError(f"{name}: area is {_short(annotation.get('area'))}, not a number; give it the object's area")
    if crowd not in (0, 1) or isinstance(crowd, float):
        raise DatasetError(f"{name}: iscrowd is {_short(crowd)}, neither 0 nor 1; correct it")


def _short(value: object) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _group(path: Path, annotations: list[dict[str, Any]], images: set[int]) -> Mapping[int, list[dict[str, Any]]]:
    """Annotations by image id; no two with one id, and none without its image."""
    grouped: dict[int, list[dict[str, Any]]] = defaultdict(list)
    seen: set[Any] = set()
    for position, annotation in enumerate(annotations):
        number, image = annotation.get("id"), annotation.get("image_id")
        if not _is_int64(image) or image not in images:
            raise DatasetError(
                f"{path}: annotation {number if number is not None else f'at position {position}'} has image_id "
                f"{_short(image)}, which no image has; correct it, or take the annotation out"
            )
        if number is not None:
            if not _is_int64(number):
                raise DatasetError(f"{path}: annotation at position {position} has id {_short(number)}, not an integer")
            if number in seen:
                raise DatasetError(f"{path}: two annotations have the id {number}; give each its own id")
            seen.add(number)
        grouped[image].append(annotation)
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

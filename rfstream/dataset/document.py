"""A split in COCO's terms, whatever layout it was read from: checked, and made into the samples of a pack.

Fields and units are those of COCO's detection format (https://cocodataset.org/#format-data).
"""

from __future__ import annotations

import json
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from rfstream.dataset import tables
from rfstream.dataset.index import IMAGE_EXTENSIONS, CategoryIds, check_categories, check_inside
from rfstream.dataset.shards import Item
from rfstream.errors import DatasetError

PICTURES = (*IMAGE_EXTENSIONS, "avif", "dng", "gif", "heic", "heif", "jp2", "mpo", "tif", "tiff")
"""Extensions of images. Those that can't be packed are found as well, to be refused and not left out in silence."""
_STAT_THREADS, _STAT_CHUNK = 16, 256


@dataclass(frozen=True)
class Document:
    """Images, annotations and categories as COCO lists them.

    ``file`` states them, and is what messages name; each image's ``file_name`` is relative to ``folder``.
    """

    file: Path
    folder: Path
    images: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    categories: list[dict[str, Any]]


@dataclass(frozen=True)
class SplitSource:
    """A checked split, ready to pack: one item an image, in the order of the documents."""

    split: str
    categories: list[dict[str, Any]]
    annotated_category_ids: list[int]
    items: list[Item]


def checked(document: Document, category_ids: CategoryIds) -> Document:
    """``document``, if training can use all of it; image files are not looked at.

    Raises:
        DatasetError: on the first thing that training could not use; names the file and the image or annotation.
    """
    file, images = document.file, document.images
    if not images:
        raise DatasetError(f"{file}: lists no images, so there is nothing to pack")
    check_categories(str(file), document.categories, category_ids)
    for position, image in enumerate(images):
        _check_image(file, position, image)
    ids = _distinct(file, "images", images)
    _distinct(file, "annotations", document.annotations)
    _check_annotations(file, document.annotations, {category["id"] for category in document.categories}, ids)
    return document


def split_source(split: str, documents: Sequence[Document]) -> SplitSource:
    """The samples of a split from checked documents that share their categories and no id.

    Raises:
        DatasetError: if an image file is absent or empty; names its document.
    """
    items = [item for document in documents for item in _items(document)]
    annotated = {annotation["category_id"] for document in documents for annotation in document.annotations}
    return SplitSource(split, documents[0].categories, sorted(annotated), items)


def _items(document: Document) -> Iterable[Item]:
    by_image: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for annotation in document.annotations:
        by_image[annotation["image_id"]].append(annotation)
    sizes = _sizes(document.file, document.folder, [image["file_name"] for image in document.images])
    for image, size in zip(document.images, sizes, strict=True):
        yield _item(document.folder, image, size, by_image.get(image["id"], []))


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: object) -> bool:
    """Whether ``value`` is a JSON number that a float32 tensor can hold as finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38 and value == value


def _check_image(path: Path, position: int, image: Mapping[str, Any]) -> None:
    """Refuse an image whose id or file can't be used."""
    number, name = image.get("id"), image.get("file_name")
    if not _is_int64(number):
        raise DatasetError(f"{path}: images[{position}] has id {short(number)}; every image needs an integer id")
    if not isinstance(name, str):
        raise DatasetError(
            f"{path}: image {number} has file_name {short(name)}; every image needs the name of its file"
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
            raise DatasetError(f"{path}: {what}[{position}] has id {short(number)}; make it an integer")
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
    raise DatasetError(f"{path}: {name}{more}: {field} is {short(first.get(field))}, {text}")


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


def short(value: object) -> str:
    """``value`` for a message, in at most 60 characters."""
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sizes(file: Path, folder: Path, names: list[str]) -> list[int]:
    """Size of every image file in bytes."""
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        parts = (names[i : i + _STAT_CHUNK] for i in range(0, len(names), _STAT_CHUNK))
        sizes = [size for part in pool.map(partial(_file_sizes, folder), parts) for size in part]
    absent = [name for name, size in zip(names, sizes, strict=True) if size is None]
    if absent:
        raise DatasetError(
            f"{file}: {len(absent)} of {len(names)} images are not in {folder}, the first is "
            f"{absent[0]!r}; copy them there, or take them out of the file"
        )
    empty = [name for name, size in zip(names, sizes, strict=True) if size == 0]
    if empty:
        raise DatasetError(
            f"{file}: {len(empty)} of {len(names)} images in {folder} are empty files, the first is "
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
    width, height = (pixels(image.get(side)) for side in ("width", "height"))
    data = json.dumps(sidecar).encode()
    if len(data) > tables.MAX_SIDECAR:
        raise DatasetError(
            f"{folder}/{name}: its {len(annotations):,} annotations take {len(data):,} bytes as JSON and one image's "
            f"may take {tables.MAX_SIDECAR:,}; simplify their outlines, or take some out"
        )
    return Item(f"{folder}/{name}", _extension(name), size, data, width, height, len(annotations))


def pixels(value: object) -> int | None:
    """A plausible image side, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None

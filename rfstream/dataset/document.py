"""A split in COCO's terms, whatever layout it was read from: checked, and made into the samples of a pack.

Fields and units are those of COCO's detection format (https://cocodataset.org/#format-data).
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from rfstream.dataset import tables
from rfstream.dataset.annotations import Annotations, distinct
from rfstream.dataset.index import IMAGE_EXTENSIONS, CategoryIds, check_categories, check_inside
from rfstream.dataset.items import Items, Planned, sidecar_sizes
from rfstream.dataset.values import is_int64, pixels, short
from rfstream.errors import DatasetError
from rfstream.plan.keys import IntArray

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
    annotations: Annotations
    categories: list[dict[str, Any]]


@dataclass(frozen=True)
class SplitSource:
    """A checked split, ready to pack: one item an image, in the order of the documents."""

    split: str
    categories: list[dict[str, Any]]
    annotated_category_ids: list[int]
    items: Items


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
    ids = distinct(file, "images", (image["id"] for image in images))
    document.annotations.check(file, {category["id"] for category in document.categories}, ids)
    return document


def split_source(split: str, documents: Sequence[Document]) -> SplitSource:
    """The samples of a split from checked documents that share their categories and no id.

    Raises:
        DatasetError: if an image file is absent or empty; names its document.
    """
    items = Items(planned for document in documents for planned in _planned(document))
    annotated = np.unique(np.concatenate([document.annotations.category_ids for document in documents]))
    return SplitSource(split, documents[0].categories, annotated.tolist(), items)


def _check_image(path: Path, position: int, image: Mapping[str, Any]) -> None:
    """Refuse an image whose id or file can't be used."""
    number, name = image.get("id"), image.get("file_name")
    if not is_int64(number):
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


def _extension(name: str) -> str:
    return PurePosixPath(name).suffix.lower().removeprefix(".")


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


def _planned(document: Document) -> Iterator[Planned]:
    """The samples of a document in the order of its images."""
    rows, first, last = _by_image(document)
    ends = np.concatenate([[0], np.cumsum(document.annotations.sizes[rows])])
    about = [json.dumps({"image_id": i["id"], "file_name": i["file_name"]})[:-1].encode() for i in document.images]
    sizes = sidecar_sizes(np.array([len(data) for data in about]), ends[last] - ends[first], last - first)
    files = _sizes(document.file, document.folder, [image["file_name"] for image in document.images])
    for at, (image, size, sidecar_size) in enumerate(zip(document.images, files, sizes.tolist(), strict=True)):
        name, own = image["file_name"], rows[first[at] : last[at]]
        path = f"{document.folder}/{name}"
        if sidecar_size > tables.MAX_SIDECAR:
            raise DatasetError(
                f"{path}: its {len(own):,} annotations take {sidecar_size:,} bytes as JSON and one image's "
                f"may take {tables.MAX_SIDECAR:,}; simplify their outlines, or take some out"
            )
        width, height = (pixels(image.get(side)) for side in ("width", "height"))
        yield Planned(path, _extension(name), size, width, height, about[at], document.annotations, own, sidecar_size)


def _by_image(document: Document) -> tuple[IntArray, IntArray, IntArray]:
    """Numbers of the annotations by image, and where those of each image begin and end among them, int64 (n,) each."""
    stated = document.annotations.image_ids
    rows = np.argsort(stated, kind="stable")
    ids = np.array([image["id"] for image in document.images], dtype=np.int64)
    return rows, np.searchsorted(stated, ids, "left", rows), np.searchsorted(stated, ids, "right", rows)

"""COCO and Roboflow's COCO folders: where their splits lie, read into documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from rfstream.dataset import storage
from rfstream.dataset.annotations import Annotations
from rfstream.dataset.document import Document, SplitSource, checked, split_source
from rfstream.dataset.index import CategoryIds
from rfstream.dataset.json_stream import NoObjectError, members, open_text
from rfstream.errors import DatasetError

ROBOFLOW_FILE = "_annotations.coco.json"
LOOKED_FOR = f"SPLIT/{ROBOFLOW_FILE} (Roboflow) nor annotations/instances_SPLIT.json (COCO)"
_COCO, _ROBOFLOW = "annotations/instances_*.json", f"*/{ROBOFLOW_FILE}"
_OF_IMAGE = ("id", "file_name", "width", "height")
_JSON_FILES = ("*.json", "annotations/*.json")


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """Where one split lies on disk: its annotation file and the folder that ``file_name`` is relative to.

    ``further`` are more of both, of which the split is made too.
    """

    split: str
    annotations: Path
    images: Path
    further: tuple[tuple[Path, Path], ...] = ()


def is_here(source: Path) -> bool:
    """Whether ``source`` has a split in one of these layouts."""
    return any(True for pattern in (_COCO, _ROBOFLOW) for _ in source.glob(pattern))


def find_splits(source: Path) -> dict[str, SplitFiles]:
    """Splits in ``source`` by their name on disk.

    Roboflow: ``SPLIT/_annotations.coco.json`` beside the images. COCO: ``annotations/instances_SPLIT.json`` with the
    images in ``SPLIT/``, ``images/SPLIT/`` or ``images/``. Where a split has both, Roboflow's is taken.

    Raises:
        DatasetError: if there is neither; names what was looked for.
    """
    found = {}
    for file in sorted(source.glob(_COCO)):
        split = file.stem.removeprefix("instances_")
        folders = [source / split, source / "images" / split, source / "images"]
        images = next((folder for folder in folders if folder.is_dir()), folders[0])
        found[split] = SplitFiles(split, file, images)
    for file in sorted(source.glob(_ROBOFLOW)):
        found[file.parent.name] = SplitFiles(file.parent.name, file, file.parent)
    if not found:
        raise DatasetError(f"{source}: has neither {LOOKED_FOR}; {name_the_files(source)}")
    return found


def name_the_files(source: Path) -> str:
    """What to do about a folder in which nothing was found, and the JSON files that are there."""
    files = [str(file.relative_to(source)) for pattern in _JSON_FILES for file in sorted(source.glob(pattern))]
    return (
        "name a COCO file and its image folder with --annotations and --images "
        f"(JSON files here: {', '.join(files[:3]) or 'none'})"
    )


def read_split(files: SplitFiles, category_ids: CategoryIds) -> SplitSource:
    """Read and check one split.

    Several files are joined in their order. An id that an earlier file has taken is replaced by the smallest positive
    one that no file has and that is not given yet.

    Raises:
        DatasetError: on the first thing that training could not use, or if two files differ about a category or list
            the same image; names the file and the image or annotation.
    """
    places = [(files.annotations, files.images), *files.further]
    documents = [checked(_document(*place), category_ids) for place in places]
    return split_source(files.split, _joined(documents) if files.further else documents)


def _document(path: Path, images: Path) -> Document:
    if not path.is_file():
        raise DatasetError(f"{path}: no such annotation file")
    found = _read(path)
    if "images" not in found:
        raise _not_coco(path, ", ".join(map(repr, list(found)[:6])))
    annotations = found.get("annotations", Annotations())
    categories = _objects(path, found, "categories")
    entries = _objects(path, found, "images")
    if not isinstance(annotations, Annotations):
        raise _no_list(path, "annotations")
    return Document(path, images, entries, annotations, categories)


def _not_coco(path: Path, found: str) -> DatasetError:
    return DatasetError(f"{path}: has no 'images' list (found {found}), so it is no COCO dataset; convert it first")


def _read(path: Path) -> dict[str, Any]:
    """The members of a COCO file, of which only images and categories are in memory; None for those that are unused."""
    found: dict[str, Any] = {}
    with storage.explained(str(path), "read"), storage.open_binary(str(path)) as file:
        try:
            for key, value in members(open_text(file)):
                found[key] = _kept(key, value)
        except NoObjectError:
            raise _other(path) from None
        except (ValueError, RecursionError) as error:
            raise storage.not_json(str(path), error) from None
    return found


def _kept(key: str, value: object) -> object:
    """What is kept of a member: a list is an iterator that has not begun."""
    if key == "annotations" and isinstance(value, Iterator):
        return _annotations(value)
    if key == "images" and isinstance(value, Iterator):
        return [_used(image) for image in value]
    if key == "categories" and isinstance(value, Iterator):
        return list(value)
    return None


def _used(image: object) -> object:
    """An image without what a pack has no place for, such as URLs: there may be millions."""
    return {name: image[name] for name in _OF_IMAGE if name in image} if isinstance(image, dict) else image


def _annotations(entries: Iterator[object]) -> Annotations | None:
    """The entries of a list, if all of them are objects."""
    annotations = Annotations()
    for entry in entries:
        if not isinstance(entry, dict):
            return None
        annotations.append(entry)
    return annotations


def _other(path: Path) -> DatasetError:
    """What is wrong with a file that holds no object."""
    document = storage.read_json(str(path))
    if not isinstance(document, list):
        return _not_coco(path, type(document).__name__)
    kind = "a list of detection results" if document and isinstance(document[0], dict) else "a list"
    return DatasetError(
        f"{path}: {kind}, not a COCO dataset; give the file that has 'images', 'annotations' and 'categories'"
    )


def _objects(path: Path, found: dict[str, Any], field: str) -> list[dict[str, Any]]:
    value = found.get(field, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise _no_list(path, field)
    return value


def _no_list(path: Path, field: str) -> DatasetError:
    return DatasetError(f"{path}: '{field}' is not a list of objects; correct the file")


def _joined(documents: Sequence[Document]) -> list[Document]:
    """The documents with the categories of all and no id in common."""
    categories = _all_categories(documents)
    _check_apart(documents)
    images = _distinct_ids([[image["id"] for image in document.images] for document in documents])
    annotations = _distinct_ids([document.annotations.ids.tolist() for document in documents])
    return [
        replace(
            document,
            images=[image | {"id": image_ids[image["id"]]} for image in document.images],
            annotations=Annotations(
                a | {"image_id": image_ids[a["image_id"]]} | ({"id": ids[a["id"]]} if a.get("id") is not None else {})
                for a in document.annotations
            ),
            categories=categories,
        )
        for document, image_ids, ids in zip(documents, images, annotations, strict=True)
    ]


def _all_categories(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """The categories of all documents, in the order in which they first come."""
    known: dict[int, tuple[dict[str, Any], Path]] = {}  # with the file that had it first
    for document in documents:
        by_name = {category["name"]: (category["id"], file) for category, file in known.values()}
        for category in document.categories:
            number, name = category["id"], category["name"]
            other, file = known.get(number, (category, document.file))
            if other["name"] != name:
                raise DatasetError(
                    f"{document.file}: category {number} is {name!r}, in {file} it is {other['name']!r}; "
                    "give both files the same categories"
                )
            other_id, file = by_name.get(name, (number, file))
            if number not in known and other_id != number:
                raise DatasetError(
                    f"{document.file}: category {name!r} has the id {number}, in {file} it has {other_id}; "
                    "give both files the same categories"
                )
        known |= {c["id"]: (c, document.file) for c in document.categories if c["id"] not in known}
    return [category for category, _ in known.values()]


def _check_apart(documents: Sequence[Document]) -> None:
    """Refuse an image that two documents list."""
    listed: dict[str, Path] = {}
    for document in documents:
        own = {f"{document.folder}/{image['file_name']}" for image in document.images}
        twice = min(own & listed.keys(), default=None)
        if twice is not None:
            raise DatasetError(
                f"{document.file}: lists {twice}, as {listed[twice]} does; list each image in one file, with all of "
                "its annotations"
            )
        listed |= dict.fromkeys(own, document.file)


def _distinct_ids(ids: Sequence[Sequence[int]]) -> list[dict[int, int]]:
    """For each file, its ids to ids that no other file has: those taken before become the next that no file has."""
    used = set(chain.from_iterable(ids))
    free = (number for number in count(1) if number not in used)
    taken: set[int] = set()
    found = []
    for of_file in ids:
        found.append({number: next(free) if number in taken else number for number in of_file})
        taken.update(of_file)
    return found

"""The layouts that a dataset may have on disk: which one a folder has, and the reader of each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from rfstream.dataset import coco, voc, yolo
from rfstream.dataset.document import Document, SplitSource, checked, split_source
from rfstream.dataset.index import CategoryIds
from rfstream.errors import DatasetError

Layout = Literal["coco", "yolo", "voc"]
SplitFiles: TypeAlias = coco.SplitFiles | yolo.SplitFiles | voc.SplitFiles


def layouts_of(source: Path) -> list[Layout]:
    """The layouts that the folder ``source`` has."""
    here: dict[Layout, bool] = {
        "coco": coco.is_here(source),
        "yolo": yolo.is_here(source),
        "voc": voc.is_here(source),
    }
    return [layout for layout, is_here in here.items() if is_here]


def find_splits(source: Path, layout: Layout | None = None) -> dict[str, SplitFiles]:
    """Splits in ``source`` by their name on disk; its layout is the one it has, where none is given.

    Raises:
        DatasetError: if there is no split in that layout, or none in any, or several layouts are there.
    """
    if not source.is_dir():
        raise DatasetError(f"{source}: no such folder; give the folder that holds the splits")
    match layout or _only_layout(source):
        case "coco":
            return {**coco.find_splits(source)}
        case "yolo":
            return {**yolo.find_splits(source)}
        case "voc":
            return {**voc.find_splits(source)}


def _only_layout(source: Path) -> Layout:
    found = layouts_of(source)
    if len(found) > 1:
        raise DatasetError(f"{source}: is laid out as {' and as '.join(found)}; say with --layout which one to pack")
    if not found:
        raise DatasetError(
            f"{source}: has neither {coco.LOOKED_FOR} nor {yolo.LOOKED_FOR} nor {voc.LOOKED_FOR}; "
            f"{coco.name_the_files(source)}"
        )
    return found[0]


def read_split(files: SplitFiles, category_ids: CategoryIds) -> SplitSource:
    """Read and check one split.

    Raises:
        DatasetError: on the first thing that training could not use; names the file and the place in it.
    """
    if isinstance(files, coco.SplitFiles):
        return coco.read_split(files, category_ids)
    return split_source(files.split, [checked(read_document(files), category_ids)])


def read_document(files: yolo.SplitFiles | voc.SplitFiles) -> Document:
    """Read one split of a layout that is not COCO's.

    Raises:
        DatasetError: on the first thing that can't be read as the format says; names the file and the place in it.
    """
    return yolo.read_document(files) if isinstance(files, yolo.SplitFiles) else voc.read_document(files)

"""The layouts that a dataset may have on disk: which one a folder has, and the reader of each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from rfstream.dataset import coco, voc, yolo
from rfstream.dataset.document import SplitSource, checked, split_source
from rfstream.dataset.index import CategoryIds
from rfstream.errors import DatasetError

Layout = Literal["coco", "yolo", "voc"]
SplitFiles: TypeAlias = coco.SplitFiles | yolo.SplitFiles | voc.SplitFiles


def find_splits(source: Path, layout: Layout | None = None) -> dict[str, SplitFiles]:
    """Splits in ``source`` by their name on disk; its layout is the one it has, where none is given.

    Raises:
        DatasetError: if there is no split in that layout, or none in any, or several layouts are there.
    """
    if not source.is_dir():
        raise DatasetError(f"{source}: no such folder; give the folder that holds the splits")
    match layout or _layout(source):
        case "coco":
            return {**coco.find_splits(source)}
        case "yolo":
            return {**yolo.find_splits(source)}
        case "voc":
            return {**voc.find_splits(source)}


def _layout(source: Path) -> Layout:
    here: dict[Layout, bool] = {
        "coco": coco.is_here(source),
        "yolo": yolo.is_here(source),
        "voc": voc.is_here(source),
    }
    found = [layout for layout, is_here in here.items() if is_here]
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
    match files:
        case coco.SplitFiles():
            return coco.read_split(files, category_ids)
        case yolo.SplitFiles():
            document = yolo.read_document(files)
        case voc.SplitFiles():
            document = voc.read_document(files)
    return split_source(files.split, [checked(document, category_ids)])

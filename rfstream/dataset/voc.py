"""Pascal VOC folders: an XML file for each image, read into documents.

The format is that of the VOC devkit (http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html), in its
folders or beside the images as Roboflow exports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from rfstream.dataset import storage
from rfstream.dataset.annotations import Annotations
from rfstream.dataset.document import PICTURES, Document
from rfstream.dataset.values import short
from rfstream.errors import DatasetError

LOOKED_FOR = "Annotations/*.xml (Pascal VOC) or SPLIT/*.xml (Roboflow)"
_SIDES = ("xmin", "ymin", "xmax", "ymax")
_OF_A_CLASS = re.compile(r".*\S\s+-?[01]")  # a line of ImageSets/Main/CLASS_SPLIT.txt: an image, and whether it has one
_THREADS = 16

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """Where one split lies on disk.

    Attributes:
        split: its name.
        listing: file that lists the split's images by name without extension; or the folder, for all in it.
        annotations: folder of the XML files.
        images: folder of the images.
        names: of the categories, over all splits, sorted.
    """

    split: str
    listing: Path
    annotations: Path
    images: Path
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Annotation:
    """What one XML file states: (width, height) in pixels or None, and name and box of each object."""

    size: tuple[int, int] | None
    objects: list[tuple[str, Box]]


def is_here(source: Path) -> bool:
    """Whether ``source`` is a folder in this layout."""
    return any(True for _ in _xml_files(source))


def _xml_files(source: Path) -> Iterator[Path]:
    """The XML files in the folders of ``source``; hidden folders are those of editors."""
    return (file for file in source.glob("*/*.xml") if not file.parent.name.startswith("."))


def find_splits(source: Path) -> dict[str, SplitFiles]:
    """Splits in ``source`` by their name on disk.

    Devkit: ``ImageSets/Main/SPLIT.txt``, with ``Annotations/`` and ``JPEGImages/``; lists of single classes
    (``CLASS_SPLIT.txt``) are no splits. Without ``Annotations/``, each folder with XML files beside its images is one.

    Raises:
        DatasetError: if there is neither, or an XML file of any split is broken: all say which categories there are.
    """
    annotations = source / "Annotations"
    files = sorted(annotations.glob("*.xml"))
    if files:
        lists = [file for file in sorted(source.glob("ImageSets/Main/*.txt")) if not _is_of_a_class(file)]
        if not lists:
            raise DatasetError(
                f"{source}: has Annotations but no ImageSets/Main/SPLIT.txt, so there are no splits; write one for "
                "each that lists its images, one name a line without extension"
            )
        names = _names(files)
        return {file.stem: SplitFiles(file.stem, file, annotations, source / "JPEGImages", names) for file in lists}
    files = sorted(_xml_files(source))
    if not files:
        raise DatasetError(f"{source}: has neither {LOOKED_FOR}; give the folder that holds them")
    names = _names(files)
    folders = sorted({file.parent for file in files})
    return {folder.name: SplitFiles(folder.name, folder, folder, folder, names) for folder in folders}


def _is_of_a_class(file: Path) -> bool:
    lines = _lines(file)
    return bool(lines) and all(_OF_A_CLASS.fullmatch(line) for line in lines)


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in storage.read_text(str(file)).splitlines() if line.strip()]


def _names(files: Sequence[Path]) -> tuple[str, ...]:
    return tuple(sorted({name for annotation in _read_all(files) for name, _ in annotation.objects}))


def _read_all(files: Sequence[Path]) -> Iterable[Annotation]:
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(lambda file: parse_annotation(file, storage.read_bytes(str(file))), files)


def read_document(files: SplitFiles) -> Document:
    """Read one split.

    Categories have the ids 1, 2, 3, ... in the order of their names over all splits; image ids are 1, 2, 3, ... in the
    order of the list, or of the files' names; annotation ids in that order too. Boxes are 1-based and inclusive in the
    XML, so a box from 1 to 10 is 10 pixels wide and begins at 0. ``truncated`` and ``difficult`` objects are objects
    as any other.

    Raises:
        DatasetError: on the first thing that can't be read as the format says; names the file, object and field.
    """
    stems, names = _stems(files), _image_names(files.images)
    _check_there(files, stems, names)
    ids = {name: number for number, name in enumerate(files.names, 1)}
    images: list[dict[str, Any]] = []
    annotations = Annotations()
    read = _read_all([files.annotations / f"{stem}.xml" for stem in stems])
    for number, (stem, annotation) in enumerate(zip(stems, read, strict=True), 1):
        width, height = annotation.size or (None, None)
        images.append({"id": number, "file_name": names[stem][0], "width": width, "height": height})
        for name, (x0, y0, x1, y1) in annotation.objects:
            box = [x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1]
            about = {"id": len(annotations) + 1, "image_id": number, "category_id": ids[name]}
            annotations.append(about | {"bbox": box, "area": box[2] * box[3], "segmentation": [], "iscrowd": 0})
    categories = [{"id": number, "name": name} for name, number in ids.items()]
    return Document(files.listing, files.images, images, annotations, categories)


def _stems(files: SplitFiles) -> list[str]:
    """Names of the split's images, without extension."""
    if files.listing.is_dir():
        return sorted(file.stem for file in files.listing.glob("*.xml"))
    stems: dict[str, None] = {}
    for stem in _lines(files.listing):
        if stem in stems:
            raise DatasetError(f"{files.listing}: lists {short(stem)} twice; take one out")
        stems[stem] = None
    return list(stems)


def _image_names(folder: Path) -> dict[str, list[str]]:
    """Names of the image files in ``folder`` by their name without extension."""
    found: dict[str, list[str]] = {}
    if folder.is_dir():
        for file in sorted(folder.iterdir()):
            if file.suffix.lower().removeprefix(".") in PICTURES:
                found.setdefault(file.stem, []).append(file.name)
    return found


def _check_there(files: SplitFiles, stems: Sequence[str], names: dict[str, list[str]]) -> None:
    """Refuse names without an image or without an XML file, and those of two images."""
    annotated = {file.stem for file in files.annotations.glob("*.xml")}
    for what, folder, there in (("image", files.images, names.keys()), ("XML file", files.annotations, annotated)):
        absent = [stem for stem in stems if stem not in there]
        if absent:
            raise DatasetError(
                f"{files.listing}: {len(absent)} of {len(stems)} names have no {what} in {folder}, the first is "
                f"{short(absent[0])}; copy it there, or take the name out"
            )
    several = next((stem for stem in stems if len(names[stem]) > 1), None)
    if several is not None:
        raise DatasetError(
            f"{files.listing}: {short(several)} may be {' or '.join(names[several])} in {files.images}; remove or "
            "rename one"
        )


def parse_annotation(file: Path, data: bytes) -> Annotation:
    """What an XML file holds; boxes as it states them.

    Raises:
        DatasetError: if it is no XML, declares a document type, or an object lacks a name or a box with its corners in
            order; names ``file``, and the object and field.
    """
    root = _xml(file, data)
    if root.tag != "annotation":
        raise DatasetError(f"{file}: is a <{root.tag}>, not an <annotation> of Pascal VOC; take it out or convert it")
    objects = [_object(f"{file}: object {i}", element) for i, element in enumerate(root.findall("object"), 1)]
    sides = [_pixels(root.findtext(f"size/{side}")) for side in ("width", "height")]
    return Annotation((sides[0], sides[1]) if all(sides) else None, objects)


def _xml(file: Path, data: bytes) -> Element:
    """The root element. A document type is refused: entities that it may declare expand without bounds."""

    def refuse(*_: Any) -> NoReturn:
        raise DatasetError(f"{file}: declares a document type, which no annotation needs; take the DOCTYPE out")

    builder, parser = TreeBuilder(), expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = builder.data, refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # the latter two for encodings
        raise DatasetError(f"{file}: not a readable XML file ({storage.describe(error)}); correct it") from None
    return builder.close()


def _object(where: str, element: Element) -> tuple[str, Box]:
    name = (element.findtext("name") or "").strip()
    if not name:
        raise DatasetError(f"{where}: has no name; give it one, or take the object out")
    x0, y0, x1, y1 = (_side(where, side, element.findtext(f"bndbox/{side}")) for side in _SIDES)
    if x1 < x0 or y1 < y0:
        axis = "x" if x1 < x0 else "y"
        raise DatasetError(f"{where}: {axis}max is less than {axis}min; correct it, or take the object out")
    return name, (x0, y0, x1, y1)


def _side(where: str, side: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DatasetError(f"{where}: {side} is {short(text)}, no finite number; correct it, or take the object out")
    return int(value) if value.is_integer() else value


def _pixels(text: str | None) -> int:
    """A side as stated, 0 where it is not: some tools write no size, or zeros."""
    try:
        return int(text or "")
    except ValueError:
        return 0

"""YOLO folders: ``data.yaml``, images, and a label file for each image, read into documents.

The format is that of Ultralytics' detection and segmentation datasets (https://docs.ultralytics.com/datasets/detect,
https://docs.ultralytics.com/datasets/segment), as Ultralytics and Roboflow write it. Nothing outside of the dataset's
folder is read, whatever ``data.yaml`` or a list of images say.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from rfstream.dataset import storage
from rfstream.dataset.annotations import Annotations
from rfstream.dataset.document import PICTURES, Document
from rfstream.dataset.exif import shown_size
from rfstream.dataset.values import short
from rfstream.errors import DatasetError

DATA_FILE = "data.yaml"
LOOKED_FOR = f"{DATA_FILE} (YOLO)"
SLACK = 0.01
"""How far past 0 or 1 the centre and size of a box may lie, as in Ultralytics."""
_SPLITS = ("train", "val", "test")
_BOX = ("x_center", "y_center", "width", "height")
_THREADS = 16


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """Where one split lies on disk.

    Attributes:
        split: its name.
        data: the ``data.yaml`` that states it.
        root: the folder that ``places`` are relative to.
        places: folders of images, and .txt files that list images, as stated.
        names: class id to name.
    """

    split: str
    data: Path
    root: Path
    places: tuple[str, ...]
    names: Mapping[int, str]


def is_here(source: Path) -> bool:
    """Whether ``source`` is a folder in this layout."""
    return (source / DATA_FILE).is_file()


def find_splits(source: Path) -> dict[str, SplitFiles]:
    """The splits that ``data.yaml`` in ``source`` states as ``train``, ``val`` and ``test``.

    Raises:
        DatasetError: if there is no such file, or ``path``, ``names``, ``nc`` or a split in it can't be used.
    """
    source = source.absolute()
    file = source / DATA_FILE
    if not is_here(source):
        raise DatasetError(f"{source}: has no {LOOKED_FOR}; it states where the images are and names the classes")
    data = _mapping(file)
    if data.get("kpt_shape") is not None:
        raise DatasetError(f"{file}: has kpt_shape, so labels hold keypoints, which are not packed; convert them first")
    root, names = _root(source, file, data.get("path")), _names(file, data)
    found = {}
    for split in _SPLITS:
        stated = data.get(split)
        places = stated if isinstance(stated, list) else [stated] if stated else []
        if not all(isinstance(place, str) for place in places):
            raise DatasetError(f"{file}: {split} is neither a folder or .txt file nor a list of them; correct it")
        if places:
            found[split] = SplitFiles(split, file, root, tuple(places), names)
    if not found:
        raise DatasetError(f"{file}: states none of {', '.join(_SPLITS)}; add the folders of their images")
    return found


def _mapping(file: Path) -> dict[Any, Any]:
    text = storage.read_bytes(str(file))
    try:
        data = yaml.safe_load(text)
    except Exception as error:  # PyYAML lets out whatever a date, a number or deep nesting raises
        raise DatasetError(f"{file}: not a readable YAML file ({storage.describe(error)}); correct it") from None
    if not isinstance(data, dict):
        raise DatasetError(f"{file}: holds no mapping with the keys train, val and names; correct it")
    return data


def _root(source: Path, file: Path, stated: object) -> Path:
    """The folder that splits are relative to: ``path``, where that is one inside ``source``, else ``source``."""
    if stated is None or stated == "":
        return source
    if not isinstance(stated, str):
        raise DatasetError(f"{file}: path is a {type(stated).__name__}, not the name of a folder; correct it")
    root = Path(os.path.normpath(source / stated))
    if not _is_folder(root):
        return source  # where the dataset was when the file was written
    if root.is_relative_to(source):
        return root
    if root.samefile(source):
        return source
    raise DatasetError(
        f"{file}: path is {short(stated)}, another folder, and nothing outside of {source} is read; "
        "pack that folder with the file in it, or correct path"
    )


def _names(file: Path, data: Mapping[Any, Any]) -> dict[int, str]:
    """Class id to name, from a list or from a mapping of ids."""
    stated, count = data.get("names"), data.get("nc")
    if isinstance(stated, list):
        stated = dict(enumerate(stated))
    if not isinstance(stated, dict) or not stated:
        raise DatasetError(f"{file}: names is neither a list nor a mapping of class names; give each class its name")
    names = {}
    for number, name in stated.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise DatasetError(f"{file}: names has the key {short(number)}; a class id is 0, 1, 2, ...")
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise DatasetError(f"{file}: the name of class {number} is no text; put it in quotes")
        names[number] = str(name)
    if count is not None and count != len(names):
        raise DatasetError(f"{file}: nc is {_scalar(count)}, but names has {len(names)} classes; correct one of them")
    return dict(sorted(names.items()))


def _scalar(value: object) -> str:
    """``value`` for a message; what YAML aliases nest may be endless."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict | set) else short(value)


def read_document(files: SplitFiles) -> Document:
    """Read one split.

    Image ids are 1, 2, 3, ... in the order of the files' names, or of the list that names them; annotation ids in that
    order too; category ids are the class ids. ``file_name`` is relative to the folder that holds all images.

    Raises:
        DatasetError: on the first thing that can't be read as the format says; names the file, line and field.
    """
    images, folder = _images(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        read = list(pool.map(partial(_read_image, files), images))
    if images and not any(is_labelled for _, is_labelled, _ in read):
        raise DatasetError(
            f"{files.data}: none of the {len(images)} images of {', '.join(files.places)} has a label file, the first "
            f"would be {_label_files(files, images[0])[0]}; put them there (an empty one for an image without objects)"
        )
    entries: list[dict[str, Any]] = []
    annotations = Annotations()
    for number, (image, (size, _, objects)) in enumerate(zip(images, read, strict=True), 1):
        name = image.relative_to(folder).as_posix()
        entries.append({"id": number, "file_name": name, "width": size[0], "height": size[1]})
        for about in objects:
            annotations.append({"id": len(annotations) + 1, "image_id": number} | about)
    categories = [{"id": number, "name": name} for number, name in files.names.items()]
    return Document(files.data, folder, entries, annotations, categories)


def _images(files: SplitFiles) -> tuple[list[Path], Path]:
    """The images of a split in order, and the folder that holds all of them."""
    found: dict[Path, str] = {}
    folders: set[Path] = set()
    for stated in files.places:
        place = _place(files, stated)
        if _is_folder(place):
            folders.add(place)
            images = [(image, str(files.data)) for image in _images_in(place)]
        else:
            images = list(_listed(files, place))
            folders |= {image.parent for image, _ in images}
        for image, where in images:
            if image in found:
                raise DatasetError(f"{where}: {image} comes twice, and first by {found[image]}; take one out")
            found[image] = where
    return list(found), Path(os.path.commonpath(folders)) if folders else files.root


def _place(files: SplitFiles, stated: str) -> Path:
    """The folder or list that ``stated`` names. Roboflow writes ``../train/images`` for what lies in the root."""
    source = files.data.parent
    for name in (stated, stated.removeprefix("../")):
        place = Path(os.path.normpath(files.root / name))
        if place.is_relative_to(source) and (_is_folder(place) or (place.suffix == ".txt" and os.path.lexists(place))):
            return place
    raise DatasetError(
        f"{files.data}: {short(stated)} is neither a folder nor a .txt file inside {source}; correct it or take it "
        "out, or name other splits with --splits"
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long, for one
        return False


def _images_in(folder: Path) -> list[Path]:
    """All images in ``folder`` and below it, by name. Hidden files, such as those that macOS leaves, are none."""
    files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names if not name.startswith("."))
    return sorted(file for file in files if file.suffix.lower().removeprefix(".") in PICTURES)


def _listed(files: SplitFiles, listing: Path) -> Iterator[tuple[Path, str]]:
    """The images that ``listing`` names, relative to itself or, if the first is not there, to the root."""
    source = files.data.parent
    lines = [(number, line.strip()) for number, line in enumerate(storage.read_text(str(listing)).splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line]
    beside = not lines or os.path.lexists(listing.parent / lines[0][1])
    for number, line in lines:
        image = Path(os.path.normpath((listing.parent if beside else files.root) / line))
        if not image.is_relative_to(source) or image == source:
            raise DatasetError(
                f"{listing}: line {number}: {short(line)} is not inside {source}, and nothing outside is read; "
                "correct the line"
            )
        yield image, f"{listing}: line {number}"


def _label_files(files: SplitFiles, image: Path) -> list[Path]:
    """Where the label file of ``image`` may be: below ``labels`` in place of the last ``images``, or beside it."""
    beside = image.with_suffix(".txt")
    parts = list(beside.relative_to(files.data.parent).parts)
    at = next((i for i in range(len(parts) - 2, -1, -1) if parts[i] == "images"), None)
    if at is None:
        return [beside]
    return [files.data.parent.joinpath(*parts[:at], "labels", *parts[at + 1 :]), beside]


def _read_image(files: SplitFiles, image: Path) -> tuple[tuple[int, int], bool, list[dict[str, Any]]]:
    """Width and height of an image, whether it has a label file, and its objects."""
    try:
        size = shown_size(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DatasetError(
            f"{image}: the image's size can't be read ({storage.describe(error)}), which its labels need; copy the "
            f"image again, or take it out of what {files.data} states"
        ) from None
    label = next((file for file in _label_files(files, image) if file.is_file()), None)
    if label is None:
        return size, False, []
    return size, True, parse_labels(label, storage.read_text(str(label)), size, files.names)


def parse_labels(file: Path, text: str, size: tuple[int, int], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The objects of a label file as COCO annotations without ``id`` and ``image_id``.

    A line is ``class x_center y_center width height``, or ``class x1 y1 x2 y2 x3 y3 ...`` for a polygon, in parts of
    the image's ``size`` (width, height in pixels).

    Raises:
        DatasetError: if a line is neither, its class has no name, or its box is past 0 or 1 (see ``SLACK``); names the
            line and the field.
    """
    lines = enumerate(text.splitlines(), 1)
    return [_object(f"{file}: line {number}", line.split(), size, names) for number, line in lines if line.strip()]


def _object(where: str, fields: list[str], size: tuple[int, int], names: Mapping[int, str]) -> dict[str, Any]:
    if len(fields) != 5 and (len(fields) < 7 or len(fields) % 2 == 0):
        raise DatasetError(
            f"{where}: has {len(fields)} fields; a box has 5 (class, {', '.join(_BOX)}), a polygon a class and "
            "three or more pairs x y: correct the line, or take it out"
        )
    category = _class_id(where, fields[0], names)
    if len(fields) == 5:
        x, y, width, height = (_number(where, name, text) for name, text in zip(_BOX, fields[1:], strict=True))
        _check_extent(where, "", (x, y, width, height))
        box = [(x - width / 2) * size[0], (y - height / 2) * size[1], width * size[0], height * size[1]]
        return _annotation(category, box, box[2] * box[3], [])
    values = [_number(where, f"{'xy'[i % 2]}{i // 2 + 1}", text) for i, text in enumerate(fields[1:])]
    xs, ys = values[::2], values[1::2]
    left, top, width, height = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
    _check_extent(where, "the polygon's ", (left + width / 2, top + height / 2, width, height))
    points = [(x * size[0], y * size[1]) for x, y in zip(xs, ys, strict=True)]
    area = abs(sum(x * v - u * y for (x, y), (u, v) in pairwise([*points, points[0]]))) / 2
    box = [left * size[0], top * size[1], width * size[0], height * size[1]]
    return _annotation(category, box, area, [[value for point in points for value in point]])


def _annotation(category: int, box: list[float], area: float, segmentation: list[list[float]]) -> dict[str, Any]:
    return {"category_id": category, "bbox": box, "area": area, "segmentation": segmentation, "iscrowd": 0}


def _class_id(where: str, text: str, names: Mapping[int, str]) -> int:
    """A class id; some tools write it as a float."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value not in names:
        raise DatasetError(
            f"{where}: class is {short(text)}, and {DATA_FILE} names the classes {min(names)} to {max(names)}; correct "
            "the line, or add the name"
        )
    return int(value)


def _number(where: str, field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DatasetError(f"{where}: {field} is {short(text)}, no finite number; correct the line, or take it out")
    return value


def _check_extent(where: str, whose: str, box: tuple[float, float, float, float]) -> None:
    """Refuse centre and size that are no parts of an image's sides. What a box or polygon covers may pass the edge."""
    for field, value in zip(_BOX, box, strict=True):
        if not -SLACK <= value <= 1 + SLACK:
            raise DatasetError(
                f"{where}: {whose}{field} is {value:g}, not between 0 and 1 (1 % past is taken); give coordinates as "
                "parts of the image's width and height"
            )
    negative = next((field for field, value in zip(_BOX[2:], box[2:], strict=True) if value < 0), None)
    if negative is not None:
        raise DatasetError(f"{where}: {whose}{negative} is negative; correct the line, or take it out")

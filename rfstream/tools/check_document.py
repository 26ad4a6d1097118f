"""Traits of a COCO document, found without looking at any image file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rfstream.dataset.index import IMAGE_EXTENSIONS, SplitIndex, check_inside
from rfstream.errors import DatasetError
from rfstream.stream.segmentation import checked_polygon, checked_runs
from rfstream.tools.check_traits import Finding, Trait, collect

_SECTIONS = ("images", "annotations", "categories")
_EDGE = 1.0  # pixels past the edge that rounding explains
_SLACK = 1.1  # how much an area may exceed its box's, which rounding explains


@dataclass(frozen=True)
class _Image:
    """What annotations are checked against: how to name the image, and its (width, height) where stated."""

    place: str
    size: tuple[int, int] | None


@dataclass
class _Seen:
    """What the annotations of a document have in common."""

    ids: set[int] = field(default_factory=set)
    categories: set[int] = field(default_factory=set)
    images: set[int] = field(default_factory=set)
    crowds: int = 0


def check_document(file: str, document: object, places: Sequence[str] | None = None) -> list[Trait]:
    """Traits of a parsed COCO document, the gravest first.

    Args:
        file: name of the document, for the report.
        document: what ``json.loads`` gave; anything at all.
        places: how to name each image in examples, in the order of the list; default: its id and file name.
    """
    return collect(file, _document(document, places))


def sections(document: object) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]] | None:
    """The document's images, annotations and categories, or None if it is no COCO dataset at all."""
    if not isinstance(document, dict) or "images" not in document:
        return None
    lists = [document.get(name, []) for name in _SECTIONS]
    if not all(isinstance(entries, list) and all(isinstance(e, dict) for e in entries) for entries in lists):
        return None
    return lists[0], lists[1], lists[2]


def stated_size(image: Mapping[str, Any]) -> tuple[int, int] | None:
    """(width, height) as an entry of ``images`` states them, if both are plausible."""
    sides = image.get("width"), image.get("height")
    return sides if all(is_integer(side) and 0 < side < 2**31 for side in sides) else None  # type: ignore[operator,return-value]


def is_integer(value: object) -> bool:
    """Whether ``value`` is a JSON integer that fits 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38


def _document(document: object, places: Sequence[str] | None) -> Iterator[Finding]:
    found = sections(document)
    if found is None:
        yield _no_dataset(document)
        return
    images, annotations, categories = found
    if not images:
        yield "no-images", "images is an empty list"
    if annotations and all(annotation.get("bbox") is None for annotation in annotations):
        yield "no-boxes", f"all of {len(annotations)}; the first has {_keys(annotations[0])}"
        return
    names = places if places is not None else [_image_name(i, image) for i, image in enumerate(images)]
    by_id: dict[int, _Image] = {}
    yield from _images(images, names, by_id)
    seen = _Seen()
    known = {category["id"] for category in categories if is_integer(category.get("id"))}
    outlined = any(annotation.get("segmentation") for annotation in annotations)
    for position, annotation in enumerate(annotations):
        yield from _annotation(position, annotation, by_id, known, outlined, seen)
    yield from _summary(annotations, by_id, seen)
    yield from _categories(categories, seen.categories)


def _no_dataset(document: object) -> Finding:
    if isinstance(document, list):
        if document and isinstance(document[0], dict):
            return "results-file", f"a list of {len(document)} objects; the first has {_keys(document[0])}"
        return "not-coco", "a list"
    if not isinstance(document, dict) or "images" not in document:
        return "not-coco", f"found {_keys(document) if isinstance(document, dict) else type(document).__name__}"
    wrong = [n for n in _SECTIONS if n in document and sections({"images": [], n: document[n]}) is None]
    return "malformed-list", ", ".join(wrong)


def _keys(entry: Mapping[str, Any]) -> str:
    return "the keys " + ", ".join(map(repr, list(entry)[:6]))


def _image_name(position: int, image: Mapping[str, Any]) -> str:
    return f"image {image.get('id', f'at {position}')!r} ({image.get('file_name')})"


def _images(images: Sequence[dict[str, Any]], names: Sequence[str], by_id: dict[int, _Image]) -> Iterator[Finding]:
    files: set[str] = set()
    for image, place in zip(images, names, strict=True):
        number, name = image.get("id"), image.get("file_name")
        if not is_integer(number):
            yield "bad-image-id", place
        elif number in by_id:
            yield "duplicate-image-id", place
        else:
            assert isinstance(number, int)
            by_id[number] = _Image(place, stated_size(image))
        if stated_size(image) is None:
            yield "missing-size", place
        if not isinstance(name, str):
            yield "bad-file-name", place
            continue
        yield from _file_name(name, place)
        if name in files:
            yield "duplicate-file-name", place
        files.add(name)


def _file_name(name: str, place: str) -> Iterator[Finding]:
    try:
        check_inside(name, "file_name")
    except DatasetError:
        yield "bad-file-name", f"{place}: {name!r}"
        return
    if PurePosixPath(name).suffix.lower().removeprefix(".") not in IMAGE_EXTENSIONS:
        yield "unsupported-extension", place


def _categories(categories: Sequence[dict[str, Any]], used: set[int]) -> Iterator[Finding]:
    sound: dict[int, dict[str, Any]] = {}
    names: Counter[str] = Counter()
    for position, category in enumerate(categories):
        number, name = category.get("id"), category.get("name")
        if not is_integer(number) or not isinstance(name, str):
            yield "bad-category", f"categories[{position}]: id {number!r}, name {name!r}"
            continue
        if isinstance(category.get("supercategory"), list | dict):
            yield "bad-category", f"{_category_name(category)}: its supercategory is no text"
            continue
        names[name] += 1
        if number in sound:
            yield "duplicate-category-id", _category_name(category)
        elif names[name] > 1:
            yield "duplicate-category-name", _category_name(category)
        sound[category["id"]] = category
    labels = _labels(list(sound.values()), used)
    for number in sorted(sound.keys() - used):
        yield "unused-category" if number in labels else "parent-category", _category_name(sound[number])
    if 0 in labels:
        yield "category-id-zero", _category_name(sound[0])
    ids = sorted(sound)
    if ids and ids[-1] - ids[0] >= len(ids):
        yield "category-id-gaps", f"{len(ids)} ids from {ids[0]} to {ids[-1]}"


def _category_name(category: Mapping[str, Any]) -> str:
    return f"category {category['id']} ({category['name']})"


def _labels(categories: Sequence[dict[str, Any]], used: set[int]) -> dict[int, int]:
    """Category id -> label, as an index of these categories assigns them."""
    annotated = tuple(sorted(used))
    return SplitIndex("", "", (), 0, tuple(categories), annotated, "remap", (), "", "").label_of()


def _summary(annotations: Sequence[object], by_id: Mapping[int, _Image], seen: _Seen) -> Iterator[Finding]:
    if by_id and not annotations:
        yield "no-objects", f"{len(by_id)} images"
    if annotations and seen.crowds == len(annotations):
        yield "only-crowds", f"{seen.crowds} annotations"
    for number, image in by_id.items():
        if number not in seen.images:
            yield "image-without-objects", image.place


def _annotation(
    position: int,
    annotation: Mapping[str, Any],
    by_id: Mapping[int, _Image],
    known: set[int],
    outlined: bool,
    seen: _Seen,
) -> Iterator[Finding]:
    number, owner, category = (annotation.get(name) for name in ("id", "image_id", "category_id"))
    name = f"annotation {number}" if is_integer(number) else f"annotations[{position}]"
    image = by_id.get(owner) if is_integer(owner) else None  # type: ignore[arg-type]
    place = f"{name} of {image.place}" if image else name
    yield from _annotation_id(number, place, seen)
    if image is None:
        yield "unknown-image", f"{place}: image_id {owner!r}"
    else:
        seen.images.add(owner)  # type: ignore[arg-type]
    if not is_integer(category) or category not in known:
        yield "unknown-category", f"{place}: category_id {category!r}"
    else:
        assert isinstance(category, int)
        seen.categories.add(category)
    size = image.size if image else None
    yield from ((kind, f"{place}: {what}") for kind, what in _box(annotation, size))
    yield from ((kind, f"{place}{what}") for kind, what in _crowd(annotation, seen))
    if annotation.get("segmentation"):
        yield from ((kind, f"{place}{what}") for kind, what in _segmentation(annotation["segmentation"], size))
    elif outlined:
        yield "no-mask", place


def _annotation_id(number: object, place: str, seen: _Seen) -> Iterator[Finding]:
    if number is None:
        yield "missing-annotation-id", place
    elif not is_integer(number):
        yield "bad-annotation-id", f"{place}: id {number!r}"
    elif number in seen.ids:
        yield "duplicate-annotation-id", place
    else:
        seen.ids.add(number)  # type: ignore[arg-type]


def _box(annotation: Mapping[str, Any], size: tuple[int, int] | None) -> Iterator[Finding]:
    box, area = annotation.get("bbox"), annotation.get("area")
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
        yield "bad-box", f"bbox {box!r}"
        return
    width, height = box[2:]
    if width <= 0 or height <= 0:
        yield "empty-box", f"bbox {box}"
    else:
        yield from _placed(box, size)
    if not _is_number(area):
        yield "bad-area", f"area {area!r}"
    elif area == 0:
        yield "zero-area", f"bbox {box}"
    elif area < 0 or (width > 0 and height > 0 and area > _SLACK * (width + 1) * (height + 1)):  # type: ignore[operator]
        yield "odd-area", f"area {area}, bbox {box}"


def _placed(box: Sequence[float], size: tuple[int, int] | None) -> Iterator[Finding]:
    """Traits of a box with area on an image of ``size``."""
    x, y, width, height = box
    if min(width, height) < 1:
        yield "sub-pixel-box", f"bbox {box}"
    if size is None:
        return
    past = max(-x, -y, x + width - size[0], y + height - size[1])
    if x >= size[0] or y >= size[1] or x + width <= 0 or y + height <= 0:
        yield "box-outside", f"bbox {box} on {size[0]} x {size[1]}"
    elif past > _EDGE:
        yield "box-past-edge", f"bbox {box} on {size[0]} x {size[1]}"
    elif past > 1e-3:  # less is what adding two decimal numbers leaves
        yield "box-rounds-past-edge", f"bbox {box} on {size[0]} x {size[1]}"


def _crowd(annotation: Mapping[str, Any], seen: _Seen) -> Iterator[Finding]:
    crowd, segmentation = annotation.get("iscrowd"), annotation.get("segmentation")
    if "iscrowd" not in annotation:
        yield "missing-iscrowd", ""
    elif isinstance(crowd, float) or crowd not in (0, 1):
        yield "bad-iscrowd", f": iscrowd {crowd!r}"
    elif crowd:
        seen.crowds += 1
        if not segmentation:
            yield "crowd-without-mask", ""
        elif isinstance(segmentation, list):
            yield "crowd-with-polygon", ""


def _segmentation(segmentation: object, size: tuple[int, int] | None) -> Iterator[Finding]:
    if isinstance(segmentation, dict):
        yield from _rle(segmentation, size)
    elif isinstance(segmentation, list):
        yield from dict(finding for polygon in segmentation for finding in _polygon(polygon, size)).items()
    else:
        yield "bad-segmentation", f": {type(segmentation).__name__} is neither polygons nor RLE"


def _rle(rle: dict[str, Any], size: tuple[int, int] | None) -> Iterator[Finding]:
    own = rle.get("size")
    if not (isinstance(own, list) and len(own) == 2 and all(is_integer(side) and side >= 0 for side in own)):
        yield "bad-segmentation", f": an RLE of size {own!r}"
        return
    if size is not None and own != [size[1], size[0]]:
        yield "rle-of-other-size", f": {own} (height, width) on {size[0]} x {size[1]}"
    try:
        checked_runs(rle, *own)
    except ValueError as error:
        yield "bad-segmentation", f": {error}"


def _polygon(polygon: object, size: tuple[int, int] | None) -> Iterator[Finding]:
    try:
        points = checked_polygon(polygon)
    except ValueError as error:
        yield "bad-segmentation", f": {error}"
        return
    if len(points) < 6:
        yield "short-polygon", f": {len(points)} numbers"
        return
    if len(points) % 2:
        yield "odd-polygon", f": {len(points)} numbers"
    if size is not None:
        x, y = points[0 : len(points) // 2 * 2 : 2], points[1::2]
        past = max(-min(x), -min(y), max(x) - size[0], max(y) - size[1])
        if past > _EDGE:
            yield "polygon-past-edge", f": by {past:.1f} pixels"

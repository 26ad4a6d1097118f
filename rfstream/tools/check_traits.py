"""The traits that ``rfstream check`` looks for: what each is called, how grave it is, what training does with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
EXAMPLES = 3
_LONGEST = 240  # characters of an example

Finding = tuple[str, str]
"""Name of a trait, and where it was seen."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A trait in general. An error stops packing or training, or makes its result wrong; a warning leaves it working,
    but probably not as meant; a note is good to know."""

    severity: Severity
    effect: str


@dataclass(frozen=True, slots=True)
class Trait:
    """A trait as found in ``file``: how often, and at most three places."""

    name: str
    file: str
    count: int
    examples: tuple[str, ...]

    @property
    def severity(self) -> Severity:
        """How grave it is."""
        return KINDS[self.name].severity

    @property
    def effect(self) -> str:
        """What packing and training do with it."""
        return KINDS[self.name].effect


def collect(file: str, findings: Iterable[Finding]) -> list[Trait]:
    """Count ``findings`` by trait, the gravest first."""
    counts: dict[str, int] = {}
    examples: dict[str, list[str]] = {}
    for name, place in findings:
        counts[name] = counts.get(name, 0) + 1
        kept = examples.setdefault(name, [])
        if len(kept) < EXAMPLES:
            kept.append(short(place))
    names = sorted(counts, key=lambda name: (SEVERITIES.index(KINDS[name].severity), _ORDER[name]))
    return [Trait(name, file, counts[name], tuple(examples[name])) for name in names]


def short(text: str) -> str:
    """``text`` in one printable line of bounded length."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


KINDS = {
    # The file
    "nothing-found": Kind("error", "there is nothing to pack: no dataset is where one was looked for"),
    "unreadable-json": Kind("error", "packing refuses the file"),
    "unreadable-labels": Kind(
        "error", "packing refuses the YOLO or VOC folder or split; the check of it ends at the first such place"
    ),
    "results-file": Kind("error", "packing refuses it: detections are no dataset; give the annotation file"),
    "not-coco": Kind("error", "packing refuses it: there is no list of images"),
    "malformed-list": Kind("error", "packing refuses it: images, annotations and categories are lists of objects"),
    "no-images": Kind("error", "packing refuses it: there is nothing to pack"),
    "no-boxes": Kind("error", "packing refuses it: annotations without boxes (captions, panoptic) are of another task"),
    "unknown-layout": Kind(
        "note", "packing needs --annotations, and --images where the images are not beside the file"
    ),
    # Images as the document lists them
    "bad-image-id": Kind("error", "packing refuses it: evaluation matches by an integer id"),
    "duplicate-image-id": Kind("error", "packing refuses it: evaluation could not tell the images apart"),
    "bad-file-name": Kind("error", "packing refuses it: a name is text and stays inside the image folder"),
    "unsupported-extension": Kind("error", "packing refuses it: convert the image to JPEG, PNG, WebP or BMP"),
    "missing-file": Kind("error", "packing refuses it"),
    "empty-file": Kind("error", "packing refuses it"),
    "duplicate-file-name": Kind("warning", "the image is trained on several times, each time with a part of its boxes"),
    "no-objects": Kind("warning", "no image has an object, so training learns nothing but background"),
    "image-without-objects": Kind("note", "trained on as background"),
    "missing-size": Kind("note", "training uses the file's own size; boxes can't be checked without the files"),
    "unreferenced-file": Kind("note", "not packed: the document does not list it"),
    # Categories
    "bad-category": Kind("error", "packing refuses it: a category has an integer id and a name that is text"),
    "duplicate-category-id": Kind("error", "packing refuses it: a label could not be told from the other"),
    "duplicate-category-name": Kind("warning", "two labels of the same name, unless one is an unused parent"),
    "parent-category": Kind("note", "gets no label: it only groups others, as the first one of a Roboflow export"),
    "unused-category": Kind("note", "gets a label that no object has"),
    "category-id-gaps": Kind(
        "note", "labels are numbered 0, 1, 2, ...; with --category-ids raw, gaps are empty labels"
    ),
    "category-id-zero": Kind("note", "an ordinary class; tools that keep 0 for background number differently"),
    # Annotations
    "bad-annotation-id": Kind("error", "packing refuses it: an id is an integer"),
    "duplicate-annotation-id": Kind("error", "packing refuses it: evaluation keeps one annotation an id"),
    "missing-annotation-id": Kind("note", "packed; pycocotools can't load the file"),
    "unknown-category": Kind("error", "packing refuses it: the object would have no label"),
    "unknown-image": Kind("error", "packing refuses it: the object would belong to no image"),
    "bad-box": Kind("error", "packing refuses it: a box is [x, y, width, height] in finite numbers"),
    "empty-box": Kind("warning", "training leaves the object out: its box has no area"),
    "box-outside": Kind("warning", "training leaves the object out: nothing of it is in the image"),
    "box-past-edge": Kind("warning", "training cuts the box at the image's edge; more than a pixel is lost"),
    "box-rounds-past-edge": Kind("note", "training cuts the box at the image's edge; less than a pixel is lost"),
    "sub-pixel-box": Kind("warning", "trained on, though less than a pixel wide or high; hardly to be learned"),
    "bad-area": Kind("error", "packing refuses it: RF-DETR does not train without an area"),
    "zero-area": Kind("note", "training takes the area of the box"),
    "odd-area": Kind("warning", "evaluation sorts objects by size with it: negative, or far more than the box holds"),
    "bad-iscrowd": Kind("error", "packing refuses it: only 0 and 1 are defined"),
    "missing-iscrowd": Kind("note", "taken for 0"),
    "only-crowds": Kind("warning", "every object is a crowd, and training leaves crowds out: none is left to learn"),
    "crowd-with-polygon": Kind("warning", "training leaves crowds out; a single outlined object is seldom a crowd"),
    "crowd-without-mask": Kind("warning", "training leaves crowds out; evaluation ignores what its box alone covers"),
    # Masks
    "bad-segmentation": Kind("error", "with masks on, training stops at it; without, it is not looked at"),
    "rle-of-other-size": Kind("error", "with masks on, training stops at it; without, it is not looked at"),
    "short-polygon": Kind("warning", "left out of the mask: fewer than three points enclose nothing"),
    "odd-polygon": Kind("warning", "its last number is left out: coordinates come in pairs"),
    "polygon-past-edge": Kind("warning", "the mask is cut at the image's edge; more than a pixel is lost"),
    "no-mask": Kind("note", "with masks on, the object's mask is empty, though others have one"),
    # Image files
    "undecodable-image": Kind("error", "training stops at it: the file can't be decoded"),
    "rotated-frame": Kind(
        "error", "boxes are drawn on the turned image, all are wrong: training stops at it, RF-DETR sees it as stored"
    ),
    "size-differs": Kind("error", "boxes were meant for another size: training stops at it, RF-DETR goes on"),
    "rotated-image": Kind("warning", "training sees the image as it is stored, unless decode.exif=transpose"),
    "huge-image": Kind("warning", "decoded at full size: hundreds of megabytes for a sample (decode.shrink_to)"),
    "cmyk-image": Kind("warning", "turned to RGB without a colour profile: colours are off"),
    "deep-image": Kind("warning", "training sees the upper eight bits of each value"),
    "transparent-image": Kind("warning", "alpha is dropped: training sees the colours under transparent pixels"),
    "animated-image": Kind("warning", "training sees the first frame only"),
    "other-format": Kind("note", "decoded by content, so training works; tools that trust the extension fail"),
    # Packs
    "bad-index": Kind("error", "training refuses the pack"),
    "missing-shard": Kind("error", "training stops at it: copy the shard again"),
    "damaged-shard": Kind("error", "training stops at it: copy the shard or pack again"),
    "wrong-sample-count": Kind("error", "index and shards contradict each other: pack again"),
    "missing-table": Kind("error", "training refuses the pack: run `rfstream index`"),
    "wrong-table": Kind("error", "training reads other bytes than a sample's: run `rfstream index`"),
    "changed-content": Kind("error", "a shard or the index is not what was packed, since the names' token differs"),
    "bad-sidecar": Kind("error", "training stops at it: the annotations of the sample can't be read"),
    "duplicate-key": Kind("warning", "two samples of one name: messages and ledgers can't tell them apart"),
    "unlisted-shard": Kind("note", "not read: the index does not list it"),
    # LeRobot datasets
    "bad-metadata": Kind("error", "training refuses the dataset; nothing more of it is checked"),
    "unreadable-episode": Kind(
        "error", "training stops at it: a file is absent, cut short or contradicts the metadata"
    ),
    "undecodable-frame": Kind("error", "training stops at it: the frame can't be decoded"),
}
_ORDER = {name: position for position, name in enumerate(KINDS)}

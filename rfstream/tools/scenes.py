"""A small detection dataset drawn from nothing: coloured shapes on textured grounds, in COCO layout.

It needs no network and no licence, takes seconds, and is easy enough that a detector of half a million weights learns
it on two CPU cores. What is drawn depends on (seed, split, image number) alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from rfstream.errors import DatasetError

if TYPE_CHECKING:
    import albumentations as A

CLASSES = ("disc", "square", "triangle", "star")
SIDES = (192, 256)
"""Shortest and longest image side, pixels."""
RADII = (14.0, 46.0)
"""Smallest and largest circumradius of a shape, pixels."""

EMPTY_SHARE = 0.05
MAX_SHAPES = 6
MAX_COVERED = 0.25
"""Largest part of the smaller of two boxes that the two may share: some occlusion, no shape hidden."""
SUPERSAMPLE = 2

Points = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.float64]


def make_scenes(folder: str | Path, *, train: int, val: int, seed: int) -> Path:
    """Draw ``train`` + ``val`` scenes into ``folder``: ``{split}/*.jpg`` and ``annotations/instances_{split}.json``.

    Boxes are those of the drawn outlines, exact to the hundredth of a pixel; the outline is the segmentation. Category
    ids start at 1 in the order of ``CLASSES``. The same arguments write the same JSON, byte for byte.

    Returns:
        ``folder``.

    Raises:
        DatasetError: if a split is asked to hold less than one image.
    """
    folder = Path(folder)
    if min(train, val) < 1:
        raise DatasetError(f"scenes need at least one image a split, got train={train}, val={val}: ask for more")
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    for number, (split, count) in enumerate((("train", train), ("val", val))):
        document = _write_split(folder / split, count, np.random.SeedSequence([seed, number]))
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))
    return folder


def _write_split(folder: Path, count: int, seed: np.random.SeedSequence) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for i, child in enumerate(seed.spawn(count)):
        picture, shapes = draw_scene(np.random.default_rng(child))
        name = f"scene_{i:05d}.jpg"
        picture.save(folder / name, quality=90)
        images.append({"id": i + 1, "file_name": name, "width": picture.width, "height": picture.height})
        for label, outline in shapes:
            annotations.append(_annotation(len(annotations) + 1, i + 1, label, outline))
    categories = [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASSES)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _annotation(number: int, image: int, label: int, outline: Points) -> dict[str, Any]:
    outline = outline.round(2)
    low, high = outline.min(0), outline.max(0)
    x, y = outline[:, 0], outline[:, 1]
    area = 0.5 * abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1)))
    return {
        "id": number,
        "image_id": image,
        "category_id": label + 1,
        "bbox": [round(float(v), 2) for v in (*low, *(high - low))],
        "area": round(area, 2),
        "segmentation": [[float(v) for v in outline.ravel()]],
        "iscrowd": 0,
    }


def draw_scene(rng: np.random.Generator) -> tuple[Image.Image, list[tuple[int, Points]]]:
    """One RGB image and its shapes: (label, outline float64 (n, 2) as x, y in pixels), later ones in front."""
    width, height = (int(v) for v in rng.integers(SIDES[0], SIDES[1] + 1, size=2))
    shapes = _place(rng, width, height)
    ground = _GROUNDS[rng.integers(len(_GROUNDS))](rng, height, width)
    picture = Image.fromarray(ground.clip(0, 255).astype(np.uint8))
    for _, outline in shapes:
        _paint(rng, picture, outline)
    grain = rng.normal(0, rng.uniform(0, 6), size=(height, width, 1))
    return Image.fromarray((np.asarray(picture) + grain).clip(0, 255).astype(np.uint8)), shapes


def _place(rng: np.random.Generator, width: int, height: int) -> list[tuple[int, Points]]:
    """Shapes wholly inside the frame, none hidden by more than ``MAX_COVERED`` of its box by any one other."""
    if rng.random() < EMPTY_SHARE:
        return []
    placed: list[tuple[int, Points]] = []
    for _ in range(int(rng.integers(1, MAX_SHAPES + 1))):
        label = int(rng.integers(len(CLASSES)))
        radius = float(np.exp(rng.uniform(*np.log(RADII))))
        centre = rng.uniform(radius + 1, np.array([width, height]) - radius - 1)
        outline = centre + radius * _outline(label, float(rng.uniform(0, 2 * np.pi)))
        if all(_covered(outline, other) <= MAX_COVERED for _, other in placed):
            placed.append((label, outline))
    return placed


def _covered(a: Points, b: Points) -> float:
    """Overlap of the two outlines' boxes, as a part of the smaller box."""
    low, high = np.maximum(a.min(0), b.min(0)), np.minimum(a.max(0), b.max(0))
    smaller = min(float(np.prod(np.ptp(a, axis=0))), float(np.prod(np.ptp(b, axis=0))))
    return float(np.prod((high - low).clip(0))) / smaller


def _outline(label: int, turn: float) -> Points:
    """Outline of a shape of circumradius 1 around the origin, turned by ``turn`` radians: (n, 2)."""
    corners = {"disc": 48, "square": 4, "triangle": 3, "star": 10}[CLASSES[label]]
    angle = turn + np.arange(corners) * (2 * np.pi / corners)
    reach = np.where(np.arange(corners) % 2, 0.45, 1.0) if CLASSES[label] == "star" else np.ones(corners)
    return np.asarray(reach[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1))


def _paint(rng: np.random.Generator, picture: Image.Image, outline: Points) -> None:
    """Fill ``outline`` with a shaded colour that stands out from what is under it, edges smoothed."""
    low = np.floor(outline.min(0)).astype(int) - 1
    high = np.ceil(outline.max(0)).astype(int) + 1
    w, h = (int(v) for v in high - low)
    stencil = Image.new("L", (w * SUPERSAMPLE, h * SUPERSAMPLE))
    # A pixel's index is its centre to Pillow and its left edge to COCO, hence the half.
    corners = (outline - low) * SUPERSAMPLE - 0.5
    ImageDraw.Draw(stencil).polygon([(float(x), float(y)) for x, y in corners], fill=255)
    box = (int(low[0]), int(low[1]), int(high[0]), int(high[1]))
    under = np.asarray(picture.crop(box), dtype=np.float64).mean((0, 1))
    colour = rng.uniform(0, 255, 3)
    while np.abs(colour - under).sum() < 150:
        colour = rng.uniform(0, 255, 3)
    shade = 1 + 0.25 * _ramp(h, w, float(rng.uniform(0, 2 * np.pi)))[..., None]
    fill = Image.fromarray((colour * shade).clip(0, 255).astype(np.uint8))
    picture.paste(fill, box[:2], stencil.resize((w, h), Image.Resampling.BOX))


def _ramp(height: int, width: int, angle: float) -> Pixels:
    """A plane that rises along ``angle`` from about -1 to 1: (height, width)."""
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    return np.asarray(np.cos(angle) * x + np.sin(angle) * y)


def _gradient(rng: np.random.Generator, height: int, width: int) -> Pixels:
    ramp = (_ramp(height, width, float(rng.uniform(0, 2 * np.pi))).clip(-1, 1)[..., None] + 1) / 2
    return np.asarray(ramp * rng.uniform(30, 225, 3) + (1 - ramp) * rng.uniform(30, 225, 3))


def _stripes(rng: np.random.Generator, height: int, width: int) -> Pixels:
    ramp = _ramp(height, width, float(rng.uniform(0, 2 * np.pi)))
    wave = np.sin(rng.uniform(8, 40) * ramp + rng.uniform(0, 2 * np.pi))[..., None]
    return np.asarray(rng.uniform(50, 205, 3) + wave * rng.uniform(-30, 30, 3))


def _clouds(rng: np.random.Generator, height: int, width: int) -> Pixels:
    """Smooth noise: a coarse random grid, enlarged."""
    grid = rng.uniform(0, 255, size=(*rng.integers(4, 16, size=2), 3)).astype(np.uint8)
    smooth = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(0.55 * np.asarray(smooth, dtype=np.float64) + rng.uniform(20, 95, 3))


_GROUNDS: tuple[Callable[[np.random.Generator, int, int], Pixels], ...] = (_gradient, _stripes, _clouds)


def train_transform(size: int) -> A.Compose:
    """Random crop that keeps every object, flips and colours, at ``size`` x ``size``: for ``augment.cpu``."""
    import albumentations as A

    return A.Compose(
        [
            A.RandomSizedBBoxSafeCrop(size, size, erosion_rate=0.2, p=0.5),
            A.Resize(size, size),
            A.HorizontalFlip(p=0.5),
            A.VerticalFlip(p=0.5),
            A.ColorJitter(0.2, 0.2, 0.2, 0.05, p=0.5),
        ],
        bbox_params=A.BboxParams(format="pascal_voc", min_visibility=0.3),
    )


def eval_transform(size: int) -> A.Compose:
    """``size`` x ``size``, nothing random: for ``augment.eval``."""
    import albumentations as A

    return A.Compose([A.Resize(size, size)], bbox_params=A.BboxParams(format="pascal_voc"))

"""A COCO dataset of any size, cheaply: distinct annotations, and a few hundred distinct photos under many names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from PIL import Image

PHOTOS = 300
CATEGORIES = 80
POINTS = (4, 25)  # of a polygon, at least and less than
SIDES = (320, 641)
_AT_ONCE = 10_000


def write_source(folder: Path, images: int, annotations: int, *, photos: bool = True, seed: int = 0) -> Path:
    """Write ``folder/annotations/instances_train.json`` with the fields that COCO's has, in its order, and the images
    that it lists, hard links to :data:`PHOTOS` files; returns the JSON file.

    Args:
        photos: whether the files are like photos, of about 80 kB, or as small as a JPEG can be.
    """
    random = np.random.default_rng(seed)
    (folder / "photos").mkdir(parents=True)
    (folder / "train").mkdir()
    (folder / "annotations").mkdir()
    sizes = [_write_photo(folder / "photos" / f"{i}.jpg", random, photos) for i in range(PHOTOS)]
    for number in range(images):
        os.link(folder / "photos" / f"{number % PHOTOS}.jpg", folder / "train" / _name(number))
    file = folder / "annotations" / "instances_train.json"
    with file.open("w") as out:
        out.write('{"info": {"description": "generated", "year": 2026}, "licenses": [{"id": 1, "name": "none"}], ')
        _write_list(out, "images", (_image(number, *sizes[number % PHOTOS]) for number in range(images)), ", ")
        _write_list(out, "annotations", _annotations(images, annotations, sizes, random), ", ")
        _write_list(out, "categories", ({"id": i, "name": f"category {i}"} for i in range(1, CATEGORIES + 1)), "}\n")
    return file


def _name(number: int) -> str:
    return f"{number:012d}.jpg"


def _write_photo(file: Path, random: np.random.Generator, like_a_photo: bool) -> tuple[int, int]:
    """Noise of all scales, as photos have; returns width and height."""
    width, height = (int(side) for side in random.integers(*SIDES, 2)) if like_a_photo else (1, 1)
    pixels = np.zeros((height, width, 3))
    for side in (4, 16, 64, 256):
        noise = Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))
        pixels += np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC)) / side**0.5
    pixels *= 255 / pixels.max()
    Image.fromarray(pixels.astype(np.uint8)).save(file, quality=90)
    return width, height


def _image(number: int, width: int, height: int) -> dict[str, Any]:
    name = _name(number)
    url = f"http://images.cocodataset.org/train2017/{name}"
    about = {"license": 1, "file_name": name, "coco_url": url, "height": height, "width": width}
    return about | {"date_captured": "2013-11-14 16:28:13", "id": number}


def _annotations(
    images: int, count: int, sizes: list[tuple[int, int]], random: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Polygons in images at random, so that those of an image lie apart in the file, as they do in COCO's."""
    for first in range(0, count, _AT_ONCE):
        n = min(_AT_ONCE, count - first)
        owners, points = random.integers(0, images, n), random.integers(*POINTS, n)
        categories = random.integers(1, CATEGORIES + 1, n)
        for at, (image, number) in enumerate(zip(owners.tolist(), points.tolist(), strict=True)):
            polygon = (random.random((number, 2)) * sizes[image % PHOTOS]).round(2)
            low, extent = polygon.min(0), np.ptp(polygon, 0).round(2)
            yield {
                "segmentation": [polygon.ravel().tolist()],
                "area": float(extent.prod().round(4)) / 2,
                "iscrowd": 0,
                "image_id": image,
                "bbox": [*low.tolist(), *extent.tolist()],
                "category_id": int(categories[at]),
                "id": first + at + 1,
            }


def _write_list(out: TextIO, key: str, entries: Iterator[dict[str, Any]], end: str) -> None:
    out.write(f'"{key}": [')
    for number, entry in enumerate(entries):
        out.write((", " if number else "") + json.dumps(entry))
    out.write(f"]{end}")

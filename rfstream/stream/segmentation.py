"""COCO segmentations to masks (https://cocodataset.org/#format-data): polygons, run lengths, compressed run lengths.

The rasteriser is pycocotools' native code, which trusts its input: a size, run or coordinate that can't be ends the
process, or leaves memory that nobody wrote in the mask. So all is checked here first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pycocotools import mask as coco_mask

from rfstream.stream.scaling import WHOLE, Scaling

_LARGEST = 1e8  # of a coordinate: native code multiplies by 5 and keeps 32 bits
_LONGEST = 2**20  # pixels of outline: native code holds 80 bytes for each
_CONTINUES, _NEGATIVE, _GROUP = 0x20, 0x10, 5  # bits of one character of compressed run lengths
_MAX_BITS = 35  # seven characters hold any 32-bit number


def mask_of(segmentation: object, height: int, width: int, scaling: Scaling = WHOLE) -> npt.NDArray[np.uint8]:
    """Polygons or run lengths on an image of ``height`` x ``width`` to 0 and 1, uint8 (height, width), or smaller as
    ``scaling`` says.

    Without a segmentation, and with polygons that enclose nothing, all zero.

    Raises:
        ValueError: saying what is wrong with it.
    """
    size = scaling.size(height, width)
    if not segmentation:
        return np.zeros(size, dtype=np.uint8)
    if isinstance(segmentation, list):
        polygons = [p for p in map(checked_polygon, segmentation) if len(p) >= 6]  # three points at least
        if not polygons:
            return np.zeros(size, dtype=np.uint8)
        if scaling != WHOLE:  # before it is drawn, which takes less time than to scale what is
            polygons = [scaling.points(np.array(p[: len(p) // 2 * 2], dtype=np.float64)).tolist() for p in polygons]
        drawn: npt.NDArray[np.uint8] = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, *size)))
        return drawn
    if isinstance(segmentation, dict):
        runs = checked_runs(segmentation, height, width)
        rle = coco_mask.frPyObjects({"counts": runs, "size": [height, width]}, height, width)
        return scaling.mask(coco_mask.decode(rle))
    raise ValueError(f"{type(segmentation).__name__} is neither polygons nor RLE")


def check_segmentation(segmentation: object, height: int, width: int) -> None:
    """Look whether native code can take a segmentation of an image of ``height`` x ``width``.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if isinstance(segmentation, dict):
        checked_runs(segmentation, height, width)
    elif isinstance(segmentation, list):
        for polygon in segmentation:
            checked_polygon(polygon)


def checked_polygon(polygon: object) -> list[float]:
    """``polygon`` as [x0, y0, x1, y1, ...], if it can be rasterised.

    Raises:
        ValueError: if it is no flat list of finite numbers, or reaches far beyond any image.
    """
    if not isinstance(polygon, list):
        raise ValueError(f"a polygon is {type(polygon).__name__}, not a list of coordinates")
    try:
        values = np.asarray(polygon)
    except ValueError:  # lists of several lengths
        values = np.empty(0, dtype=object)
    if len(polygon) and (values.ndim != 1 or values.dtype.kind not in "iuf"):
        raise ValueError("a polygon holds something that is no number")
    if not (np.abs(values) < _LARGEST).all():
        raise ValueError("a polygon has a coordinate that is not finite or absurdly large")
    points = values[: len(values) // 2 * 2].reshape(-1, 2)
    if len(points) and np.abs(np.diff(points, axis=0, append=points[:1])).max(axis=1).sum() > _LONGEST:
        raise ValueError(f"a polygon's outline is longer than {_LONGEST} pixels")
    return polygon


def checked_runs(rle: dict[str, object], height: int, width: int) -> list[int]:
    """The run lengths of ``rle``, if they fill an image of ``height`` x ``width``.

    Raises:
        ValueError: if they don't, its size is another, or the counts are malformed.
    """
    counts, size = rle.get("counts"), rle.get("size")
    if size != [height, width]:
        given = tuple(size) if isinstance(size, list) else size
        raise ValueError(f"an RLE of {given!r}, the image is {(height, width)} (height, width)")
    if isinstance(counts, str):
        runs: Sequence[object] = decompress(counts)
    elif isinstance(counts, list):
        runs = counts
    else:
        raise ValueError("an RLE without counts")
    lengths = [run for run in runs if isinstance(run, int) and not isinstance(run, bool) and run >= 0]
    if len(lengths) != len(runs) or sum(lengths) != height * width:
        raise ValueError(f"an RLE whose counts are not whole numbers that add up to {height} x {width} pixels")
    return lengths


def decompress(counts: str) -> list[int]:
    """Run lengths from COCO's compressed form.

    Each number is written in groups of five bits, the lowest first, one character a group; from the fourth on it is the
    difference to the last but one.

    Raises:
        ValueError: if a character is none of the 64, or a number is too long or not complete.
    """
    runs: list[int] = []
    value = bits = 0
    for character in counts:
        group = ord(character) - 48
        if not 0 <= group < 64 or bits >= _MAX_BITS:
            raise ValueError("an RLE whose compressed counts are damaged")
        value |= (group & 0x1F) << bits
        bits += _GROUP
        if group & _CONTINUES:
            continue
        if group & _NEGATIVE:
            value -= 1 << bits
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = bits = 0
    if bits:
        raise ValueError("an RLE whose compressed counts are cut short")
    return runs

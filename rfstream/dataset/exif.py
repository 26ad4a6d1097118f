"""EXIF orientation: how an image is to be turned before it is shown (Exif 2.3, tag 0x0112)."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

from PIL import Image, ImageOps

_TAG = 0x0112
TURNED = (5, 6, 7, 8)
"""Orientations that swap width and height."""
LEFT_WAS_END, TOP_WAS_END = (2, 3, 6, 7), (3, 4, 7, 8)
"""Orientations whose left edge as shown is the right or bottom one as stored; those of whose top edge that is so."""


def orientation_of(image: Image.Image) -> int:
    """Orientation 1 to 8 of an opened image, 1 (upright) if there is none or none that can be read."""
    try:
        value = image.getexif().get(_TAG, 1)
    except Exception:  # damaged metadata raises many kinds
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def stored_orientation(data: bytes) -> int:
    """:func:`orientation_of` an encoded image, 1 also for what is none; nothing is decoded."""
    return _header(data)[1]


def shown_size(file: Path) -> tuple[int, int]:
    """Width and height of an image file as it is shown, turned as EXIF says; nothing is decoded.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: as Pillow does for what it can't open.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata
        with Image.open(file) as image:
            width, height = image.size
            return (height, width) if orientation_of(image) in TURNED else (width, height)


def is_of_turned_frame(data: bytes, width: int | None, height: int | None) -> bool:
    """Whether annotations for ``width`` x ``height`` are for the encoded image as it is shown, not as it is stored."""
    if width == height or width is None or height is None:
        return False
    size, orientation = _header(data)
    return orientation in TURNED and size == (height, width)


def _header(data: bytes) -> tuple[tuple[int, int], int]:
    """Width and height as stored, and orientation."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata
            with Image.open(io.BytesIO(data)) as image:
                return image.size, orientation_of(image)
    except Exception:  # whoever decodes it says what is wrong with it
        return (0, 0), 1


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """``image``, whose file is of ``orientation``, as it is to be shown."""
    if orientation == 1:
        return image
    image.getexif()[_TAG] = orientation  # decoding and conversion have lost it
    return ImageOps.exif_transpose(image)

"""Encoded bytes to pixels, exactly what Pillow's ``Image.open(...).convert("RGB")`` gives and faster where that is
possible; pixels to the planes of a batch."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import simplejpeg
from PIL import Image

from rfstream import recycle
from rfstream.config import MAX_PIXELS
from rfstream.stream.scaling import factor_for

_JPEG = b"\xff\xd8\xff"
_PLAIN = ("Gray", "YCbCr")


class Decoded(NamedTuple):
    """An image as it was decoded: pixels uint8 (h, w, 3); height and width of the file; and by what h and w are these
    divided, rounded up: 1, 2, 4 or 8."""

    pixels: npt.NDArray[np.uint8]
    size: tuple[int, int]
    factor: int


def decode_rgb(data: bytes, max_pixels: int = MAX_PIXELS) -> npt.NDArray[np.uint8]:
    """Pixels of an encoded image, uint8 (H, W, 3), EXIF orientation ignored. Raises as :func:`decode_scaled` does."""
    return decode_scaled(data, max_pixels, None).pixels


def decode_scaled(data: bytes, max_pixels: int, shrink_to: int | None) -> Decoded:
    """An encoded image, EXIF orientation ignored; a plain JPEG as small as :func:`factor_for` allows.

    Plain JPEGs go straight through libjpeg-turbo (accurate DCT, smooth upsampling: Pillow's settings), which saves
    Pillow's copies; whatever that path can't take without a warning is left to Pillow, which decodes it whole. Scaled
    or not, libjpeg reads all of the file, and so finds the same faults.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: as Pillow does; the last for more than
            ``max_pixels`` too.
    """
    if data.startswith(_JPEG):
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=True)
            _check_pixels(width, height, max_pixels)
            if colorspace in _PLAIN and height * width <= (Image.MAX_IMAGE_PIXELS or height * width):
                factor = factor_for(height, width, shrink_to)
                return Decoded(_decode_jpeg(data, height, width, factor), (height, width), factor)
        except ValueError:
            pass  # damaged or unusual: Pillow decides what it is
    with _opened(data, max_pixels) as image:
        pixels = np.array(image.convert("RGB"))  # writable, as the fast path's is
    return Decoded(pixels, (pixels.shape[0], pixels.shape[1]), 1)


def _decode_jpeg(data: bytes, height: int, width: int, factor: int) -> npt.NDArray[np.uint8]:
    """Pixels of a plain JPEG of ``height`` x ``width``, each divided by ``factor`` and rounded up."""
    rows, columns = -(-height // factor), -(-width // factor)
    nbytes = rows * columns * 3
    own = recycle.LARGEST_HEAP_BLOCK < nbytes <= recycle.KEPT_BYTES  # smaller ones the heap keeps
    pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
        data,
        "RGB",
        min_height=rows,
        min_width=columns,
        min_factor=factor,
        buffer=recycle.empty((nbytes,), np.uint8) if own else None,
        strict=True,
    )
    return pixels


def check_header(data: bytes, max_pixels: int) -> None:
    """Look at an encoded image's size without decoding it.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: as :func:`decode_rgb` does.
    """
    if data.startswith(_JPEG):
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        except ValueError:
            pass  # as above
        else:
            _check_pixels(width, height, max_pixels)
            return
    with _opened(data, max_pixels):
        pass


def raise_pillow_limit(max_pixels: int) -> None:
    """Let Pillow open images of ``max_pixels`` in this process, where its own limit is lower: it refuses twice that."""
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels


def pixels_of(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Pixels of an RGB image: (H, W, 4), the fourth channel without meaning, in Pillow's own memory. A copy (H, W, 3)
    where Pillow has them in several pieces, as it has those of more than 16 MiB."""
    try:
        flat: npt.NDArray[np.uint8] = pa.array(image).flatten().to_numpy()
    except ValueError:
        return np.asarray(image)
    return flat.reshape(image.height, image.width, 4)


def to_planes(image: npt.NDArray[np.uint8], frame: npt.NDArray[np.uint8]) -> None:
    """Write the first three channels of ``image`` (H, W, 3 or 4) into the top left of ``frame``
    (3, H' >= H, W' >= W), and zeros around it."""
    height, width, channels = image.shape
    planes = [plane[:height, :width] for plane in frame]
    # OpenCV's is vectorised: a sixth of the time of assigning a transposed view.
    cv2.split(image, planes if channels == 3 else [*planes, np.empty((height, width), dtype=np.uint8)])
    frame[:, height:] = 0
    frame[:, :height, width:] = 0


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """The image in ``data`` as Pillow opens it, not decoded yet."""
    if not data:
        raise ValueError("the image file is empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata; the pixels are what they are
        with Image.open(io.BytesIO(data)) as image:
            _check_pixels(*image.size, max_pixels)
            yield image


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise Image.DecompressionBombError(
            f"the image has {width} x {height} pixels, more than decode.max_pixels={max_pixels}"
        )

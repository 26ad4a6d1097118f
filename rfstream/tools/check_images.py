"""Traits of encoded images: whether training can decode them, and what it loses."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from PIL import Image, UnidentifiedImageError

from rfstream.dataset.exif import TURNED, orientation_of
from rfstream.stream.image import decode_rgb
from rfstream.tools.check_traits import Finding

LARGE_PIXELS = 89_478_485
"""Above this Pillow warns, of twice this it refuses to decode; not read from Pillow, since RF-DETR raises its limit."""
_WORKERS = 2  # decoding releases the interpreter's lock; each worker holds one image
_EXTENSIONS = {"JPEG": ("jpg", "jpeg"), "MPO": ("jpg", "jpeg"), "PNG": ("png",), "WEBP": ("webp",), "BMP": ("bmp",)}
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTH = 24  # byte that holds a PNG's bits a channel


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image to check: how to name it, its file name, (width, height) where stated, and how to read its bytes."""

    place: str
    name: str
    size: tuple[int, int] | None
    read: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class _Header:
    """What Pillow tells of a file without decoding it."""

    format: str
    mode: str
    size: tuple[int, int]
    frames: int
    orientation: int
    alpha: bool


def check_images(images: Sequence[Encoded], advance: Callable[[], None]) -> list[Finding]:
    """Traits of every image, in order; ``advance`` is called after each."""
    findings: list[Finding] = []
    # Pillow warns of odd metadata; each thread silencing that by itself would leave the filters in a random state.
    with warnings.catch_warnings(), ThreadPoolExecutor(_WORKERS) as pool:
        warnings.simplefilter("ignore")
        for found in pool.map(_check, images):
            findings += found
            advance()
    return findings


def _check(image: Encoded) -> list[Finding]:
    try:
        data = image.read()
    except OSError as error:
        return [("undecodable-image", f"{image.place}: {error.strerror or error}")]
    return [(kind, f"{image.place}{what}") for kind, what in check_image(data, image.name, image.size)]


def check_image(data: bytes, name: str, size: tuple[int, int] | None) -> Iterator[Finding]:
    """Traits of one encoded image.

    Args:
        data: the file's bytes; anything at all.
        name: its name, of which the extension counts.
        size: (width, height) as the annotations state it, if they do.
    """
    if not data:
        yield "empty-file", ""
        return
    try:
        header = _header(data)
        if header.size[0] * header.size[1] > LARGE_PIXELS:
            yield "huge-image", f": {header.size[0]} x {header.size[1]}"
        height, width = decode_rgb(data).shape[:2]
        transparent = header.alpha and _transparent(data)
    except Exception as error:  # Pillow raises many kinds for a file it can't read
        unknown = isinstance(error, UnidentifiedImageError)
        yield "undecodable-image", ": of no known format, or its header is damaged" if unknown else f": {error}"
        return
    yield from _frame((width, height), size, header.orientation)
    yield from _content(data, header, transparent)
    if PurePosixPath(name).suffix.lower().removeprefix(".") not in _EXTENSIONS.get(header.format, ()):
        yield "other-format", f": holds {header.format}"


def _header(data: bytes) -> _Header:
    with Image.open(io.BytesIO(data)) as image:
        return _Header(
            format=image.format or "",
            mode=image.mode,
            size=image.size,
            frames=getattr(image, "n_frames", 1),
            orientation=orientation_of(image),
            alpha=image.has_transparency_data,
        )


def _transparent(data: bytes) -> bool:
    """Whether any pixel is less than opaque."""
    with Image.open(io.BytesIO(data)) as image:
        low, _ = image.convert("RGBA").getchannel("A").getextrema()
        return bool(low < 255)  # type: ignore[operator]  # bands of 8 bits have numbers


def _frame(own: tuple[int, int], stated: tuple[int, int] | None, orientation: int) -> Iterator[Finding]:
    differs = f": {own[0]} x {own[1]} in the file, {stated[0]} x {stated[1]} in the annotations" if stated else ""
    if stated and stated != own:
        turned = orientation in TURNED and stated == own[::-1]
        yield "rotated-frame" if turned else "size-differs", differs
    if orientation != 1:
        yield "rotated-image", f": orientation {orientation}"


def _content(data: bytes, header: _Header, transparent: bool) -> Iterator[Finding]:
    if header.mode == "CMYK":
        yield "cmyk-image", ""
    if header.mode in ("I", "F") or header.mode.startswith("I;16") or (data[:8] == _PNG and data[_PNG_DEPTH] == 16):
        yield "deep-image", f": mode {header.mode}"
    if transparent:
        yield "transparent-image", f": mode {header.mode}"
    if header.frames > 1:
        yield "animated-image", f": {header.frames} frames"


def read_span(path: str, start: int = 0, size: int = -1) -> bytes:
    """``size`` bytes of a local file from ``start`` on; all of them by default."""
    with Path(path).open("rb") as file:
        file.seek(start)
        return file.read(size)

"""Pixels are Pillow's, to the bit, for every image file there is to try."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rfstream.stream.image import decode_rgb, pixels_of, to_planes

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ico", ".mpo"}


def pillow(data: bytes) -> np.ndarray | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    except Exception as error:
        return type(error).__name__


def ours(data: bytes) -> np.ndarray | str:
    try:
        return decode_rgb(data)
    except Exception as error:
        return type(error).__name__


def test_pixels_equal_pillows_for_every_file(shared_data: Path) -> None:
    files = [p for p in sorted(shared_data.rglob("*")) if p.suffix.lower() in SUFFIXES]
    assert len(files) > 1000
    refused = 0
    for path in files:
        data = path.read_bytes()
        expected, got = pillow(data), ours(data)
        assert type(expected) is type(got), f"{path}: Pillow {expected!r}, here {got!r}"
        assert np.array_equal(expected, got), path
        refused += isinstance(expected, str)
    assert refused == 12  # the broken ones of odd_images


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 2, "quality": 40}])
def test_pixels_equal_pillows_for_every_jpeg_kind(mode: str, options: dict[str, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (37, 53, len(Image.new(mode, (1, 1)).getbands())), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise.squeeze(), mode).save(buffer, "JPEG", **options)
    assert np.array_equal(pillow(buffer.getvalue()), ours(buffer.getvalue()))


def test_a_decompression_bomb_is_refused_on_the_fast_path_too(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(Image.DecompressionBombError):
        decode_rgb(buffer.getvalue())


@pytest.mark.parametrize("size", [(7, 10), (3000, 2000)], ids=["one piece", "several pieces"])
def test_planes_are_the_pixels_of_an_image_with_zeros_around_them(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    frame = np.full((3, size[0] + 2, size[1] + 3), 255, dtype=np.uint8)
    to_planes(pixels_of(Image.fromarray(pixels)), frame)
    assert np.array_equal(frame[:, : size[0], : size[1]], pixels.transpose(2, 0, 1))
    assert not frame[:, size[0] :].any() and not frame[:, :, size[1] :].any()

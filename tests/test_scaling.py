"""Images decoded at 1/2, 1/4 or 1/8: pixels are libjpeg's, and boxes, areas and masks lie on them to the fraction of a
pixel."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from packing import pack_here
from PIL import Image
from pycocotools import mask as coco_mask

from rfstream.config import MAX_PIXELS, Config
from rfstream.dataset.reader import EncodedSample
from rfstream.errors import SampleError, StateError
from rfstream.plan.position import Position, position_of, state_of
from rfstream.plan.windows import Windows
from rfstream.stream.decode import BatchDecoder, DetectionSpec
from rfstream.stream.image import decode_rgb, decode_scaled
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.scaling import factor_for
from rfstream.stream.wire import WireBatch

FACTORS = (2, 4, 8)
ODD = (317, 491)  # height and width: 3 and 5 pixels short of a multiple of 8
STORED_AS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""EXIF orientation -> what makes of an upright image the one that is stored."""


def jpeg(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def spec(shrink_to: int | None, **changes: Any) -> DetectionSpec:
    values = {"seed": 0, "labels": ((1, 0),), "transform": "", "transform_key": "augment.cpu", "masks": False}
    return DetectionSpec(**{**values, "pad_multiple": 1, "shrink_to": shrink_to, **changes})


def decoded(image: bytes, annotations: list[dict[str, Any]], of: DetectionSpec, **stated: int) -> WireBatch:
    sidecar = json.dumps({"image_id": 1, "file_name": "a.jpg", "annotations": annotations}).encode()
    return BatchDecoder.of(of).batch([EncodedSample("a.tar", "0", image, sidecar, 0, 0, **stated)], 0, 0, 0)


# Pixels


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 10**5))
def test_the_factor_is_the_largest_that_keeps_what_was_asked_for(height: int, width: int, shrink_to: int) -> None:
    kept = [factor for factor in FACTORS if min(height, width) / factor >= shrink_to]
    assert factor_for(height, width, shrink_to) == max(kept, default=1)
    assert factor_for(height, width, None) == 1


@pytest.mark.parametrize("size", [(64, 96), ODD, (3, 5), (8, 1000), (1025, 33)])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_pixels_are_those_of_libjpeg_at_that_scale(size: tuple[int, int], options: dict[str, Any]) -> None:
    """Pillow's ``draft`` asks the same of libjpeg in another way."""
    data = jpeg(noise(*size), **options)
    for shrink_to in {min(size), *(max(1, min(size) // factor) for factor in FACTORS)}:
        pixels, whole, factor = decode_scaled(data, MAX_PIXELS, shrink_to)
        assert whole == size and min(pixels.shape[:2]) >= shrink_to
        assert pixels.shape[:2] == (-(-size[0] // factor), -(-size[1] // factor))
        image = Image.open(io.BytesIO(data))
        image.draft("RGB", (size[1] // factor, size[0] // factor))
        if image.size == pixels.shape[1::-1]:  # draft leaves small images a larger scale
            assert np.array_equal(pixels, np.asarray(image))
        else:
            assert min(size) < 8
        given = simplejpeg.decode_jpeg(data, min_height=pixels.shape[0], min_width=pixels.shape[1], min_factor=factor)
        assert np.array_equal(pixels, given)


@pytest.mark.parametrize("image", [Image.new("CMYK", (64, 64)), Image.new("RGB", (64, 64))], ids=["CMYK", "PNG"])
def test_what_is_no_plain_jpeg_is_decoded_whole(image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG" if image.mode == "CMYK" else "PNG")
    pixels, size, factor = decode_scaled(buffer.getvalue(), MAX_PIXELS, 8)
    assert pixels.shape == (64, 64, 3) and size == (64, 64) and factor == 1


def test_a_large_image_takes_the_memory_of_the_last_one_and_has_the_same_pixels() -> None:
    image = Image.fromarray(np.tile(np.asarray(noise(300, 400)), (10, 10, 1)))
    photos = [jpeg(image.transpose(turn), quality=30) for turn in list(Image.Transpose)[:2]]
    first = decode_rgb(photos[0])
    assert np.array_equal(first, simplejpeg.decode_jpeg(photos[0]))
    held = decode_rgb(photos[1])
    assert np.array_equal(first, simplejpeg.decode_jpeg(photos[0]))  # it is held, so nothing is written over it
    where = held.ctypes.data
    del held
    again = decode_rgb(photos[1])
    assert again.ctypes.data == where and again.flags.writeable


# Boxes, areas and masks


def rectangle(size: tuple[int, int], x0: int, y0: int, x1: int, y1: int, orientation: int) -> bytes:
    """White on black, stored as a camera that was held so would."""
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    pixels[y0:y1, x0:x1] = 255
    turn = STORED_AS[orientation]
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(image if turn is None else image.transpose(turn), quality=100, subsampling=0, exif=exif)


def span(profile: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Where what is bright in ``profile`` begins and ends, to the fraction of a pixel."""
    length = profile.sum()
    middle = (profile * (np.arange(len(profile)) + 0.5)).sum() / length
    return middle - length / 2, middle + length / 2


@pytest.mark.parametrize("orientation", STORED_AS)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("size", [(320, 480), ODD, (ODD[1], ODD[0])])
def test_targets_lie_where_the_pixels_do(size: tuple[int, int], factor: int, orientation: int) -> None:
    height, width = size
    x0, y0, x1, y1 = box = (width - 147, 21, width - 30, height - 50)  # far from the origin, where ratios would differ
    corners = [[x0, y0, x1, y0, x1, y1, x0, y1]]
    whole = np.zeros(size, dtype=np.uint8, order="F")
    whole[y0:y1, x0:x1] = 1
    runs = {"size": list(size), "counts": coco_mask.encode(whole)["counts"].decode()}
    common = {"bbox": [x0, y0, x1 - x0, y1 - y0], "category_id": 1, "area": (x1 - x0) * (y1 - y0), "iscrowd": 0}
    annotations = [{**common, "id": i, "segmentation": form} for i, form in enumerate([corners, runs])]
    data = rectangle(size, *box, orientation)
    of = spec(min(size) // factor, masks=True, exif="transpose")
    arrays = decoded(data, annotations, of, width=width, height=height).arrays

    assert arrays["orig_sizes"].tolist() == [[height, width]]
    assert arrays["sizes"].tolist() == [[-(-height // factor), -(-width // factor)]]
    assert arrays["area"].tolist() == [(x1 - x0) * (y1 - y0) / factor**2] * 2
    pixels = arrays["images"][0].mean(axis=0) / 255
    middle = [(a + b) // 2 // factor for a, b in ((y0, y1), (x0, x1))]
    (left, right), (top, bottom) = span(pixels[middle[0]]), span(pixels[:, middle[1]])
    assert np.abs(arrays["boxes"] - [left, top, right, bottom]).max() < 0.05
    frame = pixels.shape
    masks = np.unpackbits(arrays["masks"], axis=1)[:, : frame[0] * frame[1]].reshape(2, *frame)
    for mask in masks:
        drawn = [span(mask.any(axis=axis).astype(float)) for axis in (0, 1)]
        assert np.abs(np.transpose(drawn).ravel() - arrays["boxes"][0]).max() <= 0.6  # to whole pixels
        assert (mask != (pixels > 0.5)).mean() < 0.02  # but for an edge that ends in the middle of a pixel


def test_the_same_objects_are_left_of_real_annotations(shared_data: Path) -> None:
    """Photos with polygons and run lengths: boxes and areas are the whole ones', masks overlap with them."""
    folder = shared_data / "coco_cc" / "valid"
    document = json.loads((folder / "_annotations.coco.json").read_text())
    labels = tuple((category["id"], i) for i, category in enumerate(document["categories"]))
    large = 0
    for image in document["images"]:
        own = [a for a in document["annotations"] if a["image_id"] == image["id"]]
        data = (folder / image["file_name"]).read_bytes()
        whole, half = (decoded(data, own, spec(n, labels=labels, masks=True)).arrays for n in (None, 100))
        factor = factor_for(image["height"], image["width"], 100)
        assert factor > 1
        for field in ("labels", "iscrowd", "orig_sizes"):
            assert np.array_equal(whole[field], half[field])
        assert np.array_equal(whole["boxes"] / factor, half["boxes"])
        assert np.allclose(whole["area"] / factor**2, half["area"])
        areas = [
            np.unpackbits(arrays["masks"], axis=1).sum(axis=1, dtype=int) * each**2
            for arrays, each in ((whole, 1), (half, factor))
        ]
        for of_whole, of_half in zip(*areas, strict=True):
            if of_whole > 5000:
                large += 1
                assert of_half == pytest.approx(of_whole, rel=0.1)
    assert large > 20


# What is bad stays bad


def outcome(data: bytes, shrink_to: int | None) -> str:
    try:
        decode_scaled(data, MAX_PIXELS, shrink_to)
    except Exception as error:
        return str(error).partition("<")[0]  # Pillow names objects by their addresses
    return "ok"


def test_a_damaged_file_is_found_damaged(shared_data: Path) -> None:
    photo = next((shared_data / "coco_cc" / "train").glob("*.jpg")).read_bytes()
    progressive = jpeg(Image.open(io.BytesIO(photo)), progressive=True)
    damaged = [data[: len(data) * part // 20] for data in (photo, progressive) for part in range(1, 20)]
    drawn = np.random.default_rng(0)
    for data in (photo, progressive) * 20:
        spoiled = bytearray(data)
        at = int(drawn.integers(700, len(data) - 20))
        spoiled[at : at + 4] = drawn.bytes(4)
        damaged.append(bytes(spoiled))
    odd = [path.read_bytes() for path in sorted((shared_data / "odd_images").iterdir()) if path.is_file()]
    outcomes = [(outcome(data, None), outcome(data, 16)) for data in (*damaged, *odd)]
    assert all(whole == scaled for whole, scaled in outcomes)
    assert sum(whole != "ok" for whole, _ in outcomes) > 40 and ("ok", "ok") in outcomes


def test_sizes_are_looked_at_in_the_file() -> None:
    data = jpeg(noise(60, 80))
    assert decoded(data, [], spec(8), width=80, height=60).arrays["images"].shape == (1, 3, 15, 20)
    with pytest.raises(SampleError, match="the file has 80 x 60 pixels, and its annotations are for 40 x 30"):
        decoded(data, [], spec(8), width=40, height=30)
    with pytest.raises(SampleError, match=r"80 x 60 pixels, more than decode.max_pixels=4799"):
        decoded(data, [], spec(8, max_pixels=4799))


# Configuration and state


def test_it_is_part_of_the_stream(shared_data: Path, tmp_path: Path) -> None:
    pack_here(shared_data / "coco_cc", tmp_path / "pack", 50)
    data = {"path": str(tmp_path / "pack")}
    for training in (True, False):
        pipelines = [
            build_pipeline(Config(data=data, decode=decode), "train", 1, training=training)
            for decode in ({}, {"shrink_to": 100})
        ]
        whole, shrunk = (pipeline.decode.fingerprint() for pipeline in pipelines)
        assert shrunk == {**whole, "shrink_to": 100} and "shrink_to" not in whole
    windows = Windows(8, 1, 1, 4, "wrap")
    state = state_of(Position(0, 1), windows, whole)
    assert position_of(state, windows, shrunk, ["shrink_to"]) == Position(0, 1)
    with pytest.raises(StateError, match="shrink_to was None, is 100"):
        position_of(state, windows, shrunk)

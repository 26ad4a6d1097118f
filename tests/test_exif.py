"""EXIF orientation: ignored by default as RF-DETR ignores it, applied where it is asked for, and told of by pack."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps
from rfdetr_reference import configs

import rfstream
from rfstream.config import Exif
from rfstream.dataset.reader import EncodedSample
from rfstream.errors import StateError
from rfstream.plan.position import Position, position_of, state_of
from rfstream.plan.windows import Windows
from rfstream.stream.decode import BatchDecoder, DetectionSpec
from rfstream.train.rfdetr import RFDETRTransform

WIDTH, HEIGHT = 30, 20
BOX = [2.0, 3.0, 9.0, 5.0]


def encoded(orientation: int) -> bytes:
    """A PNG of noise, stored 30 x 20."""
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def shown(data: bytes) -> Image.Image:
    """The image as Pillow turns it."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def decoded(data: bytes, exif: Exif) -> npt.NDArray[np.uint8]:
    sidecar = json.dumps({"image_id": 1, "file_name": "a.png", "annotations": []}).encode()
    spec = DetectionSpec(0, (), "", "augment.cpu", masks=False, pad_multiple=1, exif=exif)
    wire = BatchDecoder.of(spec).batch([EncodedSample("a.tar", "0", data, sidecar, 0, 0)], 0, 0, 0)
    return wire.arrays["images"][0].transpose(1, 2, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_only_if_that_is_asked_for(orientation: int) -> None:
    data = encoded(orientation)
    stored = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decoded(data, "ignore"), stored)
    assert np.array_equal(decoded(data, "transpose"), np.asarray(shown(data)))


def test_odd_files_are_turned_as_pillow_turns_them(shared_data: Path) -> None:
    turned = 0
    for path in sorted(p for p in (shared_data / "odd_images").iterdir() if p.is_file()):
        data = path.read_bytes()
        try:
            expected = np.asarray(shown(data))
        except Exception:  # what Pillow can't decode, no policy of orientation will
            continue
        assert np.array_equal(decoded(data, "transpose"), expected), path
        turned += not np.array_equal(decoded(data, "ignore"), expected)
    assert turned >= 3


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_rfdetr_s_transforms_get_the_image_upright(tmp_path: Path, orientation: int) -> None:
    model, train = configs(tmp_path, augmentation_backend="torchvision")
    annotations = [{"id": 1, "category_id": 1, "bbox": BOX, "area": 45.0, "iscrowd": 0}]
    data = encoded(orientation)
    upright = io.BytesIO()
    shown(data).save(upright, "PNG")
    stock, ours = (RFDETRTransform(model, train, "val", exif=exif) for exif in ("ignore", "transpose"))
    pixels, target = ours(*ours.decode(data, 1, annotations), 5)
    expected, of_upright = stock(*stock.decode(upright.getvalue(), 1, annotations), 5)
    assert pixels.equal(expected)
    assert all(target[name].equal(values) for name, values in of_upright.items())


@pytest.mark.parametrize(("saved", "now"), [("ignore", "transpose"), ("transpose", "ignore")])
def test_a_state_of_the_other_orientation_is_refused(saved: Exif, now: Exif) -> None:
    windows = Windows(8, 1, 1, 4, "wrap")
    was, is_now = (
        DetectionSpec(0, (), "", "", masks=False, pad_multiple=1, exif=exif).fingerprint() for exif in (saved, now)
    )
    state = state_of(Position(0, 1), windows, was)
    assert position_of(state, windows, was) == position_of(state, windows, is_now, ["exif"]) == Position(0, 1)
    with pytest.raises(StateError, match="exif was"):
        position_of(state, windows, is_now)


@pytest.mark.parametrize("stated", [(WIDTH, HEIGHT), (HEIGHT, WIDTH)], ids=["as stored", "as shown"])
def test_pack_says_so_if_annotations_are_for_the_image_as_shown(
    tmp_path: Path, ray_session: None, caplog: pytest.LogCaptureFixture, stated: tuple[int, int]
) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "a.png").write_bytes(encoded(6))
    image = {"id": 1, "file_name": "a.png", "width": stated[0], "height": stated[1]}
    annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": BOX, "area": 45.0, "iscrowd": 0}
    document = {"images": [image], "annotations": [annotation], "categories": [{"id": 1, "name": "thing"}]}
    (folder / "_annotations.coco.json").write_text(json.dumps(document))
    with caplog.at_level(logging.WARNING, "rfstream"):
        rfstream.pack(str(tmp_path), str(tmp_path / "pack"), progress=False)
    told = [record.getMessage() for record in caplog.records if "EXIF" in record.getMessage()]
    assert len(told) == (stated == (HEIGHT, WIDTH)) and all("a.png" in message for message in told)

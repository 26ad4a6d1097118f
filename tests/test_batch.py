"""From annotations to tensors: targets, collation, the wire, and the batch in the training process."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from rfstream.batch import Batch, batch_of, unpack_masks
from rfstream.config import CpuTransform
from rfstream.dataset.reader import EncodedSample
from rfstream.errors import ConfigError, SampleError
from rfstream.stream.augment import build_transform
from rfstream.stream.decode import BatchDecoder, DetectionSpec
from rfstream.stream.source import rows_of
from rfstream.stream.targets import targets_of
from rfstream.stream.wire import WireBatch, from_row, to_row

LABELS = {3: 0, 7: 1}


def spec(**changes: Any) -> DetectionSpec:
    values: dict[str, Any] = {
        "seed": 0,
        "labels": tuple(LABELS.items()),
        "transform": "",
        "transform_key": "augment.cpu",
        "masks": False,
        "pad_multiple": 1,
    }
    return DetectionSpec(**{**values, **changes})


def sample(key: str, size: tuple[int, int], boxes: list[list[float]], **fields: Any) -> EncodedSample:
    pixels = np.random.default_rng(len(key)).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    annotations = [{"id": i, "bbox": b, "category_id": 3, "area": b[2] * b[3], **fields} for i, b in enumerate(boxes)]
    sidecar = {"image_id": int(key), "file_name": f"{key}.png", "annotations": annotations}
    return EncodedSample("train-0-000000.tar", key, buffer.getvalue(), json.dumps(sidecar).encode(), 7, 512)


def batch_from(samples: list[EncodedSample], **changes: Any) -> Batch:
    row = to_row([BatchDecoder.of(spec(**changes)).batch(samples, 2, 5, 10)])
    assert row.num_rows == 1
    (wire,) = from_row(row)
    return batch_of(wire, step=5, window_end=True)


def test_images_of_different_sizes_are_padded_with_a_mask() -> None:
    batch = batch_from([sample("1", (10, 20), [[1, 2, 3, 4]]), sample("2", (16, 8), [])], pad_multiple=32)
    assert batch.images.shape == (2, 3, 32, 32)
    assert batch.sizes.tolist() == [[10, 20], [16, 8]]
    for i, (h, w) in enumerate(batch.sizes.tolist()):
        assert not batch.mask[i, :h, :w].any()
        assert batch.mask[i].sum() == 32 * 32 - h * w
        assert batch.images[i, :, :h, :w].any()
        assert not batch.images[i].masked_select(batch.mask[i]).any()
    assert batch.keys == ["1", "2"]
    assert batch.image_ids.tolist() == [1, 2]
    assert (batch.epoch, batch.step, batch.window_end) == (2, 5, True)


def test_targets_are_views_of_flat_buffers() -> None:
    batch = batch_from(
        [
            sample("1", (10, 20), [[1, 2, 3, 4], [0, 0, 5, 5]]),
            sample("2", (9, 9), []),
            sample("3", (9, 9), [[1, 1, 1, 1]]),
        ]
    )
    assert [len(t["boxes"]) for t in batch.targets] == [2, 0, 1]
    assert batch.targets[0]["boxes"].tolist() == [[1, 2, 4, 6], [0, 0, 5, 5]]
    assert batch.targets[0]["boxes"].data_ptr() == batch.targets.flat["boxes"].data_ptr()
    assert batch.targets[-1]["labels"].tolist() == [0]
    assert len(batch.targets[0:2]) == 2
    with pytest.raises(IndexError):
        batch.targets[3]


def test_the_number_of_buffers_does_not_grow_with_the_batch() -> None:
    def row_of(images: int, objects: int) -> pa.Table:
        samples = [sample(str(i), (256, 256), [[1, 1, 2, 2]] * objects) for i in range(images)]
        return to_row([BatchDecoder.of(spec()).batch(samples, 0, 0, 0)])

    assert row_of(1, 1).column_names == row_of(64, 9).column_names == ["header", "small", "0.images"]


def test_several_batches_cross_in_one_row() -> None:
    decoder = BatchDecoder.of(spec())
    wires = [decoder.batch([sample(str(i), (256, 200 + i), [[1, 1, 2, 2]] * i)], 3, i, i) for i in range(4)]
    back = from_row(to_row(wires))
    assert [(wire.epoch, wire.batch, wire.keys) for wire in back] == [(3, i, [str(i)]) for i in range(4)]
    for wire, own in zip(back, wires, strict=True):
        assert wire.arrays.keys() == own.arrays.keys()
        for name, values in own.arrays.items():
            np.testing.assert_array_equal(wire.arrays[name], values)
            assert wire.arrays[name].dtype == values.dtype
        assert np.shares_memory(wire.arrays["images"], own.arrays["images"]), "pixels are copied on the way"


@pytest.mark.parametrize(("side", "sizes"), [(8, [4, 4, 2]), (2600, [3, 3, 3, 1]), (6000, [1] * 10)])
def test_a_row_takes_no_more_batches_than_its_bytes_allow(side: int, sizes: list[int]) -> None:
    pixels = np.zeros((1, 3, side, side), dtype=np.uint8)
    rows = rows_of((WireBatch(0, i, ["key"], {"images": pixels}) for i in range(10)), 4)
    numbers = [[wire.batch for wire in from_row(row)] for row in rows]
    assert [len(each) for each in numbers] == sizes
    assert list(itertools.chain(*numbers)) == list(range(10))


def test_masks_cross_bit_packed_and_come_back_whole() -> None:
    square = [[2.0, 3.0, 7.0, 3.0, 7.0, 8.0, 2.0, 8.0]]
    samples = [sample("1", (11, 13), [[2, 3, 5, 5]], segmentation=square), sample("2", (9, 5), [])]
    batch = batch_from(samples, masks=True)
    assert batch.targets.flat["masks"].shape == (1, -(-11 * 13 // 8))
    masks = batch.targets[0]["masks"]
    assert masks.shape == (1, 11, 13)
    expected = torch.zeros(11, 13, dtype=torch.bool)
    expected[3:8, 2:7] = True
    assert torch.equal(masks[0], expected)
    assert batch.targets[1]["masks"].shape == (0, 11, 13)


def test_unpacking_masks_is_numpys() -> None:
    bits = np.random.default_rng(0).integers(0, 2, (3, 7 * 9)).astype(bool)
    packed = torch.from_numpy(np.packbits(bits, axis=1))
    assert torch.equal(unpack_masks(packed, 7, 9), torch.from_numpy(bits).reshape(3, 7, 9))


def test_boxes_are_clipped_and_empty_ones_left_out() -> None:
    annotations = [
        {"id": 1, "bbox": [-5, -5, 10, 10], "category_id": 3, "area": 100},
        {"id": 2, "bbox": [4, 4, 0, 3], "category_id": 3, "area": 0},
        {"id": 3, "bbox": [30, 4, 5, 5], "category_id": 7, "area": 25},
        {"id": 4, "bbox": [18, 8, 50, 50], "category_id": 7, "area": 25, "iscrowd": 1},
    ]
    target = targets_of(annotations, LABELS, 10, 20, masks=False)
    assert target["boxes"].tolist() == [[0, 0, 5, 5], [18, 8, 20, 10]]
    assert target["labels"].tolist() == [0, 1]
    assert target["iscrowd"].tolist() == [0, 1]
    assert {name: str(v.dtype) for name, v in target.items()} == {
        "boxes": "float32",
        "labels": "int64",
        "area": "float32",
        "iscrowd": "int64",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"category_id": 99}, r"annotation 0 has category_id 99, which is not among"),
        ({"bbox": [1, 2, 3]}, r"annotation 0 has bbox \[1, 2, 3\], not four finite numbers"),
        ({"bbox": [1, 2, float("nan"), 3]}, "not four finite numbers"),
        ({"segmentation": {"counts": "!", "size": "?"}}, "neither polygons nor RLE"),
        ({"segmentation": {"counts": [99], "size": [9, 11]}}, r"RLE of \(9, 11\), the image is \(10, 20\)"),
    ],
)
def test_a_bad_annotation_is_named_with_shard_key_and_file(change: dict[str, Any], message: str) -> None:
    bad = sample("4", (10, 20), [[1, 2, 3, 4]], **change)
    with pytest.raises(SampleError, match=rf"shard train-0-000000.tar, key 4 \(file 4.png\): .*{message}"):
        BatchDecoder.of(spec(masks=True)).batch([bad], 0, 0, 0)


@pytest.mark.parametrize("data", [b"", b"no image", b"\xff\xd8\xff\xe0 broken"])
def test_a_bad_image_is_named_with_shard_key_and_file(data: bytes) -> None:
    good = sample("4", (10, 20), [])
    with pytest.raises(SampleError, match=r"shard train-0-000000.tar, key 4 \(file 4.png\): .*pack again"):
        BatchDecoder.of(spec()).batch([replace(good, image=data)], 0, 0, 0)


@pytest.mark.parametrize("sidecar", [b"{", b"[]", b'{"annotations": 3}'])
def test_a_bad_sidecar_is_named_with_shard_and_key(sidecar: bytes) -> None:
    good = sample("4", (10, 20), [])
    with pytest.raises(SampleError, match=r"shard train-0-000000.tar, key 4: the annotations"):
        BatchDecoder.of(spec()).batch([replace(good, sidecar=sidecar)], 0, 0, 0)


@pytest.mark.parametrize("name", ["pipelines:crop_flip_jitter", "augmentations:noise"])
def test_augmentation_depends_on_the_position_alone(name: str) -> None:
    cpu = CpuTransform(transform=f"tests.{name}").model_dump_json()
    samples = [sample(str(i), (300, 280), [[10, 20, 100, 120]]) for i in range(3)]
    first = BatchDecoder.of(spec(transform=cpu)).batch(samples, 1, 0, 30).arrays["images"]
    decoder = BatchDecoder.of(spec(transform=cpu))
    decoder.batch(samples[::-1], 5, 0, 99)  # whatever ran before
    again = decoder.batch(samples[1:], 1, 0, 31).arrays["images"]
    assert np.array_equal(first[1:], again)
    assert not np.array_equal(decoder.batch(samples, 2, 0, 30).arrays["images"], first)


def test_boxes_and_masks_follow_an_albumentations_crop() -> None:
    image = np.zeros((100, 100, 3), dtype=np.uint8)
    image[40:60, 30:50] = 255
    mask = (image[..., 0] > 0).astype(np.uint8)
    target = {
        "boxes": np.array([[30, 40, 50, 60], [0, 0, 2, 2]], dtype=np.float32),
        "labels": np.array([1, 0]),
        "area": np.array([400, 4], dtype=np.float32),
        "iscrowd": np.array([0, 0]),
        "masks": np.stack([mask, np.zeros_like(mask)]),
    }
    import albumentations as A

    crop = A.to_dict(A.Compose([A.Crop(40, 40, 90, 90), A.HorizontalFlip(p=1.0)]))
    out, moved = build_transform(CpuTransform(albumentations=crop), "augment.cpu")(image, target, 5)
    assert out.shape == (50, 50, 3)
    assert moved["labels"].tolist() == [1]
    x1, y1, x2, y2 = moved["boxes"][0].round().astype(int).tolist()
    assert (out[y1:y2, x1:x2] == 255).all()
    assert (out == 255).sum() == 3 * (x2 - x1) * (y2 - y1)
    assert np.array_equal(moved["masks"][0], (out[..., 0] > 0).astype(np.uint8))
    assert moved["area"][0] == pytest.approx(200, rel=1e-3)


@pytest.mark.parametrize(
    ("cpu", "message"),
    [
        ({"transform": "tests.augmentations:not_a_transform"}, "returned int"),
        ({"transform": "tests.augmentations:resize", "args": {"sise": 3}}, "can't be built with args"),
        ({"albumentations": {"transform": {}}}, "not a pipeline that A.to_dict wrote"),
    ],
)
def test_a_transform_that_can_not_be_built_is_named(cpu: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_transform(CpuTransform(**cpu), "augment.cpu")


def test_pinning_and_moving_keep_everything() -> None:
    batch = batch_from([sample("1", (10, 20), [[1, 2, 3, 4]])])
    moved = batch.to("meta")
    assert moved.images.device.type == "meta"
    assert moved.targets.flat["boxes"].device.type == "meta"
    assert moved.keys == batch.keys
    assert batch.to("cpu").images.data_ptr() == batch.images.data_ptr()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipelines:floats", r"an image that is float32 of shape .*, not uint8"),
        ("pipelines:large_crop", "CropSizeError"),
    ],
)
def test_a_transform_that_fails_names_the_sample(name: str, message: str) -> None:
    cpu = CpuTransform(transform=f"tests.{name}").model_dump_json()
    with pytest.raises(ConfigError, match=rf"augment.cpu fails on shard .*, key 4 \(file 4.png\): .*{message}"):
        BatchDecoder.of(spec(transform=cpu)).batch([sample("4", (10, 20), [])], 0, 0, 0)


def test_a_composes_own_probability_is_kept() -> None:
    cpu = CpuTransform(transform="tests.pipelines:never").model_dump_json()
    samples = [sample("4", (10, 20), [[1, 2, 3, 4]])]
    plain, left = (BatchDecoder.of(spec(transform=t)).batch(samples, 0, 0, 0).arrays["images"] for t in ("", cpu))
    assert np.array_equal(plain, left)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("def make(): return lambda image, target, rng: (image, target)", []),
        ("import albumentations as A\ndef make(): return A.HorizontalFlip(p=0.5)", ["albumentations"]),
        ("import albumentations, torch\ndef make(): return torch.sigmoid", ["albumentations", "torch"]),
    ],
)
def test_decode_actors_import_only_what_their_transform_asks_for(
    tmp_path: Path, module: str, imported: list[str]
) -> None:
    (tmp_path / "transform.py").write_text(module)
    code = (
        "import sys\n"
        "import rfstream.stream.source\n"
        "from rfstream.config import CpuTransform\n"
        "from rfstream.stream.augment import build_transform\n"
        "build_transform(CpuTransform(transform='transform:make'), 'augment.cpu')\n"
        "print(sorted({'aiohttp', 'albumentations', 'torch'} & sys.modules.keys()))"
    )
    paths = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"}
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(imported), done.stderr

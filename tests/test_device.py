"""The device stage on real photos: exact arithmetic, boxes and masks that move with the pixels, repeatable draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools.coco import COCO

from rfstream.batch import Batch, Targets
from rfstream.config import DeviceConfig
from rfstream.errors import ConfigError
from rfstream.train.device import DeviceStage

MARKED = (255, 0, 255)
"""No photo here has it: the colour of what a box holds where a test looks for it again."""


def batch_of_photos(folder: Path, count: int = 4, *, masks: bool = False, limit: int = 320) -> Batch:
    """The first photos of a Roboflow folder, cut to different sizes, padded to one frame, with their real boxes."""
    coco = COCO(str(folder / "_annotations.coco.json"))
    images, targets, sizes = [], [], []
    for i, image in enumerate(list(coco.imgs.values())[:count]):
        photo = np.array(Image.open(folder / image["file_name"]).convert("RGB"))[: limit - 24 * i, : limit - 17 * i]
        h, w = photo.shape[:2]
        found = [a for a in coco.imgToAnns[image["id"]] if a["bbox"][0] + 2 < w and a["bbox"][1] + 2 < h]
        boxes = np.array([[x, y, min(x + bw, w), min(y + bh, h)] for x, y, bw, bh in (a["bbox"] for a in found)])
        shapes = [coco.annToMask(a)[:h, :w] for a in found] if masks else []
        images.append(photo)
        sizes.append((h, w))
        targets.append((boxes.reshape(-1, 4), [a["category_id"] for a in found], shapes))
    return collate(images, sizes, targets)


def collate(images: Sequence[np.ndarray], sizes: Sequence[tuple[int, int]], targets: Sequence[tuple]) -> Batch:
    height, width = (max(s[axis] for s in sizes) for axis in (0, 1))
    frame = np.zeros((len(images), 3, height, width), np.uint8)
    for i, image in enumerate(images):
        frame[i, :, : image.shape[0], : image.shape[1]] = image.transpose(2, 0, 1)
    boxes = np.concatenate([t[0] for t in targets]).astype(np.float32)
    flat = {
        "boxes": torch.from_numpy(boxes),
        "labels": torch.tensor([label for t in targets for label in t[1]], dtype=torch.int64),
        "area": torch.from_numpy((boxes[:, 2:] - boxes[:, :2]).prod(1)),
        "iscrowd": torch.zeros(len(boxes), dtype=torch.int64),
    }
    shapes = [shape for t in targets for shape in t[2]]
    if shapes:
        padded = np.zeros((len(shapes), height, width), np.uint8)
        for i, shape in enumerate(shapes):
            padded[i, : shape.shape[0], : shape.shape[1]] = shape
        flat["masks"] = torch.from_numpy(np.packbits(padded.reshape(len(shapes), -1), axis=1))
    offsets = torch.tensor(np.cumsum([0] + [len(t[0]) for t in targets]), dtype=torch.int64)
    return Batch(
        images=torch.from_numpy(frame),
        sizes=torch.tensor(sizes),
        orig_sizes=torch.tensor(sizes),
        image_ids=torch.arange(len(images)),
        targets=Targets(flat, offsets, (height, width)),
        keys=[str(i) for i in range(len(images))],
        epoch=3,
        step=5,
        window_end=True,
    )


def stage(normalize: object = "none", *kornia: dict, seed: int = 0) -> DeviceStage:
    return DeviceStage(DeviceConfig(normalize=normalize, kornia=list(kornia)), seed=seed)


def mark(batch: Batch) -> Batch:
    """Paint the inside of one large box of each image, so that a test can find it again."""
    for i in range(len(batch)):
        x1, y1, x2, y2 = chosen(batch, i).round().int().tolist()
        batch.images[i, :, y1:y2, x1:x2] = torch.tensor(MARKED, dtype=torch.uint8)[:, None, None]
    return batch


def chosen(batch: Batch, i: int) -> torch.Tensor:
    boxes = batch.targets[i]["boxes"]
    return boxes[(boxes[:, 2:] - boxes[:, :2]).prod(1).argmax()]


def marked_box(image: torch.Tensor) -> list[int]:
    """The box around the pixels of the marking colour, from a float image in 0..1."""
    r, g, b = image
    ys, xs = torch.nonzero((r > 0.8) & (g < 0.2) & (b > 0.8), as_tuple=True)
    return [int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1]


@pytest.fixture(scope="module")
def photos(shared_data: Path) -> Batch:
    return batch_of_photos(shared_data / "bccd" / "valid")


def test_arithmetic_is_torchvision_s_bit_for_bit(photos: Batch) -> None:
    from torchvision.transforms import v2

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    for normalize in ("imagenet", {"mean": mean, "std": std}):
        out = stage(normalize)(photos, augment=True)
        for i, (h, w) in enumerate(photos.sizes.tolist()):
            assert torch.equal(out.images[i, :, :h, :w], expected(photos.images[i, :, :h, :w]))
    plain = stage("none")(photos, augment=False)
    assert torch.equal(plain.images, v2.functional.to_dtype(photos.images, torch.float32, scale=True))


def test_padding_is_zero_after_normalisation_and_the_batch_is_left_alone(photos: Batch) -> None:
    before = photos.images.clone()
    out = stage("imagenet", {"name": "RandomHorizontalFlip", "p": 1.0})(photos, augment=True)
    assert torch.equal(photos.images, before)
    assert out.mask.any() and (out.images.movedim(1, -1)[out.mask] == 0).all()
    assert (out.images.movedim(1, -1)[~out.mask] != 0).any()
    assert torch.equal(out.mask, photos.mask.flip(2))


@pytest.mark.parametrize(("name", "axis"), [("RandomHorizontalFlip", 2), ("RandomVerticalFlip", 1)])
def test_flipped_boxes_hold_the_flipped_pixels_exactly(photos: Batch, name: str, axis: int) -> None:
    plain = stage()(photos, augment=False)
    out = stage("none", {"name": name, "p": 1.0})(photos, augment=True)
    assert torch.equal(out.images, plain.images.flip(axis + 1))
    size = photos.images.shape[axis + 1]
    low, high = (0, 2) if axis == 2 else (1, 3)
    for before, after in zip(photos.targets, out.targets, strict=True):
        expected = before["boxes"].clone()
        expected[:, low], expected[:, high] = size - before["boxes"][:, high], size - before["boxes"][:, low]
        torch.testing.assert_close(after["boxes"], expected, atol=1e-3, rtol=0)
        for field in ("labels", "area", "iscrowd"):
            torch.testing.assert_close(after[field], before[field])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), number=st.integers(0, 1000))
def test_boxes_follow_the_pixels_under_any_affine(shared_data: Path, seed: int, number: int) -> None:
    batch = mark(batch_of_photos(shared_data / "bccd" / "valid", 2))
    affine = {"name": "RandomAffine", "degrees": 10.0, "translate": [0.05, 0.05], "scale": [0.8, 1.2], "p": 1.0}
    flip = {"name": "RandomHorizontalFlip", "p": 0.5}
    out = stage("none", affine, flip, seed=seed)(batch, augment=True, number=number)
    height, width = batch.images.shape[2:]
    for i in range(len(batch)):
        seen = marked_box(out.images[i])
        boxes = out.targets[i]["boxes"]
        # A turned rectangle's corners are cut by interpolation, and the photo's edge may cut the box itself.
        nearest = (boxes - torch.tensor(seen)).abs().amax(1).min()
        assert nearest <= 3.0, (seen, boxes)
        assert boxes.min() >= 0 and (boxes <= torch.tensor([width, height, width, height])).all()


def test_masks_and_boxes_stay_together(shared_data: Path) -> None:
    batch = batch_of_photos(shared_data / "facade" / "train", 2, masks=True)
    turned = stage("none", {"name": "RandomAffine", "degrees": 15.0, "p": 1.0})(batch, augment=True, number=2)
    compared = 0
    for before, after in zip(batch.targets, turned.targets, strict=True):
        assert after["masks"].dtype == torch.bool and after["masks"].shape[1:] == batch.images.shape[2:]
        assert len(after["masks"]) == len(after["boxes"]) == len(after["labels"]) <= len(before["boxes"])
        for box, shape in zip(after["boxes"].tolist(), after["masks"], strict=True):
            if shape.sum() < 50:
                continue
            ys, xs = torch.nonzero(shape, as_tuple=True)
            x1, y1, x2, y2 = box
            assert x1 - 1.5 <= xs.min() and xs.max() + 1 <= x2 + 1.5
            assert y1 - 1.5 <= ys.min() and ys.max() + 1 <= y2 + 1.5
            compared += 1
    assert compared > 10
    flipped = stage("none", {"name": "RandomHorizontalFlip", "p": 1.0})(batch, augment=True)
    for before, after in zip(batch.targets, flipped.targets, strict=True):
        assert torch.equal(after["masks"], before["masks"].flip(2))


def test_what_leaves_the_frame_is_clipped_or_dropped_with_its_labels(photos: Batch) -> None:
    half = {"name": "RandomTranslate", "translate_x": [0.5, 0.5001], "translate_y": [0.0, 0.0001], "p": 1.0}
    out = stage("none", half)(photos, augment=True)
    width = photos.images.shape[3]
    dropped = 0
    for before, after in zip(photos.targets, out.targets, strict=True):
        moved = before["boxes"] + torch.tensor([width / 2, 0, width / 2, 0])
        keep = moved[:, 0] <= width - 1
        expected = moved[keep].clamp(max=torch.tensor([width, 1e9, width, 1e9]))
        torch.testing.assert_close(after["boxes"], expected, atol=0.1, rtol=0)
        assert torch.equal(after["labels"], before["labels"][keep])
        share = (expected[:, 2] - expected[:, 0]) / (moved[keep][:, 2] - moved[keep][:, 0])
        torch.testing.assert_close(after["area"], before["area"][keep] * share, rtol=0.02, atol=1.0)
        dropped += int((~keep).sum())
    assert dropped > 0


def test_images_without_objects(photos: Batch) -> None:
    empty = (np.zeros((0, 4)), [], [])
    box = (np.array([[5.0, 6.0, 20.0, 30.0]]), [1], [])
    picture = np.full((40, 50, 3), 90, np.uint8)
    flip = stage("none", {"name": "RandomHorizontalFlip", "p": 1.0})
    for targets in ([empty, box], [empty, empty]):
        out = flip(collate([picture, picture], [(40, 50)] * 2, targets), augment=True)
        assert out.targets[0]["boxes"].shape == (0, 4)
        assert [len(t["labels"]) for t in out.targets] == [len(t[1]) for t in targets]


def test_draws_depend_on_seed_epoch_and_batch_alone(photos: Batch) -> None:
    jitter = {"name": "ColorJiggle", "brightness": 0.3, "contrast": 0.3, "p": 1.0}
    noise = {"name": "RandomGaussianNoise", "std": 0.1, "p": 1.0}
    first = stage("imagenet", jitter, noise)(photos, augment=True, number=7)
    torch.manual_seed(1234)
    state = torch.random.get_rng_state()
    again = stage("imagenet", jitter, noise)(photos, augment=True, number=7)
    assert torch.equal(first.images, again.images)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator must be left as it was"
    others = [
        stage("imagenet", jitter, noise)(photos, augment=True, number=8),
        stage("imagenet", jitter, noise, seed=1)(photos, augment=True, number=7),
    ]
    assert all(not torch.equal(first.images, other.images) for other in others)
    assert torch.equal(
        stage("imagenet", jitter)(photos, augment=False).images, stage("imagenet")(photos, augment=True).images
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "RandomFlip"}, r"augment.device.kornia\[0\]: kornia.augmentation has no 'RandomFlip'"),
        ({"p": 0.5}, r"augment.device.kornia\[0\]: kornia.augmentation has no None"),
        ({"name": "RandomElasticTransform"}, "does not move boxes and masks with the pixels"),
        ({"name": "RandomMosaic"}, "does not move boxes and masks with the pixels"),
        ({"name": "RandomRotation", "angle": 3}, "RandomRotation can't be built with {'angle': 3}"),
    ],
)
def test_refuses_what_it_can_not_do(spec: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage("none", spec)


def test_refuses_another_frame(photos: Batch) -> None:
    with pytest.raises(ConfigError, match="the frame must stay"):
        stage("none", {"name": "Resize", "size": [64, 64]})(photos, augment=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_moves_boxes_as_the_cpu_does(photos: Batch) -> None:
    flip = stage("imagenet", {"name": "RandomHorizontalFlip", "p": 0.5})
    here, there = flip(photos, augment=True, number=1), flip.to("cuda")(photos.to("cuda"), augment=True, number=1)
    torch.testing.assert_close(there.images.cpu(), here.images)
    for a, b in zip(here.targets, there.targets, strict=True):
        torch.testing.assert_close(b["boxes"].cpu(), a["boxes"])

"""The drawn scenes: the same for the same seed, and boxed exactly."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageChops

from rfstream.errors import DatasetError
from rfstream.tools import scenes


def annotations(folder: Path, split: str) -> dict[str, Any]:
    return json.loads((folder / "annotations" / f"instances_{split}.json").read_text())


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenes.make_scenes(tmp_path_factory.mktemp("scenes"), train=40, val=8, seed=3)


def test_same_seed_same_files(drawn: Path, tmp_path: Path) -> None:
    def digests(folder: Path) -> dict[str, str]:
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    assert digests(scenes.make_scenes(tmp_path / "again", train=40, val=8, seed=3)) == digests(drawn)
    other = scenes.make_scenes(tmp_path / "other", train=40, val=8, seed=4)
    assert annotations(other, "train") != annotations(drawn, "train")


def test_a_split_s_first_scenes_do_not_depend_on_its_size(drawn: Path, tmp_path: Path) -> None:
    fewer = scenes.make_scenes(tmp_path, train=5, val=2, seed=3)
    assert annotations(fewer, "train")["images"] == annotations(drawn, "train")["images"][:5]
    assert (fewer / "train/scene_00004.jpg").read_bytes() == (drawn / "train/scene_00004.jpg").read_bytes()


def test_coco_reads_it_and_every_class_and_empty_images_occur(drawn: Path) -> None:
    from pycocotools.coco import COCO

    coco = COCO(str(drawn / "annotations" / "instances_train.json"))
    assert {c["name"] for c in coco.dataset["categories"]} == set(scenes.CLASSES)
    assert {a["category_id"] for a in coco.dataset["annotations"]} == {1, 2, 3, 4}
    assert any(not coco.getAnnIds(imgIds=[i]) for i in coco.getImgIds())
    for image in coco.dataset["images"]:
        with Image.open(drawn / "train" / image["file_name"]) as opened:
            assert opened.size == (image["width"], image["height"])
            assert scenes.SIDES[0] <= min(opened.size) and max(opened.size) <= scenes.SIDES[1]
    for a in coco.dataset["annotations"]:
        image = coco.imgs[a["image_id"]]
        x, y, w, h = a["bbox"]
        assert x >= 0 and y >= 0 and x + w <= image["width"] and y + h <= image["height"]
        outline = np.array(a["segmentation"][0]).reshape(-1, 2)
        np.testing.assert_allclose([x, y, x + w, y + h], [*outline.min(0), *outline.max(0)], atol=0.011)
        # The polygon's area as COCO itself rasterises it: a pixel at its rim more or less.
        rim = np.abs(np.diff(outline, axis=0, append=outline[:1])).sum()
        assert abs(coco.annToMask(a).sum() - a["area"]) <= rim


def test_boxes_are_where_the_pixels_change() -> None:
    """Paint one shape and compare the pixels that changed with its outline."""
    rng = np.random.default_rng(0)
    for label in range(len(scenes.CLASSES)):
        outline = np.array([100.3, 90.6]) + 40 * scenes._outline(label, 0.7)
        before = Image.new("RGB", (200, 180), (120, 120, 120))
        after = before.copy()
        scenes._paint(rng, after, outline)
        changed = ImageChops.difference(before, after).convert("L").point(lambda v: 255 * (v > 40)).getbbox()
        assert changed is not None
        np.testing.assert_allclose(changed, [*outline.min(0), *outline.max(0)], atol=1.5)


def test_refuses_an_empty_split(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="at least one image a split, got train=0"):
        scenes.make_scenes(tmp_path, train=0, val=3, seed=0)

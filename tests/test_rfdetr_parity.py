"""Batches equal, bit for bit, to what RF-DETR's own dataset and collate make of the loose files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rfdetr.evaluation.keypoint_oks import MetricKeypointOKS
from rfdetr_reference import Compared, configs, ours, pack_in_process, theirs

from rfstream.tools.scenes import make_scenes
from rfstream.train.rfdetr.labels import PackedCoco, keypoint_schema, labels_of

pytestmark = pytest.mark.filterwarnings("ignore:RF-DETR has changed", "ignore:.*pretrain_weights=None")

ALBUMENTATIONS = {
    "HorizontalFlip": {"p": 0.5},
    "Affine": {"scale": (0.8, 1.2), "rotate": (-20, 20), "p": 0.7},
    "RandomBrightnessContrast": {"p": 0.5},
    "GaussNoise": {"p": 0.5},
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "crops and flips": ("bccd", "train", {}),
    "evaluation": ("bccd", "val", {}),
    "aspect kept": ("coco_cc", "train", {"square_resize_div_64": False}),
    "aspect kept, evaluation": ("coco_cc", "val", {"square_resize_div_64": False}),
    "a scale a sample": ("coco_cc", "train", {"multi_scale": "per-sample"}),
    "a scale a batch": ("bccd", "train", {"multi_scale": "per-batch", "expanded_scales": False}),
    "one scale, no crops": ("dali_objects", "train", {"multi_scale": "off", "scale_jitter": False, "resolution": 320}),
    "no augmentation": ("bccd", "train", {"aug_config": {}}),
    "albumentations": ("bccd", "train", {"augmentation_backend": "albumentations", "aug_config": ALBUMENTATIONS}),
    "albumentations by default": ("coco_cc", "train", {"augmentation_backend": "cpu"}),
    "padded targets": ("bccd", "train", {"pad_targets_to": 12}),
    "masks": ("facade", "train", {"kind": "segmentation", "resolution": 144}),
    "masks, evaluation": ("facade", "val", {"kind": "segmentation", "resolution": 144}),
    "masks of polygons and RLE": ("coco_cc", "train", {"kind": "segmentation", "resolution": 144}),
    "masks, aspect kept": (
        "dali_objects",
        "train",
        {"kind": "segmentation", "resolution": 144, "square_resize_div_64": False},
    ),
    "masks, albumentations": (
        "coco_cc",
        "train",
        {"kind": "segmentation", "resolution": 144, "aug_config": ALBUMENTATIONS},
    ),
}


@pytest.fixture(scope="module")
def packed(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs")
    for name in {name for name, *_ in CASES.values()}:
        for role in ("train", "val"):
            pack_in_process(shared_data / name, folder / name, role)
    return folder


def compare(pack: Path, role: str, count: int, model: Any, train: Any) -> Compared:
    compared = Compared()
    mine = list(ours(pack, model, train, role, count))
    ids = [number for image_ids, _ in mine for number in image_ids]
    for (_, batch), its in zip(mine, theirs(model, train, role, ids), strict=True):
        compared.same(batch.collated("cpu"), its)
        compared.same((batch.samples(), batch.targets()), its)
    return compared


@pytest.mark.parametrize("case", CASES)
def test_equal_to_rfdetr_on_loose_files(shared_data: Path, packed: Path, case: str) -> None:
    name, role, options = CASES[case]
    model, train = configs(shared_data / name, **options)
    compared = compare(packed / name, role, 16, model, train)
    print(f"{case}, {name} {role}: {compared}")
    assert compared.boxes > 30 and (options.get("kind") != "segmentation" or compared.mask_bytes > 10**5)
    padded = not options.get("square_resize_div_64", True) or options.get("multi_scale") == "per-sample"
    assert (compared.padding > 0) == padded


def test_equal_to_rfdetr_under_raw_ids(shared_data: Path, tmp_path: Path) -> None:
    """The layout of COCO itself, whose labels are the category ids, with gaps."""
    source = shared_data / "coco_cc"
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    for role, split in (("train", "train"), ("val", "valid")):
        (tmp_path / "coco" / f"{role}2017").symlink_to(source / split)
        annotations = source / "annotations" / f"instances_{split}.json"
        (tmp_path / "coco" / "annotations" / f"instances_{role}2017.json").symlink_to(annotations)
        pack_in_process(source, tmp_path / "pack", role, "raw")
    model, train = configs(tmp_path / "coco", dataset_file="coco")
    for role in ("train", "val"):
        compared = compare(tmp_path / "pack", role, 16, model, train)
        print(f"raw ids, coco_cc {role}: {compared}")


def test_equal_from_a_parquet_pack(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "coco_cc"
    for role in ("train", "val"):
        pack_in_process(source, tmp_path, role, format="parquet")
    for kind in ("detection", "segmentation"):
        model, train = configs(source, kind=kind, resolution=144 if kind == "segmentation" else 128)
        for role in ("train", "val"):
            print(f"Parquet, coco_cc {role}, {kind}: {compare(tmp_path, role, 16, model, train)}")


def test_equal_from_a_pack_that_rfdetr_wrote(shared_data: Path, tmp_path: Path) -> None:
    from rfdetr.datasets.webdataset.pack import pack_coco_to_shards

    from rfstream.dataset.pack import index_pack

    for role, split in (("train", "train"), ("val", "valid")):
        folder = shared_data / "coco_cc" / split
        pack_coco_to_shards(folder, folder / "_annotations.coco.json", tmp_path, split=role, max_shard_bytes=10**6)
        index_pack(str(tmp_path), role)
    model, train = configs(shared_data / "coco_cc")
    for role in ("train", "val"):
        print(f"RF-DETR's own pack, coco_cc {role}: {compare(tmp_path, role, 16, model, train)}")


def keypoint_layout(folder: Path) -> Path:
    """Drawn scenes in Roboflow's layout; each object has the corners of its box as keypoints, one of them hidden."""
    make_scenes(folder / "drawn", train=12, val=6, seed=4)
    names = ["left_top", "right_top", "left_bottom", "right_bottom"]
    for role, split in (("train", "train"), ("val", "valid")):
        document = json.loads((folder / "drawn" / "annotations" / f"instances_{role}.json").read_text())
        document["categories"] = [{"id": 1, "name": "shape", "keypoints": names, "skeleton": []}]
        for annotation in document["annotations"]:
            x, y, w, h = annotation["bbox"]
            annotation["category_id"] = 1
            annotation["keypoints"] = [x, y, 2, x + w, y, 2, x, y + h, 1, x + w, y + h, 0]
            annotation["num_keypoints"] = 3
        (folder / "set" / split).mkdir(parents=True)
        for image in (folder / "drawn" / role).iterdir():
            image.rename(folder / "set" / split / image.name)
        (folder / "set" / split / "_annotations.coco.json").write_text(json.dumps(document))
    return folder / "set"


@pytest.mark.parametrize("flip_pairs", [[], [0, 1, 2, 3]])
def test_keypoints(tmp_path: Path, flip_pairs: list[int]) -> None:
    source = keypoint_layout(tmp_path)
    for role in ("train", "val"):
        pack_in_process(source, tmp_path / "pack", role)
    schema = {"num_keypoints_per_class": [4], "keypoint_flip_pairs": flip_pairs}
    model, train = configs(source, kind="keypoints", resolution=144, **schema)
    for role in ("train", "val"):
        compared = compare(tmp_path / "pack", role, 12, model, train)
        print(f"keypoints {role}, flip pairs {flip_pairs}: {compared}")
        assert compared.fields == 8 * 2 * (12 if role == "train" else 6)


def test_the_keypoint_schema_comes_from_the_index(tmp_path: Path) -> None:
    source = keypoint_layout(tmp_path)
    index = pack_in_process(source, tmp_path / "pack", "train")
    schema = keypoint_schema(index)
    assert (schema.num_keypoints_per_class, schema.keypoint_flip_pairs) == ([4], [0, 1, 2, 3])
    model, _ = configs(source, kind="keypoints", resolution=144, num_keypoints_per_class=[4])
    coco = PackedCoco(index, index, labels_of(index, model))
    assert coco.label2cat == {0: 1} and len(coco.dataset["images"]) == 12
    metric = MetricKeypointOKS(coco)
    its = json.loads((source / "train" / "_annotations.coco.json").read_text())
    keypoints = [[a["image_id"], a["keypoints"]] for a in coco.dataset["annotations"]]
    assert sorted(keypoints) == sorted([a["image_id"], a["keypoints"]] for a in its["annotations"])
    for image in coco.dataset["images"]:
        truth = [a for a in coco.dataset["annotations"] if a["image_id"] == image["id"]]
        boxes = torch.tensor([a["bbox"] for a in truth]).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        points = torch.tensor([a["keypoints"] for a in truth], dtype=torch.float32).reshape(-1, 4, 3)
        found = {"boxes": boxes, "scores": torch.ones(len(truth)), "labels": torch.zeros(len(truth), dtype=torch.int64)}
        metric.update({image["id"]: {**found, "keypoints": points}})
    assert metric.compute()["map"] > 0.99

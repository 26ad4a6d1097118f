"""Label spaces, class names, crowds and counting in evaluation: what RF-DETR's own code then works with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rfdetr.datasets.coco import crowd_regions_from_coco
from rfdetr.datasets.webdataset.index import read_shard_index
from rfdetr.training.callbacks.coco_eval import COCOEvalCallback
from rfdetr.training.module_data import RFDETRDataModule
from rfdetr_reference import configs, pack_in_process

from rfstream.config import Config
from rfstream.dataset.pack import index_pack
from rfstream.loader import EvaluationLoader
from rfstream.stream.pipeline import build_pipeline
from rfstream.train.rfdetr import RFStreamDataModule
from rfstream.train.rfdetr.data import RFDETREvaluation

pytestmark = pytest.mark.filterwarnings("ignore:RF-DETR has changed", "ignore:.*pretrain_weights=None")


def module(pack: Path, **options: Any) -> RFStreamDataModule:
    return RFStreamDataModule(*configs(pack, **options), Config(data={"path": str(pack)}))


def coco_layout(source: Path, folder: Path) -> Path:
    """``source``, in Roboflow's layout, in COCO's own."""
    (folder / "annotations").mkdir(parents=True)
    for role, split in (("train", "train"), ("val", "valid")):
        (folder / f"{role}2017").symlink_to(source / split)
        annotations = source / split / "_annotations.coco.json"
        (folder / "annotations" / f"instances_{role}2017.json").symlink_to(annotations)
    return folder


@pytest.mark.parametrize("policy", ["remap", "raw"])
@pytest.mark.parametrize("name", ["bccd", "coco_cc", "dali_objects", "facade"])
def test_names_and_labels_are_rfdetr_s(shared_data: Path, tmp_path: Path, name: str, policy: str) -> None:
    for role in ("train", "val"):
        pack_in_process(shared_data / name, tmp_path / "pack", role, policy)
    ours = module(tmp_path / "pack")
    ours.setup("fit")
    if policy == "raw":
        names = ours.class_names or []
        its = read_shard_index(tmp_path / "pack", "train")
        assert names == its.class_names() and len(names) == max(c["id"] for c in its.categories) + 1
        assert all(names[c["id"]] == c["name"] for c in its.categories)
        assert ours._dataset_val is not None and not hasattr(ours._dataset_val.coco, "label2cat")
        return
    theirs = RFDETRDataModule(*configs(shared_data / name))
    theirs.setup("fit")
    assert ours.class_names == theirs.class_names
    for mine, its in ((ours._dataset_train, theirs._dataset_train), (ours._dataset_val, theirs._dataset_val)):
        assert mine is not None and len(mine) == len(its) and mine.coco.label2cat == its.coco.label2cat  # type: ignore[attr-defined,arg-type]


@pytest.mark.parametrize("policy", ["remap", "raw"])
def test_crowds_come_from_the_pack_alone(shared_data: Path, tmp_path: Path, policy: str) -> None:
    source = shared_data / "coco_cc"
    loose = coco_layout(source, tmp_path / "coco") if policy == "raw" else source
    theirs = RFDETRDataModule(*configs(loose, dataset_file="coco" if policy == "raw" else "roboflow"))
    theirs.setup("fit")
    for role in ("train", "val"):
        pack_in_process(source, tmp_path / "pack", role, policy)
    ours = module(tmp_path / "pack")
    ours.setup("fit")
    for mine, its in ((ours._dataset_train, theirs._dataset_train), (ours._dataset_val, theirs._dataset_val)):
        expected = crowd_regions_from_coco(its.coco)  # type: ignore[union-attr]
        assert mine is not None and crowd_regions_from_coco(mine.coco) == expected and expected
    callback = COCOEvalCallback(max_dets=100)
    trainer: Any = type("Trainer", (), {"datamodule": ours})
    assert callback._get_crowd_regions(trainer, "val") == crowd_regions_from_coco(theirs._dataset_val.coco)  # type: ignore[union-attr]


def test_crowds_of_a_pack_that_was_indexed_later(shared_data: Path, tmp_path: Path) -> None:
    """Without the sizes of images, which a shard does not hold, the same regions in the source's own form."""
    for role in ("train", "val"):
        index = pack_in_process(shared_data / "coco_cc", tmp_path, role)
    ours = module(tmp_path)
    ours.setup("fit")
    assert ours._dataset_val is not None
    before = crowd_regions_from_coco(ours._dataset_val.coco)
    Path(index.table_url("samples")).unlink()
    index_pack(str(tmp_path), "val")
    again = module(tmp_path)
    again.setup("fit")
    assert again._dataset_val is not None
    after = crowd_regions_from_coco(again._dataset_val.coco)
    assert {k: [(r.label, r.box) for r in v] for k, v in after.items()} == {
        k: [(r.label, r.box) for r in v] for k, v in before.items()
    }


def test_a_class_that_only_validation_has_keeps_training_s_labels(shared_data: Path, tmp_path: Path) -> None:
    """Labels are numbered by the training split's categories, whatever a split annotates."""
    for role in ("train", "val"):
        pack_in_process(shared_data / "facade", tmp_path, role)
    ours = module(tmp_path)
    ours.setup("fit")
    train = json.loads((tmp_path / "train-index.json").read_text())
    roots = {c["id"] for c in train["categories"]} - set(train["annotated_category_ids"])
    assert roots == {0}  # the export's unused root
    assert ours._dataset_val is not None and 0 not in ours._dataset_val.coco.label2cat.values()


@pytest.mark.parametrize("samples", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_image_is_scored_once(shared_data: Path, tmp_path: Path, samples: int, world_size: int) -> None:
    """All ranks get as many batches, and RF-DETR's callback leaves out what only fills them up."""
    from rfstream.dataset.coco import find_splits, read_split
    from rfstream.dataset.publish import describe_pack, publish, staging
    from rfstream.dataset.shards import write_shard

    checked = read_split(find_splits(shared_data / "bccd")["valid"], "remap")
    with staging(tmp_path) as folder:
        written = [write_shard(folder / "0.tar", 0, 0, checked.items[:samples])]
        about = describe_pack("val", checked.categories, checked.annotated_category_ids, "remap", written)
        publish(tmp_path, folder, *about, written)
    config = Config(data={"path": str(tmp_path)}, stream={"batch_size": 2})
    scored: list[int] = []
    lengths = set()
    for rank in range(world_size):
        pipeline = build_pipeline(config, "val", world_size, training=False)
        loader = RFDETREvaluation(EvaluationLoader(pipeline, rank, world_size, even=True))  # type: ignore[arg-type]
        callback = COCOEvalCallback(max_dets=100)
        callback._reset_padding_filter(loader)
        lengths.add(len(loader))
        for lo, hi in loader._loader._batches:
            real = callback._next_real_sample_mask(hi - lo, 0)
            scored += [row for row, keep in zip(range(lo, hi), real, strict=True) if keep]
    assert len(lengths) == 1 and sorted(scored) == list(range(samples))

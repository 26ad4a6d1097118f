"""The packer against RF-DETR's own: equal bytes, read by its loader, whatever the parallelism."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packing import ROOT, SMALL, files_in, pack_small, start_job

from rfstream.dataset.index import read_index
from rfstream.dataset.pack import index_pack, pack
from rfstream.errors import DatasetError
from rfstream.plan.keys import permutation

SETS = {"bccd": {"train": 205, "val": 87}, "coco_cc": {"train": 55, "val": 49}}


pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.mark.parametrize("category_ids", ["remap", "raw"])
@pytest.mark.parametrize("max_shard_bytes", [100 * 1024 * 1024, SMALL])
@pytest.mark.parametrize("name", sorted(SETS))
def test_shards_and_index_equal_what_rfdetr_packs(
    shared_data: Path, tmp_path: Path, name: str, max_shard_bytes: int, category_ids: str
) -> None:
    stock = pytest.importorskip("rfdetr.datasets.webdataset.pack")
    source = shared_data / name
    options = {"max_shard_bytes": max_shard_bytes, "category_ids": category_ids}
    indexes = pack(str(source), str(tmp_path / "ours"), splits="train,valid:val", progress=False, **options)
    for on_disk, split in (("train", "train"), ("valid", "val")):
        folder = source / on_disk
        stock.pack_coco_to_shards(
            folder, folder / "_annotations.coco.json", tmp_path / "theirs", split=split, **options
        )
    ours, theirs = files_in(tmp_path / "ours"), files_in(tmp_path / "theirs")
    assert {index.split: index.num_samples for index in indexes} == SETS[name]
    assert {key: ours[key] for key in theirs} == theirs
    assert {Path(key).suffix for key in set(ours) - set(theirs)} == {".parquet"}


def test_an_export_with_subfolders_equals_what_rfdetr_packs(shared_data: Path, tmp_path: Path) -> None:
    stock = pytest.importorskip("rfdetr.datasets.webdataset.pack")
    source = shared_data / "odd_coco" / "label_studio_export"
    file = source / "result.json"
    pack(str(source), str(tmp_path / "ours"), annotations=str(file), splits="train", progress=False)
    stock.pack_coco_to_shards(source, file, tmp_path / "theirs", split="train")
    ours, theirs = files_in(tmp_path / "ours"), files_in(tmp_path / "theirs")
    assert {key: ours[key] for key in theirs} == theirs


@pytest.mark.parametrize("name", sorted(SETS))
def test_coco_and_roboflow_layouts_pack_alike(shared_data: Path, tmp_path: Path, name: str) -> None:
    source = tmp_path / "coco"
    (source / "images").mkdir(parents=True)
    (source / "annotations").symlink_to(shared_data / name / "annotations")
    for split in ("train", "valid"):
        (source / "images" / split).mkdir()
        for image in (shared_data / name / split).glob("*.jpg"):
            (source / "images" / split / image.name).symlink_to(image)
    assert pack_small(source, tmp_path / "a") == pack_small(shared_data / name, tmp_path / "b")


@pytest.mark.parametrize("name", sorted(SETS))
def test_rfdetr_reads_every_sample(shared_data: Path, tmp_path: Path, name: str) -> None:
    load = pytest.importorskip("rfdetr.datasets.webdataset.load")
    pack_small(shared_data / name, tmp_path / "pack")
    for on_disk, split in (("train", "train"), ("valid", "val")):
        document = json.loads((shared_data / name / on_disk / "_annotations.coco.json").read_text())
        solid = [a for a in document["annotations"] if not a["iscrowd"] and min(a["bbox"][2:]) > 0]
        samples = list(load.WebDatasetDetection(tmp_path / "pack", split, transforms=None))
        assert [int(target["image_id"]) for _, target in samples] == [image["id"] for image in document["images"]]
        assert sum(len(target["boxes"]) for _, target in samples) == len(solid)


def test_rfdetr_trains_and_evaluates_from_the_pack(shared_data: Path, tmp_path: Path) -> None:
    module_data = pytest.importorskip("rfdetr.training.module_data")
    config = pytest.importorskip("rfdetr.config")
    pack_small(shared_data / "bccd", tmp_path / "pack")
    train = config.TrainConfig(
        dataset_file="webdataset",
        dataset_dir=str(tmp_path / "pack"),
        output_dir=str(tmp_path),
        batch_size=4,
        grad_accum_steps=1,
        num_workers=0,
        run_test=False,
    )
    module = module_data.RFDETRDataModule(config.RFDETRNanoConfig(num_classes=3, resolution=128), train)
    module.setup("fit")
    assert module.class_names == ["RBC", "WBC", "Platelets"]
    images, targets = next(iter(module.train_dataloader()))
    assert images.tensors.shape[0] == len(targets) == 4
    evaluated = [int(target["image_id"]) for _, targets in module.val_dataloader() for target in targets]
    document = json.loads((shared_data / "bccd" / "valid" / "_annotations.coco.json").read_text())
    assert evaluated == [image["id"] for image in document["images"]]


def test_a_shuffled_pack_is_that_of_a_shuffled_source(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "bccd"
    shuffled = tmp_path / "source" / "train"
    shuffled.mkdir(parents=True)
    document = json.loads((source / "train" / "_annotations.coco.json").read_text())
    order = permutation(len(document["images"]), "rfstream.pack", 7)
    document["images"] = [document["images"][i] for i in order]
    (shuffled / "_annotations.coco.json").write_text(json.dumps(document))
    for image in (source / "train").glob("*.jpg"):
        (shuffled / image.name).symlink_to(image)
    options = {"splits": "train", "max_shard_bytes": SMALL, "progress": False}
    pack(str(source), str(tmp_path / "a"), shuffle_seed=7, **options)
    pack(str(tmp_path / "source"), str(tmp_path / "b"), **options)
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")


def test_the_tables_say_where_every_member_lies(shared_data: Path, tmp_path: Path) -> None:
    pack_small(shared_data / "coco_cc", tmp_path)
    index = read_index(str(tmp_path), "train")
    table = pq.ParquetFile(index.table_url("samples"))
    assert [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)] == list(index.samples_per_shard)
    document = json.loads((shared_data / "coco_cc" / "train" / "_annotations.coco.json").read_text())
    rows = table.read().to_pylist()
    for row, image in zip(rows, document["images"], strict=True):
        shard = (tmp_path / index.shards[row["shard"]]).read_bytes()
        photo = (shared_data / "coco_cc" / "train" / image["file_name"]).read_bytes()
        sidecar = json.loads(shard[row["json_offset"] :][: row["json_size"]])
        assert shard[row["image_offset"] :][: row["image_size"]] == photo
        assert (row["width"], row["height"]) == (image["width"], image["height"])
        assert (sidecar["file_name"], len(sidecar["annotations"])) == (image["file_name"], row["objects"])
    shard_edges = np.cumsum([0, *index.samples_per_shard])
    fragments = index.fragments()
    assert fragments.total == len(rows)
    assert set(shard_edges) <= set(fragments.starts)


def test_an_index_of_an_rfdetr_pack_gives_the_tables_of_ours(shared_data: Path, tmp_path: Path) -> None:
    ours = pack_small(shared_data / "coco_cc", tmp_path)
    index = read_index(str(tmp_path), "train")
    for path in tmp_path.glob("train-*.parquet"):
        path.unlink()
    with pytest.raises(DatasetError, match=rf"run `rfstream index {tmp_path} train` once"):
        index.fragments()
    index_pack(str(tmp_path), "train")
    again = files_in(tmp_path)
    name = f"train-{index.generation}.fragments.parquet"
    assert again[name] == ours[name]
    assert set(again) == set(ours)
    sizes = ["width", "height"]  # not in the shards
    before, after = (
        pq.read_table(pa.BufferReader(c[f"train-{index.generation}.samples.parquet"])) for c in (ours, again)
    )
    assert after.drop(sizes).equals(before.drop(sizes))
    assert after["width"].null_count == len(after)


def test_the_job_on_one_cpu_writes_the_same_bytes(shared_data: Path, tmp_path: Path) -> None:
    source = str(shared_data / "bccd")
    arguments = ["--splits", "train,valid:val", "--max-shard-bytes", str(SMALL), "--shuffle-seed", "3"]
    job = start_job(source, str(tmp_path / "a"), *arguments, cpus=1)
    assert job.wait(timeout=120) == 0, job.communicate()[1]
    assert files_in(tmp_path / "a") == pack_small(shared_data / "bccd", tmp_path / "b", shuffle_seed=3)


def test_the_job_fails_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "pipelines/pack.py", str(tmp_path / "nowhere"), str(tmp_path / "out")]
    job = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert job.returncode == 1
    assert job.stderr == f"{tmp_path}/nowhere: no such folder; give the folder that holds the splits\n"
    assert not (tmp_path / "out").exists()


def test_without_splits_all_are_packed_and_valid_becomes_val(shared_data: Path, tmp_path: Path) -> None:
    indexes = pack(str(shared_data / "bccd"), str(tmp_path / "pack"), progress=False)
    assert sorted(index.split for index in indexes) == ["test", "train", "val"]


def test_the_bar_shows_images_bytes_and_the_time_left(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(str(shared_data / "bccd"), str(tmp_path / "pack"), splits="train", max_shard_bytes=SMALL)
    assert re.search(r"packing .* 205/205 images 4\.\d/4\.\d MB 0:00:00", capsys.readouterr().out)

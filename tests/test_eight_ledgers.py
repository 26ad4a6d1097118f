"""The same 100 images as COCO, Roboflow's COCO, YOLO and Pascal VOC, as tar and as Parquet, on disk and in a bucket."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from gcs import BUCKET

from benchmarks.bad_storage import BadStorage
from rfstream.config import Config
from rfstream.dataset.pack import pack
from rfstream.tools.ledger import first_difference, make_ledger
from rfstream.tools.scenes import CLASSES, make_scenes

COUNT = 100
LAYOUTS = ("coco", "roboflow", "yolo", "voc")
FORMATS = ("tar", "parquet")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scenes in each layout, of what all four can say: boxes of whole pixels, and classes that are
    numbered in the order of their names, as VOC has no numbers. There are no outlines and no crowds."""
    folder = tmp_path_factory.mktemp("layouts")
    scenes = make_scenes(folder / "drawn", train=COUNT, val=1, seed=5)
    document = json.loads((scenes / "annotations" / "instances_train.json").read_text())
    names = sorted(CLASSES)
    number = {category["id"]: names.index(category["name"]) + 1 for category in document["categories"]}
    document["categories"] = [{"id": at, "name": name} for at, name in enumerate(names, 1)]
    for annotation in document["annotations"]:
        x, y, width, height = annotation["bbox"]
        left, top = math.floor(x), math.floor(y)
        box = [left, top, math.ceil(x + width) - left, math.ceil(y + height) - top]
        about = {"bbox": box, "area": box[2] * box[3], "segmentation": []}
        annotation |= about | {"category_id": number[annotation["category_id"]]}
    write_coco(folder / "coco" / "annotations" / "instances_train.json", document)
    write_coco(folder / "roboflow" / "train" / "_annotations.coco.json", document)
    write_yolo(folder / "yolo", document, names)
    write_voc(folder / "voc", document, names)
    for images in ("coco/train", "roboflow/train", "yolo/images/train", "voc/JPEGImages"):
        shutil.copytree(scenes / "train", folder / images, dirs_exist_ok=True)
    return folder


def write_coco(file: Path, document: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(document))


def objects_of(document: dict[str, Any], image: dict[str, Any]) -> list[dict[str, Any]]:
    return [annotation for annotation in document["annotations"] if annotation["image_id"] == image["id"]]


def write_yolo(folder: Path, document: dict[str, Any], names: list[str]) -> None:
    """Parts of the image's sides with all digits, so that 32-bit boxes are whole pixels again."""
    labels = folder / "labels" / "train"
    labels.mkdir(parents=True)
    (folder / "data.yaml").write_text(yaml.safe_dump({"train": "images/train", "names": names}))
    for image in document["images"]:
        lines = []
        for annotation in objects_of(document, image):
            x, y, width, height = annotation["bbox"]
            across = ((x + width / 2) / image["width"], (y + height / 2) / image["height"])
            size = (width / image["width"], height / image["height"])
            lines.append(" ".join(map(str, (annotation["category_id"] - 1, *across, *size))))
        (labels / image["file_name"]).with_suffix(".txt").write_text("\n".join(lines))


def write_voc(folder: Path, document: dict[str, Any], names: list[str]) -> None:
    annotations, lists = folder / "Annotations", folder / "ImageSets" / "Main"
    for made in (annotations, lists):
        made.mkdir(parents=True)
    for image in document["images"]:
        objects = ""
        for annotation in objects_of(document, image):
            x, y, width, height = annotation["bbox"]
            corners = {"xmin": x + 1, "ymin": y + 1, "xmax": x + width, "ymax": y + height}
            box = "".join(f"<{side}>{value}</{side}>" for side, value in corners.items())
            objects += f"<object><name>{names[annotation['category_id'] - 1]}</name><bndbox>{box}</bndbox></object>"
        size = f"<size><width>{image['width']}</width><height>{image['height']}</height></size>"
        file = (annotations / image["file_name"]).with_suffix(".xml")
        file.write_text(f"<annotation>{size}{objects}</annotation>")
    stems = [Path(image["file_name"]).stem for image in document["images"]]
    (lists / "train.txt").write_text("\n".join(stems))


def ledger_of(path: str) -> pa.Table:
    config = Config(
        data={"path": path},
        stream={"batch_size": 10, "seed": 3, "timeout_s": 300},
        decode={"actors": (1, 1)},
        augment={"cpu": {"transform": "rfstream.tools.scenes:train_transform", "args": {"size": 64}}},
    )
    return make_ledger(config, epochs=1, world_size=1)


@pytest.mark.usefixtures("ray_session")
def test_eight_ledgers_hold_one_content(layouts: Path, bucket: BadStorage, tmp_path: Path) -> None:
    """Keys, augmented pixels and targets are equal, bit for bit, at every position of a shuffled epoch.

    Each layout is once on disk and once in the bucket, and each format twice on either. The ids of images
    and annotations, which not all layouts have, are in no ledger.
    """
    ledgers = {}
    for at, layout in enumerate(LAYOUTS):
        for format in FORMATS:
            remote = (at + FORMATS.index(format)) % 2
            where = f"gs://{BUCKET}/eight/{layout}-{format}" if remote else str(tmp_path / f"{layout}-{format}")
            pack(str(layouts / layout), where, splits="train", format=format, progress=False)
            ledgers[layout, format] = ledger_of(where)
    first = ledgers["coco", "tar"]
    assert len(ledgers) == 8
    assert sorted(first["key"].to_pylist()) == [f"{row:08d}" for row in range(COUNT)] != first["key"].to_pylist()
    assert len(set(first["targets"].to_pylist())) > COUNT / 2
    assert {name: first_difference(first, ledger) for name, ledger in ledgers.items()} == dict.fromkeys(ledgers)

"""The same scenes as COCO, Roboflow COCO, YOLO and Pascal VOC: packs of one content, and what supervision reads."""

from __future__ import annotations

import json
import math
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import supervision as sv
import yaml
from packing import pack_here

from rfstream.dataset.index import SplitIndex
from rfstream.dataset.layouts import find_splits, read_split
from rfstream.dataset.pack import pack
from rfstream.errors import DatasetError
from rfstream.tools.scenes import make_scenes

SPLITS = {"train": 80, "val": 20}
LAYOUTS = ("coco", "roboflow", "yolo", "voc", "voc_roboflow")
Content = dict[str, tuple[bytes, list[tuple[str, tuple[float, ...]]]]]


@pytest.fixture(scope="module")
def outlined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes as they are drawn: COCO with polygons."""
    return make_scenes(tmp_path_factory.mktemp("outlined"), **SPLITS, seed=7)


@pytest.fixture(scope="module")
def layouts(outlined: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scenes in each layout; boxes are whole pixels, and without polygons."""
    folder = tmp_path_factory.mktemp("layouts")
    for split in SPLITS:
        document = json.loads((outlined / "annotations" / f"instances_{split}.json").read_text())
        for annotation in document["annotations"]:
            x, y, width, height = annotation["bbox"]
            low, high = (math.floor(x), math.floor(y)), (math.ceil(x + width), math.ceil(y + height))
            box = [*low, high[0] - low[0], high[1] - low[1]]
            annotation |= {"bbox": box, "area": box[2] * box[3], "segmentation": []}
        for path in (
            folder / "coco" / "annotations" / f"instances_{split}.json",
            folder / "roboflow" / split / "_annotations.coco.json",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document))
        for layout in ("coco", "roboflow"):
            shutil.copytree(outlined / split, folder / layout / split, dirs_exist_ok=True)
        read = sv.DetectionDataset.from_coco(
            str(folder / "coco" / split), str(folder / "coco" / "annotations" / f"instances_{split}.json")
        )
        write_with_supervision(read, folder, split)
    return folder


def write_with_supervision(read: sv.DetectionDataset, folder: Path, split: str) -> None:
    """``split`` as YOLO, as VOC's devkit, and as VOC beside the images."""
    of_yolo, of_voc, beside = folder / "yolo", folder / "voc", folder / "voc_roboflow" / split
    data = of_yolo / "data.yaml"
    read.as_yolo(str(of_yolo / split / "images"), str(of_yolo / split / "labels"), str(data))
    stated = yaml.safe_load(data.read_text()) | {name: f"../{name}/images" for name in SPLITS}
    data.write_text(yaml.safe_dump(stated))  # as Roboflow does
    renamed = folder / "renamed" / split  # the devkit has the images of all splits in one folder
    renamed.mkdir(parents=True)
    for path in read.image_paths:
        shutil.copyfile(path, renamed / f"{split}_{Path(path).name}")
    names = {path: str(renamed / f"{split}_{Path(path).name}") for path in read.image_paths}
    devkit = sv.DetectionDataset(
        read.classes, [names[path] for path in read.image_paths], {names[p]: a for p, a in read.annotations.items()}
    )
    devkit.as_pascal_voc(str(of_voc / "JPEGImages"), str(of_voc / "Annotations"))
    lists = of_voc / "ImageSets" / "Main"
    lists.mkdir(parents=True, exist_ok=True)
    stems = [Path(name).stem for name in names.values()]
    (lists / f"{split}.txt").write_text("\n".join(stems))
    (lists / f"disc_{split}.txt").write_text(
        "\n".join(f"{stem} {-1 if i % 2 else 1:2d}" for i, stem in enumerate(stems))
    )
    read.as_pascal_voc(str(beside), str(beside))


def content(index: SplitIndex, digits: int | None = None) -> Content:
    """Image bytes, and class name and corners of each object, by the image's file name."""
    names, labels = index.class_names(), index.label_of()
    found: Content = {}
    for i in range(len(index.shards)):
        with tarfile.open(index.shard_url(i)) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for key in sorted({name.split(".")[0] for name in members}):
            sidecar = json.loads(members[f"{key}.json"])
            objects = []
            for annotation in sidecar["annotations"]:
                x, y, width, height = annotation["bbox"]
                corners = tuple(round(v, digits) for v in (x, y, x + width, y + height))
                objects.append((names[labels[annotation["category_id"]]], corners))
            found[sidecar["file_name"].removeprefix(f"{index.split}_")] = (members[f"{key}.jpg"], objects)
    return found


@pytest.fixture(scope="module")
def packed(layouts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], SplitIndex]:
    folder = tmp_path_factory.mktemp("packed")
    return {
        (layout, split): pack_here(layouts / layout, folder / layout, per_shard=30, split=split)
        for layout in LAYOUTS
        for split in SPLITS
    }


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_each_layout_packs_the_same_content(packed: dict[tuple[str, str], SplitIndex], layout: str, split: str) -> None:
    ours, coco = (content(packed[name, split]) for name in (layout, "coco"))
    assert len(ours) == SPLITS[split]
    assert ours == coco
    assert set(packed[layout, split].class_names()) == set(packed["coco", split].class_names())


def test_classes_are_numbered_as_stated(packed: dict[tuple[str, str], SplitIndex]) -> None:
    for split in SPLITS:
        assert packed["coco", split].class_names() == ["disc", "square", "triangle", "star"]
        assert packed["yolo", split].class_names() == ["disc", "square", "triangle", "star"]
        assert packed["voc", split].class_names() == ["disc", "square", "star", "triangle"]
        assert packed["voc_roboflow", split].categories == packed["voc", split].categories
        assert [c["id"] for c in packed["yolo", split].categories] == [0, 1, 2, 3]
        assert [c["id"] for c in packed["voc", split].categories] == [1, 2, 3, 4]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["yolo", "voc_roboflow"])
def test_boxes_are_those_that_supervision_reads(
    layouts: Path, packed: dict[tuple[str, str], SplitIndex], layout: str, split: str
) -> None:
    folder = layouts / layout
    if layout == "yolo":
        images, labels = (str(folder / split / part) for part in ("images", "labels"))
        read = sv.DetectionDataset.from_yolo(images, labels, str(folder / "data.yaml"))
        assert packed[layout, split].class_names() == read.classes
    else:
        read = sv.DetectionDataset.from_pascal_voc(str(folder / split), str(folder / split))
    ours = content(packed[layout, split], digits=6)
    assert {Path(path).name for path in read.image_paths} == set(ours)
    for path, detections in read.annotations.items():
        objects = ours[Path(path).name][1]
        assert [name for name, _ in objects] == [read.classes[i] for i in detections.class_id]
        boxes = np.array([box for _, box in objects]).reshape(-1, 4)
        np.testing.assert_allclose(boxes, detections.xyxy, rtol=0, atol=1e-4)


def test_sidecars_have_the_same_fields(packed: dict[tuple[str, str], SplitIndex]) -> None:
    fields = {"id", "image_id", "category_id", "bbox", "area", "segmentation", "iscrowd"}
    for (_, split), index in packed.items():
        with tarfile.open(index.shard_url(0)) as tar:
            sidecars = [json.loads(tar.extractfile(m).read()) for m in tar if m.name.endswith(".json")]  # type: ignore[union-attr]
        assert all(set(sidecar) == {"image_id", "file_name", "annotations"} for sidecar in sidecars)
        assert all(set(a) == fields for sidecar in sidecars for a in sidecar["annotations"])
        assert [sidecar["image_id"] for sidecar in sidecars] == list(range(1, min(30, SPLITS[split]) + 1))


def test_rfdetr_reads_them(packed: dict[tuple[str, str], SplitIndex]) -> None:
    load = pytest.importorskip("rfdetr.datasets.webdataset.load")
    found = {}
    for layout in LAYOUTS:
        samples = list(load.WebDatasetDetection(Path(packed[layout, "val"].path), "val", transforms=None))
        found[layout] = [target["boxes"].round().tolist() for _, target in samples]
    assert all(boxes == found["coco"] for boxes in found.values())


def test_polygons_are_those_that_supervision_reads(outlined: Path, tmp_path: Path) -> None:
    coco = sv.DetectionDataset.from_coco(
        str(outlined / "val"), str(outlined / "annotations" / "instances_val.json"), force_masks=True
    )
    images, labels, data = (tmp_path / name for name in ("images/val", "labels/val", "data.yaml"))
    coco.as_yolo(str(images), str(labels), str(data))
    data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | {"path": "elsewhere", "val": "images/val"}))
    read = sv.DetectionDataset.from_yolo(str(images), str(labels), str(data), force_masks=True)
    source = read_split(find_splits(tmp_path)["val"], "remap")
    compared = 0
    for item in source.items:
        detections = read.annotations[item.image]
        annotations = json.loads(item.sidecar)["annotations"]
        assert len(annotations) == len(detections)
        for i, annotation in enumerate(annotations):
            (outline,) = annotation["segmentation"]
            points = np.array(outline).reshape(-1, 2)
            mask = sv.polygon_to_mask(points.round().astype(np.int32), (item.width, item.height))
            assert (mask.astype(bool) != detections.mask[i]).sum() <= 2  # pixels whose coordinate rounds the other way
            x, y, width, height = annotation["bbox"]
            np.testing.assert_allclose([x, y, x + width, y + height], detections.xyxy[i], rtol=0, atol=1e-3)
            assert annotation["area"] == pytest.approx(mask.sum(), rel=0.2)
            compared += 1
    assert compared > 20


@pytest.mark.usefixtures("ray_session")
def test_pack_finds_the_layout_and_takes_the_one_that_is_told(layouts: Path, tmp_path: Path) -> None:
    for layout in ("yolo", "voc"):
        indexes = pack(str(layouts / layout), str(tmp_path / layout), progress=False)
        assert {index.split: index.num_samples for index in indexes} == SPLITS
    both = tmp_path / "both"
    shutil.copytree(layouts / "coco", both)
    shutil.copytree(layouts / "yolo", both, dirs_exist_ok=True)
    with pytest.raises(
        DatasetError, match="both: is laid out as coco and as yolo; say with --layout which one to pack"
    ):
        pack(str(both), str(tmp_path / "out"), progress=False)
    (told,) = pack(str(both), str(tmp_path / "out"), layout="yolo", splits="val:test", progress=False)
    (alone,) = pack(str(layouts / "yolo"), str(tmp_path / "alone"), splits="val:test", progress=False)
    assert told.digest == alone.digest
    assert [category["id"] for category in told.categories] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (None, r"has neither SPLIT/_annotations.coco.json .* nor data.yaml \(YOLO\) nor Annotations/\*.xml"),
        ("coco", "has neither SPLIT/_annotations.coco.json"),
        ("yolo", "has no data.yaml"),
        ("voc", r"has neither Annotations/\*.xml"),
    ],
)
def test_a_folder_without_the_layout_is_refused(tmp_path: Path, layout: Any, sentence: str) -> None:
    with pytest.raises(DatasetError, match=sentence) as caught:
        find_splits(tmp_path, layout)
    assert str(caught.value).startswith(f"{tmp_path}: ")


def test_an_editors_hidden_folder_is_no_split(layouts: Path, tmp_path: Path) -> None:
    shutil.copytree(layouts / "coco", tmp_path, dirs_exist_ok=True)
    (tmp_path / ".idea").mkdir()
    (tmp_path / ".idea" / "workspace.xml").write_text("<project/>")
    assert set(find_splits(tmp_path)) == set(SPLITS)

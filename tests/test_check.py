"""``rfstream check`` finds every trait that is there, and none that is not."""

from __future__ import annotations

import html.parser
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packing import pack_here
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from rfstream.cli import app
from rfstream.errors import DatasetError
from rfstream.tools.check import Report, check
from rfstream.tools.check_document import check_document
from rfstream.tools.check_images import check_image
from rfstream.tools.check_report import html_report, print_report
from rfstream.tools.check_traits import KINDS, Trait

ROOT = Path(__file__).resolve().parents[1]


def counts(traits: list[Trait]) -> dict[str, int]:
    return {trait.name: trait.count for trait in traits}


def found(report: Report, *severities: str) -> dict[str, int]:
    """Traits of a report and how often, over all its parts."""
    total: dict[str, int] = {}
    for trait in (trait for part in report.parts for trait in part.traits):
        if not severities or trait.severity in severities:
            total[trait.name] = total.get(trait.name, 0) + trait.count
    return total


CLEAN = {
    "bccd": {},
    "cards": {},
    "coco_cc": {"image-without-objects": 2, "unused-category": 40, "category-id-gaps": 2},
    "dali_objects": {
        "crowd-with-polygon": 4,
        "transparent-image": 2,
        "image-without-objects": 3,
        "unused-category": 7,
        "category-id-zero": 2,
    },
    "facade": {"duplicate-category-name": 2, "parent-category": 2},
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_datasets_raise_no_false_alarm(shared_data: Path, name: str) -> None:
    report = check(str(shared_data / name), progress=False)
    assert found(report) == CLEAN[name]
    assert report.passed() and sum(part.images for part in report.parts) > 60


# What is odd about each file beyond its absent images; `missing` is how many of these there are.
ODD: dict[str, tuple[int, dict[str, int]]] = {
    "bccd_voc_zero_boxes": (0, {"unreadable-labels": 1}),
    "coco_keypoints_val": (79, {"image-without-objects": 40}),
    "cocoapi_results_bbox": (0, {"results-file": 1}),
    "cocoapi_results_keypoints": (0, {"results-file": 1}),
    "cvat_export": (6, {"empty-box": 1, "box-past-edge": 10, "zero-area": 1, "unused-category": 13}),
    "datumaro_coco_captions": (0, {"no-boxes": 2}),
    "datumaro_coco_image_info": (0, {"no-objects": 2, "image-without-objects": 2}),
    "datumaro_coco_roboflow": (0, {"category-id-gaps": 2, "unused-category": 3}),
    "datumaro_coco_stuff": (0, {"only-crowds": 2, "unused-category": 2}),
    "datumaro_mmdet_coco": (0, {"category-id-gaps": 2, "unused-category": 3}),
    "datumaro_roboflow": (0, {"crowd-without-mask": 1}),
    "icevision_coco6": (4, {"category-id-gaps": 1, "unused-category": 72, "image-without-objects": 1}),
    "label_studio_export": (0, {"other-format": 11, "category-id-zero": 1}),
    "mmdet_obj365_unsorted": (
        4,
        {
            "unknown-category": 1,
            "empty-box": 1,
            "sub-pixel-box": 1,
            "crowd-without-mask": 1,
            "zero-area": 2,
            "no-mask": 7,
            "image-without-objects": 1,
        },
    ),
    "mmdet_wrong_format": (1, {"duplicate-annotation-id": 1, "missing-iscrowd": 2}),
    "panoptic_detection_format": (2, {"category-id-gaps": 1, "unused-category": 125}),
    "panoptic_images_only": (
        2,
        {"no-objects": 1, "image-without-objects": 2, "unused-category": 133, "category-id-gaps": 1},
    ),
    "panoptic_segments_info": (2, {"no-boxes": 1}),
    "roboflow_dogs": (213, {"parent-category": 1, "box-rounds-past-edge": 40}),
    "roboflow_facade_raw": (83, {"duplicate-category-name": 1, "parent-category": 1, "box-rounds-past-edge": 184}),
    "sahi_coco_evaluate": (2, {"results-file": 1, "odd-area": 249, "category-id-zero": 1, "unused-category": 74}),
    "sahi_terrain": (1, {"odd-area": 22}),
    "sam2_sav_manual": (0, {"not-coco": 1}),
    "taco_unofficial": (
        3831,
        {
            "bad-box": 15,
            "box-outside": 8,
            "box-past-edge": 9,
            "box-rounds-past-edge": 9,
            "odd-area": 5,
            "polygon-past-edge": 16,
            "no-mask": 15,
            "category-id-zero": 1,
        },
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files(shared_data: Path, name: str) -> None:
    report = check(str(shared_data / "odd_coco" / name), progress=False)
    missing, expected = ODD[name]
    traits = found(report)
    traits.pop("unknown-layout", None)
    assert traits == expected | ({"missing-file": missing} if missing else {})
    assert report.passed() == (not found(report, "error"))


def test_every_odd_file_is_covered(shared_data: Path) -> None:
    cases = json.loads((shared_data / "odd_coco" / "manifest.json").read_text())["cases"]
    assert {case["name"] for case in cases} == set(ODD)


def test_a_single_file_finds_its_images(shared_data: Path) -> None:
    report = check(str(shared_data / "odd_coco/icevision_coco6/annotations.json"), progress=False)
    assert found(report)["missing-file"] == 4
    report = check(str(shared_data / "coco_cc/annotations/instances_valid.json"), progress=False)
    assert [part.images for part in report.parts] == [49] and report.passed()


IMAGES = {
    "undecodable-image": {
        "broken.png",
        "corrupt.jpg",
        "heapbof.png",
        "l2rgb_read.bmp",
        "monkey12.jpg",
        "png_decompression_dos.png",
        "sigsegv.png",
        "truncated_image.png",
        "truncated_jpeg.jpg",
        "ultrahdr.jpg",
        "unknown_compression_method.png",
        "zero_width.gif",
    },
    "huge-image": {"l2rgb_read.bmp"},
    "cmyk-image": {"cmyk.jpg"},
    "deep-image": {"gradient_16bit.png", "grayscale_16bit.png", "i_trns.png", "mode_16bit.png"},
    "transparent-image": {
        "frame_exceeds_screen.gif",
        "grayscale_alpha.png",
        "i_trns.png",
        "p_trns_single.png",
        "pil123p.png",
        "rgb_trns.png",
        "transparent.gif",
        "transparent.webp",
        "uncompressed_la.png",
    },
    "animated-image": {"frame_size.mpo", "mode_16bit.png"},
    "rotated-image": {
        "hopper_orientation_6.webp",
        "hopper_orientation_8.jpg",
        "orientation_rectangle.jpg",
        "padlock-406986_640_rotate_90.jpg",
    },
    "other-format": {
        "frame_exceeds_screen.gif",
        "frame_size.mpo",
        "hopper.gif",
        "hopper.ico",
        "jpeg.bmp",
        "jpeg.png",
        "transparent.gif",
    },
}


def write_coco(folder: Path, images: list[dict[str, Any]], annotations: list[dict[str, Any]] | None = None) -> None:
    categories = [{"id": 1, "name": "thing"}]
    given = {"images": images, "annotations": annotations or [], "categories": categories}
    (folder / "train").mkdir(exist_ok=True, parents=True)
    (folder / "train" / "_annotations.coco.json").write_text(json.dumps(given))


@pytest.fixture
def odd_images(shared_data: Path, tmp_path: Path) -> Path:
    """A COCO folder of all the odd images and an empty one."""
    manifest = json.loads((shared_data / "odd_images" / "manifest.json").read_text())["files"]
    images = [
        {"id": i, "file_name": entry["file"], "width": size[0], "height": size[1]}
        for i, entry in enumerate(manifest)
        for size in [entry["pillow"].get("size") or (10, 10)]
    ]
    write_coco(tmp_path, [*images, {"id": 1000, "file_name": "empty.jpg", "width": 10, "height": 10}])
    for image in images:
        shutil.copyfile(shared_data / "odd_images" / image["file_name"], tmp_path / "train" / image["file_name"])
    (tmp_path / "train" / "empty.jpg").touch()
    return tmp_path


def test_odd_images_are_found(odd_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rfstream.tools.check_traits.EXAMPLES", 100)
    report = check(str(odd_images), progress=False)
    assert len(report.parts) == 1
    by_name = {trait.name: trait for trait in report.parts[0].traits}
    seen = {
        name: {Path(example.split(": ")[0]).name for example in trait.examples}
        for name, trait in by_name.items()
        if name in IMAGES
    }
    assert seen == IMAGES
    assert by_name["empty-file"].examples == (str(odd_images / "train" / "empty.jpg"),)
    extensions = {"frame_exceeds_screen.gif", "frame_size.mpo", "hopper.gif", "hopper.ico", "transparent.gif"}
    assert by_name["unsupported-extension"].count == len(extensions | {"zero_width.gif"})
    assert "size-differs" not in by_name


def test_what_decodes_is_what_training_decodes(odd_images: Path) -> None:
    """Without decoding, only what the headers of files and the document say is found."""
    traits = found(check(str(odd_images), images=False, progress=False))
    assert traits == {"unsupported-extension": 6, "empty-file": 1, "no-objects": 1, "image-without-objects": 48} | {
        "unused-category": 1
    }


def test_sizes_of_turned_images(shared_data: Path) -> None:
    data = (shared_data / "odd_images" / "padlock-406986_640_rotate_90.jpg").read_bytes()

    def kinds(size: tuple[int, int]) -> set[str]:
        return {name for name, _ in check_image(data, "a.jpg", size)}

    assert kinds((640, 426)) == {"rotated-image"}
    assert kinds((426, 640)) == {"rotated-image", "rotated-frame"}
    assert kinds((320, 213)) == {"rotated-image", "size-differs"}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "PNG")
    monkeypatch.setattr("rfstream.tools.check_images.LARGE_PIXELS", 64 * 64 - 1)
    assert [name for name, _ in check_image(buffer.getvalue(), "a.png", None)] == ["huge-image"]
    monkeypatch.setattr("rfstream.tools.check_images.LARGE_PIXELS", 10**9)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    [(name, reason)] = check_image(buffer.getvalue(), "a.png", None)
    assert name == "undecodable-image" and "decompression bomb" in reason


def annotation(**fields: Any) -> dict[str, Any]:
    """A faultless annotation but for ``fields``; one that is ``...`` is left out."""
    sound = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 8, 8], "area": 64, "iscrowd": 0}
    return {name: value for name, value in (sound | fields).items() if value is not ...}


SQUARE = [1, 1, 9, 1, 9, 9, 1, 9]
ANNOTATIONS = [
    ({"id": "a"}, "bad-annotation-id"),
    ({"id": ...}, "missing-annotation-id"),
    ({"image_id": 5}, "unknown-image"),
    ({"image_id": "1"}, "unknown-image"),
    ({"category_id": 2}, "unknown-category"),
    ({"category_id": [1]}, "unknown-category"),
    ({"bbox": [1, 1, 8]}, "bad-box"),
    ({"bbox": [1, 1, 8, float("nan")]}, "bad-box"),
    ({"bbox": ["1", 1, 8, 8]}, "bad-box"),
    ({"bbox": [1, 1, -8, 8]}, "empty-box"),
    ({"bbox": [1, 1, 8, 0]}, "empty-box"),
    ({"bbox": [20, 1, 8, 8]}, "box-outside"),
    ({"bbox": [-8, 1, 8, 8]}, "box-outside"),
    ({"bbox": [-2, 1, 8, 8]}, "box-past-edge"),
    ({"bbox": [2.5, 1, 8, 8]}, "box-rounds-past-edge"),
    ({"bbox": [1, 1, 0.5, 8], "area": 4}, "sub-pixel-box"),
    ({"area": ...}, "bad-area"),
    ({"area": "64"}, "bad-area"),
    ({"area": 0}, "zero-area"),
    ({"area": -64}, "odd-area"),
    ({"area": 640}, "odd-area"),
    ({"iscrowd": ...}, "missing-iscrowd"),
    ({"iscrowd": "0"}, "bad-iscrowd"),
    ({"iscrowd": None}, "bad-iscrowd"),
    ({"iscrowd": 1, "segmentation": [SQUARE]}, "crowd-with-polygon"),
    ({"iscrowd": 1}, "crowd-without-mask"),
    ({"segmentation": [SQUARE[:4]]}, "short-polygon"),
    ({"segmentation": [[*SQUARE, 1]]}, "odd-polygon"),
    ({"segmentation": [[1, 1, 9, 1, 14, 9]]}, "polygon-past-edge"),
    ({"segmentation": [[1, 1, 9, None, 9, 9]]}, "bad-segmentation"),
    ({"segmentation": SQUARE}, "bad-segmentation"),
    ({"segmentation": "mask.png"}, "bad-segmentation"),
    ({"segmentation": {"size": [10, 10], "counts": [1, 2]}}, "bad-segmentation"),
    ({"segmentation": {"size": [10, 10], "counts": "~~~"}}, "bad-segmentation"),
    ({"segmentation": {"size": [10, 10], "counts": "Po"}}, "bad-segmentation"),
    ({"segmentation": {"size": [5, 5], "counts": [1, 24]}}, "rle-of-other-size"),
]


@pytest.mark.parametrize(("fields", "name"), ANNOTATIONS)
def test_annotations(fields: dict[str, Any], name: str) -> None:
    sound = annotation(id=2, segmentation=fields.get("segmentation") and [SQUARE])
    document = coco(annotations=[annotation(**fields), sound])
    assert counts(check_document("a.json", coco(annotations=[sound]))) == {}
    traits = check_document("a.json", document)
    assert counts(traits) == {name: 1}
    assert re.match(r"annotation(s\[0\]| 1)( of image 1 \(a.jpg\))?", traits[0].examples[0])


def coco(**fields: Any) -> dict[str, Any]:
    images = [{"id": 1, "file_name": "a.jpg", "width": 10, "height": 10}]
    categories = [{"id": 1, "name": "thing", "supercategory": "none"}]
    return {"images": images, "annotations": [annotation()], "categories": categories} | fields


def image(**fields: Any) -> dict[str, Any]:
    return {"id": 1, "file_name": "a.jpg", "width": 10, "height": 10} | fields


THING = {"id": 1, "name": "thing"}
DOCUMENTS: list[tuple[Any, dict[str, int]]] = [
    (coco(), {}),
    ([], {"not-coco": 1}),
    (None, {"not-coco": 1}),
    ({"annotations": []}, {"not-coco": 1}),
    (coco(categories={"1": "thing"}), {"malformed-list": 1}),
    (coco(images=[1]), {"malformed-list": 1}),
    (coco(images=[], annotations=[]), {"no-images": 1, "unused-category": 1}),
    (coco(images=[image(), image(file_name="b.jpg")]), {"duplicate-image-id": 1}),
    (coco(images=[image(), image(id=2)]), {"duplicate-file-name": 1, "image-without-objects": 1}),
    (coco(images=[image(), image(id="2", file_name="b.jpg")]), {"bad-image-id": 1}),
    (coco(images=[image(file_name="../a.jpg")]), {"bad-file-name": 1}),
    (coco(images=[image(file_name=None)]), {"bad-file-name": 1}),
    (coco(images=[image(file_name="a.tif")]), {"unsupported-extension": 1}),
    (coco(images=[image(width=None)]), {"missing-size": 1}),
    (coco(annotations=[annotation(), annotation()]), {"duplicate-annotation-id": 1}),
    (coco(categories=[THING, {"id": "2", "name": "b"}]), {"bad-category": 1}),
    (coco(categories=[THING, {"id": 2, "name": None}]), {"bad-category": 1}),
    (coco(categories=[THING, {"id": 2, "name": "b", "supercategory": ["a"]}]), {"bad-category": 1}),
    (coco(categories=[THING, {"id": 1, "name": "b"}]), {"duplicate-category-id": 1}),
    (coco(categories=[THING, {"id": 2, "name": "thing"}]), {"duplicate-category-name": 1, "unused-category": 1}),
    (coco(categories=[THING, {"id": 0, "name": "b"}]), {"category-id-zero": 1, "unused-category": 1}),
    (coco(categories=[THING, {"id": 3, "name": "b"}]), {"category-id-gaps": 1, "unused-category": 1}),
    (
        coco(categories=[{"id": 0, "name": "all", "supercategory": "none"}, THING | {"supercategory": "all"}]),
        {"parent-category": 1},
    ),
    (
        coco(
            annotations=[
                annotation(segmentation=[SQUARE]),
                annotation(id=2, iscrowd=1, segmentation={"size": [10, 10], "counts": [1, 99]}),
                annotation(id=3),
            ]
        ),
        {"no-mask": 1},
    ),
    (
        coco(annotations=[annotation(iscrowd=1, segmentation={"size": [10, 10], "counts": [1, 99]})]),
        {"only-crowds": 1},
    ),
]


@pytest.mark.parametrize(("document", "expected"), DOCUMENTS)
def test_documents(document: Any, expected: dict[str, int]) -> None:
    assert counts(check_document("a.json", document)) == expected


def test_folders(tmp_path: Path) -> None:
    write_coco(tmp_path, [image(), image(id=2, file_name="gone.jpg")], [annotation()])
    Image.new("RGB", (10, 10)).save(tmp_path / "train" / "a.jpg")
    Image.new("RGB", (10, 10)).save(tmp_path / "train" / "more.png")
    report = check(str(tmp_path), progress=False)
    assert found(report) == {"missing-file": 1, "unreferenced-file": 1, "image-without-objects": 1}
    (tmp_path / "train" / "_annotations.coco.json").write_text('{"images": [')
    assert found(check(str(tmp_path), progress=False)) == {"unreadable-json": 1}
    for path in (str(tmp_path / "none"), "gs://bucket/pack"):
        with pytest.raises(DatasetError):
            check(path)


def test_a_folder_of_no_layout(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "notes.txt").touch()
    assert found(check(str(tmp_path), progress=False)) == {"nothing-found": 1}
    (tmp_path / "export.json").write_text(json.dumps(coco(images=[image()])))
    assert found(check(str(tmp_path), images=False, progress=False))["unknown-layout"] == 1


def test_splits_that_share_a_folder_do_not_miss_each_others_images(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "images").mkdir()
    for name in ("train", "val"):
        Image.new("RGB", (10, 10)).save(tmp_path / "images" / f"{name}.jpg")
        document = coco(images=[image(file_name=f"{name}.jpg")])
        (tmp_path / "annotations" / f"instances_{name}.json").write_text(json.dumps(document))
    assert found(check(str(tmp_path), progress=False)) == {}


def test_yolo_and_voc_folders_are_checked_as_packing_reads_them(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        for name in ("a", "b", "gone"):
            file = tmp_path / split / "images" / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (10, 10)).save(file)
    (tmp_path / "train" / "labels").mkdir()
    (tmp_path / "train" / "labels" / "a.txt").write_text("1 0.5 0.5 0 0.5\n1 1 0.5 1 0.5")
    data = {"names": ["cat", "dog"], "train": "train/images", "val": "valid/images"}
    (tmp_path / "data.yaml").write_text(json.dumps(data))
    main = tmp_path / "ImageSets" / "Main"
    main.mkdir(parents=True)
    (main / "train.txt").write_text("a")
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "JPEGImages").mkdir()
    (tmp_path / "Annotations" / "a.xml").write_text("<annotation/>")
    for name in ("a", "unlisted"):
        (tmp_path / "JPEGImages" / f"{name}.png").write_bytes(b"no image")
    yolo_train, yolo_val, voc = check(str(tmp_path), progress=False).parts
    assert (yolo_train.name, yolo_train.images) == (f"{tmp_path} (yolo train)", 3)
    odd = {"empty-box": 1, "zero-area": 1, "box-past-edge": 1, "unused-category": 1, "image-without-objects": 2}
    assert {trait.name: trait.count for trait in yolo_train.traits} == odd | {"category-id-zero": 1}
    assert [trait.name for trait in yolo_val.traits] == ["unreadable-labels"]
    assert "none of the 3 images of valid/images has a label file" in yolo_val.traits[0].examples[0]
    assert voc.name == f"{tmp_path} (voc train)"
    assert {trait.name for trait in voc.traits} >= {"undecodable-image", "unreferenced-file", "missing-size"}
    (tmp_path / "Annotations" / "a.xml").write_text("<annotation>")
    *_, broken = check(str(tmp_path), progress=False).parts
    assert (broken.name, [trait.name for trait in broken.traits]) == (f"{tmp_path} (voc)", ["unreadable-labels"])


# Packs


@pytest.fixture
def pack(shared_data: Path, tmp_path: Path) -> Path:
    """dali_objects' small split in three shards."""
    pack_here(shared_data / "dali_objects", tmp_path / "pack", 5, split="valid")
    return tmp_path / "pack"


LEGITIMATE = {"crowd-with-polygon": 1, "image-without-objects": 1, "unused-category": 6, "category-id-zero": 1}


def structure(pack: Path) -> dict[str, int]:
    """Traits of the pack beyond those of what was packed."""
    report = check(str(pack), images=False, progress=False)
    return {name: count for name, count in found(report).items() if name not in LEGITIMATE}


def test_a_pack_has_the_traits_of_what_was_packed(pack: Path) -> None:
    report = check(str(pack), progress=False)
    assert found(report) == LEGITIMATE and report.passed() and report.parts[0].images == 12
    crowd = next(trait for trait in report.parts[0].traits if trait.name == "crowd-with-polygon")
    assert re.fullmatch(
        r"annotation 12 of valid-[0-9a-f]{8}-000000.tar 0000000\d \(dog-.*_1280.jpg\)", crowd.examples[0]
    )
    single = check(str(pack / "valid-index.json"), images=False, progress=False)
    assert found(single) == LEGITIMATE


def shards(pack: Path) -> list[Path]:
    return sorted(pack.glob("*.tar"))


def edit_index(pack: Path, **fields: Any) -> None:
    path = pack / "valid-index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_damaged_packs(pack: Path) -> None:
    names = [shard.name for shard in shards(pack)]
    edit_index(pack, num_samples=13, samples_per_shard=[6, 5, 2])
    assert structure(pack) == {"wrong-sample-count": 2}
    edit_index(pack, num_samples=12, samples_per_shard=[5, 5, 2], shards=names[:2])
    assert structure(pack) == {"bad-index": 1, "unlisted-shard": 3}
    edit_index(pack, shards=[names[1], names[0], names[2]])
    assert structure(pack) == {"wrong-table": 2}
    edit_index(pack, shards=[*names[:2], "valid-none.tar"])
    assert structure(pack) == {"missing-shard": 1, "unlisted-shard": 1}


def test_damaged_shards(pack: Path) -> None:
    shard = shards(pack)[1]
    data = bytearray(shard.read_bytes())
    data[600] ^= 1  # within the first image
    shard.write_bytes(data)
    assert structure(pack) == {"changed-content": 1}
    os.truncate(shard, 1000)
    report = check(str(pack), images=False, progress=False)
    assert found(report, "error") == {"damaged-shard": 1} and report.parts[0].images == 7


def test_damaged_tables(pack: Path) -> None:
    [samples] = pack.glob("*.samples.parquet")
    table = pq.read_table(samples)
    at = table.schema.get_field_index("image_offset")
    moved = pa.array([offset.as_py() + 512 for offset in table["image_offset"]], pa.int64())
    pq.write_table(table.set_column(at, table.schema.field(at), moved), samples)
    assert structure(pack) == {"wrong-table": 1}
    samples.write_bytes(b"PAR1")
    assert structure(pack) == {"wrong-table": 1, "missing-size": 12}
    samples.unlink()
    assert structure(pack) == {"missing-table": 1, "missing-size": 12}


def test_samples_of_a_pack(pack: Path) -> None:
    """A shard of another maker: a sample's JSON without an id, a broken image, a key that comes twice."""
    shard = shards(pack)[2]
    with tarfile.open(shard, "w") as tar:
        for name, data in [
            ("a.jpg", b"\xff\xd8\xff"),
            ("a.json", b'{"annotations": []}'),
            ("b.png", b""),
            ("b.json", b'{"image_id": 7, "file_name": "b.png", "annotations": ""}'),
            ("a.png", b""),
            ("a.json", b'{"image_id": 8, "file_name": "b.png", "annotations": []}'),
        ]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    edit_index(pack, num_samples=13, samples_per_shard=[5, 5, 3])
    traits = found(check(str(pack), progress=False), "error", "warning")
    assert traits == {
        "changed-content": 1,
        "wrong-table": 2,
        "bad-sidecar": 1,
        "bad-image-id": 1,
        "bad-file-name": 1,
        "duplicate-key": 1,
        "undecodable-image": 1,
        "empty-file": 1,
        "crowd-with-polygon": 1,
    }


# What a user sees


def test_command_line(pack: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    page = tmp_path / "report.html"
    result = runner.invoke(app, ["check", str(pack), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "12 images in 1 file: 0 error traits, 1 warning trait, 3 note traits" in " ".join(result.output.split())
    assert page.read_text().count("<tr>") == 5
    assert runner.invoke(app, ["check", str(pack), "--strict", "--no-images"]).exit_code == 1
    shards(pack)[0].unlink()
    assert runner.invoke(app, ["check", str(pack), "--no-images"]).exit_code == 1
    assert isinstance(runner.invoke(app, ["check", str(tmp_path / "none")]).exception, DatasetError)


def test_what_a_dataset_says_is_not_taken_for_markup(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>[red]x[/nonsense]\x1b[2J'
    document = coco(images=[image(file_name=f"{evil}.tif")], categories=[THING, {"id": 2, "name": f"{evil}&"}])
    (tmp_path / "a.json").write_text(json.dumps(document))
    report = check(str(tmp_path / "a.json"), progress=False)
    page = html_report(report)
    assert "<script" not in page and "&lt;script&gt;" in page and "&amp;" in page

    tags: set[str] = set()
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.add(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert tags <= {"html", "meta", "title", "style", "h1", "h2", "p", "table", "tr", "th", "td", "ul", "li"}

    out = io.StringIO()
    print_report(report, Console(file=out, width=200))
    assert "[red]x[/nonsense]" in out.getvalue().replace("\n", "")
    assert "\x1b[2J" not in out.getvalue() and "\x1b" not in page


def test_it_needs_neither_torch_nor_ray(shared_data: Path) -> None:
    code = (
        "import sys; import rfstream.cli; from rfstream.tools.check import check; import rfstream.tools.check_report; "
        "assert check(sys.argv[1], progress=False).passed(); "
        "assert not {'torch', 'ray', 'albumentations'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(shared_data / "cards")], check=True, cwd=ROOT, timeout=60)


def test_every_trait_is_documented() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (error|warning|note) \|", (ROOT / "docs" / "check.md").read_text(), re.M)
    assert rows == [(name, kind.severity) for name, kind in KINDS.items()]

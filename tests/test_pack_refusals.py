"""What can't be packed is refused with one sentence, before anything is written."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest

from rfstream.dataset.coco import SplitFiles, read_split
from rfstream.dataset.pack import pack
from rfstream.dataset.shards import write_shard
from rfstream.errors import DatasetError


@pytest.fixture
def tiny(shared_data: Path, tmp_path: Path) -> Path:
    """A Roboflow split of three real images, whose annotation file the tests damage."""
    source = shared_data / "bccd" / "train"
    document = json.loads((source / "_annotations.coco.json").read_text())
    document["images"] = document["images"][:3]
    kept = {image["id"] for image in document["images"]}
    document["annotations"] = [a for a in document["annotations"] if a["image_id"] in kept]
    folder = tmp_path / "tiny" / "train"
    folder.mkdir(parents=True)
    for image in document["images"]:
        shutil.copyfile(source / image["file_name"], folder / image["file_name"])
    (folder / "_annotations.coco.json").write_text(json.dumps(document))
    return folder


def change(field: str, at: int, **values: object):
    def apply(document: dict[str, list[dict[str, object]]]) -> None:
        document[field][at].update(values)

    return apply


BAD = {
    "missing image": (change("images", 1, file_name="gone.jpg"), "1 of 3 images are not in .*'gone.jpg'"),
    "image is a folder": (change("images", 1, file_name="sub.jpg"), "1 of 3 images are not in"),
    "orphan": (change("annotations", 0, image_id=99), "image_id is 99, the id of no image"),
    "orphan by type": (change("annotations", 0, image_id="1"), "image_id is '1', the id of no image"),
    "escape": (change("images", 0, file_name="../train/x.jpg"), "'../train/x.jpg' is absolute or leaves its folder"),
    "absolute": (change("images", 0, file_name="/etc/x.jpg"), "'/etc/x.jpg' is absolute or leaves its folder"),
    "drive": (change("images", 0, file_name="C:x.jpg"), "'C:x.jpg' is absolute or leaves its folder"),
    "backslashes": (change("images", 0, file_name="..\\x.jpg"), "is absolute or leaves its folder"),
    "no name": (change("images", 0, file_name=""), "'' is absolute or leaves its folder"),
    "folder's name": (change("images", 0, file_name="x.jpg/"), "'x.jpg/' can't be the name of a file"),
    "no character": (change("images", 0, file_name="\ud800.jpg"), "can't be the name of a file"),
    "empty image": (change("images", 0, file_name="empty.jpg"), "1 of 3 images in .* are empty files"),
    "name is a number": (change("images", 0, file_name=5), "image .* has file_name 5"),
    "extension": (change("images", 0, file_name="x.gif"), "'x.gif' has no extension that the loader decodes"),
    "image id": (change("images", 0, id="a"), r"images\[0\] has id 'a'"),
    "huge image id": (change("images", 0, id=2**70), r"images\[0\] has id 1180591620717411303424"),
    "duplicate image": (lambda d: d["images"].append(d["images"][0]), "two images have the id"),
    "duplicate annotation": (lambda d: d["annotations"].append(d["annotations"][0]), "two annotations have the id"),
    "annotation id": (change("annotations", 0, id=[1]), r"annotations\[0\] has id \[1\]; make it an integer"),
    "category": (change("annotations", 0, category_id=77), "category_id is 77, the id of no category"),
    "category by type": (change("annotations", 0, category_id="1"), "category_id is '1', the id of no category"),
    "short box": (change("annotations", 0, bbox=[1, 2, 3]), r"bbox is \[1, 2, 3\], not \[x, y, width, height\]"),
    "huge box": (change("annotations", 0, bbox=[1, 2, 3, 10**400]), r"bbox is \[1, 2, 3, 1000"),
    "nan box": (change("annotations", 0, bbox=[1, 2, 3, float("nan")]), r"bbox is \[1, 2, 3, nan\]"),
    "no area": (change("annotations", 0, area=None), "area is absent, not a finite number"),
    "crowd text": (change("annotations", 0, iscrowd="false"), "iscrowd is 'false', neither 0 nor 1"),
    "category id": (change("categories", 0, id=1.5), r"categories\[0\] has id 1.5"),
    "category name": (change("categories", 0, name=None), "category 1 has name None"),
    "duplicate category": (change("categories", 1, id=1), "two categories have the id 1"),
    "images no list": (lambda d: d.update(images={"a": 1}), "'images' is not a list of objects"),
    "no images": (lambda d: d.update(images=[]), "lists no images"),
    "annotation no object": (lambda d: d["annotations"].append(3), "'annotations' is not a list of objects"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_refused_and_nothing_is_published(tiny: Path, tmp_path: Path, case: str) -> None:
    damage, sentence = BAD[case]
    (tiny / "sub.jpg").mkdir()
    (tiny / "empty.jpg").touch()
    file = tiny / "_annotations.coco.json"
    document = json.loads(file.read_text())
    damage(document)
    file.write_text(json.dumps(document))
    with pytest.raises(DatasetError, match=sentence) as caught:
        pack(str(tiny.parent), str(tmp_path / "out"), progress=False)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff\xfe", '{"images": 1' + "0" * 5000 + "}"])
def test_an_unreadable_annotation_file_is_refused(tiny: Path, tmp_path: Path, text: str) -> None:
    (tiny / "_annotations.coco.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DatasetError, match=r"_annotations.coco.json: not a readable JSON file"):
        pack(str(tiny.parent), str(tmp_path / "out"), progress=False)


def test_annotations_that_find_no_room_on_disk_are_refused(tiny: Path) -> None:
    files = SplitFiles("train", tiny / "_annotations.coco.json", tiny)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DatasetError, match=r"annotations can't be kept here .* \(File too large\); make room, or"):
            read_split(files, "remap").items[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_image_that_changes_under_way_fails_the_pack(tiny: Path, tmp_path: Path) -> None:
    source = read_split(SplitFiles("train", tiny / "_annotations.coco.json", tiny), "remap")
    Path(source.items[1].image).write_bytes(b"shorter")
    with pytest.raises(DatasetError, match=r"bytes when the pack began, 7 now; pack again"):
        write_shard(tmp_path / "0.tar", 0, 0, source.items)
    Path(source.items[1].image).unlink()
    with pytest.raises(DatasetError, match=r"the image can't be read \(No such file or directory\)"):
        write_shard(tmp_path / "0.tar", 0, 0, source.items)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"splits": "test"}, "has no split 'test'; it has train"),
        ({"splits": "train:../x"}, "split name '../x' can't be part of a file name"),
        ({"splits": "../train"}, "split name '../train' can't be part of a file name"),
        ({"splits": "train,train"}, "two splits would have the same name"),
        ({"splits": ""}, "split name '' can't be part of a file name"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0"),
        ({"annotations": "x.json"}, "--annotations names one file: give the one name"),
        ({"annotations": "x.json", "splits": "train"}, "x.json: no such annotation file"),
        ({"images": "train"}, "--images goes with --annotations"),
    ],
)
def test_options_that_cannot_work_are_refused(tiny: Path, tmp_path: Path, options: dict, sentence: str) -> None:
    with pytest.raises(DatasetError, match=sentence):
        pack(str(tiny.parent), str(tmp_path / "out"), progress=False, **options)
    assert not (tmp_path / "out").exists()


def test_a_destination_that_cannot_be_written_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatasetError, match=r"file: can't be packed to"):
        pack(str(tiny.parent), str(tmp_path / "file"), progress=False)


def test_a_source_at_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"gs://bucket/x: pack from a local or mounted folder"):
        pack("gs://bucket/x", str(tmp_path / "out"), progress=False)
    assert not (tmp_path / "out").exists()


def test_raw_ids_that_are_no_labels_are_refused(tiny: Path, tmp_path: Path) -> None:
    file = tiny / "_annotations.coco.json"
    document = json.loads(file.read_text())
    document["categories"].append({"id": 5_000_000, "name": "far"})
    file.write_text(json.dumps(document))
    with pytest.raises(DatasetError, match=r"category id 5000000 can't be a label under category_ids='raw'"):
        pack(str(tiny.parent), str(tmp_path / "out"), category_ids="raw", progress=False)

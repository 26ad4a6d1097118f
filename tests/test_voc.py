"""Pascal VOC folders: what boxes and flags mean, and a sentence for whatever can't be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_yolo import write_image, write_text

from rfstream.dataset.document import SplitSource
from rfstream.dataset.layouts import find_splits, read_split
from rfstream.dataset.voc import parse_annotation
from rfstream.errors import DatasetError

SIZE = "<size><width>40</width><height>20</height><depth>3</depth></size>"


def xml(*objects: str, size: str = SIZE) -> str:
    return f"<annotation><filename>other.jpg</filename>{size}{''.join(objects)}</annotation>"


def an_object(name: str = "dog", box: tuple[Any, ...] = (1, 2, 10, 4), flags: str = "") -> str:
    sides = "".join(f"<{s}>{v}</{s}>" for s, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    return f"<object><name>{name}</name>{flags}<bndbox>{sides}</bndbox></object>"


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    """Three images; ``val`` has no dog, and ``train`` no cat."""
    folder = tmp_path / "VOC2012"
    for name in "abc":
        write_image(folder / "JPEGImages" / f"{name}.jpg")
    write_text(folder / "Annotations" / "a.xml", xml(an_object("dog"), an_object("ant")))
    write_text(folder / "Annotations" / "b.xml", xml())
    write_text(folder / "Annotations" / "c.xml", xml(an_object("cat")))
    write_text(folder / "ImageSets" / "Main" / "train.txt", "b\na\n")
    write_text(folder / "ImageSets" / "Main" / "val.txt", "c\n")
    write_text(folder / "ImageSets" / "Main" / "dog_train.txt", "b -1\na  1\n")
    return folder


def read(source: Path, split: str = "train") -> SplitSource:
    return read_split(find_splits(source)[split], "remap")


def annotations(source: Path, split: str = "train") -> list[dict[str, Any]]:
    return [a for item in read(source, split).items for a in json.loads(item.sidecar)["annotations"]]


def test_splits_are_the_lists_and_share_their_categories(devkit: Path) -> None:
    assert set(find_splits(devkit)) == {"train", "val"}
    train, val = read(devkit), read(devkit, "val")
    assert train.categories == val.categories
    assert train.categories == [{"id": 1, "name": "ant"}, {"id": 2, "name": "cat"}, {"id": 3, "name": "dog"}]
    assert (train.annotated_category_ids, val.annotated_category_ids) == ([1, 3], [2])
    assert [json.loads(item.sidecar)["file_name"] for item in train.items] == ["b.jpg", "a.jpg"]
    assert [(item.width, item.height, item.objects) for item in train.items] == [(40, 20, 0), (40, 20, 2)]


def test_a_box_is_one_based_and_inclusive(devkit: Path) -> None:
    objects = [an_object(box=(1, 2, 10, 4)), an_object(box=(3, 3, 3, 3)), an_object(box=("1.5", 1, "2.5", 20))]
    write_text(devkit / "Annotations" / "a.xml", xml(*objects))
    found = annotations(devkit)
    assert [a["bbox"] for a in found] == [[0, 1, 10, 3], [2, 2, 1, 1], [0.5, 0, 2, 20]]
    assert [a["area"] for a in found] == [30, 1, 40]


def test_difficult_truncated_and_parts(devkit: Path) -> None:
    flags = "<pose>Left</pose><truncated>1</truncated><difficult>1</difficult>"
    part = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
    marked = an_object(flags=flags).replace("</object>", f"{part}</object>")
    write_text(devkit / "Annotations" / "a.xml", xml(marked))
    marked_found = annotations(devkit)
    write_text(devkit / "Annotations" / "a.xml", xml(an_object()))
    assert marked_found == annotations(devkit)


@pytest.mark.parametrize(
    "size", ["", "<size><width>0</width><height>0</height></size>", "<size><width>x</width></size>"]
)
def test_a_size_that_is_not_stated_is_unknown(devkit: Path, size: str) -> None:
    write_text(devkit / "Annotations" / "a.xml", xml(an_object(), size=size))
    item = read(devkit).items[1]
    assert (item.width, item.height, item.objects) == (None, None, 1)


def test_names_and_encodings(devkit: Path) -> None:
    text = '<?xml version="1.0" encoding="ISO-8859-1"?>' + xml(an_object("\n caf\u00e9 &amp; bar "))
    (devkit / "Annotations" / "a.xml").write_bytes(text.encode("latin-1"))
    assert [category["name"] for category in read(devkit).categories] == ["caf\u00e9 & bar", "cat"]


def test_roboflow_has_the_files_beside_the_images(tmp_path: Path) -> None:
    for split, name in (("train", "b_jpg.rf.1"), ("train", "a_jpg.rf.2"), ("valid", "c.x")):
        write_image(tmp_path / split / f"{name}.jpg")
        write_text(tmp_path / split / f"{name}.xml", xml(an_object(split)))
    write_image(tmp_path / "train" / "not_annotated.jpg")
    assert set(find_splits(tmp_path)) == {"train", "valid"}
    train = read(tmp_path)
    assert [json.loads(item.sidecar)["file_name"] for item in train.items] == ["a_jpg.rf.2.jpg", "b_jpg.rf.1.jpg"]
    assert [category["name"] for category in train.categories] == ["train", "valid"]


def test_real_files_with_boxes_of_one_pixel(shared_data: Path, tmp_path: Path) -> None:
    case = shared_data / "odd_coco" / "bccd_voc_zero_boxes"
    with pytest.raises(DatasetError, match=r"has Annotations but no ImageSets/Main/SPLIT.txt"):
        find_splits(case)
    (tmp_path / "Annotations").symlink_to(case / "Annotations")
    (tmp_path / "JPEGImages").symlink_to(case / "JPEGImages")
    write_text(tmp_path / "ImageSets" / "Main" / "train.txt", "BloodImage_00338\nBloodImage_00343\n")
    found = annotations(tmp_path)
    assert min(min(a["bbox"][2:]) for a in found) == 1
    assert len(found) == sum(f.read_text().count("<object>") for f in (case / "Annotations").glob("*.xml"))


# Refusals

BOMB = '<!DOCTYPE a [<!ENTITY x "xx"><!ENTITY y "&x;&x;">]>'
OUTER = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
BAD: dict[str, tuple[str, str]] = {
    "broken": ("<annotation><object>", "not a readable XML file .*line 1"),
    "empty": ("", "not a readable XML file"),
    "encoding": ('<?xml version="1.0" encoding="klingon"?><annotation/>', "not a readable XML file"),
    "entities": (f"{BOMB}{xml(an_object('&y;'))}", "declares a document type, which no annotation needs"),
    "outer entity": (f"{OUTER}{xml(an_object('&x;'))}", "declares a document type"),
    "other": ("<svg/>", "is a <svg>, not an <annotation> of Pascal VOC"),
    "no name": (xml(an_object(), an_object("")), "object 2: has no name"),
    "no box": (xml("<object><name>a</name></object>"), "object 1: xmin is absent, no finite number"),
    "text": (xml(an_object(box=(1, "x", 3, 4))), "object 1: ymin is 'x', no finite number"),
    "nan": (xml(an_object(box=(1, 2, "nan", 4))), "object 1: xmax is 'nan', no finite number"),
    "infinite": (xml(an_object(box=(1, 2, 3, "1e999"))), "object 1: ymax is '1e999', no finite number"),
    "reversed x": (xml(an_object(box=(5, 2, 3, 4))), "object 1: xmax is less than xmin"),
    "reversed y": (xml(an_object(box=(1, 5, 3, 4))), "object 1: ymax is less than ymin"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_a_bad_file_is_refused_with_its_name_object_and_field(devkit: Path, case: str) -> None:
    text, sentence = BAD[case]
    file = devkit / "Annotations" / "a.xml"
    file.write_text(text)
    with pytest.raises(DatasetError, match=sentence) as caught:
        read(devkit)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


MAIN = "ImageSets/Main/train.txt"
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing image": (
        lambda s: (s / "JPEGImages/a.jpg").unlink(),
        "1 of 2 names have no image in .*, the first is 'a'",
    ),
    "missing xml": (
        lambda s: (s / "Annotations/b.xml").unlink(),
        "1 of 2 names have no XML file in .*the first is 'b'",
    ),
    "escape": (lambda s: write_text(s / MAIN, "../a"), "1 of 1 names have no image .* is '../a'"),
    "listed twice": (lambda s: write_text(s / MAIN, "a\nb\na\n"), "lists 'a' twice; take one out"),
    "two images": (lambda s: write_image(s / "JPEGImages/a.png"), "'a' may be a.jpg or a.png in .*JPEGImages"),
    "empty image": (lambda s: write_text(s / "JPEGImages/a.jpg", ""), "1 of 2 images in .* are empty files"),
    "empty list": (lambda s: write_text(s / MAIN, "\n"), "lists no images"),
    "binary list": (lambda s: (s / MAIN).write_bytes(b"\xff\xfe\x00"), "not a text file in UTF-8"),
    "extension": (
        lambda s: (s / "JPEGImages/a.jpg").rename(s / "JPEGImages/a.tif"),
        "'a.tif' has no extension that the loader decodes",
    ),
}


@pytest.mark.parametrize("case", sorted(FILES))
def test_files_that_cannot_be_used_are_refused(devkit: Path, case: str) -> None:
    damage, sentence = FILES[case]
    damage(devkit)
    with pytest.raises(DatasetError, match=sentence) as caught:
        read(devkit)
    assert str(caught.value).startswith(f"{devkit / MAIN}: ")
    assert "\n" not in str(caught.value)


@given(
    st.one_of(
        st.binary(),
        st.text().map(str.encode),
        st.lists(
            st.builds(
                an_object,
                st.sampled_from(["dog", "", "&lt;", "&x;", "<part/>"]),
                st.tuples(*[st.sampled_from([0, 1, -3, "1.5", "nan", "", "1e308", "9" * 5000, "<a/>"])] * 4),
            ),
            max_size=3,
        ).map(lambda objects: xml(*objects).encode()),
    )
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        found = parse_annotation(Path("a.xml"), data)
    except DatasetError as error:
        assert str(error).startswith("a.xml: ")
        assert len(str(error).splitlines()) == 1
    else:
        assert all(name and x1 >= x0 and y1 >= y0 for name, (x0, y0, x1, y1) in found.objects)

"""YOLO folders: what ``data.yaml`` may say, what a label line may be, and a sentence for whatever can't be used."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rfstream.dataset.layouts import find_splits, read_split
from rfstream.dataset.shards import Item, write_shard
from rfstream.dataset.yolo import parse_labels
from rfstream.errors import DatasetError

WIDTH, HEIGHT = 40, 20
BOX = [4.0, 2.0, 8.0, 12.0]
LINE = "1 0.2 0.4 0.2 0.6"  # BOX of a dog
POLYGON = "0 0.1 0.1 0.5 0.1 0.5 0.9"


def write_image(path: Path, size: tuple[int, int] = (WIDTH, HEIGHT), **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path, **options)
    return path


def write_data(source: Path, **stated: Any) -> None:
    (source / "data.yaml").write_text(yaml.safe_dump({"names": ["cat", "dog"]} | stated))


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """``a`` with a box, ``b`` with an empty label file, ``c`` with none."""
    folder = tmp_path / "set"
    for name in "abc":
        write_image(folder / "images" / "train" / f"{name}.png")
    write_text(folder / "labels" / "train" / "a.txt", LINE)
    write_text(folder / "labels" / "train" / "b.txt", "\n")
    write_data(folder, train="images/train")
    return folder


def read(source: Path, split: str = "train") -> list[Item]:
    return read_split(find_splits(source)[split], "remap").items


def sidecars(source: Path, split: str = "train") -> dict[str, list[list[float]]]:
    """Boxes by file name."""
    found = (json.loads(item.sidecar) for item in read(source, split))
    return {s["file_name"]: [[round(v, 9) for v in a["bbox"]] for a in s["annotations"]] for s in found}


def test_an_empty_and_a_missing_label_file_are_images_without_objects(source: Path) -> None:
    assert sidecars(source) == {"a.png": [BOX], "b.png": [], "c.png": []}
    assert [(item.width, item.height, item.ext) for item in read(source)] == [(WIDTH, HEIGHT, "png")] * 3


SAME = {
    "root": {"path": "."},
    "absolute": {"path": "{source}"},
    "from its parent": {"path": "../set"},
    "another machine's": {"path": "/content/datasets/set"},
    "its own name": {"path": "set"},
    "inner root": {"path": "images", "train": "train"},
    "slashes": {"train": "./images//train/"},
    "roboflow": {"train": "../images/train"},
    "absolute split": {"train": "{source}/images/train"},
    "one in a list": {"train": ["images/train"]},
    "names by id": {"names": {0: "cat", 1: "dog"}},
    "count": {"nc": 2},
    "no test": {"test": None, "val": ""},
    "extra": {"roboflow": {"version": 3}, "download": "https://example.com/set.zip"},
}


@pytest.mark.parametrize("case", sorted(SAME))
def test_ways_to_say_the_same(source: Path, case: str) -> None:
    stated = json.loads(json.dumps({"train": "images/train"} | {k: v for k, v in SAME[case].items() if k != "names"}))
    text = json.dumps(stated).replace("{source}", str(source))
    write_data(source, **(json.loads(text) | {k: v for k, v in SAME[case].items() if k == "names"}))
    assert set(find_splits(source)) == {"train"}
    assert sidecars(source) == {"a.png": [BOX], "b.png": [], "c.png": []}


@pytest.mark.parametrize(
    ("listing", "lines"),
    [
        ("train.txt", ["./images/train/c.png", "images/train/a.png", "", "images/train/b.png"]),
        ("lists/train.txt", ["images/train/c.png", "images/train/a.png", "images/train/b.png"]),
        ("lists/train.txt", ["../images/train/c.png", "../images/train/a.png", "../images/train/b.png"]),
        ("lists/train.txt", ["{source}/images/train/c.png", "{source}/images/train/a.png", "../images/train/b.png"]),
    ],
)
def test_a_list_of_images_gives_their_order(source: Path, listing: str, lines: list[str]) -> None:
    write_text(source / listing, "\n".join(lines).replace("{source}", str(source)))
    write_data(source, train=listing)
    assert list(sidecars(source).items()) == [("c.png", []), ("a.png", [BOX]), ("b.png", [])]


def test_several_folders_and_lists_make_one_split(source: Path) -> None:
    write_image(source / "images" / "more" / "deep" / "a.png")
    write_text(source / "labels" / "more" / "deep" / "a.txt", LINE)
    write_image(source / "images" / "listed" / "x.JPG")
    write_text(source / "train.txt", "images/listed/x.JPG")
    write_data(source, train=["images/train", "images/more", "train.txt"])
    names = ["train/a.png", "train/b.png", "train/c.png", "more/deep/a.png", "listed/x.JPG"]
    assert list(sidecars(source)) == names
    assert sidecars(source)["more/deep/a.png"] == [BOX]


def test_labels_lie_below_the_last_images_folder_or_beside_the_images(tmp_path: Path) -> None:
    for image, label in (
        ("images/images/a.png", "images/labels/a.txt"),
        ("images/b.png", "images/b.txt"),
        ("plain/c.png", "plain/c.txt"),
    ):
        write_image(tmp_path / image)
        write_text(tmp_path / label, LINE)
    write_data(tmp_path, train=["images", "plain"])
    assert sidecars(tmp_path) == {"images/images/a.png": [BOX], "images/b.png": [BOX], "plain/c.png": [BOX]}


def test_a_folder_named_images_above_the_source_is_not_replaced(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "set" / "train" / "a.png")
    write_text(tmp_path / "images" / "set" / "train" / "a.txt", LINE)
    write_text(tmp_path / "labels" / "set" / "train" / "a.txt", POLYGON)
    write_data(tmp_path / "images" / "set", train="train")
    assert sidecars(tmp_path / "images" / "set") == {"a.png": [BOX]}


def test_an_image_that_exif_turns_is_labelled_as_it_is_shown(source: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    write_image(source / "images" / "train" / "a.jpg", exif=exif)
    (source / "images" / "train" / "a.png").unlink()
    item = read(source)[0]
    assert (item.width, item.height) == (HEIGHT, WIDTH)
    (annotation,) = json.loads(item.sidecar)["annotations"]
    assert annotation["bbox"] == pytest.approx([2.0, 4.0, 4.0, 24.0])
    assert write_shard(tmp_path / "0.tar", 0, 0, [item]).turned == (item.image,)  # of which packing warns


def test_a_polygon_gives_outline_box_and_area(source: Path) -> None:
    write_text(source / "labels" / "train" / "a.txt", f"{POLYGON}\r\n1.0 0.5 0.5 1 1\r\n")
    polygon, box = json.loads(read(source)[0].sidecar)["annotations"]
    assert polygon["segmentation"] == [pytest.approx([4, 2, 20, 2, 20, 18])]
    assert polygon["bbox"] == pytest.approx([4, 2, 16, 16])
    assert polygon["area"] == pytest.approx(128)
    assert (polygon["category_id"], polygon["id"], polygon["image_id"]) == (0, 1, 1)
    assert (box["category_id"], box["id"], box["bbox"], box["segmentation"]) == (1, 2, [0, 0, WIDTH, HEIGHT], [])


# Refusals

LABELS = {
    "four fields": ("1 0.5 0.5 0.1", r"has 4 fields; a box has 5 \(class, x_center, y_center, width, height\)"),
    "confidence": ("1 0.5 0.5 0.1 0.1 0.9", "has 6 fields; a box has 5"),
    "half a pair": ("1 0.1 0.1 0.5 0.1 0.5 0.9 0.3", "has 8 fields; a box has 5"),
    "no class": ("dog 0.5 0.5 0.1 0.1", "class is 'dog', and data.yaml names the classes 0 to 1"),
    "unknown class": ("2 0.5 0.5 0.1 0.1", "class is '2', and data.yaml names the classes 0 to 1"),
    "negative class": ("-1 0.5 0.5 0.1 0.1", "class is '-1'"),
    "half a class": ("0.5 0.5 0.5 0.1 0.1", "class is '0.5'"),
    "nan class": ("nan 0.5 0.5 0.1 0.1", "class is 'nan'"),
    "text": ("1 0.5 0,5 0.1 0.1", "y_center is '0,5', no finite number"),
    "nan": ("1 0.5 0.5 nan 0.1", "width is 'nan', no finite number"),
    "infinite": ("1 0.5 0.5 0.1 inf", "height is 'inf', no finite number"),
    "pixels": ("1 320 240 64 48", "x_center is 320, not between 0 and 1"),
    "past the slack": ("1 1.011 0.5 0.1 0.1", "x_center is 1.011, not between 0 and 1"),
    "negative": ("1 -0.011 0.5 0.1 0.1", "x_center is -0.011, not between 0 and 1"),
    "negative width": ("1 0.5 0.5 -0.001 0.1", "width is negative"),
    "negative height": ("1 0.5 0.5 0.1 -0.001", "height is negative"),
    "polygon text": ("1 0.1 0.1 0.5 0.1 0.5 x", "y3 is 'x', no finite number"),
    "polygon past": ("1 0.1 0.1 1.5 0.1 0.5 0.5", "the polygon's width is 1.4, not between 0 and 1"),
    "polygon outside": ("1 1.1 0.1 1.5 0.1 1.5 0.5", "the polygon's x_center is 1.3, not between 0 and 1"),
    "polygon nan": ("1 0.1 0.1 0.5 nan 0.5 0.5", "y2 is 'nan', no finite number"),
}


@pytest.mark.parametrize("case", sorted(LABELS))
def test_a_bad_line_is_refused_with_its_file_number_and_field(source: Path, case: str) -> None:
    line, sentence = LABELS[case]
    file = source / "labels" / "train" / "a.txt"
    file.write_text(f"{LINE}\n\n{line}\n")
    with pytest.raises(DatasetError, match=sentence) as caught:
        read(source)
    assert str(caught.value).startswith(f"{file}: line 3: ")
    assert "\n" not in str(caught.value)


def test_a_box_or_polygon_may_pass_the_edge(source: Path) -> None:
    write_text(source / "labels" / "train" / "a.txt", "1 1.01 -0.01 0 0.1\n0 -0.05 0.5 0.2 -0.25 0.2 0.75")
    assert sidecars(source)["a.png"] == [[40.4, -1.2, 0, 2], [-2, -5, 10, 20]]


DATA: dict[str, tuple[str | dict[str, Any], str]] = {
    "no yaml": ("a: [", "not a readable YAML file"),
    "no mapping": ("- a", "holds no mapping with the keys"),
    "python": ("names: !!python/object/apply:os.system [ls]", "not a readable YAML file"),
    "deep": ("[" * 3000, "not a readable YAML file"),
    "no names": ({"names": None}, "names is neither a list nor a mapping"),
    "empty names": ({"names": []}, "names is neither a list nor a mapping"),
    "text for names": ({"names": "cat"}, "names is neither a list nor a mapping"),
    "name no text": ({"names": ["cat", True]}, "the name of class 1 is no text; put it in quotes"),
    "key no id": ({"names": {"a": "cat"}}, "names has the key 'a'; a class id is 0, 1, 2"),
    "negative key": ({"names": {-1: "cat"}}, "names has the key -1"),
    "count": ({"nc": 3}, "nc is 3, but names has 2 classes"),
    "path no text": ({"path": [1]}, "path is a list, not the name of a folder"),
    "outer path": ({"path": ".."}, "path is '..', another folder, and nothing outside of .*/set is read"),
    "no splits": ({"train": None}, "states none of train, val, test"),
    "split no text": ({"train": {"a": 1}}, "train is neither a folder or .txt file nor a list of them"),
    "split no texts": ({"train": ["images/train", 3]}, "train is neither a folder or .txt file nor a list of them"),
    "no folder": ({"train": "gone"}, "'gone' is neither a folder nor a .txt file inside .*/set; correct it"),
    "long name": ({"train": "x" * 5000}, "is neither a folder nor a .txt file inside"),
    "outer folder": ({"train": "../../outer"}, "'../../outer' is neither a folder nor a .txt file inside"),
    "absolute folder": ({"train": "/tmp"}, "'/tmp' is neither a folder nor a .txt file inside"),
    "keypoints": ({"kpt_shape": [17, 3]}, "has kpt_shape, so labels hold keypoints"),
    "folder twice": ({"train": ["images/train", "images"]}, "train/a.png comes twice"),
    "no labels": ({"train": "images/bare"}, r"none of the 1 images of images/bare has a label file.*labels/bare/x.txt"),
    "no images": ({"train": "labels"}, "lists no images, so there is nothing to pack"),
}


@pytest.mark.parametrize("case", sorted(DATA))
def test_a_data_file_that_cannot_be_used_is_refused(source: Path, case: str) -> None:
    stated, sentence = DATA[case]
    write_image(source.parent / "outer" / "a.png")
    write_image(source / "images" / "bare" / "x.png")
    if isinstance(stated, str):
        write_text(source / "data.yaml", stated)
    else:
        write_data(source, **({"train": "images/train"} | stated))
    with pytest.raises(DatasetError, match=sentence) as caught:
        read(source)
    assert str(caught.value).startswith(f"{source}/data.yaml: ")
    assert "\n" not in str(caught.value)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken image": (
        lambda s: write_text(s / "images/train/b.png", "no image"),
        r"images/train/b.png: the image's size can't be read \(cannot identify image file",
    ),
    "empty image": (lambda s: write_text(s / "images/train/b.png", ""), r"b.png: the image's size can't be read"),
    "extension": (lambda s: write_image(s / "images/train/d.gif"), "'d.gif' has no extension that the loader decodes"),
    "binary labels": (
        lambda s: (s / "labels/train/a.txt").write_bytes(b"\xff\xfe\x00"),
        "labels/train/a.txt: not a text file in UTF-8",
    ),
    "missing image": (
        lambda s: write_text(s / "train.txt", "images/train/gone.png"),
        r"gone.png: the image's size can't be read \(No such file or directory\)",
    ),
    "listed twice": (
        lambda s: write_text(s / "train.txt", "images/train/a.png\n\n./images/train/a.png"),
        "train.txt: line 3: .*/a.png comes twice, and first by .*/train.txt: line 1; take one out",
    ),
    "listed outside": (
        lambda s: write_text(s / "train.txt", "images/train/a.png\n../outer/a.png"),
        "train.txt: line 2: '../outer/a.png' is not inside .*/set, and nothing outside is read",
    ),
    "listed elsewhere": (
        lambda s: write_text(s / "train.txt", "/etc/a.png"),
        "train.txt: line 1: '/etc/a.png' is not inside",
    ),
    "empty list": (lambda s: write_text(s / "train.txt", "\n"), "lists no images"),
    "binary list": (lambda s: (s / "train.txt").write_bytes(b"\xff\xfe\x00"), "train.txt: not a text file in UTF-8"),
}


@pytest.mark.parametrize("case", sorted(FILES))
def test_files_that_cannot_be_used_are_refused(source: Path, case: str) -> None:
    damage, sentence = FILES[case]
    write_image(source.parent / "outer" / "a.png")
    damage(source)
    write_data(source, train="train.txt" if (source / "train.txt").exists() else "images/train")
    with pytest.raises(DatasetError, match=sentence) as caught:
        read(source)
    assert "\n" not in str(caught.value)


def test_no_link_of_yaml_makes_an_endless_message(source: Path) -> None:
    rows = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 30)]
    for field in ("names", "nc", "path", "train", "kpt_shape"):
        stated = {"names": "[cat, dog]", "train": "images/train"} | {field: "*l29"}
        lines = ["l0: &l0 [x]", *rows, *(f"{key}: {value}" for key, value in stated.items())]
        write_text(source / "data.yaml", "\n".join(lines))
        with pytest.raises(DatasetError) as caught:
            read(source)
        assert len(str(caught.value)) < 500


# Properties

parts = st.floats(0, 1)
NAMES = {0: "cat", 1: "dog", 7: "bird"}
SIZE = (640, 480)


@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), parts, parts, parts, parts), max_size=5))
def test_boxes_come_back_as_written(boxes: list[tuple[int, float, float, float, float]]) -> None:
    text = "\n".join(" ".join(map(repr, box)) for box in boxes)
    objects = parse_labels(Path("a.txt"), text, SIZE, NAMES)
    assert [annotation["category_id"] for annotation in objects] == [box[0] for box in boxes]
    for (_, *box), annotation in zip(boxes, objects, strict=True):
        x, y, width, height = annotation["bbox"]
        back = [(x + width / 2) / SIZE[0], (y + height / 2) / SIZE[1], width / SIZE[0], height / SIZE[1]]
        assert back == pytest.approx(box, abs=1e-12)
        assert annotation["area"] == pytest.approx(width * height)


@given(st.lists(st.tuples(parts, parts), min_size=3, max_size=9), st.integers(0, 8))
def test_a_polygon_does_not_depend_on_where_it_begins(points: list[tuple[float, float]], turn: int) -> None:
    turned = points[turn % len(points) :] + points[: turn % len(points)]
    first, second = (
        parse_labels(Path("a.txt"), "0 " + " ".join(repr(v) for p in outline for v in p), SIZE, NAMES)[0]
        for outline in (points, turned)
    )
    assert first["bbox"] == second["bbox"]
    assert first["area"] == pytest.approx(second["area"], abs=1e-6)
    assert first["area"] <= first["bbox"][2] * first["bbox"][3] * len(points) + 1e-6


fields = st.one_of(st.sampled_from(["0", "1", "0.5", "1.0", "nan", "-1e-3", "1e400", "٣", "0x1", "1_0"]), st.text())


@given(st.one_of(st.text(), st.lists(st.lists(fields, max_size=9).map(" ".join), max_size=4).map("\n".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        objects = parse_labels(Path("a.txt"), text, SIZE, NAMES)
    except DatasetError as error:
        assert str(error).startswith("a.txt: line ")
        assert len(str(error).splitlines()) == 1
    else:
        for annotation in objects:
            assert annotation["category_id"] in NAMES
            assert all(math.isfinite(v) and abs(v) < 2000 for v in annotation["bbox"])


def test_unlabelled_copies_of_macos_are_left_out(source: Path) -> None:
    shutil.copyfile(source / "images/train/a.png", source / "images/train/._a.png")
    assert len(read(source)) == 3

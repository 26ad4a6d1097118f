"""Several COCO files that make one split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_yolo import write_image

from rfstream.dataset.coco import SplitFiles, _distinct_ids, read_split
from rfstream.dataset.document import SplitSource
from rfstream.dataset.pack import pack
from rfstream.errors import DatasetError

CATEGORIES = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]


def document(images: dict[int, str], annotations: list[tuple[int | None, int, int]], **changes: Any) -> dict[str, Any]:
    """``images``: id to name; ``annotations``: id, image id, category id."""
    listed = [
        {"image_id": image, "category_id": category, "bbox": [1, 2, 3, 4], "area": 12} | ({"id": n} if n else {})
        for n, image, category in annotations
    ]
    entries = [{"id": n, "file_name": name, "width": 40, "height": 20} for n, name in images.items()]
    return {"images": entries, "annotations": listed, "categories": CATEGORIES} | changes


def write(folder: Path, *documents: dict[str, Any]) -> list[Path]:
    """The documents as files beside a folder ``images``, which gets the images of all."""
    files = []
    for number, content in enumerate(documents):
        files.append(folder / f"{number}.json")
        files[-1].write_text(json.dumps(content))
        for image in content["images"]:
            write_image(folder / "images" / image["file_name"])
    return files


def read(folder: Path, *documents: dict[str, Any]) -> SplitSource:
    first, *further = write(folder, *documents)
    images = folder / "images"
    return read_split(SplitFiles("train", first, images, tuple((file, images) for file in further)), "remap")


def summary(source: SplitSource) -> list[tuple[int, str, list[tuple[int | None, int, int]]]]:
    sidecars = [json.loads(item.sidecar) for item in source.items]
    return [
        (s["image_id"], s["file_name"], [(a.get("id"), a["image_id"], a["category_id"]) for a in s["annotations"]])
        for s in sidecars
    ]


def test_ids_that_clash_become_the_next_that_no_file_has(tmp_path: Path) -> None:
    source = read(
        tmp_path,
        document({1: "a.jpg", 2: "x/b.jpg"}, [(1, 1, 1), (None, 2, 2)]),
        document({2: "c.jpg", 9: "d.jpg", 1: "e.jpg"}, [(1, 2, 2), (5, 9, 1), (None, 1, 1)]),
        document({2: "f.jpg"}, [(5, 2, 2)]),
    )
    assert summary(source) == [
        (1, "a.jpg", [(1, 1, 1)]),
        (2, "x/b.jpg", [(None, 2, 2)]),
        (3, "c.jpg", [(2, 3, 2)]),
        (9, "d.jpg", [(5, 9, 1)]),
        (4, "e.jpg", [(None, 4, 1)]),
        (5, "f.jpg", [(3, 5, 2)]),
    ]
    assert source.categories == CATEGORIES
    assert source.annotated_category_ids == [1, 2]


@given(
    st.lists(
        st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True),
        min_size=2,
        max_size=4,
    )
)
def test_joined_ids_are_distinct_and_keep_what_they_name(ids: list[list[int]]) -> None:
    found = _distinct_ids(ids)
    new = [number for of_file in found for number in of_file.values()]
    assert len(set(new)) == len(new)
    assert [list(of_file) for of_file in found] == ids
    assert found[0] == {number: number for number in ids[0]}


def test_categories_of_one_file_are_added(tmp_path: Path) -> None:
    more = [*CATEGORIES[::-1], {"id": 7, "name": "bird", "supercategory": "animal"}]
    source = read(tmp_path, document({1: "a.jpg"}, []), document({2: "b.jpg"}, [(1, 2, 7)], categories=more))
    assert source.categories == [*CATEGORIES, more[2]]
    assert source.annotated_category_ids == [7]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (
            document({2: "b.jpg"}, [], categories=[{"id": 2, "name": "bird"}]),
            r"1.json: category 2 is 'bird', in .*/0.json it is 'dog'; give both files the same categories",
        ),
        (
            document({2: "b.jpg"}, [], categories=[{"id": 3, "name": "dog"}]),
            r"1.json: category 'dog' has the id 3, in .*/0.json it has 2; give both files the same categories",
        ),
        (document({2: "a.jpg"}, []), r"1.json: lists .*/images/a.jpg, as .*/0.json does; list each image in one file"),
        (document({2: "b.jpg"}, [(1, 1, 1)]), r"1.json: annotation 1: image_id is 1, the id of no image"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, second: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DatasetError, match=sentence) as caught:
        read(tmp_path, document({1: "a.jpg"}, [(1, 1, 1)]), second)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("ray_session")
def test_pack_takes_them_by_comma(tmp_path: Path) -> None:
    files = write(tmp_path, document({1: "x/a.jpg"}, [(1, 1, 1)]), document({1: "b.jpg"}, [(1, 1, 2)]))
    by_comma = ",".join(map(str, files))
    images = str(tmp_path / "images")
    (one,) = pack(
        str(tmp_path), str(tmp_path / "out"), splits="train", annotations=by_comma, images=images, progress=False
    )
    (each,) = pack(
        str(tmp_path),
        str(tmp_path / "each"),
        splits="train",
        annotations=by_comma,
        images=f"{images},{images}",
        progress=False,
    )
    assert (one.num_samples, one.annotated_category_ids) == (2, (1, 2))
    assert one.digest == each.digest
    with pytest.raises(DatasetError, match="--images names 3 folders for 2 files of --annotations"):
        pack(str(tmp_path), str(tmp_path / "no"), splits="train", annotations=by_comma, images="a,b,c", progress=False)
    with pytest.raises(DatasetError, match="--annotations names a COCO file: leave --layout yolo out"):
        pack(str(tmp_path), str(tmp_path / "no"), splits="train", annotations=by_comma, layout="yolo", progress=False)

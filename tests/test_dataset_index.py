"""The index: RF-DETR's labels, damage refused in a sentence, and tables for packs that RF-DETR wrote."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import files_in, pack_here

from rfstream.dataset.index import SplitIndex, read_index
from rfstream.dataset.pack import index_pack
from rfstream.errors import DatasetError

NAMES = st.sampled_from(["a", "b", "c", "none", ""])
CATEGORY = st.fixed_dictionaries(
    {"id": st.integers(0, 30), "name": NAMES},
    optional={"supercategory": st.one_of(NAMES, st.none(), st.just("null"), st.just("z"))},
)


@pytest.fixture(scope="module")
def stock() -> Any:
    return pytest.importorskip("rfdetr.datasets.webdataset.index")


@pytest.mark.parametrize("category_ids", ["remap", "raw"])
@settings(deadline=None)
@given(
    categories=st.lists(CATEGORY, max_size=8, unique_by=lambda category: category["id"]),
    annotated=st.sets(st.integers(0, 30)),
)
def test_labels_and_names_are_those_of_rfdetr(
    stock: Any, category_ids: Any, categories: list[dict[str, Any]], annotated: set[int]
) -> None:
    fields = ("train", ("train-0.tar",), 1, tuple(categories), tuple(sorted(annotated)), category_ids, (1,))
    ours, theirs = SplitIndex("pack", *fields, "00000000", "0" * 16), stock.ShardIndex(*fields)
    identity = {category["id"]: category["id"] for category in categories}
    assert ours.label_of() == (identity if category_ids == "raw" else theirs.cat2label())
    assert ours.class_names() == theirs.class_names()


@pytest.mark.parametrize(("name", "classes"), [("bccd", 3), ("coco_cc", 80), ("facade", 10), ("dali_objects", None)])
def test_labels_of_real_datasets_are_those_of_rfdetr(
    stock: Any, shared_data: Path, tmp_path: Path, name: str, classes: int | None
) -> None:
    ours = pack_here(shared_data / name, tmp_path, per_shard=100)
    theirs = stock.read_shard_index(tmp_path, "train")
    assert ours.label_of() == theirs.cat2label()
    assert ours.class_names() == theirs.class_names()
    assert classes is None or len(ours.class_names()) == classes


# ---- a damaged index ----

GOOD: dict[str, Any] = {
    "version": 1,
    "split": "train",
    "shards": ["train-01234567-000000.tar"],
    "num_samples": 2,
    "categories": [{"id": 1, "name": "a"}],
    "annotated_category_ids": [1],
    "category_ids": "remap",
    "samples_per_shard": [2],
}
DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "not a version-1 index: version"),
    ({"split": "val"}, "is an index of split 'val', renamed"),
    ({"split": 3}, "not a version-1 index: split"),
    ({"shards": []}, "not a version-1 index: shards"),
    ({"shards": "train.tar"}, "not a version-1 index: shards"),
    ({"shards": [7]}, r"not a version-1 index: shards\.0"),
    ({"shards": ["../x.tar"]}, r"shard name '\.\./x\.tar' is absolute or leaves its folder"),
    ({"shards": ["a/../../x.tar"]}, "is absolute or leaves its folder"),
    ({"shards": ["/etc/passwd"]}, "shard name '/etc/passwd' is absolute or leaves its folder"),
    ({"shards": ["C:\\x.tar"]}, "is absolute or leaves its folder"),
    ({"shards": ["..\\x.tar"]}, "is absolute or leaves its folder"),
    ({"shards": ["\\\\host\\share\\x.tar"]}, "is absolute or leaves its folder"),
    ({"shards": [""]}, "is absolute or leaves its folder"),
    ({"shards": ["x/"]}, "can't be the name of a file"),
    ({"shards": ["x\x00.tar"]}, "can't be the name of a file"),
    ({"shards": ["x\ud800.tar"]}, "can't be the name of a file"),
    ({"shards": ["a.tar", "a.tar"], "samples_per_shard": [1, 1]}, "lists a shard twice"),
    ({"num_samples": -1}, "not a version-1 index: num_samples"),
    ({"num_samples": 2**60}, "not a version-1 index: num_samples"),
    ({"num_samples": "2"}, "not a version-1 index: num_samples"),
    ({"num_samples": 2.5}, "not a version-1 index: num_samples"),
    ({"num_samples": True}, "not a version-1 index: num_samples"),
    ({"num_samples": 3}, r"samples_per_shard \(1 shards, 2 samples\) contradicts"),
    ({"samples_per_shard": [1, 1]}, "contradicts the list of 1 shards"),
    ({"samples_per_shard": [-2]}, r"not a version-1 index: samples_per_shard\.0"),
    ({"category_ids": "other"}, "not a version-1 index: category_ids"),
    ({"annotated_category_ids": ["1"]}, r"not a version-1 index: annotated_category_ids\.0"),
    ({"categories": {"1": "a"}}, "not a version-1 index: categories"),
    ({"categories": [{"name": "a"}]}, r"categories\[0\] has id None"),
    ({"categories": [{"id": True, "name": "a"}]}, r"categories\[0\] has id True"),
    ({"categories": [{"id": 2**64, "name": "a"}]}, r"categories\[0\] has id 18446744073709551616"),
    ({"categories": [{"id": 1}]}, "category 1 has name None"),
    ({"categories": [{"id": 1, "name": "a", "supercategory": []}]}, "category 1 has a supercategory that is no text"),
    ({"categories": [{"id": 10**9, "name": "a"}], "category_ids": "raw"}, "can't be a label under category_ids='raw'"),
    ({"categories": [{"id": -1, "name": "a"}], "category_ids": "raw"}, "can't be a label under category_ids='raw'"),
]


@pytest.mark.parametrize(("change", "sentence"), DAMAGE, ids=lambda value: str(value)[:50])
def test_a_damaged_index_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    (tmp_path / "train-index.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(DatasetError, match=sentence) as caught:
        read_index(str(tmp_path), "train")
    assert str(caught.value).startswith(str(tmp_path / "train-index.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["version", "split", "shards", "num_samples"])
def test_an_index_without_a_field_is_refused(tmp_path: Path, field: str) -> None:
    (tmp_path / "train-index.json").write_text(json.dumps({k: v for k, v in GOOD.items() if k != field}))
    with pytest.raises(DatasetError, match=f"not a version-1 index: {field}: Field required; pack again"):
        read_index(str(tmp_path), "train")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"7", b"null", b'{"a":1' + b"0" * 5000])
def test_an_index_that_is_no_json_object_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "train-index.json").write_bytes(data)
    with pytest.raises(DatasetError, match=r"train-index.json: not a (readable JSON file|version-1 index)"):
        read_index(str(tmp_path), "train")


def test_an_absent_index_or_filesystem_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"val-index.json does not exist: no split 'val' is packed there"):
        read_index(str(tmp_path), "val")
    with pytest.raises(DatasetError, match=r"nosuch://bucket/train-index.json: can't be read \(Protocol not known"):
        read_index("nosuch://bucket", "train")


@pytest.mark.parametrize("split", ["", ".", "..", "a/b", "a\\b", "C:", "*", "tr?in", "[a]", "a\nb"])
def test_a_split_name_that_is_no_file_name_is_refused(tmp_path: Path, split: str) -> None:
    with pytest.raises(DatasetError, match="can't be part of a file name"):
        read_index(str(tmp_path), split)


# ---- packs that RF-DETR wrote ----

Member = tuple[str, bytes] | tarfile.TarInfo
SIDECAR = b'{"annotations": [{}, {}]}'
WHOLE: list[Member] = [("0.jpg", b"a"), ("0.json", SIDECAR), ("1.png", b"b"), ("1.json", b'{"annotations": []}')]


def write_pack(folder: Path, members: list[Member], **change: Any) -> None:
    with tarfile.open(folder / GOOD["shards"][0], "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    (folder / "train-index.json").write_text(json.dumps(GOOD | change))


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_an_older_index_without_counts_gets_its_tables(tmp_path: Path) -> None:
    write_pack(tmp_path, [special("folder", tarfile.DIRTYPE), *WHOLE], samples_per_shard=[])
    index = index_pack(str(tmp_path), "train")
    assert index.fragments().total == 2
    assert set(files_in(tmp_path)) == {
        "train-index.json",
        "train-01234567-000000.tar",
        "train-01234567.samples.parquet",
        "train-01234567.fragments.parquet",
    }


BAD_TARS: dict[str, tuple[list[Member], str]] = {
    "symlink": ([*WHOLE, special("2.jpg", tarfile.SYMTYPE, "/etc/passwd")], "member '2.jpg' is a link, device"),
    "hardlink": ([*WHOLE, special("2.jpg", tarfile.LNKTYPE, "0.jpg")], "member '2.jpg' is a link, device"),
    "device": ([*WHOLE, special("2.jpg", tarfile.CHRTYPE)], "member '2.jpg' is a link, device"),
    "fifo": ([*WHOLE, special("2.jpg", tarfile.FIFOTYPE)], "member '2.jpg' is a link, device"),
    "absolute": ([("/0.jpg", b"a"), ("/0.json", SIDECAR)], "member '/0.jpg' is absolute or leaves its folder"),
    "parent": ([("../0.jpg", b"a"), ("../0.json", SIDECAR)], r"member '\.\./0.jpg' is absolute or leaves its folder"),
    "drive": ([("C:0.jpg", b"a"), ("C:0.json", SIDECAR)], "member 'C:0.jpg' is absolute or leaves its folder"),
    "no image": ([("0.json", SIDECAR), *WHOLE[2:]], r"sample 0: has no image .* member, only \['json'\]"),
    "no json": ([("0.jpg", b"a"), *WHOLE[2:]], r"sample 0: has no JSON member, only \['jpg'\]"),
    "not adjacent": ([WHOLE[0], WHOLE[2], WHOLE[1], WHOLE[3]], "sample 0: has no JSON member"),
    "bad json": ([("0.jpg", b"a"), ("0.json", b"{"), *WHOLE[2:]], "sample 0: its JSON has no list of annotations"),
    "json of another kind": ([("0.jpg", b"a"), ("0.json", b"[1]"), *WHOLE[2:]], "sample 0: its JSON has no list"),
    "annotations no list": ([("0.jpg", b"a"), ("0.json", b'{"annotations": 3}')], "sample 0: its JSON has no list"),
    "fewer": (WHOLE[:2], "holds 1 samples, the index says 2; copy or pack it again"),
    "empty": ([], "holds no samples"),
}


@pytest.mark.parametrize("case", sorted(BAD_TARS))
def test_a_bad_shard_is_refused(tmp_path: Path, case: str) -> None:
    members, sentence = BAD_TARS[case]
    write_pack(tmp_path, members)
    with pytest.raises(DatasetError, match=sentence) as caught:
        index_pack(str(tmp_path), "train")
    assert str(caught.value).startswith(str(tmp_path / GOOD["shards"][0]))
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize("keep", [0, 100, 700, 1100, 1700])
def test_a_cut_shard_is_refused(tmp_path: Path, keep: int) -> None:
    write_pack(tmp_path, WHOLE)
    shard = tmp_path / GOOD["shards"][0]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(DatasetError, match=r"000000.tar: (not a whole tar file|holds|sample 0)"):
        index_pack(str(tmp_path), "train")


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "train-index.json").write_text(json.dumps(GOOD))
    with pytest.raises(DatasetError, match=r"000000.tar: can't be read \(No such file or directory\)"):
        index_pack(str(tmp_path), "train")


def test_a_whole_pack_that_contradicts_its_index_is_refused(tmp_path: Path) -> None:
    write_pack(tmp_path, WHOLE, num_samples=5, samples_per_shard=[])
    with pytest.raises(DatasetError, match="the shards of 'train' hold 2 samples, the index says 5"):
        index_pack(str(tmp_path), "train")

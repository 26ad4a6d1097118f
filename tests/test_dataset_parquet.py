"""Parquet packs: the samples and the order of the tar pack of the same source, open to other tools, and checked."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import files_in, pack_checked, pack_here
from test_dataset_tar import CountingFileSystem, open_files
from typer.testing import CliRunner

from rfstream.cli import app
from rfstream.config import Config
from rfstream.dataset.coco import SplitFiles, read_split
from rfstream.dataset.convention import Convention, annotations_of
from rfstream.dataset.index import SplitIndex, read_index
from rfstream.dataset.pack import index_pack
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.reader import EncodedSample
from rfstream.dataset.tar import TarReader
from rfstream.errors import DatasetError, SampleError
from rfstream.tools.check import check
from rfstream.tools.ledger import first_difference, make_ledger

PER_SHARD, COUNT = 20, 55


@pytest.fixture(scope="module")
def tar(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SplitIndex:
    """coco_cc's training split: 55 photos with gaps in the category ids, polygons and crowds."""
    return pack_here(shared_data / "coco_cc", tmp_path_factory.mktemp("tar"), PER_SHARD)


@pytest.fixture(scope="module")
def pack(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SplitIndex:
    """The same as Parquet."""
    return pack_here(shared_data / "coco_cc", tmp_path_factory.mktemp("parquet"), PER_SHARD, format="parquet")


@pytest.fixture(scope="module")
def samples(pack: SplitIndex) -> list[EncodedSample]:
    return ParquetReader(pack.path, "train", pack.digest).read(np.arange(COUNT))


@pytest.fixture
def damaged(pack: SplitIndex, tmp_path: Path) -> Path:
    """A copy of the pack to damage."""
    shutil.copytree(pack.path, tmp_path / "pack")
    return tmp_path / "pack"


def assert_alike(theirs: SplitIndex, ours: SplitIndex) -> None:
    """A tar and a Parquet pack hold the same, in the same fragments."""
    rows = np.arange(theirs.num_samples)
    of_tar = TarReader(theirs.path, theirs.split, theirs.digest).read(rows)
    of_parquet = ParquetReader(ours.path, ours.split, ours.digest).read(rows)
    for a, b in zip(of_tar, of_parquet, strict=True):
        assert a.image == b.image
        assert json.loads(a.sidecar) == json.loads(b.sidecar)
        assert (a.key, a.row, a.width, a.height) == (b.key, b.row, b.width, b.height)
    assert np.array_equal(theirs.fragments().starts, ours.fragments().starts)
    assert np.array_equal(theirs.fragments().nbytes, ours.fragments().nbytes)
    crowds = [
        [(json.loads(row["crowds"]), row["width"], row["height"]) for row in index.crowds().to_pylist()]
        for index in (theirs, ours)
    ]
    assert crowds[0] == crowds[1]


def test_samples_and_fragments_are_those_of_the_tar_pack(tar: SplitIndex, pack: SplitIndex) -> None:
    assert_alike(tar, pack)
    assert len(tar.crowds()) > 0 and any(b"counts" in s for s in sidecars(pack))
    for index in (tar, pack):
        assert (index.num_samples, index.samples_per_shard) == (COUNT, (20, 20, 15))


def sidecars(index: SplitIndex) -> list[bytes]:
    return [s.sidecar for s in ParquetReader(index.path, "train", index.digest).read(np.arange(COUNT))]


@pytest.mark.parametrize("name", ["cards", "facade"])
def test_several_row_groups_and_categories_of_one_name(shared_data: Path, tmp_path: Path, name: str) -> None:
    theirs = pack_here(shared_data / name, tmp_path / "a", 1000)
    ours = pack_here(shared_data / name, tmp_path / "b", 1000, format="parquet")
    assert len(ours.fragments()) > 1
    assert pq.ParquetFile(ours.shard_url(0)).num_row_groups == len(ours.fragments())
    assert_alike(theirs, ours)
    features = json.loads(pq.read_schema(ours.shard_url(0)).metadata[b"huggingface"])["info"]["features"]
    labels = features["objects"]["category"]["feature"]["names"]
    assert len(set(labels)) == len(ours.categories)
    assert (name == "facade") == ("facade (id 0)" in labels)


ODD: list[dict[str, Any]] = [
    {"id": None, "iscrowd": True, "segmentation": None, "attributes": {"truncated": [1, None, "ü"]}, "score": 0.5},
    {"segmentation": {"size": [480, 640], "counts": "abc"}, "iscrowd": 1, "other": "x", "category": 3},
    {"id": 2**60, "area": 2**60 + 1, "segmentation": [[]], "keypoints": [1, 2, 2], "num_keypoints": 1},
    {"bbox": [0, 1.5, 2**60 + 1, 4], "segmentation": [[1, "2"], [1.5, 2]], "keypoints": "none"},
]


def test_nothing_of_an_annotation_is_lost(shared_data: Path, tmp_path: Path) -> None:
    photo = next((shared_data / "bccd" / "train").glob("*.jpg"))
    fixed = {"image_id": 7, "category_id": 5, "bbox": [1, 2, 3, 4], "area": 12}
    document = {
        "images": [{"id": 7, "file_name": photo.name}],
        "categories": [{"id": 9, "name": "a"}, {"id": 5, "name": "b"}],
        "annotations": [fixed | odd for odd in ODD] + [fixed],
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    checked = read_split(SplitFiles("train", tmp_path / "a.json", photo.parent), "remap")
    packs = [pack_checked(checked, tmp_path / f, 1, "train", format=f) for f in ("tar", "parquet")]
    assert_alike(*packs)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELD = st.sampled_from(["id", "iscrowd", "segmentation", "keypoints", "num_keypoints", "other", "category", "score"])


@settings(deadline=None)
@given(st.lists(st.dictionaries(FIELD, JSON, max_size=4), max_size=3))
def test_any_fields_go_to_columns_and_back(fields: list[dict[str, Any]]) -> None:
    annotations = [f | {"image_id": 1, "category_id": 4, "bbox": [0, 0, 1.5, 2], "area": 3} for f in fields]
    convention = Convention((3, 4), ("a", "b"), keypoints=True)
    sidecar = json.dumps({"image_id": 1, "file_name": "a.jpg", "annotations": annotations}).encode()
    rows = [convention.row(b"", sidecar, None, None)]
    (row,) = pa.Table.from_pylist(rows, convention.schema()).to_pylist()
    assert list(annotations_of(row["objects"], 1, convention.category_ids)) == annotations


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, COUNT - 1), max_size=40))
def test_any_rows_come_in_the_order_asked_for(pack: SplitIndex, samples: list[EncodedSample], rows: list[int]) -> None:
    expected = [samples[row] for row in rows]
    assert ParquetReader(pack.path, "train", pack.digest).read(np.array(rows, dtype=np.int64)) == expected


def test_an_image_lies_in_the_shard_at_its_offset(pack: SplitIndex, samples: list[EncodedSample]) -> None:
    for sample in samples:
        shard = (Path(pack.path) / sample.shard).read_bytes()
        assert shard[sample.offset :][: len(sample.image)] == sample.image


def test_a_remote_pack_is_read_by_few_ranges_and_images_alone(
    pack: SplitIndex, samples: list[EncodedSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in files_in(Path(pack.path)).items():
        CountingFileSystem().pipe(f"/bucket/parquet/{name}", data)
    reader = ParquetReader("counting://bucket/parquet", "train", pack.digest)
    assert reader.read(np.arange(COUNT)[::-1]) == samples[::-1]
    CountingFileSystem.requests.clear()
    assert pickle.loads(pickle.dumps(reader)).read(np.array([3, 44])) == [samples[3], samples[44]]
    requests = [request for request in CountingFileSystem.requests if request[0].endswith(pack.shards)]
    assert len(requests) == 6  # a footer, a row group's annotations and an image of two shards
    read = sum(end - start for _, start, end in requests)
    assert read < len(samples[3].image) + len(samples[44].image) + 200_000
    monkeypatch.setattr("rfstream.dataset.parquet._TAIL", 9)  # the footer takes a second request
    assert pickle.loads(pickle.dumps(reader)).read(np.array([3])) == [samples[3]]


def test_what_a_reader_holds_is_bounded(shared_data: Path, tmp_path: Path) -> None:
    index = pack_here(shared_data / "bccd", tmp_path, per_shard=2, format="parquet")
    assert len(index.shards) == 103
    reader = ParquetReader(index.path, "train", index.digest)
    for _ in range(3):
        reader.read(np.random.default_rng(0).permutation(205))
    assert 0 < open_files(tmp_path) <= 33  # 32 shards and the table
    assert len(reader._footers._values) == 64
    del reader
    assert open_files(tmp_path) == 0


def test_equal_input_gives_equal_bytes(shared_data: Path, tmp_path: Path, pack: SplitIndex) -> None:
    again = pack_here(shared_data / "coco_cc", tmp_path, PER_SHARD, format="parquet")
    assert files_in(tmp_path) == files_in(Path(pack.path))
    assert again.shards[1] == f"train-{again.generation}-000001.parquet"


def test_a_pack_in_the_other_format_takes_the_place_of_the_former(
    shared_data: Path, tmp_path: Path, tar: SplitIndex, pack: SplitIndex
) -> None:
    shutil.copytree(tar.path, tmp_path / "pack")
    pack_here(shared_data / "coco_cc", tmp_path / "pack", PER_SHARD, format="parquet")
    assert files_in(tmp_path / "pack") == files_in(Path(pack.path))


def test_other_tools_open_the_shards(pack: SplitIndex, samples: list[EncodedSample], tmp_path: Path) -> None:
    datasets, duckdb, pandas = (pytest.importorskip(name) for name in ("datasets", "duckdb", "pandas"))
    files = [pack.shard_url(number) for number in range(len(pack.shards))]
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))
    written = datasets.Features.from_arrow_schema(pq.read_schema(files[0]))
    assert loaded.features == written
    assert loaded.features.arrow_schema.metadata[b"huggingface"] == pq.read_schema(files[0]).metadata[b"huggingface"]
    names = loaded.features["objects"]["category"].feature
    by_id = {category["id"]: category["name"] for category in pack.categories}
    for row, sample in zip(loaded, samples, strict=True):
        sidecar = json.loads(sample.sidecar)
        assert row["image"].size == (sample.width, sample.height) == (row["width"], row["height"])
        assert row["image_id"] == sidecar["image_id"]
        labels = [names.int2str(category) for category in row["objects"]["category"]]
        assert labels == [by_id[annotation["category_id"]] for annotation in sidecar["annotations"]]
        assert row["objects"]["bbox"] == [annotation["bbox"] for annotation in sidecar["annotations"]]
    query = f"select count(*), sum(len(objects.bbox)), sum(octet_length(image.bytes)) from read_parquet({files})"
    objects = sum(len(json.loads(s.sidecar)["annotations"]) for s in samples)
    assert duckdb.sql(query).fetchall()[0] == (COUNT, objects, sum(len(s.image) for s in samples))
    frame = pandas.read_parquet(files[0])
    assert [image["bytes"] for image in frame["image"]] == [s.image for s in samples[:PER_SHARD]]


def test_indexing_and_checking_find_what_packing_wrote(damaged: Path, pack: SplitIndex) -> None:
    before = files_in(damaged)
    report = check(str(damaged), progress=False)
    assert report.passed() and report.parts[0].images == COUNT
    for table in ("samples", "fragments"):
        (damaged / f"train-{pack.generation}.{table}.parquet").unlink()
    with pytest.raises(DatasetError, match="run `rfstream index"):
        read_index(str(damaged), "train").fragments()
    index_pack(str(damaged), "train")
    assert files_in(damaged) == before
    shutil.copy(damaged / pack.shards[0], damaged / "train-01234567-000003.parquet")
    os.truncate(damaged / pack.shards[0], 1000)
    kinds = [trait.name for trait in check(str(damaged), progress=False).parts[0].traits]
    assert {"damaged-shard", "unlisted-shard"} <= set(kinds)


def rewrite(shard: Path, change: Callable[[list[dict[str, Any]]], object], schema: pa.Schema | None = None) -> None:
    """Write a shard anew as it was but for ``change`` to its rows."""
    table = pq.read_table(shard)
    rows = table.to_pylist()
    change(rows)
    kept = {"use_dictionary": False, "compression": "NONE", "write_statistics": False}
    pq.write_table(pa.Table.from_pylist(rows, schema or table.schema), shard, **kept)


def first_objects(name: str, value: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda rows: rows[1]["objects"][name].__setitem__(0, value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda rows: rows[1].update(image_id=None), r"row 1: column 'image_id' is null"),
        (lambda rows: rows[1].update(objects=None), r"row 1: column 'objects.id' is null"),
        (
            lambda rows: rows[1]["image"].update(bytes=None),
            r"row 1: column 'image.bytes' is not where the sample",
        ),
        (lambda rows: rows[1]["objects"].update(bbox=None), r"row 1: column 'objects.bbox' is null"),
        (
            lambda rows: rows[1]["objects"]["area"].pop(),
            r"row 1: column 'objects.area' has \d+ entries, 'ob",
        ),
        (first_objects("bbox", None), r"row 1: column 'objects.bbox' holds"),
        (first_objects("category", None), r"row 1: column 'objects.category' holds a null"),
        (first_objects("category", 80), r"row 1: column 'objects.category' holds 80, and there are 80 categories"),
        (first_objects("category", -1), r"row 1: column 'objects.category' holds -1"),
        (first_objects("other", "[1]"), r"row 1: column 'objects.other' holds something that is no JSON object"),
        (first_objects("other", "{"), r"row 1: column 'objects.other' holds something that is no JSON object"),
    ],
)
def test_a_row_that_can_not_be_understood_is_named(
    damaged: Path, pack: SplitIndex, samples: list[EncodedSample], change: Any, sentence: str
) -> None:
    shard = damaged / pack.shards[0]
    rewrite(shard, change)
    reader = ParquetReader(str(damaged), "train", pack.digest)
    with pytest.raises(SampleError, match=rf"^{shard}: {sentence}.*copy or (pack|write) it again"):
        reader.read(np.array([30, 1]))
    assert reader.read(np.array([30])) == [samples[30]]


def without(schema: pa.Schema, column: str) -> pa.Schema:
    return schema.remove(schema.get_field_index(column))


def with_objects(schema: pa.Schema, **types: pa.DataType | None) -> pa.Schema:
    kept = [(f.name, types.get(f.name, f.type)) for f in schema.field("objects").type]
    objects = pa.struct([(name, kind) for name, kind in kept if kind is not None])
    return schema.set(schema.get_field_index("objects"), pa.field("objects", objects))


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (lambda s: without(s, "image"), "column 'image.bytes' is absent"),
        (lambda s: without(s, "objects"), "column 'objects.id' is absent"),
        (lambda s: with_objects(s, bbox=None), "column 'objects.bbox' is absent"),
        (lambda s: with_objects(s, other=None), "column 'objects.other' is absent"),
        (lambda s: with_objects(s, area=pa.list_(pa.string())), r"column 'objects.area' is list<.*string>, not list<"),
        (lambda s: with_objects(s, bbox=pa.list_(pa.float64())), r"column 'objects.bbox' is list<.*double>, not list<"),
        (lambda s: with_objects(s, category=pa.list_(pa.float64())), "column 'objects.category' is list<"),
    ],
)
def test_a_column_that_is_absent_or_of_another_type_is_named(
    damaged: Path, pack: SplitIndex, schema: Any, sentence: str
) -> None:
    shard = damaged / pack.shards[0]
    changed = schema(pq.read_schema(shard))
    rows = [{"image_id": 1, "image": {"bytes": b"", "path": ""}}] * PER_SHARD
    pq.write_table(pa.Table.from_pylist(rows, changed), shard)
    with pytest.raises(DatasetError, match=rf"^{shard}: {sentence}.*; copy or write it again"):
        ParquetReader(str(damaged), "train", pack.digest).read(np.array([0]))


@pytest.mark.parametrize("keep", [0, 3, 1000, -1, -5000])
def test_a_cut_shard_is_named(damaged: Path, pack: SplitIndex, keep: int) -> None:
    shard = damaged / pack.shards[0]
    os.truncate(shard, keep if keep >= 0 else shard.stat().st_size + keep)
    with pytest.raises(DatasetError, match=rf"^{shard}: not whole Parquet data \(.*\); copy or write it again"):
        ParquetReader(str(damaged), "train", pack.digest).read(np.array([0]))


def test_bytes_that_changed_are_noticed(damaged: Path, pack: SplitIndex) -> None:
    shard = damaged / pack.shards[0]
    metadata = pq.read_metadata(shard)
    column = next(
        metadata.row_group(0).column(i)
        for i in range(metadata.num_columns)
        if metadata.row_group(0).column(i).path_in_schema.startswith("objects.bbox")
    )
    data = bytearray(shard.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    shard.write_bytes(data)
    with pytest.raises(DatasetError, match=rf"^{shard}: row group 0: not whole Parquet data"):
        ParquetReader(str(damaged), "train", pack.digest).read(np.array([0]))


def test_another_shard_in_its_place_is_noticed(damaged: Path, pack: SplitIndex) -> None:
    shutil.copy(damaged / pack.shards[2], damaged / pack.shards[0])
    with pytest.raises(DatasetError, match=r"samples.parquet: shard 0: has 20 rows, and .*000000.parquet 15; run"):
        ParquetReader(str(damaged), "train", pack.digest).read(np.array([0]))
    shutil.copy(damaged / pack.shards[1], damaged / pack.shards[0])
    with pytest.raises(SampleError, match=r"000000.parquet: row 1: column 'image.bytes' is not where the sample table"):
        ParquetReader(str(damaged), "train", pack.digest).read(np.array([1]))
    (damaged / pack.shards[0]).unlink()
    with pytest.raises(DatasetError, match=r"000000.parquet: the shard can't be read \(No such file"):
        ParquetReader(str(damaged), "train", pack.digest).read(np.array([0]))


def test_an_index_of_two_formats_is_refused(damaged: Path) -> None:
    file = damaged / "train-index.json"
    index = json.loads(file.read_text())
    index["shards"][1] = "train-00000000-000001.tar"
    file.write_text(json.dumps(index))
    with pytest.raises(DatasetError, match="lists Parquet files and others"):
        read_index(str(damaged), "train")


@pytest.mark.usefixtures("ray_session")
def test_the_command_packs_the_same_bytes(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "coco_cc"
    command = ["pack", str(source), str(tmp_path / "a"), "--splits", "train", "--format", "parquet", "--no-progress"]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    pack_here(source, tmp_path / "b", COUNT, format="parquet")
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")


def ledger(path: str, assembly: str) -> pa.Table:
    config = Config(
        data={"path": path},
        stream={"batch_size": 4, "grad_accum": 2, "timeout_s": 300, "assembly": assembly, "block_bytes": "9MB"},
        decode={"actors": (1, 1), "masks": True},
        augment={"cpu": {"transform": "tests.pipelines:crop_flip_jitter"}},
    )
    return make_ledger(config, epochs=1, world_size=1)


@pytest.mark.usefixtures("ray_session")
def test_the_staged_ledger_is_the_fused_one_of_the_tar_pack(tar: SplitIndex, pack: SplitIndex) -> None:
    reference = ledger(tar.path, "fused")
    assert len(reference) == 56
    assert first_difference(reference, ledger(pack.path, "staged")) is None

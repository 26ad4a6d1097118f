"""Parquet that ``datasets`` and others wrote, indexed where it lies and read as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import files_in, pack_here
from test_dataset_tar import CountingFileSystem
from typer.testing import CliRunner

from rfstream.cli import app
from rfstream.config import Config
from rfstream.dataset.foreign import index_foreign
from rfstream.dataset.index import SplitIndex, read_index
from rfstream.dataset.pack import index_pack
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.reader import EncodedSample
from rfstream.dataset.tar import TarReader
from rfstream.errors import DatasetError, SampleError
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.source import PackReaderSpec, reader_of
from rfstream.tools.check import check
from rfstream.tools.ledger import make_ledger

COUNT, PER_GROUP = 55, 7
RENAMED = {"image": "img", "objects.bbox": "objects.boxes", "objects.category": "objects.label"}


@pytest.fixture(scope="module")
def originals(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[EncodedSample]:
    """coco_cc's training split as the tar pack has it."""
    index = pack_here(shared_data / "coco_cc", tmp_path_factory.mktemp("tar"), COUNT)
    return TarReader(index.path, "train", index.digest).read(np.arange(COUNT))


@pytest.fixture(scope="module")
def names(shared_data: Path) -> dict[int, str]:
    document = json.loads((shared_data / "coco_cc" / "train" / "_annotations.coco.json").read_text())
    return {category["id"]: category["name"] for category in document["categories"]}


def rows_of(samples: list[EncodedSample], names: dict[int, str]) -> list[dict[str, Any]]:
    """What a user of ``datasets`` would make of the samples: areas, crowds and polygons are left out."""
    place = {number: at for at, number in enumerate(names)}
    rows = []
    for sample in samples:
        annotations = json.loads(sample.sidecar)["annotations"]
        rows.append(
            {
                "image": {"bytes": sample.image, "path": None},
                "image_id": sample.row + 100,
                "objects": {
                    "bbox": [annotation["bbox"] for annotation in annotations],
                    "category": [place[annotation["category_id"]] for annotation in annotations],
                },
            }
        )
    return rows


@pytest.fixture(scope="module")
def written(originals: list[EncodedSample], names: dict[int, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files as ``datasets`` writes them, with 32-bit boxes, as most on the Hub have."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("hub")
    boxes = datasets.List(datasets.List(datasets.Value("float32"), length=4))
    labels = datasets.List(datasets.ClassLabel(names=list(names.values())))
    features = datasets.Features(
        {"image": datasets.Image(), "image_id": datasets.Value("int64"), "objects": {"bbox": boxes, "category": labels}}
    )
    rows = rows_of(originals, names)
    for number, part in enumerate((rows[:30], rows[30:])):
        file = folder / f"train-{number:05d}-of-00002.parquet"
        datasets.Dataset.from_list(part, features=features).to_parquet(file, batch_size=PER_GROUP)
    return folder


@pytest.fixture(scope="module")
def index(written: Path, tmp_path_factory: pytest.TempPathFactory) -> SplitIndex:
    return index_foreign(str(written), "train", str(tmp_path_factory.mktemp("index")), {})


def reader(index: SplitIndex) -> ParquetReader:
    return ParquetReader(index.path, index.split, index.digest, index.shards_at)


def assert_as_the_originals(index: SplitIndex, originals: list[EncodedSample], names: dict[int, str]) -> None:
    by_label = {label: name for name, label in zip(index.class_names(), index.label_of(), strict=True)}
    for sample, original in zip(reader(index).read(np.arange(COUNT)), originals, strict=True):
        assert (sample.image, sample.row, sample.key) == (original.image, original.row, original.key)
        ours, theirs = (json.loads(s.sidecar)["annotations"] for s in (sample, original))
        assert [by_label[a["category_id"]] for a in ours] == [names[a["category_id"]] for a in theirs]
        assert np.array_equal(*(np.array([a["bbox"] for a in side], dtype=np.float32) for side in (ours, theirs)))
        assert all(a["area"] == a["bbox"][2] * a["bbox"][3] for a in ours)


def test_what_datasets_wrote_is_read_as_it_is(
    written: Path, index: SplitIndex, originals: list[EncodedSample], names: dict[int, str]
) -> None:
    assert [Path(shard).name for shard in index.shards] == sorted(path.name for path in written.iterdir())
    groups = [pq.ParquetFile(index.shard_url(number)).num_row_groups for number in (0, 1)]
    assert groups == [5, 4] and len(index.fragments()) == 9
    assert index.class_names() == list(names.values())
    assert_as_the_originals(index, originals, names)
    first = json.loads(reader(index).read(np.array([3]))[0].sidecar)
    assert (first["image_id"], first["file_name"]) == (103, "")


@settings(deadline=None, max_examples=20)
@given(rows=st.lists(st.integers(0, COUNT - 1), max_size=20))
def test_any_rows_come_in_the_order_asked_for(
    index: SplitIndex, originals: list[EncodedSample], rows: list[int]
) -> None:
    found = reader(index).read(np.array(rows, dtype=np.int64))
    assert [sample.image for sample in found] == [originals[row].image for row in rows]


def test_columns_of_other_names_in_one_large_compressed_row_group(
    originals: list[EncodedSample], names: dict[int, str], tmp_path: Path
) -> None:
    rows = [
        {
            "img": row["image"]["bytes"],
            "objects": {"boxes": row["objects"]["bbox"], "label": row["objects"]["category"]},
            "image_id": f"{number}.jpg",
        }
        for number, row in enumerate(rows_of(originals, names))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "all.parquet", compression="snappy")
    command = ["index", f"{tmp_path}/a*.parquet", "train", "--output", str(tmp_path / "index")]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, DatasetError)
    assert "column 'image.bytes' is absent; say which to take with --columns image=NAME (it has img, objects," in str(
        refused.exception
    )
    named = ",".join(f"{name}={column}" for name, column in RENAMED.items())
    done = CliRunner().invoke(app, [*command, "--columns", named])
    assert done.output == f"55 samples in 1 files: data.path={tmp_path}/index data.shards={tmp_path}\n"
    index = read_index(str(tmp_path / "index"), "train", str(tmp_path))
    assert index.fragments().nbytes.tolist() == [pytest.approx(9.1e6, rel=0.2)]  # larger than a fragment of ours
    used = max(a["category_id"] for s in originals for a in json.loads(s.sidecar)["annotations"])
    numbers = {number: str(at) for at, number in enumerate(names) if number <= used}
    assert index.class_names() == list(numbers.values())  # the file does not name them
    assert_as_the_originals(index, originals, numbers)
    ids = [json.loads(sample.sidecar)["image_id"] for sample in reader(index).read(np.arange(COUNT))]
    assert ids == list(range(COUNT))  # texts are no ids


def test_remote_files_with_a_local_index(
    written: Path, index: SplitIndex, originals: list[EncodedSample], tmp_path: Path
) -> None:
    for name, data in files_in(written).items():
        CountingFileSystem().pipe(f"/hub/data/{name}", data)
    CountingFileSystem.requests.clear()
    remote = index_foreign("counting://hub/data", "train", str(tmp_path), {})
    assert sum(end - start for _, start, end in CountingFileSystem.requests) < 100_000  # no image among them
    assert (remote.shards, remote.digest, remote.shards_at) == (index.shards, index.digest, "counting://hub/data")
    assert [s.image for s in reader(remote).read(np.arange(COUNT))] == [s.image for s in originals]
    CountingFileSystem.requests.clear()
    reader(remote).read(np.array([1, 2, 40]))
    assert len(CountingFileSystem.requests) == 6  # two footers, and images and the rest of two row groups
    config = Config(data={"path": str(tmp_path), "shards": "counting://hub/data"})
    pipeline = build_pipeline(config, "train", 1, training=True)
    assert not pipeline.fused
    assert reader_of(pipeline.reader).read(np.array([5]))[0].image == originals[5].image


def test_an_index_does_not_say_where_shards_are(index: SplitIndex, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"train-00000-of-00002.parquet: the shard can't be read"):
        ParquetReader(index.path, "train", index.digest).read(np.array([0]))
    document = json.loads((Path(index.path) / "train-index.json").read_text())
    document["shards"][0] = "/etc/passwd.parquet"
    (tmp_path / "train-index.json").write_text(json.dumps(document))
    with pytest.raises(DatasetError, match="is absolute or leaves its folder"):
        read_index(str(tmp_path), "train", index.shards_at)


@pytest.mark.parametrize("columns", [{}, {"image.bytes": "image.bytes"}, {"objects.bbox": "objects.bbox", "a": "b"}])
def test_an_index_with_odd_columns_is_refused(index: SplitIndex, tmp_path: Path, columns: dict[str, str]) -> None:
    for name, data in files_in(Path(index.path)).items():
        (tmp_path / name.replace(index.generation, "0" * 8)).write_bytes(data)
    document = json.loads((tmp_path / "train-index.json").read_text()) | {"columns": columns}
    (tmp_path / "train-index.json").write_text(json.dumps(document))
    changed = read_index(str(tmp_path), "train", index.shards_at)
    for table in tmp_path.glob("*.parquet"):
        table.rename(str(table).replace("0" * 8, changed.generation))
    with pytest.raises(DatasetError, match="that the index names are not those of the convention"):
        reader(changed).read(np.array([0]))


def test_indexing_again_replaces_tables_and_packing_leaves_the_files(
    written: Path, shared_data: Path, tmp_path: Path
) -> None:
    files = files_in(written)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    first = index_foreign(str(tmp_path), "train", str(tmp_path), {})
    assert first.shards_at == first.path == str(tmp_path)
    (tmp_path / first.shards[1]).unlink()
    second = index_foreign(str(tmp_path), "train", str(tmp_path), {})
    assert second.num_samples == 30 and second.digest != first.digest
    tables = {f"train-{second.generation}.{table}.parquet" for table in ("samples", "fragments")}
    assert set(files_in(tmp_path)) == {*second.shards, "train-index.json", *tables}
    with pytest.raises(DatasetError, match=r"did not write; run `rfstream index FILES train --output .*` again"):
        index_pack(str(tmp_path), "train")
    with pytest.raises(DatasetError, match="split 'train' has shards that rfstream did not write"):
        check(str(tmp_path), progress=False)
    pack_here(shared_data / "coco_cc", tmp_path, COUNT)
    assert (tmp_path / first.shards[0]).read_bytes() == files[first.shards[0]]
    with pytest.raises(DatasetError, match="holds a pack of split 'train'; give another folder"):
        index_foreign(str(tmp_path / "train-0*.parquet"), "train", str(tmp_path), {})


def test_an_empty_row_group_is_passed_over(written: Path, tmp_path: Path) -> None:
    table = pq.read_table(written / "train-00000-of-00002.parquet")
    with pq.ParquetWriter(tmp_path / "train.parquet", table.schema) as writer:
        for part in (table.slice(0, 2), table.slice(0, 0), table.slice(2, 3)):
            writer.write_table(part)
    index = index_foreign(str(tmp_path), "train", str(tmp_path / "index"), {})
    assert (len(index.fragments()), index.num_samples) == (2, 5)
    assert [s.image for s in reader(index).read(np.arange(5))] == [i["bytes"] for i in table["image"][:5].to_pylist()]


def change(written: Path, to: Path, edit: Callable[[pa.Table], pa.Table]) -> Path:
    """The first file with another content."""
    file = to / "train-0.parquet"
    table = pq.read_table(written / "train-00000-of-00002.parquet")
    pq.write_table(edit(table), file)
    return file


def with_row(**cells: Any) -> Callable[[pa.Table], pa.Table]:
    def edit(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        rows[2] |= cells
        return pa.Table.from_pylist(rows, table.schema)

    return edit


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda t: t.drop(["objects"]),
            r"column 'objects.bbox' is absent; say which to take with --columns objects.bbox",
        ),
        (with_row(objects=None), r"row 2: column 'objects.bbox' is null"),
        (with_row(objects={"bbox": [[1, 2, 3, 4]], "category": [80]}), "'objects.category' holds 80, and there are 80"),
        (lambda t: t.slice(0, 0), r"holds no samples; leave it out"),
    ],
)
def test_files_that_can_not_be_understood_are_refused(
    written: Path, tmp_path: Path, edit: Callable[[pa.Table], pa.Table], sentence: str
) -> None:
    file = change(written, tmp_path, edit)
    with pytest.raises(DatasetError, match=rf"^{file}: .*{sentence}"):
        index_foreign(str(tmp_path), "train", str(tmp_path / "index"), {})
    assert not (tmp_path / "index").exists()


def test_labels_as_text_are_refused(written: Path, tmp_path: Path) -> None:
    def texts(table: pa.Table) -> pa.Table:
        rows = [row | {"objects": {"bbox": [], "category": ["cat"]}} for row in table.to_pylist()]
        return pa.Table.from_pylist(rows)

    file = change(written, tmp_path, texts)
    with pytest.raises(DatasetError, match=rf"^{file}: column 'objects.(bbox|category)' is list<.*>, not list<"):
        index_foreign(str(tmp_path), "train", str(tmp_path / "index"), {})


def test_images_that_are_only_named_are_refused(written: Path, tmp_path: Path) -> None:
    file = change(written, tmp_path, with_row(image={"bytes": None, "path": "a.jpg"}))
    index = index_foreign(str(tmp_path), "train", str(tmp_path / "index"), {})
    with pytest.raises(SampleError, match=rf"^{file}: row 2: column 'image.bytes' is null: the file names its images"):
        reader(index).read(np.array([2]))


def test_what_is_not_there_is_said(written: Path, tmp_path: Path) -> None:
    for path in (str(written), f"{written}/test-*.parquet"):
        with pytest.raises(DatasetError, match=r"no file test-.*\(train-00000-of-00002.parquet, train-00001"):
            index_foreign(path, "test", str(tmp_path), {})
    with pytest.raises(DatasetError, match="can't be listed"):
        index_foreign(str(tmp_path / "nowhere"), "train", str(tmp_path), {})
    with pytest.raises(DatasetError, match="there is no column 'boxes' to name, only image, "):
        index_foreign(str(written), "train", str(tmp_path), {"boxes": "objects.bbox"})


@pytest.mark.usefixtures("ray_session")
def test_it_streams(index: SplitIndex) -> None:
    config = Config(
        data={"path": index.path, "shards": index.shards_at},
        stream={"batch_size": 5, "timeout_s": 300},
        decode={"actors": (1, 1)},
        augment={"cpu": {"transform": "tests.augmentations:resize", "args": {"size": 96}}},
    )
    table = make_ledger(config, epochs=1, world_size=1)
    assert sorted(table["key"].to_pylist()) == [f"{row:08d}" for row in range(COUNT)]
    assert reader_of(PackReaderSpec.of(index)) is reader_of(PackReaderSpec.of(index))

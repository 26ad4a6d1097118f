"""Reading samples by row: the tar's own bytes, in the order asked for, with few requests and bounded resources."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import files_in, pack_here

from rfstream.dataset.index import SplitIndex, read_index
from rfstream.dataset.reader import EncodedSample
from rfstream.dataset.tar import TarReader
from rfstream.errors import DatasetError, SampleError


class CountingFileSystem(MemoryFileSystem):
    """A remote store that lives in memory and records every range it is asked for."""

    protocol = "counting"
    store: dict = {}  # noqa: RUF012 - fsspec's own convention for what all instances share
    pseudo_dirs = [""]  # noqa: RUF012
    requests: list[tuple[str, int, int]] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("counting://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        if start is not None:
            self.requests.append((path, start, end))
        return super().cat_file(path, start, end, **kwargs)


fsspec.register_implementation("counting", CountingFileSystem, clobber=True)


@pytest.fixture(scope="module")
def pack(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SplitIndex:
    """bccd's training split, 205 small images in seven shards."""
    return pack_here(shared_data / "bccd", tmp_path_factory.mktemp("tar") / "pack", per_shard=32)


@pytest.fixture(scope="module")
def members(pack: SplitIndex) -> list[EncodedSample]:
    """All samples as tarfile reads them."""
    samples = []
    for shard in pack.shards:
        with tarfile.open(Path(pack.path) / shard) as tar:
            payload = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
            offset = {member.name: member.offset_data for member in tar}
        keys = sorted({name.split(".")[0] for name in payload})
        for key in keys:
            image, sidecar = payload[f"{key}.jpg"], payload[f"{key}.json"]
            samples.append(EncodedSample(shard, key, image, sidecar, int(key), offset[f"{key}.jpg"], 640, 480))
    return samples


@pytest.fixture(scope="module")
def remote(pack: SplitIndex) -> str:
    for name, data in files_in(Path(pack.path)).items():
        CountingFileSystem().pipe(f"/bucket/pack/{name}", data)
    return "counting://bucket/pack"


@pytest.fixture
def damaged(pack: SplitIndex, tmp_path: Path) -> Path:
    """A copy of the pack to damage."""
    shutil.copytree(pack.path, tmp_path / "pack")
    return tmp_path / "pack"


def open_files(folder: Path) -> int:
    """How many files in ``folder`` this process has open."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += link.readlink().is_relative_to(folder)
    return found


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 204), max_size=40))
def test_any_rows_are_the_tars_own_members(pack: SplitIndex, members: list[EncodedSample], rows: list[int]) -> None:
    expected = [members[row] for row in rows]
    assert TarReader(pack.path, "train", pack.digest).read(np.array(rows, dtype=np.int64)) == expected


@pytest.mark.parametrize("kind", ["path", "file", "remote"])
def test_a_pack_reads_alike_wherever_it_lies(
    pack: SplitIndex, members: list[EncodedSample], remote: str, kind: str
) -> None:
    path = {"path": pack.path, "file": f"file://{pack.path}", "remote": remote}[kind]
    assert read_index(path, "train").digest == pack.digest
    assert read_index(path, "train").fragments().total == 205
    rows = np.random.default_rng(0).permutation(205)
    assert TarReader(path, "train", pack.digest).read(rows) == [members[row] for row in rows]


def requests_for(remote: str, digest: str, rows: list[int]) -> list[tuple[str, int, int]]:
    reader = TarReader(remote, "train", digest)
    reader.read(np.array([0]))  # index and tables
    CountingFileSystem.requests.clear()
    reader.read(np.array(rows))
    return list(CountingFileSystem.requests)


def test_neighbours_are_one_request(pack: SplitIndex, remote: str) -> None:
    assert len(requests_for(remote, pack.digest, list(range(16)))) == 1
    assert len(requests_for(remote, pack.digest, [15, 3, 7, 3, 0, 8])) <= 3
    # Over the edge of a shard: one request each.
    assert len(requests_for(remote, pack.digest, list(range(24, 40)))) == 2
    # The two ends of one shard are farther apart than a request is worth.
    assert len(requests_for(remote, pack.digest, [0, 31])) == 2
    assert requests_for(remote, pack.digest, []) == []


def test_a_request_spans_what_it_needs_and_no_more_than_the_limit(
    pack: SplitIndex, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rfstream.dataset.reader._MAX_READ", 100_000)
    requests = requests_for(remote, pack.digest, list(range(205)))
    assert max(end - start for _, start, end in requests) <= 100_000
    samples = TarReader(remote, "train", pack.digest).read(np.arange(205))
    wanted = sum(len(sample.image) + len(sample.sidecar) for sample in samples)
    assert wanted <= sum(end - start for _, start, end in requests) <= 1.1 * wanted


def test_it_pickles_to_a_few_strings(pack: SplitIndex, members: list[EncodedSample]) -> None:
    reader = TarReader(pack.path, "train", pack.digest)
    reader.read(np.arange(205))
    data = pickle.dumps(reader)
    assert len(data) < 1000
    assert pickle.loads(data).read(np.array([100])) == [members[100]]


def test_open_files_do_not_grow(shared_data: Path, tmp_path: Path) -> None:
    index = pack_here(shared_data / "bccd", tmp_path, per_shard=3)
    assert len(index.shards) == 69
    reader = TarReader(index.path, "train", index.digest)
    rng = np.random.default_rng(0)
    for _ in range(50):
        reader.read(rng.integers(0, 205, 16))
    assert 0 < open_files(tmp_path) <= 33  # 32 shards and the table
    del reader
    gc.collect()
    assert open_files(tmp_path) == 0


def test_a_truncated_shard_names_shard_and_key(damaged: Path, pack: SplitIndex, members: list[EncodedSample]) -> None:
    shard = damaged / pack.shards[1]
    os.truncate(shard, 200_000)
    reader = TarReader(str(damaged), "train", pack.digest)
    assert reader.read(np.array([32, 33, 64])) == [members[32], members[33], members[64]]
    with pytest.raises(SampleError, match=rf"{shard}: sample 000000\d\d ends at byte \d+ but the shard before that"):
        reader.read(np.arange(32, 64))
    with pytest.raises(SampleError, match=r"sample 00000063 ends at byte \d+ but the shard before"):
        reader.read(np.array([63]))


def test_an_absent_shard_is_named(damaged: Path, pack: SplitIndex) -> None:
    (damaged / pack.shards[2]).unlink()
    with pytest.raises(DatasetError, match=rf"{damaged / pack.shards[2]}: the shard can't be read \(No such file"):
        TarReader(str(damaged), "train", pack.digest).read(np.array([70]))


def test_an_absent_remote_shard_is_named(pack: SplitIndex, remote: str) -> None:
    fs = CountingFileSystem()
    fs.copy("/bucket/pack", "/bucket/other", recursive=True)
    fs.rm(f"/bucket/other/{pack.shards[2]}")
    with pytest.raises(DatasetError, match=rf"counting://bucket/other/{pack.shards[2]}: can't be read"):
        TarReader("counting://bucket/other", "train", pack.digest).read(np.array([70]))


def test_rows_that_are_not_there_are_refused(pack: SplitIndex) -> None:
    for row in (-1, 205):
        with pytest.raises(DatasetError, match="has rows 0 to 204, not"):
            TarReader(pack.path, "train", pack.digest).read(np.array([0, row]))


def test_a_pack_that_changed_is_refused(pack: SplitIndex) -> None:
    with pytest.raises(DatasetError, match="was packed again since this run began"):
        TarReader(pack.path, "train", "0" * 16).read(np.array([0]))


def rewrite(folder: Path, index: SplitIndex, **columns: object) -> None:
    """Replace columns of the sample table, keeping its row groups."""
    path = folder / f"train-{index.generation}.samples.parquet"
    file = pq.ParquetFile(path)
    groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    with pq.ParquetWriter(path, file.schema_arrow) as writer:
        for group in groups:
            for name, value in columns.items():
                at = group.schema.get_field_index(name)
                field = group.schema.field(at)
                group = group.set_column(at, field, pa.array([value] * len(group), field.type))
            writer.write_table(group)


@pytest.mark.parametrize(
    ("columns", "error", "sentence"),
    [
        ({"image_offset": -5}, DatasetError, "a negative offset or size; run `rfstream index"),
        ({"json_size": -1}, DatasetError, "a negative offset or size; run `rfstream index"),
        ({"json_size": 2**26 + 1}, SampleError, "tar: sample 00000000 has a JSON member of 67,108,865 bytes and"),
        ({"image_size": 2**62}, SampleError, "sample 00000000 ends at byte .* but the shard before"),
        ({"image_size": 2**63 - 1}, DatasetError, "a negative offset or size"),
        ({"json_offset": 2**40}, SampleError, "sample 00000000 ends at byte .* but the shard before"),
    ],
)
def test_a_damaged_table_is_refused(
    damaged: Path, pack: SplitIndex, columns: dict[str, int], error: type[Exception], sentence: str
) -> None:
    rewrite(damaged, pack, **columns)
    with pytest.raises(error, match=sentence):
        TarReader(str(damaged), "train", pack.digest).read(np.array([0]))


def table_files(damaged: Path, pack: SplitIndex) -> Iterator[Path]:
    for table in ("samples", "fragments"):
        yield damaged / f"train-{pack.generation}.{table}.parquet"


@pytest.mark.parametrize("keep", [0, 10, 1000])
def test_a_cut_table_is_refused(damaged: Path, pack: SplitIndex, keep: int) -> None:
    samples, fragments = table_files(damaged, pack)
    os.truncate(samples, keep)
    os.truncate(fragments, keep)
    with pytest.raises(DatasetError, match=r"samples.parquet: not a readable sample table"):
        TarReader(str(damaged), "train", pack.digest).read(np.array([0]))
    with pytest.raises(DatasetError, match=r"fragments.parquet: not a readable fragment table"):
        read_index(str(damaged), "train").fragments()


def test_tables_of_something_else_are_refused(damaged: Path, pack: SplitIndex) -> None:
    samples, fragments = table_files(damaged, pack)
    other = pa.table({"a": [1, 2, 3]})
    pq.write_table(other, samples)
    pq.write_table(other, fragments)
    with pytest.raises(DatasetError, match=r"the sample table of 'train' does not fit the index; run `rfstream index"):
        TarReader(str(damaged), "train", pack.digest).read(np.array([0]))
    with pytest.raises(DatasetError, match=r"fragments.parquet: not a readable fragment table \(.*first"):
        read_index(str(damaged), "train").fragments()

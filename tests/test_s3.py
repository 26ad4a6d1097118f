"""S3, as any other storage: packed to, indexed, streamed from over a bad line, cached, and refused in one sentence."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from packing import SMALL, files_in, in_bucket, pack_small
from s3 import BUCKET

from benchmarks.bad_storage import BadStorage, Line
from rfstream.config import Config
from rfstream.dataset import storage
from rfstream.dataset.index import read_index
from rfstream.dataset.pack import index_pack, pack
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.remote import call
from rfstream.dataset.tar import TarReader
from rfstream.errors import DatasetError
from rfstream.tools.ledger import first_difference, make_ledger

pytestmark = pytest.mark.usefixtures("ray_session")
BAD = Line(errors=0.02, broken=0.01, seed=5)
URL = f"s3://{BUCKET}/pack"


@pytest.fixture(scope="module")
def local(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack on this machine's disk."""
    folder = tmp_path_factory.mktemp("s3") / "local"
    pack_small(shared_data / "bccd", folder)
    return folder


@pytest.fixture(scope="module")
def packed(shared_data: Path, s3_bucket: BadStorage) -> str:
    """The same packed into the bucket over a bad line."""
    s3_bucket.requests.clear()
    s3_bucket.line = BAD
    pack(str(shared_data / "bccd"), URL, splits="train,valid:val", max_shard_bytes=SMALL, progress=False)
    s3_bucket.line = Line()
    assert s3_bucket.requests["error"] > 0
    return URL


@pytest.fixture
def line(s3_bucket: BadStorage) -> Iterator[BadStorage]:
    """The line to the bucket, which the test may spoil."""
    s3_bucket.requests.clear()
    yield s3_bucket
    s3_bucket.line, s3_bucket.mode = Line(), "well"


def version(url: str, name: str) -> str:
    """What S3 gives anew whenever an object is written."""
    return str(call(storage.join(url, name), 10.0, "info")["VersionId"])


def ledger(**data: object) -> pa.Table:
    stream = {"batch_size": 5, "block_bytes": "1MB", "timeout_s": 300}
    return make_ledger(Config(data=data, stream=stream, decode={"actors": (1, 1)}), epochs=1, world_size=1)


def test_a_pack_in_a_bucket_equals_the_local_one(local: Path, packed: str) -> None:
    assert in_bucket(packed) == files_in(local)


def test_an_epoch_over_a_bad_line_is_the_local_one_and_the_next_is_in_the_cache(
    local: Path, packed: str, line: BadStorage, tmp_path: Path
) -> None:
    cache = {"folder": str(tmp_path / "cache"), "bytes": "1GB"}
    line.line = BAD
    expected, streamed = ledger(path=str(local)), ledger(path=packed, cache=cache)
    assert first_difference(expected, streamed) is None
    assert line.requests["error"] > 0
    line.line, line.mode = Line(), "refuse"  # shards, not the index and the tables
    assert first_difference(expected, ledger(path=packed, cache=cache)) is None
    assert line.requests["refuse"] == 0


@pytest.mark.parametrize("bad", [Line(errors=0.3), Line(broken=0.3)], ids=["errors", "broken"])
def test_reads_are_tried_again(local: Path, packed: str, line: BadStorage, bad: Line) -> None:
    rows = np.random.default_rng(0).permutation(205)
    line.line = bad
    index = read_index(packed, "train")
    assert TarReader(packed, "train", index.digest).read(rows) == TarReader(str(local), "train", index.digest).read(
        rows
    )
    assert line.requests["error"] + line.requests["break off"] > 5


def test_a_pack_that_was_cut_short_goes_on_where_it_was(shared_data: Path, local: Path, line: BadStorage) -> None:
    url, files = f"s3://{BUCKET}/cut", files_in(local)
    done = sorted(name for name in files if name.endswith(".tar"))[:7]
    for name in done:
        storage.upload(local / name, storage.join(url, name))
    written = {name: version(url, name) for name in done}
    pack(str(shared_data / "bccd"), url, splits="train,valid:val", max_shard_bytes=SMALL, progress=False)
    assert in_bucket(url) == files
    assert {name: version(url, name) for name in done} == written, "a finished shard was uploaded again"


def test_a_pack_without_tables_is_indexed_and_what_is_dead_removed(
    shared_data: Path, local: Path, tmp_path: Path, line: BadStorage
) -> None:
    url, files = f"s3://{BUCKET}/bare", files_in(local)
    for name in [name for name in files if not name.endswith(".parquet")]:
        storage.upload(local / name, storage.join(url, name))
    rows = np.random.default_rng(0).permutation(205)
    indexed, expected = (
        [(sample.key, sample.image, sample.sidecar) for sample in TarReader(path, "train", index.digest).read(rows)]
        for path, index in ((url, index_pack(url, "train")), (str(local), read_index(str(local), "train")))
    )
    assert indexed == expected
    options = {"splits": "train,valid:val", "max_shard_bytes": SMALL, "format": "parquet", "progress": False}
    pack(str(shared_data / "bccd"), str(tmp_path / "parquet"), **options)
    pack(str(shared_data / "bccd"), url, clean=True, **options)
    assert in_bucket(url) == files_in(tmp_path / "parquet")
    digest = read_index(url, "train").digest
    as_written = ParquetReader(str(tmp_path / "parquet"), "train", digest).read(rows)
    assert ParquetReader(url, "train", digest).read(rows) == as_written


def test_what_it_refuses_or_lacks_is_one_sentence(shared_data: Path, packed: str, line: BadStorage) -> None:
    with pytest.raises(DatasetError, match=r"s3://absent/pack/\S+: can't be written \(there is no such bucket"):
        pack(str(shared_data / "bccd"), "s3://absent/pack", splits="train", progress=False)
    with pytest.raises(DatasetError, match="does not exist: no split 'test' is packed there"):
        read_index(packed, "test")
    index = read_index(packed, "train")
    line.mode = "refuse"
    line.requests.clear()
    with pytest.raises(DatasetError, match=r"access was refused \(403 Forbidden\); set AWS credentials"):
        TarReader(packed, "train", index.digest).read(np.array([3]))
    assert line.requests["refuse"] == 1


def test_a_server_that_is_down_is_given_up_at_the_deadline(
    packed: str, line: BadStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.mode = "error"
    reader = TarReader(packed, "train", read_index(packed, "train").digest, deadline_s=5.0)
    began = time.monotonic()
    with pytest.raises(DatasetError, match=r"\.tar: can't be read .*: \d+ tries in \d+\.\d s, the last: 503 Service"):
        reader.read(np.array([3]))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with pytest.raises(DatasetError, match=r"can't be read: \d+ tries in \d+\.\d s, the last: Could not connect"):
            read_index(packed, "train", deadline_s=5.0)
    assert time.monotonic() - began < 60
    fsspec.get_filesystem_class("s3").clear_instance_cache()

"""Packing straight into a bucket: the bytes of a local pack, over a bad line, killed and resumed, and cleaned up."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcs import BUCKET
from packing import SMALL, files_in, in_bucket, pack_small, start_job

from benchmarks.bad_storage import BadStorage, Line
from benchmarks.killing import kill_worker
from rfstream.dataset import storage
from rfstream.dataset.index import read_index
from rfstream.dataset.pack import pack
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.publish import remove_dead
from rfstream.dataset.remote import call
from rfstream.errors import DatasetError

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def local(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The local pack that those in the bucket have to equal."""
    return pack_small(shared_data / "bccd", tmp_path_factory.mktemp("local"))


@pytest.fixture
def line(bucket: BadStorage) -> Iterator[BadStorage]:
    bucket.requests.clear()
    yield bucket
    bucket.line, bucket.mode = Line(), "well"


def test_a_pack_in_a_bucket_equals_the_local_one(shared_data: Path, local: dict[str, bytes], line: BadStorage) -> None:
    url = f"gs://{BUCKET}/whole"
    line.line = Line(errors=0.02, broken=0.01, seed=3)
    indexes = pack(str(shared_data / "bccd"), url, splits="train,valid:val", max_shard_bytes=SMALL, progress=False)
    assert [index.num_samples for index in indexes] == [205, 87]
    assert line.requests["error"] + line.requests["break off"] > 0
    line.line = Line()
    assert in_bucket(url) == local


def test_parquet_goes_into_a_bucket_as_onto_a_disk(shared_data: Path, tmp_path: Path, line: BadStorage) -> None:
    url, source = f"gs://{BUCKET}/parquet", str(shared_data / "bccd")
    options: Any = {"splits": "valid:val", "max_shard_bytes": SMALL, "format": "parquet", "progress": False}
    pack(source, str(tmp_path / "pack"), **options)
    (index,) = pack(source, url, **options)
    assert in_bucket(url) == files_in(tmp_path / "pack")
    rows = np.random.default_rng(0).permutation(87)
    local = ParquetReader(str(tmp_path / "pack"), "val", index.digest)
    assert ParquetReader(url, "val", index.digest).read(rows) == local.read(rows)
    written = {name: _generation(url, name) for name in index.shards}
    pack(source, url, clean=True, **options)
    assert in_bucket(url) == files_in(tmp_path / "pack")
    assert {name: _generation(url, name) for name in index.shards} == written
    # In the other format it is another generation, since the shards' digests are others.
    pack(source, url, **{**options, "format": "tar", "clean": True})
    assert not any(name in in_bucket(url) for name in index.shards)


def test_a_pack_killed_three_times_goes_on_where_it_was(
    shared_data: Path, local: dict[str, bytes], line: BadStorage
) -> None:
    url, source = f"gs://{BUCKET}/killed", str(shared_data / "bccd")
    line.line = Line(latency_s=0.2)
    for shards in (1, 8):
        job = start_job(source, url, "--splits", "train,valid:val", "--max-shard-bytes", str(SMALL))
        deadline = time.monotonic() + 120
        while len(storage.sizes_in(url)) < shards:
            assert job.poll() is None, job.communicate()[1]
            assert time.monotonic() < deadline
        job.send_signal(signal.SIGKILL)
        job.wait()
    time.sleep(2)  # Ray's workers notice that their driver is gone
    done = storage.sizes_in(url)
    assert 8 <= len(done) < len(local) - 6  # without tables and indexes
    assert not [name for name in done if name.endswith(".json")]
    with pytest.raises(DatasetError, match="does not exist: no split 'train' is packed there"):
        read_index(url, "train")
    written = {name: _generation(url, name) for name in done}
    with ThreadPoolExecutor() as beside:
        killed = beside.submit(kill_worker, "_upload", 60.0)
        pack(source, url, splits="train,valid:val", max_shard_bytes=SMALL, progress=False)
        assert killed.result()
    line.line = Line()
    assert in_bucket(url) == local
    assert {name: _generation(url, name) for name in done} == written, "a finished shard was uploaded again"


def _generation(url: str, name: str) -> str:
    """What Cloud Storage numbers anew whenever an object is written."""
    return str(call(storage.join(url, name), 10.0, "info")["generation"])


@pytest.mark.parametrize("remote", [False, True])
def test_clean_removes_what_no_index_names(shared_data: Path, tmp_path: Path, line: BadStorage, remote: bool) -> None:
    where = f"gs://{BUCKET}/clean" if remote else str(tmp_path / "pack")
    mine = ["train-notes.txt", "test-20240101-000000.tar", "train-notes-01234567-000000.tar", "train-00000.parquet"]
    dead = ["train-01234567-000000.tar", "train-01234567-000001.parquet"]
    dead += ["train-89abcdef.samples.parquet", "val-01234567.fragments.parquet"]
    storage.make_folder(where)
    pack(str(shared_data / "bccd"), where, splits="train,valid:val", progress=False)
    former = set(storage.sizes_in(where))
    for name in [*mine, *dead]:
        with storage.replacing(storage.join(where, name)) as file:
            file.write(b"x")
    # Into a bucket packing again deletes nothing: who trains from the former generation goes on.
    pack(str(shared_data / "coco_cc"), where, splits="train", progress=False)
    assert (former < set(storage.sizes_in(where))) == remote
    pack(str(shared_data / "coco_cc"), where, splits="train", clean=True, progress=False)
    names = set(storage.sizes_in(where))
    assert set(mine) < names
    assert not names & set(dead)
    assert len(names) == len(mine) + 8
    assert read_index(where, "train").num_samples == 55
    assert read_index(where, "val").fragments().total == 87
    assert remove_dead(where) == []


def test_a_bucket_that_refuses_or_is_not_there_is_one_sentence(shared_data: Path, line: BadStorage) -> None:
    source = str(shared_data / "bccd")
    with pytest.raises(DatasetError, match=r"gs://absent/pack/\S+: can't be written \(there is no such bucket"):
        pack(source, "gs://absent/pack", splits="train", progress=False)
    line.mode = "refuse"
    with pytest.raises(DatasetError, match=r"\.tar: can't be written: access was refused .*gcloud auth"):
        pack(source, f"gs://{BUCKET}/refused", splits="train", progress=False)

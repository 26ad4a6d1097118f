"""Storage that fails, breaks off, stalls and refuses: tried again for a bounded time, and then one sentence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gcs import BUCKET
from hypothesis import given
from hypothesis import strategies as st
from packing import files_in, pack_here

from benchmarks.bad_storage import BadStorage, Line
from rfstream.config import load_config
from rfstream.dataset import storage
from rfstream.dataset.index import PackFormat, SplitIndex, read_index
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.tar import TarReader
from rfstream.errors import DatasetError
from rfstream.tools.scenes import make_scenes
from rfstream.train.run import train

DEMO = Path(__file__).resolve().parents[1] / "configs" / "train" / "demo.yaml"
BAD = Line(errors=0.04, broken=0.02, latency_s=0.01, bytes_per_s=50_000_000, seed=6)


@pytest.fixture(scope="module")
def pack(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SplitIndex:
    return pack_here(shared_data / "bccd", tmp_path_factory.mktemp("storage") / "pack", per_shard=2)


@pytest.fixture
def line(bucket: BadStorage) -> Iterator[BadStorage]:
    """The line to the bucket, which the test may spoil."""
    bucket.requests.clear()
    yield bucket
    bucket.line, bucket.mode = Line(), "well"


@pytest.fixture(scope="module")
def remote(pack: SplitIndex, bucket: BadStorage) -> str:
    """The same pack in the bucket."""
    return uploaded(Path(pack.path), f"gs://{BUCKET}/pack")


def uploaded(folder: Path, url: str) -> str:
    for name in files_in(folder):
        storage.upload(folder / name, storage.join(url, name))
    return url


@pytest.fixture
def web(pack: SplitIndex) -> Iterator[BadStorage]:
    """The same pack over HTTP."""
    with BadStorage(Path(pack.path)) as server:
        yield server


def test_the_demo_trains_from_a_bucket_over_a_bad_line_as_from_disk(
    tmp_path: Path, line: BadStorage, ray_session: None
) -> None:
    make_scenes(tmp_path / "scenes", train=80, val=8, seed=0)
    for split in ("train", "val"):
        pack_here(tmp_path / "scenes", tmp_path / "pack", per_shard=2, split=split)
    where = {"bucket": uploaded(tmp_path / "pack", f"gs://{BUCKET}/demo"), "disk": str(tmp_path / "pack")}
    line.line = BAD
    metrics = {}
    for name, path in where.items():
        changes = ["train.epochs=1", f"train.output={tmp_path / name}", "stream.block_bytes=1MB"]
        config = load_config(str(DEMO), [f"data.path={path}", *changes])
        trained = train(config)
        metrics[name] = {key: value for key, value in trained.items() if not key.startswith("time/")}
    assert min(line.requests["error"], line.requests["break off"]) > 0
    assert metrics["bucket"] == metrics["disk"]
    assert metrics["bucket"].keys() >= {"train/heat", "train/box", "val/mAP50"}


@pytest.mark.parametrize("bad", [Line(errors=0.3), Line(broken=0.3)], ids=["errors", "broken"])
def test_plain_http_is_tried_again(pack: SplitIndex, web: BadStorage, bad: Line) -> None:
    rows = np.random.default_rng(0).permutation(205)
    web.line = bad
    index = read_index(web.url, "train")
    assert index.fragments().total == 205
    assert TarReader(web.url, "train", index.digest).read(rows) == TarReader(pack.path, "train", pack.digest).read(rows)
    assert web.requests["error"] + web.requests["break off"] > 5


def test_parquet_over_http_is_tried_again(shared_data: Path, tmp_path: Path) -> None:
    pack = pack_here(shared_data / "bccd", tmp_path, per_shard=20, format="parquet")
    rows = np.random.default_rng(0).permutation(205)
    with BadStorage(tmp_path, Line(errors=0.2, broken=0.2, seed=1)) as web:
        remote = ParquetReader(web.url, "train", pack.digest, deadline_s=30.0)
        assert remote.read(rows) == ParquetReader(pack.path, "train", pack.digest).read(rows)
        assert min(web.requests["error"], web.requests["break off"]) > 2


@pytest.mark.parametrize("format", ["tar", "parquet"])
def test_a_storage_that_is_down_is_given_up_at_the_deadline(
    shared_data: Path, tmp_path: Path, format: PackFormat
) -> None:
    pack = pack_here(shared_data / "bccd", tmp_path, per_shard=2, format=format)
    with BadStorage(tmp_path) as web:
        kind = TarReader if format == "tar" else ParquetReader
        reader = kind(web.url, "train", pack.digest, deadline_s=1.0)
        reader.read(np.array([0]))
        web.mode = "error"
        began = time.monotonic()
        asked = r"\.tar: can't be read from byte \d+ to \d+" if format == "tar" else r"\d\.parquet: can't be read"
        with pytest.raises(DatasetError, match=rf"{asked}: \d+ tries in \d+\.\d s, the last: 503 Service Unavailable"):
            reader.read(np.array([3]))
        assert time.monotonic() - began < 20
        assert web.requests["error"] > 2


@pytest.mark.parametrize("where", ["gs", "http"])
def test_opening_waits_no_longer_than_its_deadline(remote: str, line: BadStorage, web: BadStorage, where: str) -> None:
    line.line = web.line = Line(latency_s=30)
    began = time.monotonic()
    with pytest.raises(
        DatasetError, match=r"train-index.json: can't be read: \d tries in \d+\.\d s, the last: no answer"
    ):
        read_index(remote if where == "gs" else web.url, "train", deadline_s=1.5)
    assert time.monotonic() - began < 25  # an answer takes 30


@pytest.mark.parametrize("where", ["gs", "http"])
def test_refused_access_is_not_tried_again(
    pack: SplitIndex, remote: str, line: BadStorage, web: BadStorage, where: str
) -> None:
    url, way, advice = {
        "gs": (remote, line, "log in with `gcloud auth application-default login`"),
        "http": (web.url.replace("//", "//me:secret@"), web, "give this machine credentials for it"),
    }[where]
    reader = TarReader(url, "train", pack.digest)
    reader.read(np.array([0]))
    way.mode = "refuse"
    with pytest.raises(DatasetError, match=rf"\.tar: can't be read .*: access was refused \(403 Forbid.*{advice}") as e:
        reader.read(np.array([3]))
    assert way.requests["refuse"] == 1
    assert "secret" not in str(e.value)


@pytest.mark.parametrize("where", ["gs", "http"])
def test_what_is_absent_is_not_tried_again(remote: str, line: BadStorage, web: BadStorage, where: str) -> None:
    url = remote if where == "gs" else web.url
    with pytest.raises(DatasetError, match=r"val-index.json does not exist: no split 'val' is packed there"):
        read_index(url, "val")
    with pytest.raises(DatasetError, match=r"none.tar: can't be read \(No such file"):
        storage.read_range(f"{url}/none.tar", 0, 10)
    assert (line if where == "gs" else web).requests.total() <= 4


SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)).map(lambda span: (span[0], sum(span))), max_size=20)


@given(SPANS, st.integers(0, 20))
def test_merged_spans_hold_all_and_little_more(spans: list[tuple[int, int]], max_gap: int) -> None:
    found = storage.merged(spans, max_gap)
    assert all(any(begin <= low and high <= end for begin, end in found) for low, high in spans)
    assert all(later - end > max_gap for (_, end), (later, _) in pairwise(found))
    wanted = {at for low, high in spans for at in range(low, high)}
    assert all(begin in {low for low, _ in spans} and end in {high for _, high in spans} for begin, end in found)
    assert all(wanted & set(range(at, at + max_gap + 1)) for begin, end in found for at in range(begin, end - max_gap))


def test_a_file_at_a_url_is_the_file(pack: SplitIndex, web: BadStorage) -> None:
    name = pack.shards[0]
    data = (Path(pack.path) / name).read_bytes()
    web.line = Line(errors=0.3)
    assert storage.read_range(str(Path(pack.path) / name), 700, 9000) == data[700:9000]
    with storage.open_binary(f"{web.url}/{name}") as file:
        assert file.read() == data
        assert file.read(1) == b""
        for begin, size in np.random.default_rng(0).integers(0, len(data), (20, 2)).tolist():
            file.seek(begin)
            assert file.read(size) == data[begin : begin + size]

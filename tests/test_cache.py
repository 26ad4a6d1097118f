"""The cache of shards on a node: no request for what it holds, never more than its bound, whoever dies."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from packing import ROOT, pack_here

from benchmarks.bad_storage import BadStorage, Line
from benchmarks.common import sampled
from rfstream.config import Config
from rfstream.dataset.cache import ShardCache
from rfstream.dataset.index import PackFormat, SplitIndex
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.tar import TarReader
from rfstream.tools.ledger import first_difference, make_ledger

ALL = np.random.default_rng(0).permutation(205)
READ_ALL = """
import hashlib, sys, numpy as np
from rfstream.dataset.cache import ShardCache
from rfstream.dataset.tar import TarReader
url, digest, folder, nbytes = sys.argv[1:]
samples = TarReader(url, "train", digest, cache=ShardCache(folder, int(nbytes))).read(np.arange(205))
print(hashlib.sha256(b"".join(sample.image for sample in samples)).hexdigest())
"""


@pytest.fixture(scope="module")
def pack(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SplitIndex:
    return pack_here(shared_data / "bccd", tmp_path_factory.mktemp("cache") / "pack", per_shard=20)


@pytest.fixture
def web(pack: SplitIndex) -> Iterator[BadStorage]:
    with BadStorage(Path(pack.path)) as server:
        yield server


def taken(folder: Path) -> int:
    nbytes = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # it went meanwhile
            nbytes += path.stat().st_size
    return nbytes


def sizes(pack: SplitIndex) -> list[int]:
    return [(Path(pack.path) / name).stat().st_size for name in pack.shards]


@pytest.mark.parametrize("format", ["tar", "parquet"])
def test_what_is_there_is_not_asked_for_again(shared_data: Path, tmp_path: Path, format: PackFormat) -> None:
    pack = pack_here(shared_data / "bccd", tmp_path / "pack", per_shard=20, format=format)
    kind = TarReader if format == "tar" else ParquetReader
    with BadStorage(Path(pack.path)) as web:
        reader = kind(web.url, "train", pack.digest, cache=ShardCache(str(tmp_path / "cache"), 10**9))
        expected = kind(pack.path, "train", pack.digest).read(ALL)
        assert reader.read(ALL) == expected
        assert taken(tmp_path / "cache") == sum(sizes(pack))
        web.requests.clear()
        assert reader.read(ALL[::-1]) == expected[::-1]
        assert web.requests.total() == 0


def test_a_parquet_pack_with_room_for_some_of_its_shards(shared_data: Path, tmp_path: Path) -> None:
    pack = pack_here(shared_data / "bccd", tmp_path / "pack", per_shard=20, format="parquet")
    expected = ParquetReader(pack.path, "train", pack.digest).read(ALL)
    with BadStorage(Path(pack.path)) as web:
        cache = ShardCache(str(tmp_path / "cache"), 3 * max(sizes(pack)))
        assert ParquetReader(web.url, "train", pack.digest, cache=cache).read(ALL) == expected
        assert taken(tmp_path / "cache") <= cache.nbytes


def test_it_keeps_to_its_bound_and_removes_what_was_used_longest_ago(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    for name in "abcd":
        (source / f"{name}.tar").write_bytes(name.encode() * 1000)
    cache = ShardCache(str(folder), 3500)
    with BadStorage(source) as server:

        def use(name: str) -> int:
            """Open and close a shard; how many requests that took."""
            server.requests.clear()
            descriptor = cache.open(f"{server.url}/{name}.tar", "digest", 10.0)
            assert descriptor is not None
            assert os.pread(descriptor, 2000, 0) == name.encode() * 1000
            os.close(descriptor)
            assert taken(folder) <= 3000
            return server.requests.total()

        assert [use(name) > 0 for name in "abcabc"] == [True, True, True, False, False, False]
        assert [use(name) > 0 for name in "ad"] == [False, True]
        assert [use(name) > 0 for name in "acdb"] == [False, False, False, True]


def test_a_shard_in_use_stays_and_others_are_read_where_they_are(
    pack: SplitIndex, web: BadStorage, tmp_path: Path
) -> None:
    reader = TarReader(web.url, "train", pack.digest, cache=ShardCache(str(tmp_path), max(sizes(pack))))
    expected = TarReader(pack.path, "train", pack.digest)
    assert reader.read(np.array([0])) == expected.read(np.array([0]))
    kept = list(tmp_path.glob("*.shard"))
    assert reader.read(np.arange(120)) == expected.read(np.arange(120))
    assert list(tmp_path.glob("*.shard")) == kept
    del reader
    other = TarReader(web.url, "train", pack.digest, cache=ShardCache(str(tmp_path), max(sizes(pack))))
    assert other.read(np.array([100])) == expected.read(np.array([100]))
    assert len(list(tmp_path.glob("*.shard"))) == 1
    assert list(tmp_path.glob("*.shard")) != kept


@pytest.mark.parametrize("room", [11, 3], ids="room for {} shards".format)
def test_who_dies_while_filling_leaves_it_to_the_next(
    pack: SplitIndex, web: BadStorage, tmp_path: Path, room: int
) -> None:
    web.line = Line(bytes_per_s=300_000)
    nbytes = sum(sorted(sizes(pack))[-room:])
    command = [sys.executable, "-c", READ_ALL, web.url, pack.digest, str(tmp_path), str(nbytes)]
    with sampled(lambda: taken(tmp_path), 0.002) as seen:
        readers = [subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) for _ in range(2)]
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*.part")):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        filling = next(reader for reader in readers if _holds(reader.pid, ".part"))
        filling.send_signal(signal.SIGKILL)
        filling.wait()
        assert list(tmp_path.glob("*.part"))
        web.line = Line()
        (other,) = (reader for reader in readers if reader is not filling)
        expected = TarReader(pack.path, "train", pack.digest).read(np.arange(205))
        images = hashlib.sha256(b"".join(sample.image for sample in expected))
        assert other.communicate(timeout=60)[0].split() == [images.hexdigest()]
    assert not list(tmp_path.glob("*.part"))
    assert len(list(tmp_path.glob("*.shard"))) == min(room, len(pack.shards))
    assert max(seen) <= nbytes


def _holds(pid: int, *suffixes: str) -> bool:
    """Whether the process has a file whose name ends so open."""
    with suppress(OSError):  # it, or a file of its, is gone
        return any(str(link.readlink()).endswith(suffixes) for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_a_stream_from_the_cache_is_the_local_one(
    shared_data: Path, pack: SplitIndex, tmp_path: Path, ray_session: None
) -> None:
    def ledger(**data: object) -> pa.Table:
        stream = {"batch_size": 5, "block_bytes": "1MB", "timeout_s": 300}
        return make_ledger(Config(data=data, stream=stream, decode={"actors": (1, 1)}), epochs=1, world_size=1)

    local = ledger(path=pack.path)
    parquet = pack_here(shared_data / "bccd", tmp_path / "parquet", per_shard=20, format="parquet")
    for index in (pack, parquet):
        folder = tmp_path / f"cache of {index.format}"
        with BadStorage(Path(index.path)) as web:
            cached = ledger(path=web.url, cache={"folder": str(folder), "bytes": "1GB"})
        assert first_difference(local, cached) is None
        assert taken(folder) == sum(sizes(index))

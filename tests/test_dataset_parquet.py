"""Parquet packs: the samples and the order of the tar pack of the same source, open to other tools, and checked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from packing import pack_here

from rfstream.dataset.index import SplitIndex
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.tar import TarReader

PER_SHARD = 20


@pytest.fixture(scope="module")
def tar(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SplitIndex:
    """coco_cc's training split: 55 photos with gaps in the category ids, polygons and crowds."""
    return pack_here(shared_data / "coco_cc", tmp_path_factory.mktemp("tar"), PER_SHARD)


@pytest.fixture(scope="module")
def pack(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SplitIndex:
    """The same as Parquet."""
    return pack_here(shared_data / "coco_cc", tmp_path_factory.mktemp("parquet"), PER_SHARD, format="parquet")


def test_samples_are_those_of_the_tar_pack(tar: SplitIndex, pack: SplitIndex) -> None:
    rows = np.arange(55)
    theirs = TarReader(tar.path, "train", tar.digest).read(rows)
    ours = ParquetReader(pack.path, "train", pack.digest).read(rows)
    for a, b in zip(theirs, ours, strict=True):
        assert a.image == b.image
        assert json.loads(a.sidecar) == json.loads(b.sidecar)
        assert (a.key, a.row, a.width, a.height) == (b.key, b.row, b.width, b.height)
    assert np.array_equal(tar.fragments().starts, pack.fragments().starts)
    assert np.array_equal(tar.fragments().nbytes, pack.fragments().nbytes)

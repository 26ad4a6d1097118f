"""Shards read back, whatever their format: where their samples lie, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa

from rfstream.dataset import storage
from rfstream.dataset.index import SplitIndex
from rfstream.dataset.parquet_shards import scan_parquet_shard, sidecars_of
from rfstream.dataset.shards import scan_shard, tar_fragments


def scan(index: SplitIndex, number: int) -> tuple[pa.Table, pa.Table]:
    """Sample rows and fragments of shard ``number``, from the shard alone.

    Raises:
        DatasetError: if it is damaged; names shard and key, or row and column.
    """
    url = index.shard_url(number)
    if index.format == "parquet":
        return scan_parquet_shard(url, number, sum(index.samples_per_shard[:number]), index.ids())
    samples = scan_shard(url, number)
    return samples, tar_fragments(number, samples)


def sidecars(index: SplitIndex, number: int, samples: pa.Table) -> Iterator[bytes]:
    """The JSON member of each sample of shard ``number``, which has the rows ``samples``.

    Raises:
        DatasetError: if the shard is damaged.
    """
    url = index.shard_url(number)
    with storage.open_binary(url) as file:
        if index.format == "parquet":
            yield from (json.dumps(sidecar).encode() for sidecar in sidecars_of(url, file, index.ids()))
            return
        for offset, size in zip(*(samples[name].to_pylist() for name in ("json_offset", "json_size")), strict=True):
            file.seek(offset)
            yield file.read(size)

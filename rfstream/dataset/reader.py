"""What readers of every pack format share: the encoded sample, and bytes out of shards with few and large reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rfstream.dataset import storage, tables
from rfstream.dataset.index import SplitIndex, read_index
from rfstream.errors import DatasetError
from rfstream.plan.keys import IntArray

# Two spans this near in a shard are one read: on a remote store a request costs more than the bytes between them.
_MAX_GAP = 64 * 1024
_MAX_READ = 8 * 1024 * 1024
_OPEN_FILES = 32


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One sample as it lies in its shard: ``image`` is the encoded file, ``sidecar`` the JSON of its annotations.

    ``row`` is its row in the index, ``offset`` the byte of the shard where the image begins. ``width`` and ``height``
    are what the dataset's annotations said of the image, in pixels; None where they did not, or the pack does not tell.
    """

    shard: str
    key: str
    image: bytes
    sidecar: bytes
    row: int
    offset: int
    width: int | None = None
    height: int | None = None


class SampleReader(Protocol):
    """Reads samples of one split by their row in the index, in any process that it is pickled to."""

    def read(self, rows: IntArray) -> list[EncodedSample]:
        """The samples at ``rows``, int64 (n,), in that order; a row may occur twice.

        Raises:
            DatasetError: if the pack has changed or lacks a file, or there is no such row.
            SampleError: if a sample can't be read as a whole; names shard and sample.
        """
        ...


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Bytes ``start <= b < end`` of the pack's shard number ``shard``."""

    shard: int
    start: int
    end: int


class _OpenFile:
    """A local file open for positioned reads, closed when nobody holds it any more."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``start <= b < end``, as far as the file goes: a damaged table can't ask for more memory than that."""
        return os.pread(self._descriptor, max(0, min(end, self.size) - start), start)


class PackFiles:
    """A split's index, sample table and shards, loaded on first use; what stays open is bounded.

    Args:
        path: folder or fsspec URL of the pack.
        split: name of the split.
        digest: ``SplitIndex.digest`` of the pack that the rows were planned on.
        shards_at: where the shards are, if they are not at ``path``.
    """

    def __init__(self, path: str, split: str, digest: str, shards_at: str | None) -> None:
        self._path, self._split, self._digest, self._shards_at = path, split, digest, shards_at

    @cached_property
    def index(self) -> SplitIndex:
        """The index that the rows were planned on.

        Raises:
            DatasetError: if there is another one by now.
        """
        index = read_index(self._path, self._split, self._shards_at)
        if index.digest != self._digest:
            raise DatasetError(
                f"{self._path}: split {self._split!r} was packed again since this run began (index {index.digest}, "
                f"planned on {self._digest}); start the run again"
            )
        return index

    @cached_property
    def _table(self) -> pq.ParquetFile:
        url = self.index.table_url("samples")
        try:
            return pq.ParquetFile(storage.local_path(url) or storage.open_binary(url))
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(f"{url}: not a readable sample table ({storage.describe(error)})") from None

    @cached_property
    def first_rows(self) -> IntArray:
        """Row of the first sample of each shard and, last, the number of samples: int64 (shards + 1,)."""
        metadata = self._table.metadata
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if len(counts) != len(self.index.shards) or sum(counts) != self.index.num_samples:
            raise DatasetError(
                f"{self._path}: the sample table of {self._split!r} does not fit the index; {self.index.reindex}"
            )
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def locate(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """The shard of each row, and its place among that shard's samples: int64 (n,) each.

        Raises:
            DatasetError: if there is no such row.
        """
        first = self.first_rows
        if len(rows) and (rows.min() < 0 or rows.max() >= first[-1]):
            raise DatasetError(
                f"{self._path}: split {self._split!r} has rows 0 to {first[-1] - 1}, not {rows.tolist()}"
            )
        shards = np.searchsorted(first, rows, side="right") - 1
        return shards, rows - first[shards]

    def samples(self, shard: int, schema: pa.Schema) -> pa.Table:
        """Columns ``schema`` of the sample table, of one shard.

        Raises:
            DatasetError: if the table lacks one, or says what can't be.
        """
        try:
            return tables.conform(self._table.read_row_group(shard, columns=schema.names), schema)
        except (OSError, pa.ArrowException) as error:
            raise self.wrong_table(shard, storage.describe(error)) from None

    def wrong_table(self, shard: int, reason: str) -> DatasetError:
        """The error for a sample table that is wrong about ``shard``."""
        return DatasetError(f"{self.index.table_url('samples')}: shard {shard}: {reason}; {self.index.reindex}")

    def fetch(self, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of each of ``spans``, in ascending order; shorter where the shard ends early.

        Neighbours in a shard are fetched with one range request.

        Raises:
            DatasetError: if a shard can't be read.
        """
        groups = list(_coalesce(spans))
        whole = [Span(group[0].shard, group[0].start, max(span.end for span in group)) for group in groups]
        found = []
        for group, data in zip(groups, self._read(whole), strict=True):
            view, origin = memoryview(data), group[0].start
            found += [view[span.start - origin : span.end - origin] for span in group]
        return found

    def tails(self, shards: Sequence[int], nbytes: int) -> list[bytes]:
        """The last ``nbytes`` of each shard, or all of a smaller one.

        Raises:
            DatasetError: if a shard can't be read.
        """
        with self._naming(shards):
            if self._local is None:
                urls = [self.index.shard_url(shard) for shard in shards]
                sizes = storage.file_sizes(urls)  # not all filesystems know ranges from the end
                return storage.read_ranges(urls, [(max(0, size - nbytes), size) for size in sizes])
            files = [self._local(shard) for shard in shards]
            return [file.read(max(0, file.size - nbytes), file.size) for file in files]

    @cached_property
    def _local(self) -> Callable[[int], _OpenFile] | None:
        """Opens a local shard by its number; None if the shards are remote."""
        folder = storage.local_path(self.index.shards_at)
        return None if folder is None else lru_cache(_OPEN_FILES)(partial(_open_shard, folder, self.index.shards))

    def _read(self, spans: Sequence[Span]) -> list[bytes]:
        with self._naming([span.shard for span in spans]):
            if self._local is None:
                urls = [self.index.shard_url(span.shard) for span in spans]
                return storage.read_ranges(urls, [(span.start, span.end) for span in spans])
            return [self._local(span.shard).read(span.start, span.end) for span in spans]

    @contextmanager
    def _naming(self, shards: Sequence[int]) -> Iterator[None]:
        """Say which of ``shards`` the system can't read."""
        try:
            yield
        except OSError as error:
            where = error.filename or ", ".join(self.index.shard_url(shard) for shard in sorted(set(shards)))
            raise DatasetError(f"{where}: the shard can't be read ({storage.describe(error)})") from error


def _coalesce(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Group ascending spans that one read should fetch together."""
    group: list[Span] = []
    end = 0
    for span in spans:
        near = group and span.shard == group[0].shard and span.start - end <= _MAX_GAP
        if group and not (near and max(end, span.end) - group[0].start <= _MAX_READ):
            yield group
            group = []
        end = max(end, span.end) if group else span.end
        group.append(span)
    if group:
        yield group


def _open_shard(folder: Path, shards: tuple[str, ...], number: int) -> _OpenFile:
    return _OpenFile(folder / shards[number])

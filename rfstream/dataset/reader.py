"""What readers of every pack format share: the encoded sample, and bytes out of shards with few and large reads."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rfstream.dataset import storage, tables
from rfstream.dataset.cache import ShardCache
from rfstream.dataset.index import SplitIndex, read_index
from rfstream.dataset.retry import DEADLINE_S
from rfstream.errors import DatasetError
from rfstream.plan.keys import IntArray

_MAX_READ = 8 * 1024 * 1024
_OPEN_FILES = 32
_OPEN_CACHED = 8  # each of them can't be removed to make room


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One sample as it lies in its shard: ``image`` is the encoded file, ``sidecar`` the JSON of its annotations.

    ``row`` is its row in the index, ``offset`` the byte of the shard where the image begins. ``width`` and ``height``
    are what the dataset's annotations said of the image, in pixels; None where they did not, or the pack does not tell.
    ``pack`` is the number of its pack in a mixture.
    """

    shard: str
    key: str
    image: bytes
    sidecar: bytes
    row: int
    offset: int
    width: int | None = None
    height: int | None = None
    pack: int = 0


class PackReader(ABC):
    """Reads samples by their row in the index, and puts them into Arrow and back."""

    @abstractmethod
    def read(self, rows: IntArray) -> list[EncodedSample]:
        """The samples at ``rows``, int64 (n,), in that order; a row may occur twice.

        Raises:
            DatasetError: if the pack has changed or lacks a file, or there is no such row.
            SampleError: if a sample can't be read as a whole; names shard and sample.
        """

    def parts(self, rows: IntArray, size: int) -> Iterator[list[EncodedSample]]:
        """The samples at ``rows`` in parts of ``size``: all are read at once, since they lie in few fragments."""
        samples = self.read(rows)
        for first in range(0, len(samples), size):
            yield samples[first : first + size]

    @staticmethod
    def to_columns(samples: Sequence[EncodedSample]) -> dict[str, pa.Array]:
        """Samples as the columns of one row."""
        places = [[{name: getattr(sample, name) for name in _PLACE.names} for sample in samples]]
        return {
            "places": pa.array(places, pa.list_(_PLACE)),
            "images": pa.array([[sample.image for sample in samples]], pa.large_list(pa.large_binary())),
            "sidecars": pa.array([[sample.sidecar for sample in samples]], pa.large_list(pa.large_binary())),
        }

    @staticmethod
    def of_columns(columns: Mapping[str, pa.Array]) -> list[EncodedSample]:
        """The samples that :meth:`to_columns` put into a row."""
        members = (columns[name][0] for name in ("images", "sidecars", "places"))
        return [
            EncodedSample(image=image.as_buffer().to_pybytes(), sidecar=sidecar.as_py(), **place.as_py())
            for image, sidecar, place in zip(*members, strict=True)
        ]


class SampleReader(PackReader):
    """Reads samples of one split by their row in the index.

    It pickles to its arguments, so it travels with a task; index, rows and open files are loaded on first use in each
    process and stay bounded.

    Args:
        path: folder or fsspec URL of the pack.
        split: name of the split.
        digest: ``SplitIndex.digest`` of the pack that the rows were planned on.
        shards_at: where the shards are, if they are not at ``path``.
        deadline_s: how long one file or range of a remote pack may take, seconds.
        cache: where to keep remote shards.
    """

    def __init__(
        self,
        path: str,
        split: str,
        digest: str,
        shards_at: str | None = None,
        deadline_s: float = DEADLINE_S,
        cache: ShardCache | None = None,
    ) -> None:
        self._arguments = (str(path), split, digest, shards_at, deadline_s, cache)
        self._files = PackFiles(*self._arguments)

    def __reduce__(self) -> tuple[type[SampleReader], tuple[Any, ...]]:
        return type(self), self._arguments


_PLACE = pa.struct(
    [
        ("shard", pa.string()),
        ("key", pa.string()),
        ("row", pa.int64()),
        ("offset", pa.int64()),
        ("width", pa.int64()),
        ("height", pa.int64()),
        ("pack", pa.int64()),
    ]
)
"""What a row of encoded samples says of each beside its bytes."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Bytes ``start <= b < end`` of the pack's shard number ``shard``."""

    shard: int
    start: int
    end: int


class _OpenFile:
    """A local file open for positioned reads, to be closed when nobody holds it any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``start <= b < end``, as far as the file goes: a damaged table can't ask for more memory than that."""
        return os.pread(self._descriptor, max(0, min(end, self.size) - start), start)


class PackFiles:
    """A split's index, sample table and shards, loaded on first use; what stays open is bounded.

    The arguments are those of :class:`SampleReader`.
    """

    def __init__(
        self, path: str, split: str, digest: str, shards_at: str | None, deadline_s: float, cache: ShardCache | None
    ) -> None:
        self._path, self._split, self._digest, self._shards_at = path, split, digest, shards_at
        self._deadline_s, self._cache = deadline_s, cache

    @cached_property
    def index(self) -> SplitIndex:
        """The index that the rows were planned on.

        Raises:
            DatasetError: if there is another one by now.
        """
        index = read_index(self._path, self._split, self._shards_at, self._deadline_s)
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
            return pq.ParquetFile(storage.local_path(url) or storage.open_binary(url, self._deadline_s))
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

        def remote(absent: list[int]) -> list[bytes]:
            urls = [self.index.shard_url(shards[at]) for at in absent]
            sizes = storage.sizes_of(urls, self._deadline_s)  # not all filesystems know ranges from the end
            return storage.read_ranges(urls, [(max(0, size - nbytes), size) for size in sizes], self._deadline_s)

        return self._each(shards, lambda file, _: file.read(max(0, file.size - nbytes), file.size), remote)

    def _read(self, spans: Sequence[Span]) -> list[bytes]:
        def remote(absent: list[int]) -> list[bytes]:
            urls = [self.index.shard_url(spans[at].shard) for at in absent]
            return storage.read_ranges(urls, [(spans[at].start, spans[at].end) for at in absent], self._deadline_s)

        return self._each(
            [span.shard for span in spans], lambda file, at: file.read(spans[at].start, spans[at].end), remote
        )

    def _each(
        self,
        shards: Sequence[int],
        local: Callable[[_OpenFile, int], bytes],
        remote: Callable[[list[int]], list[bytes]],
    ) -> list[bytes]:
        """Bytes of each of ``shards``: what ``local`` reads of one that lies on this machine, given its place in the
        list, and what ``remote`` reads of all others together, given theirs."""
        with self._naming(shards):
            files = map(self._local, shards)  # one after the other, so that few are open
            found = [None if file is None else local(file, at) for at, file in enumerate(files)]
        absent = [at for at, data in enumerate(found) if data is None]
        fetched = iter(remote(absent))
        return [next(fetched) if data is None else data for data in found]

    @cached_property
    def _local(self) -> Callable[[int], _OpenFile | None]:
        """Opens a shard that lies on this machine by its number; None for one that does not."""
        folder = storage.local_path(self.index.shards_at)
        if folder is not None:
            return lru_cache(_OPEN_FILES)(partial(_open_shard, folder, self.index.shards))
        if self._cache is not None:
            return lru_cache(_OPEN_CACHED)(partial(_open_cached, self._cache, self.index))
        return _nowhere

    @contextmanager
    def _naming(self, shards: Sequence[int]) -> Iterator[None]:
        """Say which of ``shards`` the system can't read."""
        try:
            yield
        except OSError as error:
            where = error.filename or ", ".join(self.index.shard_url(shard) for shard in sorted(set(shards)))
            advice = "" if self.index.columns is None else "; data.shards says where shards are that others wrote"
            raise DatasetError(f"{where}: the shard can't be read ({storage.describe(error)}){advice}") from error


def _coalesce(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Group ascending spans that one read should fetch together."""
    group: list[Span] = []
    end = 0
    for span in spans:
        near = group and span.shard == group[0].shard and span.start - end <= storage.MAX_GAP
        if group and not (near and max(end, span.end) - group[0].start <= _MAX_READ):
            yield group
            group = []
        end = max(end, span.end) if group else span.end
        group.append(span)
    if group:
        yield group


def _open_shard(folder: Path, shards: tuple[str, ...], number: int) -> _OpenFile:
    return _OpenFile(os.open(folder / shards[number], os.O_RDONLY))


def _open_cached(cache: ShardCache, index: SplitIndex, number: int) -> _OpenFile | None:
    descriptor = cache.open(index.shard_url(number), index.digest, index.deadline_s)
    return None if descriptor is None else _OpenFile(descriptor)


def _nowhere(_: int) -> None:
    """No shard lies on this machine."""

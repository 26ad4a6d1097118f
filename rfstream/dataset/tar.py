"""Encoded samples out of a pack's tar shards, by row, with few and large reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rfstream.dataset import storage, tables
from rfstream.dataset.cache import ShardCache
from rfstream.dataset.index import SplitIndex, read_index
from rfstream.dataset.retry import DEADLINE_S
from rfstream.errors import DatasetError, SampleError
from rfstream.plan.keys import IntArray

# Two samples this near in a shard are one read: on a remote store a request costs more than the bytes between them.
_MAX_GAP = 64 * 1024
_MAX_READ = 8 * 1024 * 1024
_OPEN_FILES = 32
_OPEN_CACHED = 8  # each of them can't be removed to make room
_CACHED_SHARDS = 256
_COLUMNS = pa.schema([tables.SAMPLES.field(name) for name in ("key", *tables.PLACE, *tables.STATED)])


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One sample as it lies in its shard: ``image`` is the encoded file, ``sidecar`` the JSON member.

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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one sample lies; ``slot`` is its place in the answer."""

    slot: int
    row: int
    shard: int
    key: str
    image: tuple[int, int]
    sidecar: tuple[int, int]
    stated: tuple[int, int]

    @property
    def start(self) -> int:
        return min(self.image[0], self.sidecar[0])

    @property
    def end(self) -> int:
        return max(self.image[1], self.sidecar[1])


@dataclass(frozen=True, slots=True)
class _ShardRows:
    """The rows of one shard: keys; int64 (n, 4) of image begin, image end, JSON begin, JSON end; int64 (n, 2) of the
    stated width and height, 0 where there is none."""

    keys: list[str]
    spans: IntArray
    stated: IntArray


class _OpenFile:
    """A local file open for positioned reads, to be closed when nobody holds it any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``start <= b < end``, as far as the file goes: a damaged table can't ask for more memory than that."""
        return os.pread(self._descriptor, max(0, min(end, self._size) - start), start)


class TarReader:
    """Reads samples of one split by their row in the index.

    It pickles to a few strings, so it travels in a task's arguments; index, rows and open files are loaded on first use
    in each process and stay bounded.

    Args:
        path: folder or fsspec URL of the pack.
        split: name of the split.
        digest: ``SplitIndex.digest`` of the pack that the rows were planned on.
        deadline_s: how long one file or range of a remote pack may take, seconds.
        cache: where to keep shards of a remote pack.
    """

    def __init__(
        self, path: str, split: str, digest: str, deadline_s: float = DEADLINE_S, cache: ShardCache | None = None
    ) -> None:
        self._path, self._split, self._digest = str(path), split, digest
        self._deadline_s, self._cache = deadline_s, cache

    def __reduce__(self) -> tuple[type[TarReader], tuple[str, str, str, float, ShardCache | None]]:
        return TarReader, (self._path, self._split, self._digest, self._deadline_s, self._cache)

    def read(self, rows: IntArray) -> list[EncodedSample]:
        """The samples at ``rows``, int64 (n,), in that order; a row may occur twice.

        Neighbours in a shard are fetched with one range request.

        Raises:
            DatasetError: if the pack has changed or lacks a file, or there is no such row.
            SampleError: if a shard ends before a sample does; names shard and key.
        """
        groups = list(_coalesce(self._places(np.asarray(rows, dtype=np.int64))))
        found: list[EncodedSample | None] = [None] * len(rows)
        for group, data in zip(groups, self._fetch(groups), strict=True):
            for place in group:
                found[place.slot] = self._cut(place, data, group[0].start)
        return [sample for sample in found if sample is not None]

    @cached_property
    def _index(self) -> SplitIndex:
        index = read_index(self._path, self._split, self._deadline_s)
        if index.digest != self._digest:
            raise DatasetError(
                f"{self._path}: split {self._split!r} was packed again since this run began (index {index.digest}, "
                f"planned on {self._digest}); start the run again"
            )
        return index

    @cached_property
    def _table(self) -> pq.ParquetFile:
        url = self._index.table_url("samples")
        try:
            return pq.ParquetFile(storage.local_path(url) or storage.open_binary(url, self._deadline_s))
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(f"{url}: not a readable sample table ({storage.describe(error)})") from None

    @cached_property
    def _first_rows(self) -> IntArray:
        """Row of the first sample of each shard and, last, the number of samples: int64 (shards + 1,)."""
        metadata = self._table.metadata
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if len(counts) != len(self._index.shards) or sum(counts) != self._index.num_samples:
            raise DatasetError(
                f"{self._path}: the sample table of {self._split!r} does not fit the index; {self._index.reindex}"
            )
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @cached_property
    def _rows_of(self) -> Callable[[int], _ShardRows]:
        return lru_cache(_CACHED_SHARDS)(partial(_shard_rows, self._table, self._index))

    @cached_property
    def _local(self) -> Callable[[int], _OpenFile | None]:
        """Opens a shard that lies on this machine by its number; None for one that does not."""
        folder = storage.local_path(self._path)
        if folder is not None:
            return lru_cache(_OPEN_FILES)(partial(_open_shard, folder, self._index.shards))
        if self._cache is not None:
            return lru_cache(_OPEN_CACHED)(partial(_open_cached, self._cache, self._index))
        return _nowhere

    def _places(self, rows: IntArray) -> list[_Place]:
        """Where each row's sample lies, sorted by shard and offset."""
        first = self._first_rows
        if len(rows) and (rows.min() < 0 or rows.max() >= first[-1]):
            raise DatasetError(
                f"{self._path}: split {self._split!r} has rows 0 to {first[-1] - 1}, not {rows.tolist()}"
            )
        shards = np.searchsorted(first, rows, side="right") - 1
        inside = rows - first[shards]
        places = []
        for slot, (row, shard, at) in enumerate(zip(rows.tolist(), shards.tolist(), inside.tolist(), strict=True)):
            table = self._rows_of(shard)
            a, b, c, d = table.spans[at].tolist()
            width, height = table.stated[at].tolist()
            places.append(_Place(slot, row, shard, table.keys[at], (a, b), (c, d), (width, height)))
        return sorted(places, key=lambda place: (place.shard, place.start))

    def _fetch(self, groups: list[list[_Place]]) -> list[bytes]:
        """The bytes that each group spans; shorter where the shard ends early."""
        shards = [group[0].shard for group in groups]
        spans = [(group[0].start, max(place.end for place in group)) for group in groups]
        try:
            files = map(self._local, shards)
            found = [None if file is None else file.read(*span) for file, span in zip(files, spans, strict=True)]
        except OSError as error:
            where = error.filename or ", ".join(self._index.shard_url(shard) for shard in sorted(set(shards)))
            raise DatasetError(f"{where}: the shard can't be read ({storage.describe(error)})") from error
        absent = [at for at, data in enumerate(found) if data is None]
        urls = [self._index.shard_url(shards[at]) for at in absent]
        fetched = iter(storage.read_ranges(urls, [spans[at] for at in absent], self._deadline_s))
        return [next(fetched) if data is None else data for data in found]

    def _cut(self, place: _Place, data: bytes, origin: int) -> EncodedSample:
        """One sample out of the bytes from ``origin`` on that were fetched for its group."""
        if place.end - origin > len(data):
            raise SampleError(
                f"{self._index.shard_url(place.shard)}: sample {place.key} ends at byte {place.end} but the shard at "
                f"{origin + len(data)}: it is truncated; copy or pack it again"
            )
        image, sidecar = (data[a - origin : b - origin] for a, b in (place.image, place.sidecar))
        stated = (pixels or None for pixels in place.stated)
        shard = self._index.shards[place.shard]
        return EncodedSample(shard, place.key, image, sidecar, place.row, place.image[0], *stated)


def _coalesce(places: list[_Place]) -> Iterator[list[_Place]]:
    """Group places, sorted by shard and offset, that one read should fetch together."""
    group: list[_Place] = []
    end = 0
    for place in places:
        near = group and place.shard == group[0].shard and place.start - end <= _MAX_GAP
        if group and not (near and max(end, place.end) - group[0].start <= _MAX_READ):
            yield group
            group = []
        end = max(end, place.end) if group else place.end
        group.append(place)
    if group:
        yield group


def _open_shard(folder: Path, shards: tuple[str, ...], number: int) -> _OpenFile:
    return _OpenFile(os.open(folder / shards[number], os.O_RDONLY))


def _open_cached(cache: ShardCache, index: SplitIndex, number: int) -> _OpenFile | None:
    descriptor = cache.open(index.shard_url(number), index.digest, index.deadline_s)
    return None if descriptor is None else _OpenFile(descriptor)


def _nowhere(_: int) -> None:
    """No shard lies on this machine."""


def _shard_rows(table: pq.ParquetFile, index: SplitIndex, shard: int) -> _ShardRows:
    """The rows of one shard, checked: an offset or size that can't be is a damaged table."""
    try:
        rows = tables.conform(table.read_row_group(shard, columns=_COLUMNS.names), _COLUMNS)
    except (OSError, pa.ArrowException) as error:
        reason = storage.describe(error)
        raise DatasetError(f"{index.table_url('samples')}: shard {shard}: {reason}; {index.reindex}") from None
    image, image_size, sidecar, sidecar_size = (rows[name].to_numpy() for name in tables.PLACE)
    spans = np.stack([image, image + image_size, sidecar, sidecar + sidecar_size], axis=1)
    if spans.min() < 0 or image_size.min() < 0 or sidecar_size.min() < 0:
        raise DatasetError(f"{index.table_url('samples')}: shard {shard}: a negative offset or size; {index.reindex}")
    stated = np.stack([rows[name].fill_null(0).to_numpy() for name in tables.STATED], axis=1).astype(np.int64)
    return _ShardRows(rows["key"].to_pylist(), spans, stated)

"""Encoded samples out of a pack's Parquet shards, by row."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property, lru_cache, partial
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from rfstream.dataset import tables
from rfstream.dataset.parquet_file import IMAGE, Annotations, Footer, Parts
from rfstream.dataset.parquet_shards import LENGTH
from rfstream.dataset.reader import EncodedSample, PackFiles, SampleReader, Span
from rfstream.errors import SampleError
from rfstream.plan.keys import IntArray

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_CACHED_SHARDS = 256  # rows of the sample table
_CACHED_FOOTERS = 64
_CACHED_GROUPS = 128  # annotations of as many row groups: a few MB each where objects are outlined, else far less
_TAIL = 64 * 1024  # bytes of a shard's end that are read for its footer
_PLACE = ("image_offset", "image_size")
_COLUMNS = pa.schema([tables.PARQUET_SAMPLES.field(name) for name in ("key", *_PLACE, *tables.STATED)])
_FOREIGN_COLUMNS = pa.schema([tables.FOREIGN_SAMPLES.field(name) for name in ("key", *tables.STATED)])

_Group = tuple[int, int]  # a shard, and a row group of it


class ParquetReader(SampleReader):
    """Reads samples of one split out of Parquet shards. See :class:`rfstream.dataset.reader.SampleReader`.

    An image is read from where the sample table says that it lies, without the rest of its row group. Of the other
    columns, whole row groups are read, which are small, and the latest are kept.

    Parquet that others wrote has images in row groups of any size, compressed or not: such a row group is read as a
    whole, and the last one is kept. So beside the answer there is one of them in memory, as it lies in the file and,
    up to twice while it grows, as it is decoded.
    """

    @cached_property
    def _footers(self) -> _Recent[int, Footer]:
        return _Recent(_CACHED_FOOTERS)

    @cached_property
    def _annotations(self) -> _Recent[_Group, Annotations]:
        return _Recent(_CACHED_GROUPS)

    @cached_property
    def _images(self) -> _Recent[_Group, pa.Array]:
        return _Recent(1)

    def read(self, rows: IntArray) -> list[EncodedSample]:
        """The samples at ``rows``, int64 (n,), in that order; a row may occur twice.

        Raises:
            DatasetError: if the pack has changed or lacks a file, a shard is damaged, lacks a column or has one of
                another type, or there is no such row.
            SampleError: if a row holds a null or what is not of the convention, or its image is not where the sample
                table says; names shard, row and column.
        """
        rows = np.asarray(rows, dtype=np.int64)
        shards, inside = self._files.locate(rows)
        footers = self._footers.get(shards.tolist(), self._load_footers)
        groups = [self._group(footers[shard], shard, at) for shard, at in zip(shards.tolist(), inside, strict=True)]
        annotations = self._annotations.get(groups, lambda absent: self._load_annotations(absent, footers))
        sidecars = [
            json.dumps(footers[shard].sidecar(annotations[shard, group], group, at, row, self._category_ids)).encode()
            for row, (shard, group), at in zip(rows.tolist(), groups, inside.tolist(), strict=True)
        ]
        find = self._images_in_place if self._files.index.columns is None else self._images_of_groups
        images = find(groups, inside.tolist(), footers)
        samples = []
        for slot, (row, shard, at) in enumerate(zip(rows.tolist(), shards.tolist(), inside.tolist(), strict=True)):
            said = self._rows_of(shard).slice(at, 1).to_pylist()[0]
            name, (offset, image) = self._files.index.shards[shard], images[slot]
            stated = (said[name] for name in tables.STATED)
            samples.append(EncodedSample(name, said["key"], image, sidecars[slot], row, offset, *stated))
        return samples

    @cached_property
    def _category_ids(self) -> list[int]:
        return self._files.index.ids()

    @cached_property
    def _rows_of(self) -> Callable[[int], pa.Table]:
        return lru_cache(_CACHED_SHARDS)(partial(_shard_rows, self._files))

    def _images_in_place(
        self, groups: list[_Group], inside: list[int], footers: dict[int, Footer]
    ) -> list[tuple[int, bytes]]:
        """Offset and bytes of the images of the shards' rows ``inside``, from where the sample table says they lie."""
        spans = []
        for (shard, _), at in zip(groups, inside, strict=True):
            offset, size = (self._rows_of(shard)[name][at].as_py() for name in _PLACE)
            spans.append(Span(shard, offset - LENGTH, offset + size))
        order = sorted(range(len(spans)), key=lambda slot: spans[slot])
        found = dict(zip(order, self._files.fetch([spans[slot] for slot in order]), strict=True))
        return [
            (span.start + LENGTH, _checked(footers[span.shard].url, at, span, found[slot]))
            for slot, (span, at) in enumerate(zip(spans, inside, strict=True))
        ]

    def _images_of_groups(
        self, groups: list[_Group], inside: list[int], footers: dict[int, Footer]
    ) -> list[tuple[int, bytes]]:
        """The same out of whole row groups, one after the other; the offset is that of the row group's images."""
        slots: dict[_Group, list[int]] = defaultdict(list)
        for slot, key in enumerate(groups):
            slots[key].append(slot)
        images: dict[int, tuple[int, bytes]] = {}
        for shard, group in sorted(slots):
            found = self._images_of_group(footers[shard], shard, group, [inside[slot] for slot in slots[shard, group]])
            images.update(zip(slots[shard, group], found, strict=True))
        return [images[slot] for slot in range(len(groups))]

    def _images_of_group(self, footer: Footer, shard: int, group: int, rows: list[int]) -> list[tuple[int, bytes]]:
        """The same of the shard's ``rows``, all of one row group."""
        start, end = footer.image_span(group)

        def load(_: list[_Group]) -> list[pa.Array]:
            (data,) = self._files.fetch([Span(shard, start, end)])
            return [footer.images(group, Parts([(start, data)]))]

        cells = self._images.get([(shard, group)], load)[shard, group]
        images = [cells[row - int(footer.starts[group])].as_py() for row in rows]
        if None in images:
            raise SampleError(
                f"{footer.url}: row {rows[images.index(None)]}: column {footer.path(IMAGE)!r} is null: the file names "
                "its images and does not hold them; write it with them"
            )
        return [(start, image) for image in images]

    def _group(self, footer: Footer, shard: int, at: int) -> _Group:
        """The row group that holds the shard's row ``at``."""
        rows = self._files.first_rows[shard + 1] - self._files.first_rows[shard]
        if footer.starts[-1] != rows:
            raise self._files.wrong_table(shard, f"has {rows} rows, and {footer.url} {footer.starts[-1]}")
        return shard, int(np.searchsorted(footer.starts, at, side="right")) - 1

    def _load_footers(self, shards: list[int]) -> list[Footer]:
        tails = self._files.tails(shards, _TAIL)
        long = [i for i, tail in enumerate(tails) if Footer.missing(tail)]
        for i in long:
            tails[i] = self._files.tails([shards[i]], len(tails[i]) + Footer.missing(tails[i]))[0]
        index = self._files.index
        urls = [index.shard_url(shard) for shard in shards]
        return [Footer.parse(url, tail, index.columns) for url, tail in zip(urls, tails, strict=True)]

    def _load_annotations(self, groups: list[_Group], footers: dict[int, Footer]) -> list[Annotations]:
        spans = sorted({Span(shard, *span) for shard, group in groups for span in footers[shard].spans(group)})
        parts = dict(zip(spans, self._files.fetch(spans), strict=True))
        loaded = []
        for shard, group in groups:
            of_group = [Span(shard, *span) for span in footers[shard].spans(group)]
            source = Parts([(span.start, parts[span]) for span in of_group])
            loaded.append(footers[shard].annotations(group, source))
        return loaded


def _shard_rows(files: PackFiles, shard: int) -> pa.Table:
    """The rows of one shard, checked: an offset or size that can't be is a damaged table."""
    if files.index.columns is not None:
        return files.samples(shard, _FOREIGN_COLUMNS)
    table = files.samples(shard, _COLUMNS)
    offset, size = (table[name].to_numpy() for name in _PLACE)
    if offset.min() < LENGTH or size.min() < 0 or (offset + size).min() < 0:
        raise files.wrong_table(shard, "a negative offset or size")
    return table


def _checked(url: str, row: int, span: Span, data: memoryview) -> bytes:
    """The image out of its span, which begins with its length."""
    size = span.end - span.start - LENGTH
    if len(data) < LENGTH + size:
        raise SampleError(
            f"{url}: row {row}: column {IMAGE!r} ends at byte {span.end} but the shard at {span.start + len(data)}: it "
            "is truncated; copy or pack it again"
        )
    if int.from_bytes(data[:LENGTH], "little") != size:
        raise SampleError(
            f"{url}: row {row}: column {IMAGE!r} is not where the sample table says, byte {span.start + LENGTH}: the "
            "shard is not the one that was packed; copy or pack it again"
        )
    return bytes(data[LENGTH:])


class _Recent(Generic[K, V]):
    """The ``limit`` values last asked for, and as many more as one request asks for at once."""

    def __init__(self, limit: int) -> None:
        self._limit, self._values = limit, OrderedDict[K, V]()

    def get(self, keys: Iterable[K], load: Callable[[list[K]], list[V]]) -> dict[K, V]:
        """The values of ``keys``; ``load`` makes those that are not there, all together."""
        wanted = list(dict.fromkeys(keys))
        absent = [key for key in wanted if key not in self._values]
        found = {key: self._values.pop(key) for key in wanted if key not in absent}
        self._forget(self._limit - len(wanted))  # before loading, which may take much memory
        found.update(zip(absent, load(absent) if absent else [], strict=True))
        self._values.update(found)
        self._forget(self._limit)
        return found

    def _forget(self, limit: int) -> None:
        while len(self._values) > max(0, limit):
            self._values.popitem(last=False)

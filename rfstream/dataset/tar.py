"""Encoded samples out of a pack's tar shards, by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import pyarrow as pa

from rfstream.dataset import tables
from rfstream.dataset.reader import EncodedSample, PackFiles, SampleReader, Span
from rfstream.errors import SampleError
from rfstream.plan.keys import IntArray

_CACHED_SHARDS = 256
_COLUMNS = pa.schema([tables.SAMPLES.field(name) for name in ("key", *tables.PLACE, *tables.STATED)])


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
    def span(self) -> Span:
        return Span(self.shard, min(self.image[0], self.sidecar[0]), max(self.image[1], self.sidecar[1]))


@dataclass(frozen=True, slots=True)
class _ShardRows:
    """The rows of one shard: keys; int64 (n, 4) of image begin, image end, JSON begin, JSON end; int64 (n, 2) of the
    stated width and height, 0 where there is none."""

    keys: list[str]
    spans: IntArray
    stated: IntArray


class TarReader(SampleReader):
    """Reads samples of one split out of tar shards. See :class:`rfstream.dataset.reader.SampleReader`."""

    def read(self, rows: IntArray) -> list[EncodedSample]:
        """The samples at ``rows``, int64 (n,), in that order; a row may occur twice.

        Neighbours in a shard are fetched with one range request.

        Raises:
            DatasetError: if the pack has changed or lacks a file, or there is no such row.
            SampleError: if a shard ends before a sample does; names shard and key.
        """
        places = self._places(np.asarray(rows, dtype=np.int64))
        found: list[EncodedSample | None] = [None] * len(rows)
        for place, data in zip(places, self._files.fetch([place.span for place in places]), strict=True):
            found[place.slot] = self._cut(place, data)
        return [sample for sample in found if sample is not None]

    @cached_property
    def _rows_of(self) -> Callable[[int], _ShardRows]:
        return lru_cache(_CACHED_SHARDS)(partial(_shard_rows, self._files))

    def _places(self, rows: IntArray) -> list[_Place]:
        """Where each row's sample lies, sorted by shard and offset."""
        shards, inside = self._files.locate(rows)
        places = []
        for slot, (row, shard, at) in enumerate(zip(rows.tolist(), shards.tolist(), inside.tolist(), strict=True)):
            table = self._rows_of(shard)
            a, b, c, d = table.spans[at].tolist()
            width, height = table.stated[at].tolist()
            places.append(_Place(slot, row, shard, table.keys[at], (a, b), (c, d), (width, height)))
        return sorted(places, key=lambda place: place.span)

    def _cut(self, place: _Place, data: memoryview) -> EncodedSample:
        """One sample out of the bytes of its span."""
        span, shard = place.span, self._files.index.shards[place.shard]
        if span.end - span.start > len(data):
            raise SampleError(
                f"{self._files.index.shard_url(place.shard)}: sample {place.key} ends at byte {span.end} but the shard "
                f"at {span.start + len(data)}: it is truncated; copy or pack it again"
            )
        image, sidecar = (bytes(data[a - span.start : b - span.start]) for a, b in (place.image, place.sidecar))
        width, height = (pixels or None for pixels in place.stated)
        return EncodedSample(shard, place.key, image, sidecar, place.row, place.image[0], width, height)


def _shard_rows(files: PackFiles, shard: int) -> _ShardRows:
    """The rows of one shard, checked: an offset or size that can't be is a damaged table."""
    rows = files.samples(shard, _COLUMNS)
    image, image_size, sidecar, sidecar_size = (rows[name].to_numpy() for name in tables.PLACE)
    spans = np.stack([image, image + image_size, sidecar, sidecar + sidecar_size], axis=1)
    if spans.min() < 0 or image_size.min() < 0 or sidecar_size.min() < 0:
        raise files.wrong_table(shard, "a negative offset or size")
    if sidecar_size.max() > tables.MAX_SIDECAR:
        key = rows["key"][int(sidecar_size.argmax())].as_py()
        raise SampleError(
            f"{files.index.shard_url(shard)}: sample {key} has a JSON member of {sidecar_size.max():,} bytes and one "
            f"image's annotations may take {tables.MAX_SIDECAR:,}; pack it again, with simpler outlines"
        )
    stated = np.stack([rows[name].fill_null(0).to_numpy() for name in tables.STATED], axis=1).astype(np.int64)
    return _ShardRows(rows["key"].to_pylist(), spans, stated)

"""Encoded samples out of a pack's tar shards, by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from operator import attrgetter

import numpy as np
import pyarrow as pa

from rfstream.dataset import storage, tables
from rfstream.dataset.foreign_classes import ids_of
from rfstream.dataset.foreign_json import Category, describe
from rfstream.dataset.reader import EncodedSample, PackFiles, SampleReader, Span
from rfstream.errors import SampleError
from rfstream.plan.keys import IntArray

_CACHED_SHARDS = 256
_in_order = attrgetter("shard", "start", "end")  # in a fraction of the time that comparing spans takes
_COLUMNS = pa.schema([tables.SAMPLES.field(name) for name in ("key", *tables.PLACE, *tables.STATED)])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the two members of one sample lie."""

    row: int
    shard: int
    key: str
    image: Span
    sidecar: Span
    stated: tuple[int, int]


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
        spans = sorted({span for place in places for span in (place.image, place.sidecar)}, key=_in_order)
        found = dict(zip(spans, self._files.fetch(spans), strict=True))
        return [self._sample(place, found) for place in places]

    @cached_property
    def _rows_of(self) -> Callable[[int], _ShardRows]:
        return lru_cache(_CACHED_SHARDS)(partial(_shard_rows, self._files))

    def _places(self, rows: IntArray) -> list[_Place]:
        """Where each row's sample lies."""
        shards, inside = self._files.locate(rows)
        places = []
        for row, shard, at in zip(rows.tolist(), shards.tolist(), inside.tolist(), strict=True):
            table = self._rows_of(shard)
            a, b, c, d = table.spans[at].tolist()
            width, height = table.stated[at].tolist()
            places.append(_Place(row, shard, table.keys[at], Span(shard, a, b), Span(shard, c, d), (width, height)))
        return places

    def _sample(self, place: _Place, found: Mapping[Span, memoryview]) -> EncodedSample:
        """The sample whose members are among the spans that were ``found``."""
        index = self._files.index
        image, sidecar = (self._whole(place, span, found[span]) for span in (place.image, place.sidecar))
        if index.columns is not None:
            sidecar = self._own(place, sidecar, index.columns)
        width, height = (pixels or None for pixels in place.stated)
        shard = index.shards[place.shard]
        return EncodedSample(shard, place.key, image, sidecar, place.row, place.image.start, width, height)

    def _whole(self, place: _Place, span: Span, data: memoryview) -> bytes:
        if len(data) < span.end - span.start:
            raise SampleError(
                f"{self._files.index.shard_url(place.shard)}: sample {place.key} ends at byte {span.end} but the shard "
                "before that: it is truncated; copy or pack it again"
            )
        return bytes(data)

    def _own(self, place: _Place, data: bytes, columns: Mapping[str, str]) -> bytes:
        """The JSON member that a pack would have of a sample that others wrote."""
        try:
            return json.dumps(describe(data, columns).sidecar(place.row, self._ids)).encode()
        except (ValueError, KeyError) as error:
            raise SampleError(
                f"{self._files.index.shard_url(place.shard)}: sample {place.key}: its JSON is not as it was when the "
                f"shard was indexed ({storage.describe(error)}); {self._files.index.reindex}"
            ) from None

    @cached_property
    def _ids(self) -> dict[Category, int]:
        return ids_of(self._files.index.categories)


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

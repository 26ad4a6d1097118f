"""A rank's record of bad samples: logged once each, reported in a file, and a reason to stop where there are many."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

import pyarrow as pa
import pyarrow.parquet as pq

from rfstream.config import StreamConfig
from rfstream.dataset import storage
from rfstream.errors import DatasetError, StreamError
from rfstream.stream.bad import BadSample
from rfstream.stream.wire import WireBatch

PROBATION = 100
"""Samples that a rank has had before the share of bad ones is judged."""
SCHEMA = pa.schema(
    [
        ("shard", pa.string()),
        ("key", pa.string()),
        ("file_name", pa.string()),
        ("offset", pa.int64()),
        ("reason", pa.string()),
        ("first_epoch", pa.int64()),
        ("first_position", pa.int64()),
        ("times_seen", pa.int64()),
    ]
)
"""One row a bad sample; ``offset`` is the byte of the shard where its image begins, ``first_position`` the place in
``first_epoch``'s order where this rank met it first."""
_COUNTED = ("first_epoch", "first_position", "times_seen")
_PACK = b"rfstream.pack"  # the report's own metadata: the digest of the index that its rows belong to
_SHOWN = 3
_logger = logging.getLogger("rfstream")


class BadSampleRecord:
    """The bad samples that one rank has met, counted as its batches arrive.

    Args:
        stream: ``max_bad_rate``, and ``quarantine`` where the report goes, if one is asked for.
        split: name of the split, and ``digest`` of its index.
        rank: this rank.
    """

    def __init__(self, stream: StreamConfig, split: str, digest: str, rank: int) -> None:
        self._stream, self._digest, self._rank = stream, digest, rank
        self._seen = self._replaced = 0
        self._met: dict[BadSample, tuple[int, int, int]] = {}  # first epoch, first position, times
        self._reported: dict[BadSample, tuple[int, int, int]] | None = None  # what the file holds, once it is ours
        self._url: str | None = None
        if stream.quarantine is not None:
            self._url = storage.join(stream.quarantine, f"{split}-bad-samples-{rank:05d}.parquet")

    def open(self) -> None:
        """Go on with the report that a former run on the same pack left, or begin one.

        Raises:
            DatasetError: if it can't be read or written.
        """
        if self._url is not None and self._reported is None:
            storage.make_folder(str(self._stream.quarantine))
            if storage.exists(self._url):
                self._met = dict(_read(self._url, self._digest))
            self._write(self._url)

    def add(self, wire: WireBatch) -> None:
        """Count a batch that this rank has been given.

        Raises:
            StreamError: if more samples had to be replaced than ``stream.max_bad_rate`` allows.
        """
        self._seen += len(wire.keys)
        self._replaced += len({position for position, _ in wire.bad})
        for position, bad in wire.bad:
            if bad not in self._met:
                _logger.warning("%s; another sample takes its place", bad)
            epoch, first, times = self._met.get(bad, (wire.epoch, position, 0))
            self._met[bad] = (epoch, first, times + 1)
        if self._seen >= PROBATION and self._replaced > self._stream.max_bad_rate * self._seen:
            raise StreamError(self._too_many())

    def write(self) -> None:
        """Bring the report up to date, if there is one.

        Raises:
            DatasetError: if it can't be written.
        """
        if self._url is not None and self._reported not in (None, self._met):
            self._write(self._url)

    def _write(self, url: str) -> None:
        rows = [asdict(bad) | dict(zip(_COUNTED, counted, strict=True)) for bad, counted in self._met.items()]
        schema = SCHEMA.with_metadata({_PACK: self._digest.encode()})
        with storage.replacing(url) as file:
            pq.write_table(pa.Table.from_pylist(rows, schema), file)
        self._reported = dict(self._met)

    def _too_many(self) -> str:
        reasons = Counter(bad.reason for bad in self._met).most_common(_SHOWN)
        first = "; ".join(map(str, list(self._met)[:_SHOWN]))
        return (
            f"rank {self._rank}: {self._replaced} of {self._seen} samples could not be decoded and were replaced, "
            f"{self._replaced / self._seen:.1%}, and stream.max_bad_rate={self._stream.max_bad_rate:g}; "
            f"{len(self._met)} different files are bad"
            f"{f' (listed in {self._url})' if self._url else ''}, for reasons such as "
            f"{', '.join(f'{reason} ({count} files)' for reason, count in reasons)}; the first are: {first}. "
            "Repair the dataset and pack again, or raise stream.max_bad_rate"
        )


def _read(url: str, digest: str) -> Iterator[tuple[BadSample, tuple[int, int, int]]]:
    """The rows of a report, if it is of the pack with ``digest``."""
    try:
        with storage.open_binary(url) as file:
            table = pq.read_table(file)
            if (table.schema.metadata or {}).get(_PACK) != digest.encode():
                return
            rows = table.cast(SCHEMA).to_pylist()
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{url}: not a readable report of bad samples ({storage.describe(error)}); remove it, or give another "
            "stream.quarantine"
        ) from None
    for row in rows:
        epoch, position, times = (row.pop(name) for name in _COUNTED)
        yield BadSample(**row), (epoch, position, times)

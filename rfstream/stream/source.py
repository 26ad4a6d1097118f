"""Ray Data sources that execute a plan: tasks yield Arrow rows of a batch or several, encoded or decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from rfstream.dataset.cache import ShardCache
from rfstream.dataset.index import PackFormat, SplitIndex
from rfstream.dataset.mixture import MixedReader, MixedSplit, Split
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.reader import SampleReader
from rfstream.dataset.retry import DEADLINE_S
from rfstream.dataset.tar import TarReader
from rfstream.plan.keys import IntArray
from rfstream.plan.position import Position
from rfstream.plan.substitute import substitute_rows
from rfstream.plan.tasks import StreamPlan, Task
from rfstream.stream.decode import DecodeSpec, Encoded, Substitutes, decoder_of
from rfstream.stream.wire import WireBatch, to_row

E = TypeVar("E")


class BatchReader(Protocol[E]):
    """Reads encoded samples by their row in the index."""

    def read(self, rows: IntArray) -> list[E]:
        """The samples at ``rows``, int64 (n,), in that order; a row may occur twice.

        Raises:
            DatasetError: if they can't be read.
        """
        ...

    def parts(self, rows: IntArray, size: int) -> Iterator[list[E]]:
        """The same in parts of ``size``, for who reads a whole shuffle block."""
        ...

    def to_columns(self, samples: Sequence[E]) -> dict[str, pa.Array]:
        """Samples as the columns of one row, on their way to a decode actor."""
        ...

    def of_columns(self, columns: Mapping[str, pa.Array]) -> list[E]:
        """The samples that :meth:`to_columns` put into a row."""
        ...


class ReaderSpec(Protocol):
    """What to read, and how: a few hashable values that travel with every task."""

    def __hash__(self) -> int: ...

    def build(self) -> BatchReader[Any]:
        """A reader for this process."""
        ...


@dataclass(frozen=True)
class PackReaderSpec:
    """Which pack to read, and how: a few values that travel with every task."""

    path: str
    split: str
    digest: str
    format: PackFormat = "tar"
    shards_at: str | None = None
    deadline_s: float = DEADLINE_S
    cache: ShardCache | None = None

    @staticmethod
    def of(index: SplitIndex, cache: ShardCache | None = None) -> PackReaderSpec:
        """The spec of a packed split, whose remote shards are kept in ``cache``."""
        where = (index.path, index.split, index.digest, index.format, index.shards_at)
        return PackReaderSpec(*where, index.deadline_s, cache)

    def build(self) -> SampleReader:
        """See :class:`ReaderSpec`."""
        reader = ParquetReader if self.format == "parquet" else TarReader
        return reader(self.path, self.split, self.digest, self.shards_at, self.deadline_s, self.cache)


@dataclass(frozen=True)
class MixedReaderSpec:
    """Of each pack of a mixture the row of its first sample, its number, and how it is read."""

    packs: tuple[tuple[int, int, PackReaderSpec], ...]

    def build(self) -> MixedReader:
        """See :class:`ReaderSpec`."""
        return MixedReader(
            [(first, number, pack.shards_at or pack.path, pack.build()) for first, number, pack in self.packs]
        )


def reader_spec_of(split: Split, cache: ShardCache | None = None) -> ReaderSpec:
    """What travels with a task so that it can read samples of ``split``; remote shards are kept in ``cache``."""
    if isinstance(split, MixedSplit):
        packs = zip(split.first_rows[:-1], split.packs, strict=True)
        return MixedReaderSpec(
            tuple((first, pack.number, PackReaderSpec.of(pack.index, cache)) for first, pack in packs)
        )
    return PackReaderSpec.of(split, cache)


@lru_cache(maxsize=8)
def reader_of(spec: ReaderSpec) -> BatchReader[Any]:
    """This process's reader for ``spec``."""
    return spec.build()


@dataclass(frozen=True)
class PackSubstitutes:
    """Substitutes of bad samples out of the whole split: see :class:`rfstream.stream.decode.Substitutes`."""

    reader: ReaderSpec
    rows: int
    seed: int

    def of(self, bad: Encoded, epoch: int, position: int) -> Iterator[Any]:
        """Samples to try in the place of ``bad``, each read when it is asked for."""
        for row in substitute_rows(self.rows, bad.row, self.seed, epoch, position):
            yield from reader_of(self.reader).read(np.array([row], dtype=np.int64))


ReadFn = Callable[[], Iterable[pa.Table]]
_NUMBERS = ("epoch", "batch", "batch_size")
"""What a row of encoded batches says of them, beside their samples: ``batch`` is the first one's number."""


class BatchSource(Datasource):  # type: ignore[misc]
    """A source of whole batches: ``functions()`` gives one read function per task, each with its number of rows.

    The tasks are made anew wherever Ray asks for them, so what is pickled to Ray's coordinator is the plan, not its
    result.
    """

    def __init__(self, functions: Callable[[], Iterator[tuple[ReadFn, int]]]) -> None:
        super().__init__()
        self._functions = functions

    def estimate_inmemory_data_size(self) -> int | None:
        """Unknown before decoding."""
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """All tasks in order; ``parallelism`` is theirs to decide, not Ray's."""
        return [
            ReadTask(fn, BlockMetadata(num_rows=rows, size_bytes=None, input_files=None, exec_stats=None))
            for fn, rows in self._functions()
        ]


ROW_BYTES = 64 << 20
"""A row takes no further batch when it has this many bytes: memory, and the time until the first batch."""


def rows_of(batches: Iterable[WireBatch], most: int) -> Iterator[pa.Table]:
    """``batches`` in rows of up to ``most``, of about :data:`ROW_BYTES`. A row is an object of Ray's, which costs its
    daemons, coordinator and consumer the same whatever is in it."""
    row: list[WireBatch] = []
    nbytes = 0
    for batch in batches:
        row.append(batch)
        nbytes += sum(values.nbytes for values in batch.arrays.values())
        if len(row) == most or nbytes + nbytes // len(row) > ROW_BYTES:
            yield to_row(row)
            row, nbytes = [], 0
    if row:
        yield to_row(row)


def training_functions(
    plan: StreamPlan,
    start: Position,
    epochs: int,
    batches_per_task: int,
    reader: ReaderSpec,
    decode: DecodeSpec | None,
    substitutes: Substitutes | None,
) -> Iterator[tuple[ReadFn, int]]:
    """Read functions of a training stream. With ``decode`` they yield decoded batches (fused). Without, each yields the
    encoded batches of a shuffle block (staged), as many in a row as a decode task shall have.
    """
    per_row = batches_per_row(plan, batches_per_task)
    for task in plan.tasks(start, epochs, batches_per_task if decode else None):
        batches = task.hi - task.lo
        if decode is None:
            yield partial(_read_encoded, task, reader, batches_per_task), -(-batches // batches_per_task)
        else:
            yield partial(_read_decoded, task, reader, decode, substitutes, per_row), -(-batches // per_row)


def batches_per_row(plan: StreamPlan, batches_per_task: int) -> int:
    """Batches that a row of ``plan``'s stream holds at most: rows are dealt to the ranks in turn, so that several ranks
    must have one batch in each."""
    return batches_per_task if plan.windows.world_size == 1 else 1


def evaluation_functions(
    batches: Sequence[tuple[int, int]],
    rank: int,
    world_size: int,
    per_task: int,
    reader: ReaderSpec,
    decode: DecodeSpec,
) -> Iterator[tuple[ReadFn, int]]:
    """Read functions of one rank's evaluation batches, each ``(lo, hi)`` rows of the index."""
    for first in range(0, len(batches), per_task):
        chosen = batches[first : first + per_task]
        numbers = [(first + i) * world_size + rank for i in range(len(chosen))]
        yield partial(_read_evaluation, list(zip(numbers, chosen, strict=True)), reader, decode), 1


class StagedDecode:
    """Staged decoding in the actor pool: encoded batches (see :func:`_read_encoded`) to decoded ones."""

    def __init__(
        self, reader: ReaderSpec, decode: DecodeSpec, substitutes: Substitutes | None, batches_per_row: int
    ) -> None:
        self._reader = reader
        self._decoder = decoder_of(decode, substitutes)
        self._batches_per_row = batches_per_row

    def __call__(self, row: pa.Table) -> Iterator[pa.Table]:
        """Decode the batches in ``row``, one after the other."""
        return rows_of(self._decoded(row), self._batches_per_row)

    def _decoded(self, row: pa.Table) -> Iterator[WireBatch]:
        columns = {name: row.column(name).chunk(0) for name in row.column_names}
        epoch, first, size = (columns.pop(name)[0].as_py() for name in _NUMBERS)
        samples = reader_of(self._reader).of_columns(columns)
        for m in range(first, first + -(-len(samples) // size)):
            chosen, samples = samples[:size], samples[size:]  # what a batch holds goes with it
            yield self._decoder.batch(chosen, epoch, m, m * size)


def _read_decoded(
    task: Task, reader: ReaderSpec, decode: DecodeSpec, substitutes: Substitutes | None, per_row: int
) -> Iterator[pa.Table]:
    batches = range(task.lo, task.hi)
    parts = _read_together(reader, [task.rows(m, m + 1) for m in batches])
    decoder = decoder_of(decode, substitutes)
    decoded = (
        decoder.batch(samples, task.epoch, m, m * task.batch_size) for m, samples in zip(batches, parts, strict=True)
    )
    return rows_of(decoded, per_row)


def _read_together(reader: ReaderSpec, rows: Sequence[IntArray]) -> Iterator[list[Any]]:
    """Samples of each batch of a task, all read first, so that a group of pictures that they share is decoded once."""
    samples = reader_of(reader).read(np.concatenate(rows))
    for of_batch in rows:
        chosen, samples = samples[: len(of_batch)], samples[len(of_batch) :]  # what a batch holds goes with it
        yield chosen


def _read_encoded(task: Task, spec: ReaderSpec, batches_per_row: int) -> Iterator[pa.Table]:
    reader = reader_of(spec)
    parts = reader.parts(task.rows(task.lo, task.hi), batches_per_row * task.batch_size)
    for first, samples in zip(range(task.lo, task.hi, batches_per_row), parts, strict=True):
        numbers = zip(_NUMBERS, (task.epoch, first, task.batch_size), strict=True)
        yield pa.table({name: [number] for name, number in numbers} | reader.to_columns(samples))


def _read_evaluation(
    batches: Sequence[tuple[int, tuple[int, int]]], reader: ReaderSpec, decode: DecodeSpec
) -> Iterator[pa.Table]:
    parts = _read_together(reader, [np.arange(lo, hi, dtype=np.int64) for _, (lo, hi) in batches])
    decoder = decoder_of(decode)
    decoded = (decoder.batch(samples, 0, number, lo) for (number, (lo, _)), samples in zip(batches, parts, strict=True))
    return rows_of(decoded, len(batches))

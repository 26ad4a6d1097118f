"""Ray Data sources that execute a plan: each task yields one Arrow row per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from rfstream.dataset.cache import ShardCache
from rfstream.dataset.index import PackFormat, SplitIndex
from rfstream.dataset.mixture import MixedReader, MixedSplit, Split
from rfstream.dataset.parquet import ParquetReader
from rfstream.dataset.reader import EncodedSample, SampleReader
from rfstream.dataset.retry import DEADLINE_S
from rfstream.dataset.tar import TarReader
from rfstream.plan.position import Position
from rfstream.plan.substitute import substitute_rows
from rfstream.plan.tasks import StreamPlan, Task
from rfstream.stream.decode import DecodeSpec, Substitutes, decoder_of
from rfstream.stream.wire import to_row


@dataclass(frozen=True)
class ReaderSpec:
    """Which pack to read, and how: a few values that travel with every task."""

    path: str
    split: str
    digest: str
    format: PackFormat = "tar"
    shards_at: str | None = None
    deadline_s: float = DEADLINE_S
    cache: ShardCache | None = None

    @staticmethod
    def of(index: SplitIndex, cache: ShardCache | None = None) -> ReaderSpec:
        """The spec of a packed split, whose remote shards are kept in ``cache``."""
        where = (index.path, index.split, index.digest, index.format, index.shards_at)
        return ReaderSpec(*where, index.deadline_s, cache)


@dataclass(frozen=True)
class MixedReaderSpec:
    """Of each pack of a mixture the row of its first sample, its number, and how it is read."""

    packs: tuple[tuple[int, int, ReaderSpec], ...]


Reads = ReaderSpec | MixedReaderSpec


def reads_of(split: Split, cache: ShardCache | None = None) -> Reads:
    """What travels with a task so that it can read samples of ``split``; remote shards are kept in ``cache``."""
    if isinstance(split, MixedSplit):
        packs = zip(split.first_rows[:-1], split.packs, strict=True)
        return MixedReaderSpec(tuple((first, pack.number, ReaderSpec.of(pack.index, cache)) for first, pack in packs))
    return ReaderSpec.of(split, cache)


@lru_cache(maxsize=8)
def reader_of(spec: Reads) -> SampleReader | MixedReader:
    """This process's reader for ``spec``."""
    if isinstance(spec, MixedReaderSpec):
        return MixedReader(
            [(first, number, pack.shards_at or pack.path, _pack_reader(pack)) for first, number, pack in spec.packs]
        )
    return _pack_reader(spec)


def _pack_reader(spec: ReaderSpec) -> SampleReader:
    reader = ParquetReader if spec.format == "parquet" else TarReader
    return reader(spec.path, spec.split, spec.digest, spec.shards_at, spec.deadline_s, spec.cache)


@dataclass(frozen=True)
class PackSubstitutes:
    """Substitutes of bad samples out of the whole split: see :class:`rfstream.stream.decode.Substitutes`."""

    reader: Reads
    rows: int
    seed: int

    def of(self, bad: EncodedSample, epoch: int, position: int) -> Iterator[EncodedSample]:
        """Samples to try in the place of ``bad``, each read when it is asked for."""
        for row in substitute_rows(self.rows, bad.row, self.seed, epoch, position):
            yield from reader_of(self.reader).read(np.array([row], dtype=np.int64))


ReadFn = Callable[[], Iterable[pa.Table]]


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


def training_functions(
    plan: StreamPlan,
    start: Position,
    epochs: int,
    batches_per_task: int,
    reader: Reads,
    decode: DecodeSpec | None,
    substitutes: Substitutes | None,
) -> Iterator[tuple[ReadFn, int]]:
    """Read functions of a training stream. With ``decode`` they yield decoded batches (fused). Without, each yields the
    encoded batches of a shuffle block (staged), as many in a row as a decode task shall have.
    """
    for task in plan.tasks(start, epochs, batches_per_task if decode else None):
        batches = task.hi - task.lo
        if decode is None:
            yield partial(_read_encoded, task, reader, batches_per_task), -(-batches // batches_per_task)
        else:
            yield partial(_read_decoded, task, reader, decode, substitutes), batches


def evaluation_functions(
    batches: Sequence[tuple[int, int]],
    rank: int,
    world_size: int,
    per_task: int,
    reader: Reads,
    decode: DecodeSpec,
) -> Iterator[tuple[ReadFn, int]]:
    """Read functions of one rank's evaluation batches, each ``(lo, hi)`` rows of the index."""
    for first in range(0, len(batches), per_task):
        chosen = batches[first : first + per_task]
        numbers = [(first + i) * world_size + rank for i in range(len(chosen))]
        yield partial(_read_evaluation, list(zip(numbers, chosen, strict=True)), reader, decode), len(chosen)


class StagedDecode:
    """Staged decoding in the actor pool: encoded batches (see :func:`_encoded_row`) to decoded ones."""

    def __init__(self, decode: DecodeSpec, substitutes: Substitutes | None) -> None:
        self._decoder = decoder_of(decode, substitutes)

    def __call__(self, row: pa.Table) -> Iterator[pa.Table]:
        """Decode the batches in ``row``, one after the other."""
        columns = {name: row.column(name)[0] for name in row.column_names}
        members = (columns[name] for name in ("images", "sidecars", "places"))
        samples = [
            EncodedSample(image=image.as_buffer().to_pybytes(), sidecar=sidecar.as_py(), **place.as_py())
            for image, sidecar, place in zip(*members, strict=True)
        ]
        epoch, first, size = (columns[name].as_py() for name in ("epoch", "batch", "batch_size"))
        for m, chosen in _parts(samples, first, size):
            yield to_row(self._decoder.batch(chosen, epoch, m, m * size))


def _read_decoded(task: Task, reader: Reads, decode: DecodeSpec, substitutes: Substitutes | None) -> Iterator[pa.Table]:
    for m in range(task.lo, task.hi):
        samples = reader_of(reader).read(task.rows(m, m + 1))
        yield to_row(decoder_of(decode, substitutes).batch(samples, task.epoch, m, m * task.batch_size))


def _read_encoded(task: Task, reader: Reads, batches_per_row: int) -> Iterator[pa.Table]:
    # The whole block at once: its samples lie in few fragments, each one range request.
    samples = reader_of(reader).read(task.rows(task.lo, task.hi))
    for i, chosen in _parts(samples, 0, batches_per_row * task.batch_size):
        yield _encoded_row(chosen, task.epoch, task.lo + i * batches_per_row, task.batch_size)


def _parts(samples: Sequence[EncodedSample], first: int, size: int) -> Iterator[tuple[int, Sequence[EncodedSample]]]:
    """``samples`` in parts of ``size``, numbered from ``first`` on."""
    for number, lo in enumerate(range(0, len(samples), size), first):
        yield number, samples[lo : lo + size]


def _read_evaluation(
    batches: Sequence[tuple[int, tuple[int, int]]], reader: Reads, decode: DecodeSpec
) -> Iterator[pa.Table]:
    for number, (lo, hi) in batches:
        samples = reader_of(reader).read(np.arange(lo, hi, dtype=np.int64))
        yield to_row(decoder_of(decode).batch(samples, 0, number, lo))


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
"""What encoded batches say of each sample beside its bytes."""


def _encoded_row(samples: Sequence[EncodedSample], epoch: int, batch: int, batch_size: int) -> pa.Table:
    """Consecutive batches of ``epoch``, ``batch`` the first of them."""
    return pa.table(
        {
            "epoch": [epoch],
            "batch": [batch],
            "batch_size": [batch_size],
            "places": pa.array(
                [[{name: getattr(s, name) for name in _PLACE.names} for s in samples]], pa.list_(_PLACE)
            ),
            "images": pa.array([[s.image for s in samples]], type=pa.large_list(pa.large_binary())),
            "sidecars": pa.array([[s.sidecar for s in samples]], type=pa.large_list(pa.large_binary())),
        }
    )

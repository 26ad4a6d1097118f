"""The two Parquet tables beside a split's index: one row a sample, one row a fragment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rfstream.dataset import storage
from rfstream.dataset.retry import DEADLINE_S
from rfstream.errors import DatasetError, PlanError
from rfstream.plan.keys import IntArray
from rfstream.plan.order import Fragments

BLOCK = 512  # a tar file is a sequence of blocks of this many bytes
FRAGMENT_BYTES = 8 * 1024 * 1024
MAX_SIDECAR = 64 * 1024 * 1024  # bytes of the JSON beside an image: as objects it takes ten times as much memory

SAMPLES = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("ext", pa.string(), nullable=False),
        pa.field("image_offset", pa.int64(), nullable=False),
        pa.field("image_size", pa.int64(), nullable=False),
        pa.field("json_offset", pa.int64(), nullable=False),
        pa.field("json_size", pa.int64(), nullable=False),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("objects", pa.int32(), nullable=False),
        pa.field("crowds", pa.string()),  # the sample's annotations with iscrowd set, a JSON list; null if none
    ]
)
PLACE = ("image_offset", "image_size", "json_offset", "json_size")  # the columns that say where a sample lies
PARQUET_SAMPLES = pa.schema([field for field in SAMPLES if not field.name.startswith("json_")])
"""The same of a Parquet pack: annotations lie in columns, and an image's bytes in a page that is as plain as a tar."""
FOREIGN_SAMPLES = pa.schema([field for field in PARQUET_SAMPLES if not field.name.startswith("image_")])
"""The same of Parquet that others wrote: an image is found by its row group."""
STATED = ("width", "height")  # what the dataset's annotations say of the image
FRAGMENTS = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("first", pa.int64(), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
    ]
)


TableName = Literal["samples", "fragments"]


def table_name(split: str, generation: str, table: TableName) -> str:
    """File name of one of a split's tables."""
    return f"{split}-{generation}.{table}.parquet"


def table_names(split: str, generation: str) -> list[str]:
    """File names of a split's tables."""
    return [table_name(split, generation, "samples"), table_name(split, generation, "fragments")]


def padded(size: int) -> int:
    """``size`` bytes rounded up to whole tar blocks."""
    return -(-size // BLOCK) * BLOCK


def extents(samples: pa.Table) -> tuple[IntArray, IntArray]:
    """First byte (of the header) and the byte past the last of each sample in its shard, int64 (n,) each."""
    image, image_size, sidecar, sidecar_size = (samples[name].to_numpy() for name in PLACE)
    return np.minimum(image, sidecar) - BLOCK, np.maximum(image + image_size, sidecar + sidecar_size)


def fragments_of(shard: int, start: IntArray, end: IntArray) -> pa.Table:
    """Cut one shard where its samples, at ``extents`` ``start`` to ``end``, cross a multiple of 8 MiB.

    ``first`` is counted from the shard's first sample.
    """
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(start // FRAGMENT_BYTES)) + 1, [len(start)]])
    at, count = cuts[:-1], np.diff(cuts)
    columns = {
        "shard": np.full(len(at), shard, dtype=np.int32),
        "first": at,
        "samples": count,
        "offset": start[at],
        "nbytes": end[at + count - 1] - start[at],
    }
    return pa.table(columns, schema=FRAGMENTS)


def write_tables(folder: str, split: str, generation: str, shards: Sequence[tuple[pa.Table, pa.Table]]) -> list[str]:
    """Write both tables of a split from the samples and fragments of each shard; returns their file names.

    The samples have one row group a shard, so that a reader takes only the shards it needs.
    """
    names = table_names(split, generation)
    schema = shards[0][0].schema
    with storage.replacing(storage.join(folder, names[0])) as file, pq.ParquetWriter(file, schema) as writer:
        for samples, _ in shards:
            writer.write_table(samples, row_group_size=max(1, len(samples)))
    with storage.replacing(storage.join(folder, names[1])) as file:
        pq.write_table(join_fragments(shards), file)
    return names


def join_fragments(shards: Sequence[tuple[pa.Table, pa.Table]]) -> pa.Table:
    """The fragments of a split from the samples and fragments of each shard: ``first`` is counted through."""
    first, joined = 0, []
    for samples, fragments in shards:
        rows = pa.array(fragments["first"].to_numpy() + first)
        joined.append(fragments.set_column(1, FRAGMENTS.field("first"), rows))
        first += len(samples)
    return pa.concat_tables(joined)


def read_fragments(url: str, num_samples: int, reindex: str, deadline_s: float = DEADLINE_S) -> Fragments:
    """The fragments of a split of ``num_samples`` in pack order; ``reindex`` is what a message tells the user to do.

    Raises:
        DatasetError: if the table is unreadable or does not describe that many samples.
    """
    # Column by column, and only two: a split may have tens of millions of fragments.
    starts = _int64_column(url, "first", reindex, deadline_s, num_samples)
    nbytes = _int64_column(url, "nbytes", reindex, deadline_s)
    try:
        return Fragments(starts, nbytes)
    except PlanError as error:
        raise DatasetError(
            f"{url}: does not describe the {num_samples} samples of the index ({error}); {reindex}"
        ) from None


def read_crowds(url: str, reindex: str, deadline_s: float = DEADLINE_S) -> pa.Table:
    """The samples that have crowd annotations: their JSON list, width and height where they are known, and ``row``.

    Evaluation needs them, training never: they are apart from what a reader loads.

    Raises:
        DatasetError: if the table is unreadable or older than the column; ``reindex`` tells the user what to do.
    """
    schema = pa.schema([SAMPLES.field(name) for name in ("crowds", "width", "height")])
    try:
        with storage.open_binary(url, deadline_s) as file:
            table = conform(pq.read_table(file, columns=schema.names), schema)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{url}: not a readable sample table ({storage.describe(error)}); {reindex}") from None
    table = table.append_column("row", pa.array(np.arange(len(table))))
    return table.filter(table["crowds"].is_valid())


def _int64_column(url: str, name: str, reindex: str, deadline_s: float, *end: int) -> npt.NDArray[np.int64]:
    """One column, with the numbers ``end`` after it."""
    try:
        with storage.open_binary(url, deadline_s) as file:
            table = conform(pq.read_table(file, columns=[name]), pa.schema([FRAGMENTS.field(name)]))
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{url}: not a readable fragment table ({storage.describe(error)}); {reindex}") from None
    values = np.empty(len(table) + len(end), dtype=np.int64)
    at = 0
    for chunk in table[name].chunks:
        values[at : at + len(chunk)] = chunk
        at += len(chunk)
    values[at:] = end
    return values


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """``table`` with the columns and types of ``schema``; raises ArrowInvalid if it lacks a column or can't be cast."""
    absent = set(schema.names) - set(table.column_names)
    if absent:
        raise pa.ArrowInvalid(f"no column {min(absent)!r}")
    try:
        return table.select(schema.names).cast(schema)
    except ValueError as error:  # a plain one for nulls where there may be none
        raise pa.ArrowInvalid(str(error)) from None

"""The ledger: what each rank got, sample by sample. Two ledgers that are equal saw the same pixels in the same
order."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from rfstream.batch import Batch
from rfstream.config import Config
from rfstream.episodes.batch import EpisodeBatch
from rfstream.errors import DatasetError
from rfstream.loader import RankLoader, maker_of
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.ranks import Peers, threads
from rfstream.stream.split import HandOver

SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("step", pa.int64()),
        ("rank", pa.int64()),
        ("slot", pa.int64()),
        ("position", pa.int64()),
        ("key", pa.string()),
        ("pixels", pa.uint32()),
        ("targets", pa.uint32()),
    ]
)
"""One row per sample: micro-step, rank and slot in the batch; position in the epoch's order; CRC-32 of the augmented
pixels (uint8 C, H, W, without padding; of a window of frames all of them) and of the targets (fields by name)."""


def ledger_rows(batch: Batch | EpisodeBatch, rank: int, world_size: int) -> list[dict[str, Any]]:
    """The ledger's rows for one batch of ``rank``."""
    first = (batch.step * world_size + rank) * len(batch)
    rows = []
    for slot, key in enumerate(batch.keys):
        pixels, targets = batch.compared(slot)
        rows.append(
            {
                "epoch": batch.epoch,
                "step": batch.step,
                "rank": rank,
                "slot": slot,
                "position": first + slot,
                "key": key,
                "pixels": _crc(*pixels),
                "targets": _crc(*targets),
            }
        )
    return rows


def make_ledger(config: Config, *, epochs: int, world_size: int) -> pa.Table:
    """Stream ``epochs`` epochs of the training split to ``world_size`` ranks (threads here) and record every sample.

    Rows are sorted by epoch and position, so equal content is an equal table but for ``step``, ``rank`` and ``slot``.
    """
    pipeline = build_pipeline(config, "train", world_size, training=True)
    ranks = threads(world_size)
    failures: list[BaseException] = []

    def run(peers: Peers) -> list[dict[str, Any]]:
        try:
            with RankLoader(pipeline, HandOver(pipeline, peers), maker_of(pipeline)) as loader:
                rows = [
                    row for _ in range(epochs) for batch in loader for row in ledger_rows(batch, peers.rank, world_size)
                ]
                # The execution ends with rank 0's loader.
                peers.meet({}, config.stream.timeout_s, "to end")
                return rows
        except BaseException as error:
            failures.append(error)  # the first is the cause, the rest its consequences
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, peers) for peers in ranks]
    if failures:
        raise failures[0]
    rows = [row for future in futures for row in future.result()]
    return pa.Table.from_pylist(rows, schema=SCHEMA).sort_by([("epoch", "ascending"), ("position", "ascending")])


def write_ledger(table: pa.Table, path: str | Path) -> None:
    """Write a ledger as Parquet."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def read_ledger(path: str | Path) -> pa.Table:
    """Read a ledger.

    Raises:
        DatasetError: if the file is missing or is no ledger.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DatasetError(f"{path} can't be read as a ledger: {str(error).splitlines()[0]}") from None
    if table.schema.names != SCHEMA.names:
        raise DatasetError(f"{path} is not a ledger: it has the columns {', '.join(table.schema.names)}")
    return table


def first_difference(a: pa.Table, b: pa.Table) -> str | None:
    """``None`` if two ledgers hold the same samples, pixels and targets at the same positions; else where they first
    differ.

    Step, rank and slot are not compared: another world size deals the same order differently.
    """
    for i in range(min(len(a), len(b))) if not _same(a, b) else ():
        left, right = a.slice(i, 1).to_pylist()[0], b.slice(i, 1).to_pylist()[0]
        for column in ("epoch", "position", "key", "pixels", "targets"):
            if left[column] != right[column]:
                return (
                    f"epoch {left['epoch']} position {left['position']}: {column} {left[column]} against "
                    f"{right[column]} "
                    f"(key {left['key']} against {right['key']})"
                )
    if len(a) != len(b):
        return f"the first has {len(a)} samples, the second {len(b)}; they agree as far as both go"
    return None


def _same(a: pa.Table, b: pa.Table) -> bool:
    columns = ["epoch", "position", "key", "pixels", "targets"]
    return len(a) == len(b) and all(pc.all(pc.equal(a[c], b[c])).as_py() is not False for c in columns)


def _crc(*tensors: Tensor) -> int:
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().numpy().tobytes(), crc)
    return crc

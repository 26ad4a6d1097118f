"""A batch as it crosses processes: one Arrow row of a handful of contiguous buffers, whatever the batch size.

Each array is one ``large_binary`` value; a JSON header gives its dtype and shape. Arrow hands such values over without
a copy when they lie in Ray's shared memory. Needs neither Ray nor torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from rfstream.stream.bad import BadSample

HEADER = "header"
"""Column of a row that says what the others hold; no array has this name."""


@dataclass(frozen=True)
class WireBatch:
    """One batch in NumPy arrays.

    ``batch`` is its number in the epoch over all ranks; ``arrays`` are what its decoder makes: of images ``images``
    uint8 (B, 3, H, W), ``sizes``, ``orig_sizes``, ``image_ids``, ``offsets`` and one flat array per target field (see
    :class:`rfstream.batch.Batch`), of episodes one structured array and the frames of each camera.
    ``bad`` are the samples that could not be decoded, each with the position in the epoch's order where that was.
    """

    epoch: int
    batch: int
    keys: list[str]
    arrays: dict[str, npt.NDArray[Any]]
    bad: list[tuple[int, BadSample]] = field(default_factory=list)


def to_row(batch: WireBatch) -> pa.Table:
    """The batch as an Arrow table of one row, sharing the arrays' memory."""
    arrays = {name: np.ascontiguousarray(value) for name, value in batch.arrays.items()}
    header = {
        "epoch": batch.epoch,
        "batch": batch.batch,
        "keys": batch.keys,
        "bad": [[position, asdict(bad)] for position, bad in batch.bad],
        "arrays": {name: [dtype_to_descr(value.dtype), value.shape] for name, value in arrays.items()},
    }
    columns: dict[str, pa.Array] = {HEADER: pa.array([json.dumps(header)])}
    for name, value in arrays.items():
        offsets = pa.py_buffer(np.array([0, value.nbytes], dtype=np.int64))
        values = pa.py_buffer(value.reshape(-1).view(np.uint8) if value.size else b"")
        columns[name] = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, values])
    return pa.table(columns)


def from_row(row: pa.Table) -> WireBatch:
    """The batch in an Arrow table of one row. The arrays are read-only views of the table's memory."""
    header = json.loads(row.column(HEADER)[0].as_py())
    arrays = {
        name: np.frombuffer(row.column(name)[0].as_buffer(), dtype=descr_to_dtype(dtype)).reshape(shape)
        for name, (dtype, shape) in header["arrays"].items()
    }
    bad = [(position, BadSample(**fields)) for position, fields in header["bad"]]
    return WireBatch(header["epoch"], header["batch"], header["keys"], arrays, bad)

"""Batches as they cross processes: one Arrow row of a handful of contiguous buffers, whatever the batch size.

Each large array is one ``large_binary`` value, and all small ones are another, since each value costs Ray about as much
as copying half a megabyte; a JSON header gives place, dtype and shape. Arrays of a received row lie where the row does,
which is Ray's shared memory. Needs neither Ray nor torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from rfstream.stream.bad import BadSample

HEADER, SMALL = "header", "small"
"""Columns of a row: what the others hold, and the small arrays end to end."""
_SMALL_BYTES = 1 << 16
_ALIGNMENT = 8


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


def to_row(batches: Sequence[WireBatch]) -> pa.Table:
    """The batches as an Arrow table of one row, sharing the memory of their large arrays."""
    headers: list[dict[str, Any]] = []
    columns: dict[str, pa.Array] = {}
    small = bytearray()
    for number, batch in enumerate(batches):
        places: dict[str, list[Any]] = {}
        for name, value in batch.arrays.items():
            column, offset = (SMALL, len(small)) if value.nbytes < _SMALL_BYTES else (f"{number}.{name}", 0)
            if column == SMALL:
                small += value.tobytes()
                small += bytes(-len(small) % _ALIGNMENT)
            else:
                columns[column] = _binary(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            places[name] = [dtype_to_descr(value.dtype), value.shape, column, offset]
        bad = [[position, asdict(each)] for position, each in batch.bad]
        headers.append({"epoch": batch.epoch, "batch": batch.batch, "keys": batch.keys, "bad": bad, "arrays": places})
    return pa.table({HEADER: pa.array([json.dumps(headers)]), SMALL: _binary(small), **columns})


def _binary(values: Any) -> pa.Array:
    """One value of ``values``' bytes, in their own memory."""
    offsets = pa.py_buffer(np.array([0, len(values)], dtype=np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(values)])


def from_row(row: pa.Table) -> list[WireBatch]:
    """The batches in an Arrow table of one row. Their arrays are read-only views of the table's memory."""
    buffers = {name: first_value(row.column(name).chunk(0)) for name in row.column_names if name != HEADER}
    return [
        WireBatch(
            header["epoch"],
            header["batch"],
            header["keys"],
            {name: _array(buffers, *place) for name, place in header["arrays"].items()},
            [(position, BadSample(**fields)) for position, fields in header["bad"]],
        )
        for header in json.loads(row.column(HEADER)[0].as_py())
    ]


def first_value(array: pa.LargeBinaryArray) -> pa.Buffer:
    """The bytes of an array's first value where they are: ``array[0]`` would be a copy."""
    _, offsets, data = array.buffers()
    begin, end = np.frombuffer(offsets, np.int64)[array.offset : array.offset + 2].tolist()
    return pa.py_buffer(b"") if data is None else data.slice(begin, end - begin)


def _array(buffers: dict[str, pa.Buffer], descr: Any, shape: list[int], column: str, offset: int) -> npt.NDArray[Any]:
    dtype, count = descr_to_dtype(descr), math.prod(shape)
    if count == 0:  # of which NumPy makes no view
        return np.empty(shape, dtype)
    return np.frombuffer(buffers[column], dtype, count, offset).reshape(shape)

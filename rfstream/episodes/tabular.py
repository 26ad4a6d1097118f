"""The rows of episodes out of the Parquet files of ``data/``, and the windows cut from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rfstream.dataset import storage
from rfstream.episodes.layout import PAD, TASK, Field, Layout
from rfstream.episodes.metadata import INFO, readable
from rfstream.errors import DatasetError
from rfstream.plan.keys import IntArray

_ORDER = ("episode_index", "frame_index", "index", "timestamp", "task_index")
"""Columns that every dataset has, and that say which row is which."""
_LISTS = (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)


@dataclass(frozen=True, eq=False)
class EpisodeRows:
    """An episode in memory: ``columns`` holds an array (n, *shape) a tabular field, ``pictures`` the encoded images
    of each camera whose images lie in Parquet, ``task`` int64 (n,), ``timestamp`` float64 (n,)."""

    columns: Mapping[str, npt.NDArray[Any]]
    pictures: Mapping[str, pa.ChunkedArray]
    task: IntArray
    timestamp: npt.NDArray[np.float64]

    def write(self, layout: Layout, frame: int, record: np.void) -> None:
        """Fill a sample's ``record`` (see :meth:`Layout.record_type`) with the windows around ``frame``."""
        length = len(self.task)
        for field in layout.tabular:
            if field.steps is None:
                record[field.name] = self.columns[field.name][frame]
            else:
                frames, record[field.name + PAD] = field.clamped(frame, length)
                record[field.name] = self.columns[field.name][frames]
        for camera in layout.cameras:
            if camera.steps is not None:
                _, record[camera.name + PAD] = camera.clamped(frame, length)
        record[TASK] = self.task[frame]


@dataclass(frozen=True)
class Wanted:
    """An episode to read: its ``episode_index``, its length, and ``index`` of its first frame."""

    number: int
    length: int
    start: int


def read_footer(url: str, deadline_s: float) -> pq.FileMetaData:
    """What a data file says of its row groups.

    Raises:
        DatasetError: if the file can't be read.
    """
    with readable(url), storage.open_binary(url, deadline_s, buffer=1) as opened:
        return pq.read_metadata(opened)


def read_episodes(
    url: str, footer: pq.FileMetaData, wanted: Sequence[Wanted], layout: Layout, tasks: int, deadline_s: float
) -> dict[int, EpisodeRows]:
    """Episodes of one data file by their number. Row groups that hold none of them are not read.

    Rows need not lie in order, nor row groups follow episodes; columns beside the layout's are not read.

    Args:
        url: the file.
        footer: its own, see :func:`read_footer`.
        wanted: which episodes.
        layout: what to keep of them.
        tasks: number of tasks that a row may name.
        deadline_s: how long one range may take, seconds.

    Raises:
        DatasetError: if the file can't be read, or rows are absent, of another type, or not one a frame in time.
    """
    pictured = [camera.name for camera in layout.cameras if camera.dtype == "image"]
    names = list(dict.fromkeys([*_ORDER, *(field.name for field in layout.tabular), *pictured]))
    # PyArrow asks for columns that lie end to end in one range; a larger buffer would cut it in two requests.
    with readable(url), storage.open_binary(url, deadline_s, buffer=1) as opened:
        file = pq.ParquetFile(opened, metadata=footer, pre_buffer=True)
        absent = [name for name in names if name not in file.schema_arrow.names]
        if absent:
            raise DatasetError(f"{url}: has no column {absent[0]!r}, which meta/info.json names; copy it again")
        groups = _groups(footer, [episode.number for episode in wanted])
        table = file.read_row_groups(groups, columns=names).select(names)
    number = _integers(url, table, "episode_index")
    found = {}
    for episode in wanted:
        at = np.flatnonzero(number == episode.number)
        rows = _taken(f"{url}: episode {episode.number}", table, at)
        found[episode.number] = _episode(url, episode, rows, layout, pictured, tasks)
    return found


def _taken(where: str, table: pa.Table, at: IntArray) -> pa.Table:
    """Rows ``at`` of a table, without a copy where they follow each other."""
    if len(at) and (np.diff(at) == 1).all():
        return table.slice(at[0], len(at))
    try:
        return table.take(at)
    except pa.ArrowException as error:  # more than 2 GB of images
        reason = storage.describe(error)
        raise DatasetError(f"{where}: its rows can't be put in order ({reason}); write them in order") from None


def _groups(metadata: pq.FileMetaData, numbers: Sequence[int]) -> list[int]:
    """Row groups that may hold one of the episodes, as their statistics say; all where there are none."""
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    leaf = leaves.index("episode_index")
    groups = []
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(leaf).statistics
        known = statistics is not None and statistics.has_min_max
        if not known or any(statistics.min <= number <= statistics.max for number in numbers):
            groups.append(group)
    return groups


def _episode(
    url: str, episode: Wanted, rows: pa.Table, layout: Layout, pictured: Sequence[str], tasks: int
) -> EpisodeRows:
    where, frame = f"{url}: episode {episode.number}", _integers(url, rows, "frame_index")
    if (np.diff(frame) < 0).any():
        order = np.argsort(frame, kind="stable")
        rows, frame = _taken(where, rows, order), frame[order]
    index, task = (_integers(url, rows, name) for name in ("index", "task_index"))
    expected = np.arange(episode.length)
    if not (np.array_equal(frame, expected) and np.array_equal(index - episode.start, expected)):
        raise DatasetError(
            f"{where} has {len(frame)} rows that are not frames 0 to {episode.length - 1} in order, as the metadata "
            "says: write the episode again"
        )
    timestamp = _values(url, rows, Field("timestamp", "float64", (), None))
    _check_times(where, timestamp, layout.fps)
    if task.min() < 0 or task.max() >= tasks:
        raise DatasetError(f"{where} has task_index {task.max()} and meta/tasks.parquet has {tasks} tasks; correct it")
    columns = {field.name: _values(url, rows, field) for field in layout.tabular}
    return EpisodeRows(columns, {name: _pictures(url, rows, name) for name in pictured}, task, timestamp)


def _check_times(where: str, seconds: npt.NDArray[np.float64], fps: float) -> None:
    """Raise DatasetError unless the timestamps rise by about a frame a row."""
    back = np.flatnonzero(np.diff(seconds) <= 0)
    if len(back):
        at = int(back[0]) + 1
        raise DatasetError(
            f"{where}, frame {at}: timestamp {seconds[at]:g} s does not come after {seconds[at - 1]:g} s; write the "
            "episode again"
        )
    off = np.flatnonzero(np.abs(seconds - seconds[0] - np.arange(len(seconds)) / fps) > 0.5 / fps)
    if len(off):
        at = int(off[0])
        raise DatasetError(
            f"{where}, frame {at}: timestamp {seconds[at]:g} s is not frame {at} at fps={fps:g}; correct fps in "
            "meta/info.json, or write the episode again"
        )


def _integers(url: str, rows: pa.Table, name: str) -> IntArray:
    return _values(url, rows, Field(name, "int64", (), None))


def _values(url: str, rows: pa.Table, field: Field) -> npt.NDArray[Any]:
    """A column as an array (n, *shape) of the field's dtype: nested lists, or a scalar for shape ().

    Numbers of another type are taken where the field's type holds all of that one.
    """
    try:
        sizes, values = _flat(rows[field.name].combine_chunks())
        if values is None:
            raise DatasetError(f"{url}: column {field.name!r} has values that are absent; write the file again")
        fits = sizes in [[[size] for size in shape] for shape in (field.shape, field.shape or (1,))]
        if fits and values.dtype.kind in "biuf" and np.can_cast(values.dtype, field.dtype):
            return np.array(values, dtype=field.dtype).reshape(len(rows), *field.shape)  # a copy: the rest may go
        lengths = f" with lists of {sizes}" if sizes else ""
    except pa.ArrowException as error:
        lengths = f" ({storage.describe(error)})"
    raise DatasetError(
        f"{url}: column {field.name!r} is {rows.schema.field(field.name).type}{lengths}, and {INFO} says "
        f"{field.dtype} {list(field.shape)}; correct it"
    )


def _flat(column: pa.Array) -> tuple[list[list[int]], npt.NDArray[Any] | None]:
    """The lengths that lists have at each level of a column, and its values end to end; ``None`` if some are absent."""
    sizes = []
    while not column.null_count:
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        elif isinstance(column, _LISTS):
            sizes.append(sorted(pc.unique(pc.list_value_length(column)).to_pylist()))
            column = column.flatten()
        else:
            return sizes, column.to_numpy(zero_copy_only=False)
    return sizes, None


def _pictures(url: str, rows: pa.Table, name: str) -> pa.ChunkedArray:
    """The encoded images of a camera: a column struct<bytes, path>."""
    column = rows[name]
    if not pa.types.is_struct(column.type) or column.type.get_field_index("bytes") < 0:
        raise DatasetError(f"{url}: column {name!r} is {column.type}, not struct<bytes, path>; write the file again")
    data = pc.struct_field(column, "bytes")
    if data.null_count:
        raise DatasetError(f"{url}: column {name!r} names image files and does not hold them; write the file again")
    return data

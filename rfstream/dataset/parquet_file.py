"""The structure of one Parquet shard: its footer, checked, and the annotations of its row groups.

Formats: https://parquet.apache.org/docs/file-format/, and the columns of :mod:`rfstream.dataset.convention`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rfstream.dataset import storage
from rfstream.dataset.convention import COLUMNS, KEYPOINTS, annotations_of
from rfstream.errors import DatasetError, SampleError
from rfstream.plan.keys import IntArray

T = TypeVar("T")
IMAGE = "image.bytes"
_TRAILER = 8  # four bytes of the footer's length, and PAR1
_PLAIN = {IMAGE: pa.binary(), "image.path": pa.string(), "image_id": pa.int64()}
_STATED = {"width": pa.int64(), "height": pa.int64()}


@dataclass(frozen=True)
class Annotations:
    """What a row group says beside its images: columns by path, one entry a row."""

    columns: dict[str, pa.Array]

    @property
    def nbytes(self) -> int:
        """Memory of the columns."""
        return sum(column.nbytes for column in self.columns.values())

    def stated(self, row: int) -> tuple[int | None, int | None]:
        """Width and height as the annotations say, if these columns were read and hold them."""
        width, height = (self.columns[name][row].as_py() if name in self.columns else None for name in _STATED)
        return width, height

    def sidecar(self, row: int, category_ids: Sequence[int]) -> dict[str, Any]:
        """The JSON member that a tar has of the row.

        Raises:
            ValueError: naming the column that can't be understood.
        """
        cells = {path: column[row].as_py() for path, column in self.columns.items()}
        image_id, name = cells["image_id"], cells["image.path"]
        if image_id is None or name is None:
            raise ValueError(f"column {'image_id' if image_id is None else 'image.path'!r} is null")
        objects = {path.removeprefix("objects."): cell for path, cell in cells.items() if path.startswith("objects.")}
        annotations = list(annotations_of(objects, image_id, category_ids))
        return {"image_id": image_id, "file_name": name, "annotations": annotations}


class Footer:
    """The footer of the Parquet shard at ``url``.

    ``starts`` int64 (row groups + 1,): the shard's row that each row group begins with, and the number of rows.

    Raises:
        DatasetError: if a column is absent or of another type than the convention's.
    """

    def __init__(self, url: str, metadata: pq.FileMetaData) -> None:
        self.url, self._metadata = url, metadata
        self._columns = _checked_columns(url, metadata.schema.to_arrow_schema())
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.starts: IntArray = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @staticmethod
    def missing(tail: bytes) -> int:
        """How many of a file's last bytes the footer needs beyond ``tail``; 0 if they are there, or no footer is."""
        length = int.from_bytes(tail[-_TRAILER:-4], "little")
        return max(0, length + _TRAILER - len(tail)) if tail.endswith(b"PAR1") else 0

    @staticmethod
    def parse(url: str, tail: bytes) -> Footer:
        """The footer at the end of ``tail``, the last bytes of the file at ``url``.

        Raises:
            DatasetError: also if there is none, since the file is cut or is something else.
        """
        return Footer(url, _explained(url, lambda: pq.read_metadata(pa.BufferReader(tail))))

    @staticmethod
    def of(url: str, file: IO[bytes]) -> Footer:
        """The footer of the open file at ``url``. Raises as :meth:`parse` does."""
        return Footer(url, _explained(url, lambda: pq.read_metadata(file)))

    @property
    def groups(self) -> int:
        """Number of row groups."""
        return len(self.starts) - 1

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Key-value metadata."""
        return dict(self._metadata.metadata or {})

    def image_span(self, group: int) -> tuple[int, int]:
        """The bytes of the shard that hold a row group's images."""
        return next(span for path, span in self._chunks(group) if path == IMAGE)

    def spans(self, group: int) -> list[tuple[int, int]]:
        """The bytes of the shard that hold a row group's annotations."""
        wanted = tuple(path for path in self._columns if path not in _STATED)
        return [span for path, span in self._chunks(group) if _is_of(path, wanted)]

    def _chunks(self, group: int) -> list[tuple[str, tuple[int, int]]]:
        """Path and bytes of each leaf column of a row group."""
        row_group = self._metadata.row_group(group)
        chunks = [row_group.column(column) for column in range(row_group.num_columns)]
        starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
        return [
            (chunk.path_in_schema, (start, start + chunk.total_compressed_size))
            for chunk, start in zip(chunks, starts, strict=True)
        ]

    def annotations(self, group: int, source: IO[bytes] | io.RawIOBase, *, stated: bool = False) -> Annotations:
        """The annotations of a row group from the shard's bytes, with width and height if ``stated``.

        Raises:
            DatasetError: if they are damaged.
        """
        columns = {path: kind for path, kind in self._columns.items() if stated or path not in _STATED}

        def read() -> Annotations:
            table = self._table(group, source, list(columns))
            return Annotations({path: _cells(table, path).cast(kind) for path, kind in columns.items()})

        return _explained(f"{self.url}: row group {group}", read)

    def sidecar(self, annotations: Annotations, group: int, row: int, category_ids: Sequence[int]) -> dict[str, Any]:
        """The JSON member that a tar has of the shard's row ``row``, which is in ``group``.

        Raises:
            SampleError: naming the column that can't be understood.
        """
        try:
            return annotations.sidecar(row - int(self.starts[group]), category_ids)
        except ValueError as error:
            raise SampleError(f"{self.url}: row {row}: {error}; copy or pack it again") from None

    def images(self, group: int, source: IO[bytes] | io.RawIOBase) -> list[bytes | None]:
        """The images of a row group.

        Raises:
            DatasetError: if they are damaged.
        """

        def read() -> list[bytes | None]:
            images: list[bytes | None] = _cells(self._table(group, source, [IMAGE]), IMAGE).to_pylist()
            return images

        return _explained(f"{self.url}: row group {group}", read)

    def _table(self, group: int, source: IO[bytes] | io.RawIOBase, columns: list[str]) -> pa.Table:
        options = {"pre_buffer": False, "page_checksum_verification": True}  # a buffer ahead spans what is not there
        file = pq.ParquetFile(source, metadata=self._metadata, **options)
        return file.read_row_group(group, columns=columns, use_threads=False)


class Parts(io.RawIOBase):
    """A file of which only some parts are there: ``(offset, bytes)`` each. Reading elsewhere finds nothing."""

    def __init__(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        self._parts = parts
        self._end = max((offset + len(data) for offset, data in parts), default=0)
        self._at = 0

    def readable(self) -> bool:
        """See :class:`io.IOBase`."""
        return True

    def seekable(self) -> bool:
        """See :class:`io.IOBase`."""
        return True

    def tell(self) -> int:
        """See :class:`io.IOBase`."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See :class:`io.IOBase`."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """See :class:`io.RawIOBase`."""
        for offset, data in self._parts:
            if offset <= self._at < offset + len(data):
                found = bytes(data[self._at - offset :][: size if size >= 0 else None])
                self._at += len(found)
                return found
        return b""


def _explained(where: str, read: Callable[[], T]) -> T:
    """What ``read`` returns; what PyArrow makes of a damaged file becomes one sentence."""
    try:
        return read()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DatasetError(
            f"{where}: not whole Parquet data ({storage.describe(error)}); copy or pack it again"
        ) from None


def _checked_columns(url: str, schema: pa.Schema) -> dict[str, pa.DataType]:
    """The columns to read, by path, and their types as they are read."""
    lists = {f"objects.{name}": pa.list_(column.read) for name, column in COLUMNS.items()}
    optional = {f"objects.{name}" for name in KEYPOINTS}
    expected = {**_PLAIN, **_STATED, **lists}
    there = {path: _type_at(schema, path) for path in expected}
    for path in [path for path in expected if there[path] is not None or path not in optional]:
        kind = there[path]
        if kind is None or not _holds(kind, expected[path]):
            what = "is absent" if kind is None else f"is {kind}, not {expected[path]}"
            raise DatasetError(f"{url}: column {path!r} {what}; copy or pack it again")
    return {path: kind for path, kind in expected.items() if path != IMAGE and there[path] is not None}


def _type_at(schema: pa.Schema, path: str) -> pa.DataType | None:
    name, _, child = path.partition(".")
    at = schema.get_field_index(name)
    if at < 0:
        return None
    kind = schema.field(at).type
    if not child:
        return kind
    at = kind.get_field_index(child) if pa.types.is_struct(kind) else -1
    return None if at < 0 else kind.field(at).type


def _holds(there: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of type ``there`` holds what can be read as ``wanted``."""
    is_ = pa.types
    if is_.is_list(wanted):
        listed = is_.is_list(there) or is_.is_large_list(there) or is_.is_fixed_size_list(there)
        return listed and _holds(there.value_type, wanted.value_type)
    if is_.is_int64(wanted):
        return bool(is_.is_integer(there))
    if is_.is_float64(wanted):
        return bool(is_.is_integer(there) or is_.is_floating(there))
    if is_.is_string(wanted):
        return bool(is_.is_string(there) or is_.is_large_string(there))
    return bool(is_.is_binary(there) or is_.is_large_binary(there))


def _is_of(path: str, wanted: tuple[str, ...]) -> bool:
    """Whether the leaf column ``path`` belongs to a column of ``wanted``."""
    return any(path == column or path.startswith(f"{column}.") for column in wanted)


def _cells(table: pa.Table, path: str) -> pa.Array:
    """A column by its path, as one array."""
    name, _, child = path.partition(".")
    column = table[name].combine_chunks()
    return pc.struct_field(column, child) if child else column

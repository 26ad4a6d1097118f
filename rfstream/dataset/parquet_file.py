"""The structure of one Parquet shard: its footer, checked, and the annotations of its row groups.

Formats: https://parquet.apache.org/docs/file-format/, and the columns of :mod:`rfstream.dataset.convention`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rfstream.dataset import storage, tables
from rfstream.dataset.convention import COLUMNS, KEYPOINTS, annotations_of
from rfstream.errors import DatasetError, SampleError
from rfstream.plan.keys import IntArray

T = TypeVar("T")
IMAGE = "image.bytes"
_TRAILER = 8  # four bytes of the footer's length, and PAR1
_PLAIN = {IMAGE: pa.binary(), "image.path": pa.string(), "image_id": pa.int64()}
_STATED = {"width": pa.int64(), "height": pa.int64()}
_LISTS = {f"objects.{name}": pa.list_(column.read) for name, column in COLUMNS.items()}
_TYPES = {**_PLAIN, **_STATED, **_LISTS}  # what columns are read as, by their path in the convention
_OPTIONAL = {f"objects.{name}" for name in KEYPOINTS}
REQUIRED = (IMAGE, "objects.bbox", "objects.category")
"""Columns of the convention without which there is nothing to train on."""


@dataclass(frozen=True)
class Annotations:
    """What a row group says beside its images: columns by their path in the convention, one entry a row."""

    columns: dict[str, pa.Array]

    def stated(self, row: int) -> tuple[int | None, int | None]:
        """Width and height as the annotations say, if these columns were read and hold them."""
        width, height = (self.columns[name][row].as_py() if name in self.columns else None for name in _STATED)
        return width, height

    def sidecar(self, row: int, number: int, category_ids: Sequence[int]) -> dict[str, Any]:
        """The JSON member that a tar has of the row; ``number`` is the image id if there is no column of them.

        Raises:
            ValueError: naming the column that can't be understood.
        """
        cells = {path: column[row].as_py() for path, column in self.columns.items()}
        image_id, name = cells.get("image_id", number), cells.get("image.path")
        if image_id is None:
            raise ValueError("column 'image_id' is null")
        objects = {path.removeprefix("objects."): cell for path, cell in cells.items() if path.startswith("objects.")}
        annotations = list(annotations_of(objects, image_id, category_ids))
        return {"image_id": image_id, "file_name": name or "", "annotations": annotations}


class Footer:
    """The footer of the Parquet shard at ``url``; ``columns`` are those of :class:`SplitIndex`.

    ``starts`` int64 (row groups + 1,): the shard's row that each row group begins with, and the number of rows.

    Raises:
        DatasetError: if a column is absent or of another type than the convention's.
    """

    def __init__(self, url: str, metadata: pq.FileMetaData, columns: Mapping[str, str] | None = None) -> None:
        self.url, self._metadata = url, metadata
        schema = _explained(url, metadata.schema.to_arrow_schema)
        self._paths = _own_columns(schema) if columns is None else columns
        self._types = _checked_types(url, schema, self._paths)
        self._chunks = _explained(url, lambda: _chunks(metadata, self._paths[IMAGE]))
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.starts: IntArray = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @staticmethod
    def missing(tail: bytes) -> int:
        """How many of a file's last bytes the footer needs beyond ``tail``; 0 if they are there, or no footer is."""
        length = int.from_bytes(tail[-_TRAILER:-4], "little")
        return max(0, length + _TRAILER - len(tail)) if tail.endswith(b"PAR1") else 0

    @staticmethod
    def parse(url: str, tail: bytes, columns: Mapping[str, str] | None = None) -> Footer:
        """The footer at the end of ``tail``, the last bytes of the file at ``url``.

        Raises:
            DatasetError: also if there is none, since the file is cut or is something else.
        """
        return Footer(url, _explained(url, lambda: pq.read_metadata(pa.BufferReader(tail))), columns)

    @staticmethod
    def type_of(name: str) -> pa.DataType:
        """What the column ``name`` of the convention is read as."""
        return _TYPES[name]

    @staticmethod
    def holds(there: pa.DataType, name: str) -> bool:
        """Whether a column of type ``there`` can be the column ``name`` of the convention."""
        return _holds(there, _TYPES[name])

    @property
    def groups(self) -> int:
        """Number of row groups."""
        return len(self.starts) - 1

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Key-value metadata."""
        return dict(self._metadata.metadata or {})

    def nbytes(self, group: int) -> int:
        """What a row group takes up in the file."""
        return sum(end - start for start, end in self._chunks[group].values())

    def fragments(self, shard: int, nbytes: Sequence[int]) -> pa.Table:
        """The row groups as fragments of the pack's shard number ``shard``, which count as ``nbytes``.

        Raises:
            ValueError: if there are not as many row groups.
        """
        columns = {
            "shard": np.full(self.groups, shard),
            "first": self.starts[:-1],
            "samples": np.diff(self.starts),
            "offset": [self.image_span(group)[0] for group in range(self.groups)],
            "nbytes": nbytes,
        }
        return pa.table(columns, schema=tables.FRAGMENTS).filter(pc.field("samples") > 0)

    def path(self, name: str) -> str:
        """The shard's name for a column of the convention."""
        return self._paths[name]

    def image_span(self, group: int) -> tuple[int, int]:
        """The bytes of the shard that hold a row group's images."""
        return self._chunks[group][self._paths[IMAGE]]

    def spans(self, group: int, *, stated: bool = False) -> list[tuple[int, int]]:
        """The bytes of the shard that hold what :meth:`annotations` reads."""
        wanted = tuple(self._said(stated).values())
        return [span for path, span in self._chunks[group].items() if _is_of(path, wanted)]

    def annotations(self, group: int, source: IO[bytes] | io.RawIOBase, *, stated: bool = False) -> Annotations:
        """The annotations of a row group from the shard's bytes, with width and height if ``stated``.

        Raises:
            DatasetError: if they are damaged.
        """
        columns = self._said(stated)

        def read() -> Annotations:
            table = self._table(group, source, list(columns.values()))
            return Annotations({name: _cells(table, path).cast(self._types[name]) for name, path in columns.items()})

        return _explained(f"{self.url}: row group {group}", read)

    def _said(self, stated: bool) -> dict[str, str]:
        """The columns but images, and width and height unless ``stated``."""
        skipped = (IMAGE,) if stated else (IMAGE, *_STATED)
        return {name: path for name, path in self._paths.items() if name not in skipped}

    def sidecar(
        self, annotations: Annotations, group: int, row: int, number: int, category_ids: Sequence[int]
    ) -> dict[str, Any]:
        """The JSON member that a tar has of the shard's row ``row``, which is in ``group`` and the split's ``number``.

        Raises:
            SampleError: naming the column that can't be understood.
        """
        try:
            return annotations.sidecar(row - int(self.starts[group]), number, category_ids)
        except ValueError as error:
            raise SampleError(f"{self.url}: row {row}: {error}; copy or write it again") from None

    def images(self, group: int, source: IO[bytes] | io.RawIOBase) -> pa.Array:
        """The images of a row group, binary.

        Raises:
            DatasetError: if they are damaged.
        """

        def read() -> pa.Array:
            path = self._paths[IMAGE]
            return _cells(self._table(group, source, [path]), path)

        return _explained(f"{self.url}: row group {group}", read)

    def _table(self, group: int, source: IO[bytes] | io.RawIOBase, columns: list[str]) -> pa.Table:
        options = {"pre_buffer": False, "page_checksum_verification": True}  # a buffer ahead spans what is not there
        file = pq.ParquetFile(source, metadata=self._metadata, **options)
        return file.read_row_group(group, columns=columns, use_threads=False)


class Parts(storage.Positioned):
    """A file of which only some parts are there: ``(offset, bytes)`` each. Reading elsewhere finds nothing."""

    def __init__(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        super().__init__(max((offset + len(data) for offset, data in parts), default=0))
        self._parts = parts

    def read(self, size: int = -1) -> memoryview:
        """See :class:`io.RawIOBase`; a view, since PyArrow takes one and a copy would be as large as a row group."""
        for offset, data in self._parts:
            if offset <= self._at < offset + len(data):
                found = data[self._at - offset :][: size if size >= 0 else None]
                self._at += len(found)
                return found
        return memoryview(b"")


def _explained(where: str, read: Callable[[], T]) -> T:
    """What ``read`` returns; what PyArrow makes of a damaged file becomes one sentence."""
    try:
        return read()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DatasetError(
            f"{where}: not whole Parquet data ({storage.describe(error)}); copy or write it again"
        ) from None


def read_tail(file: IO[bytes]) -> bytes:
    """The footer's bytes at the end of an open Parquet file, or as many as may be."""
    size = file.seek(0, io.SEEK_END)
    tail = b""
    for length in (_TRAILER, 0):
        wanted = min(size, length or len(tail) + Footer.missing(tail))
        file.seek(size - wanted)
        tail = file.read(wanted)
    return tail


def columns_in(url: str, tail: bytes) -> dict[str, pa.DataType]:
    """The columns of a file and the fields of its structs, by path, with their types; ``tail`` are its last bytes.

    Raises:
        DatasetError: if it is no whole Parquet file.
    """
    schema = _explained(url, lambda: pq.read_schema(pa.BufferReader(tail)))
    found = {}
    for field in schema:
        found[field.name] = field.type
        if pa.types.is_struct(field.type):
            found |= {f"{field.name}.{child.name}": child.type for child in field.type}
    return found


def _chunks(metadata: pq.FileMetaData, image: str) -> list[dict[str, tuple[int, int]]]:
    """The bytes that hold each leaf column, by path, of each row group.

    Raises:
        ValueError: if they can't be there, or the leaf ``image`` is not among them.
    """
    found = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = [group.column(column) for column in range(group.num_columns)]
        starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
        if any(start < 0 or chunk.total_compressed_size < 0 for chunk, start in zip(chunks, starts, strict=True)):
            raise ValueError("a negative offset or size")
        spans = [(start, start + chunk.total_compressed_size) for chunk, start in zip(chunks, starts, strict=True)]
        found.append(dict(zip((chunk.path_in_schema for chunk in chunks), spans, strict=True)))
        if image not in found[-1]:
            raise ValueError(f"no data of column {image!r}")
    return found


def _own_columns(schema: pa.Schema) -> dict[str, str]:
    """The columns of a shard that rfstream wrote, by their path in the convention."""
    return {name: name for name in _TYPES if name not in _OPTIONAL or _type_at(schema, name) is not None}


def _checked_types(url: str, schema: pa.Schema, columns: Mapping[str, str]) -> dict[str, pa.DataType]:
    """The types to read ``columns`` as, if there are such columns."""
    if set(REQUIRED) - set(columns) or set(columns) - set(_TYPES):
        raise DatasetError(f"{url}: the columns {sorted(columns)} that the index names are not those of the convention")
    for name, path in columns.items():
        there = _type_at(schema, path)
        if there is None or not _holds(there, _TYPES[name]):
            what = "is absent" if there is None else f"is {there}, not {_TYPES[name]}"
            raise DatasetError(f"{url}: column {path!r} {what}; copy or write it again")
    return {name: _TYPES[name] for name in columns}


def _type_at(schema: pa.Schema, path: str) -> pa.DataType | None:
    """The type of the column ``path``, names joined by dots; None if there is none."""
    kind: pa.DataType = pa.struct(list(schema))
    for name in path.split("."):
        at = kind.get_field_index(name) if pa.types.is_struct(kind) else -1
        if at < 0:
            return None
        kind = kind.field(at).type
    return kind


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
    name, *children = path.split(".")
    column = table[name].combine_chunks()
    return pc.struct_field(column, children) if children else column

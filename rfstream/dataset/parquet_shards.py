"""One Parquet shard: written from files and sidecars, or scanned back into sample rows.

A row group is a fragment. Image bytes are neither compressed nor encoded (PLAIN,
https://parquet.apache.org/docs/file-format/data-pages/encodings/), so each image lies in the file as it is, after four
bytes of length: the sample table says where, and a reader fetches one image without its row group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rfstream.dataset import storage, tables
from rfstream.dataset.convention import Convention
from rfstream.dataset.exif import is_of_turned_frame
from rfstream.dataset.parquet_file import IMAGE, Footer, read_tail
from rfstream.dataset.shards import Item, WrittenShard, crowds_of, read_image, sample_table, sha256
from rfstream.errors import DatasetError

LENGTH = 4
"""Bytes before an image that hold its length, little-endian."""
_OURS = b"rfstream"


def write_parquet_shard(
    path: Path, number: int, first: int, items: Sequence[Item], convention: Convention
) -> WrittenShard:
    """Write ``items``, whose first sample has row ``first``, as shard ``number`` at ``path``.

    Fragments, and what they count as in bytes, are those of the tar shard of the same items, so the order of an epoch
    is the same. One row group is held in memory. Equal input gives equal bytes under one version of PyArrow.

    Raises:
        DatasetError: if an image can't be read or changed since the pack was planned, or the shard can't be written.
    """
    end = np.cumsum([item.tar_bytes for item in items]) - [item.tar_bytes - item.tar_end for item in items]
    start = np.cumsum([0, *(item.tar_bytes for item in items[:-1])])
    fragments = tables.fragments_of(number, start, end)
    schema = convention.schema()
    ours = json.dumps({"fragment_bytes": fragments["nbytes"].to_pylist()})
    schema = schema.with_metadata({**schema.metadata, _OURS: ours})
    turned: list[str] = []
    try:
        with path.open("wb") as file:
            with pq.ParquetWriter(file, schema, **_options(schema)) as writer:
                for lo, count in zip(*(fragments[name].to_pylist() for name in ("first", "samples")), strict=True):
                    rows = [_row(item, convention, turned) for item in items[lo : lo + count]]
                    writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=count)
            file.flush()
            os.fsync(file.fileno())
        digest = sha256(path)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path}: the shard can't be written ({storage.describe(error)})") from error
    samples, fragments = scan_parquet_shard(str(path), number, first, convention.category_ids)
    return WrittenShard(path.name, digest, samples, fragments, tuple(turned))


def _row(item: Item, convention: Convention, turned: list[str]) -> dict[str, Any]:
    image = read_image(item)
    if is_of_turned_frame(image, item.width, item.height):
        turned.append(item.image)
    return convention.row(image, item.sidecar, item.width, item.height)


def _options(schema: pa.Schema) -> dict[str, Any]:
    """Options of the writer: images as they are, the rest compressed."""
    leaves = [path for field in schema for path in _leaves(field)]
    return {
        "compression": {path: "NONE" if path == IMAGE else "ZSTD" for path in leaves},
        "use_dictionary": False,
        "write_statistics": False,
        "write_page_checksum": True,
    }


def _leaves(field: pa.Field) -> Iterator[str]:
    """Paths of a field's leaf columns, as Parquet names them."""
    if pa.types.is_struct(field.type):
        for child in field.type:
            yield from (f"{field.name}.{path}" for path in _leaves(child))
    elif pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type):
        yield from (f"{field.name}.list.{path}" for path in _leaves(pa.field("element", field.type.value_type)))
    else:
        yield field.name


def scan_parquet_shard(url: str, number: int, first: int, category_ids: Sequence[int]) -> tuple[pa.Table, pa.Table]:
    """Sample rows and fragments of the shard at ``url``, the pack's ``number``-th; ``first`` is its first sample's row.

    The shard is read through, one row group in memory.

    Raises:
        DatasetError: if it is damaged or not as :func:`write_parquet_shard` writes it.
    """
    rows: list[tuple[object, ...]] = []
    with storage.open_binary(url) as file:
        footer = Footer.parse(url, read_tail(file))
        for group in range(footer.groups):
            annotations = footer.annotations(group, file, stated=True)
            for at, place in enumerate(_places(footer, file, group)):
                sidecar = footer.sidecar(annotations, group, len(rows), -1, category_ids)
                ext = PurePosixPath(sidecar["file_name"]).suffix.lower().removeprefix(".")
                found = sidecar["annotations"]
                about = (*annotations.stated(at), len(found), crowds_of(found))
                rows.append((number, f"{first + len(rows):08d}", ext, *place, *about))
    if not rows:
        raise DatasetError(f"{url}: holds no samples; pack it again")
    return sample_table(rows, tables.PARQUET_SAMPLES), _fragments(footer, number)


def sidecars_of(url: str, file: IO[bytes], category_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The JSON members that a tar has of the rows of the shard that is open as ``file``.

    Raises:
        DatasetError: if the shard is damaged.
    """
    footer = Footer.parse(url, read_tail(file))
    for group in range(footer.groups):
        annotations = footer.annotations(group, file)
        for row in range(footer.starts[group], footer.starts[group + 1]):
            yield footer.sidecar(annotations, group, row, -1, category_ids)


def _places(footer: Footer, file: IO[bytes], group: int) -> Iterator[tuple[int, int]]:
    """Offset and size of each image of a row group."""
    start, end = footer.image_span(group)
    images = footer.images(group, file)
    file.seek(start)
    chunk = file.read(end - start)
    at = 0
    for row, image in enumerate(images.to_pylist(), start=int(footer.starts[group])):
        found = -1 if image is None else chunk.find(len(image).to_bytes(LENGTH, "little") + image, at)
        if image is None or found < 0:
            what = "is null" if image is None else "is compressed or encoded"
            raise DatasetError(f"{footer.url}: row {row}: column {IMAGE!r} {what}; pack it again")
        yield start + found + LENGTH, len(image)
        at = found + LENGTH + len(image)


def _fragments(footer: Footer, number: int) -> pa.Table:
    """The fragments of a shard: its row groups, and the bytes that they count as."""
    try:
        return footer.fragments(number, json.loads(footer.metadata[_OURS])["fragment_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(
            f"{footer.url}: its metadata does not say what its fragments count as ({storage.describe(error)}); pack it "
            "again"
        ) from None

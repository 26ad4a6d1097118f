"""Parquet that others wrote: the detection convention of Hugging Face, as ``datasets`` writes it.

Only footers and annotations are read, never an image.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from rfstream.dataset import storage, tables
from rfstream.dataset.convention import COLUMNS, HUGGINGFACE
from rfstream.dataset.parquet_file import IMAGE, REQUIRED, Footer, Parts, columns_in, read_tail
from rfstream.dataset.remote import at_once
from rfstream.dataset.shards import ForeignSplit, WrittenShard, crowds_of, sample_table
from rfstream.errors import DatasetError

_NAMES = ("image", "image_id", "width", "height", *(f"objects.{name}" for name in COLUMNS if name != "other"))
"""Columns of the convention that a user may name."""
_logger = logging.getLogger("rfstream")


@dataclass(frozen=True)
class _Shard:
    """A file: its footer, and the SHA-256 of that in hex."""

    footer: Footer
    digest: str


def find_parquet(urls: Sequence[str], named: Mapping[str, str]) -> ForeignSplit:
    """The split in the Parquet files at ``urls``, local paths or fsspec URLs.

    Args:
        urls: the files, in the split's order.
        named: column of the convention (``image``, ``objects.bbox``, ...) -> column of the files, where it differs.

    Raises:
        DatasetError: if one is damaged, lacks a column or holds what can't be understood, or they differ in their class
            names.
    """
    unknown = sorted(set(named) - set(_NAMES))
    if unknown:
        raise DatasetError(f"--columns: there is no column {unknown[0]!r} to name, only {', '.join(_NAMES)}")
    paths = _columns(urls[0], named)
    shards = at_once(partial(_open, columns=paths), urls)
    classes = _class_names(shards, paths["objects.category"])
    firsts = np.cumsum([0, *(int(shard.footer.starts[-1]) for shard in shards)]).tolist()
    scanned = at_once(partial(_scan, classes=classes), shards, range(len(shards)), firsts)
    used = sorted(set[int]().union(*(categories for _, categories in scanned)))
    if classes is None:
        classes = [str(number) for number in range(max(used, default=-1) + 1)]
    categories = [{"id": number, "name": name} for number, name in enumerate(classes)]
    return ForeignSplit(paths, categories, used, [shard for shard, _ in scanned])


def _columns(url: str, named: Mapping[str, str]) -> dict[str, str]:
    """The columns to read, by their path in the convention, as the first file has them."""
    with storage.open_binary(url) as file:
        there = columns_in(url, read_tail(file))
    image = named.get("image", "image")
    wanted = {IMAGE: image if pa.types.is_binary(there.get(image, pa.null())) else f"{image}.bytes"}
    wanted |= {"image.path": f"{image}.path"} | {name: named.get(name, name) for name in _NAMES[1:]}
    must = {*REQUIRED, *named}
    found = {}
    for name, column in wanted.items():
        fits = column in there and Footer.holds(there[column], name)
        if fits:
            found[name] = column
        elif name in must:
            what = f"is {there[column]}, not {Footer.type_of(name)}" if column in there else "is absent"
            raise DatasetError(
                f"{url}: column {column!r} {what}; say which to take with --columns {name.removesuffix('.bytes')}=NAME "
                f"(it has {', '.join(there)})"
            )
        elif column in there and not pa.types.is_null(there[column]):
            _logger.warning("%s: column %r is %s and is left out", url, column, there[column])
    return found


def _open(url: str, columns: Mapping[str, str]) -> _Shard:
    with storage.open_binary(url) as file:
        tail = read_tail(file)
    return _Shard(Footer.parse(url, tail, columns), hashlib.sha256(tail).hexdigest())


def _class_names(shards: Sequence[_Shard], column: str) -> list[str] | None:
    """Names of the class labels in ``column``; None if no file says."""
    said = [(_names_at(shard.footer, column), shard.footer.url) for shard in shards]
    for names, url in said:
        if names != said[0][0]:
            raise DatasetError(f"{url}: has other class names than {said[0][1]}; index files of one dataset together")
    return said[0][0]


def _names_at(footer: Footer, column: str) -> list[str] | None:
    """Names of the class labels in ``column``, as the metadata of ``datasets`` says."""
    try:
        feature = json.loads(footer.metadata[HUGGINGFACE])["info"]["features"]
        for name in column.split("."):
            feature = _inner(feature)[name]
        names = _inner(feature)["names"]
    except (KeyError, TypeError, ValueError, IndexError, RecursionError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _inner(feature: Any) -> Any:
    """What a list's feature is a list of."""
    while isinstance(feature, list) or (isinstance(feature, dict) and feature.get("_type") in ("List", "Sequence")):
        feature = feature[0] if isinstance(feature, list) else feature["feature"]
    return feature


def _scan(shard: _Shard, number: int, first: int, classes: Sequence[str] | None) -> tuple[WrittenShard, set[int]]:
    """A shard's tables, and the categories that it uses."""
    footer, rows, used = shard.footer, [], set[int]()
    ids = range(len(classes) if classes is not None else 2**20)
    for group in np.flatnonzero(np.diff(footer.starts)).tolist():
        parts = storage.read_near(footer.url, footer.spans(group, stated=True))
        annotations = footer.annotations(group, Parts(parts), stated=True)
        for row in range(int(footer.starts[group]), int(footer.starts[group + 1])):
            sidecar = footer.sidecar(annotations, group, row, first + row, ids)
            found = sidecar["annotations"]
            used.update(annotation["category_id"] for annotation in found)
            ext = PurePosixPath(sidecar["file_name"]).suffix.lower().removeprefix(".")
            about = annotations.stated(row - int(footer.starts[group]))
            rows.append((number, f"{first + row:08d}", ext, *about, len(found), crowds_of(found)))
    if not rows:
        raise DatasetError(f"{footer.url}: holds no samples; leave it out")
    samples = sample_table(rows, tables.FOREIGN_SAMPLES)
    nbytes = [footer.nbytes(group) for group in range(footer.groups)]
    return WrittenShard(footer.url, shard.digest, samples, footer.fragments(number, nbytes)), used

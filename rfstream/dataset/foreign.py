"""Parquet that others wrote, indexed where it lies: the detection convention of Hugging Face, as ``datasets`` writes.

Only footers and annotations are read, never an image, and nothing is rewritten. Index and tables go to a folder of the
user's. The index lists the shards by their names in the folder that holds them; where that is, the configuration says
(``data.shards``), since what comes with data must not decide what is opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from rfstream.dataset import storage, tables
from rfstream.dataset.convention import COLUMNS, HUGGINGFACE
from rfstream.dataset.index import SplitIndex, check_split, has_split, index_name, read_index
from rfstream.dataset.parquet_file import IMAGE, REQUIRED, Footer, Parts, columns_in, read_tail
from rfstream.dataset.publish import describe_pack
from rfstream.dataset.shards import WrittenShard, crowds_of, sample_table
from rfstream.errors import DatasetError

_SCAN_THREADS = 8
_NAMES = ("image", "image_id", "width", "height", *(f"objects.{name}" for name in COLUMNS if name != "other"))
"""Columns of the convention that a user may name."""
_TABLES = (".samples.parquet", ".fragments.parquet")
_logger = logging.getLogger("rfstream")


@dataclass(frozen=True)
class _Shard:
    """A file: its footer, and the SHA-256 of that in hex."""

    footer: Footer
    digest: str


def index_parquet(path: str, split: str, output: str, columns: Mapping[str, str]) -> SplitIndex:
    """Write the index and the tables of ``split`` to the folder ``output``.

    Args:
        path: a folder whose files ``{split}-*.parquet`` or ``{split}.parquet`` are meant, or a pattern for the names of
            the files in one, such as ``data/train-*.parquet``; local or an fsspec URL.
        split: name that the split shall have.
        output: folder or fsspec URL for index and tables; may be the folder of the files.
        columns: column of the convention (``image``, ``objects.bbox``, ...) -> column of the files, where it differs.

    Returns:
        The split's index. ``data.shards`` must say its ``shards_at``, unless that is ``output``.

    Raises:
        DatasetError: if there are no such files, one is damaged, lacks a column or holds what can't be understood, or
            they differ in their class names; or if ``output`` has a split of that name that rfstream packed.
    """
    unknown = sorted(set(columns) - set(_NAMES))
    if unknown:
        raise DatasetError(f"--columns: there is no column {unknown[0]!r} to name, only {', '.join(_NAMES)}")
    former = read_index(output, split) if has_split(output, split) else None
    if former is not None and former.columns is None:
        raise DatasetError(f"{output}: holds a pack of split {split!r}; give another folder with --output")
    folder, names = _shards(path, check_split(split))
    urls = [storage.join(folder, name) for name in names]
    paths = _columns(urls[0], columns)
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        shards = list(pool.map(lambda url: _open(url, paths), urls))
        classes = _class_names(shards, paths["objects.category"])
        firsts = np.cumsum([0, *(int(shard.footer.starts[-1]) for shard in shards)]).tolist()
        scanned = list(pool.map(lambda i: _scan(shards[i], i, firsts[i], classes), range(len(shards))))
    written = [shard for shard, _ in scanned]
    used = sorted(set[int]().union(*(categories for _, categories in scanned)))
    if classes is None:
        classes = [str(number) for number in range(max(used, default=-1) + 1)]
    categories = [{"id": number, "name": name} for number, name in enumerate(classes)]
    _, index = describe_pack(split, categories, used, "remap", written, "parquet")
    index |= {"shards": names, "parquet_columns": paths, "footers": [shard.digest for shard in written]}
    _publish(output, split, index, written, former)
    return read_index(output, split, folder)


def _shards(path: str, split: str) -> tuple[str, list[str]]:
    """The folder of the files that are meant, and their names."""
    folder, _, pattern = path.rstrip("/").rpartition("/")
    patterns = [pattern]
    if "*" not in pattern and not pattern.endswith(".parquet"):
        folder, patterns = path, [f"{split}-*.parquet", f"{split}.parquet"]
    there = [name for name in sorted(storage.sizes_in(folder or ".")) if not name.endswith(_TABLES)]
    names = [name for name in there if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        raise DatasetError(
            f"{path}: no file {' or '.join(patterns)} there ({', '.join(there[:3]) or 'no files'}); name them with a "
            "pattern, as in 'data/train-*.parquet'"
        )
    return folder or ".", names


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


def _publish(
    output: str, split: str, index: dict[str, Any], written: Sequence[WrittenShard], former: SplitIndex | None
) -> None:
    """Write the tables, then the index, and remove the tables of the former one."""
    storage.make_folder(output)
    data = json.dumps(index).encode()
    generation = hashlib.sha256(data).hexdigest()[:8]  # as read_index takes it
    names = tables.write_tables(output, split, generation, [(shard.samples, shard.fragments) for shard in written])
    with storage.replacing(storage.join(output, index_name(split))) as file:
        file.write(data)
    folder = storage.local_path(output)
    if folder is not None and former is not None:
        for name in set(tables.table_names(split, former.generation)) - set(names):
            (folder / name).unlink(missing_ok=True)

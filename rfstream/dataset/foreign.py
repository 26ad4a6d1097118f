"""Shards that others wrote, indexed where they lie: WebDataset tars, and detection Parquet as ``datasets`` writes it.

Headers, footers and annotations are read, never an image, and nothing is rewritten. Index and tables go to a folder of
the user's. The index lists the shards by their names in the folder that holds them; where that is, the configuration
says (``data.shards``), since what comes with data must not decide what is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from braceexpand import braceexpand

from rfstream.dataset import storage, tables
from rfstream.dataset.foreign_parquet import find_parquet
from rfstream.dataset.foreign_tar import find_tars
from rfstream.dataset.index import PackFormat, SplitIndex, check_split, has_split, index_name, read_index
from rfstream.dataset.publish import describe_pack
from rfstream.dataset.shards import ForeignSplit, WrittenShard
from rfstream.errors import DatasetError

_TABLES = (".samples.parquet", ".fragments.parquet")
_FILES = (".tar", ".tgz", ".parquet")
_WILD = "*?["
_INDEX = "-index.json"


def index_foreign(
    path: str, split: str, output: str, columns: Mapping[str, str], names: str | None = None
) -> SplitIndex:
    """Write the index and the tables of ``split`` to the folder ``output``.

    Args:
        path: a folder, of which ``{split}-*.tar`` and ``{split}.tar`` are meant, or the same with ``.parquet``; or a
            pattern for the names of the files in one, such as ``data/train-*.parquet`` or
            ``gs://bucket/train-{000000..000188}.tar``. Local, or an fsspec URL.
        split: name that the split shall have.
        output: folder or fsspec URL for index and tables; may be the folder of the files.
        columns: what they call otherwise. Of Parquet, column of the convention (``image``, ``objects.bbox``, ...) ->
            column of the files. Of tars, ``image`` and ``json`` -> extension of that member, and ``annotations``,
            ``objects.bbox``, ... -> path in the JSON.
        names: path or URL of a JSON file with the names of the categories in tars.

    Returns:
        The split's index. ``data.shards`` must say its ``shards_at``, unless that is ``output``.

    Raises:
        DatasetError: if there are no such files, one is damaged, lacks something or holds what can't be understood; or
            if ``output`` has a split of that name that rfstream packed, or one of other categories.
    """
    former = read_index(output, split) if has_split(output, split) else None
    if former is not None and former.columns is None:
        raise DatasetError(f"{output}: holds a pack of split {split!r}; give another folder with --output")
    folder, shards = _shards(path, check_split(split))
    urls = [storage.join(folder, name) for name in shards]
    format = _format(path, shards)
    if format == "parquet" and names is not None:
        raise DatasetError("--names is for tars: the categories of Parquet are named in its own metadata")
    found = find_tars(urls, columns, names) if format == "tar" else find_parquet(urls, columns)
    _check_categories(output, split, found)
    about = (split, found.categories, found.annotated_category_ids)
    _, index = describe_pack(*about, "remap", found.shards, format)
    index |= {"shards": shards, "columns": found.columns, "digests": [shard.digest for shard in found.shards]}
    _publish(output, split, index, found.shards, former)
    return read_index(output, split, folder)


def _shards(path: str, split: str) -> tuple[str, list[str]]:
    """The folder of the files that are meant, and their names."""
    folder, patterns = _patterns(path, split)
    exact = {pattern for pattern in patterns if not any(sign in pattern for sign in _WILD)}
    wild = [pattern for pattern in patterns if pattern not in exact]
    there = [name for name in sorted(storage.sizes_in(folder)) if not name.endswith(_TABLES)]
    names = [name for name in there if name in exact or any(fnmatchcase(name, pattern) for pattern in wild)]
    if not names:
        raise DatasetError(
            f"{path}: no file {' or '.join(patterns[:4])} there ({', '.join(there[:3]) or 'no files'}); name them "
            "with a pattern, as in 'data/train-*.tar'"
        )
    absent = sorted(exact - set(names)) if "{" in path else []
    if absent:
        raise DatasetError(
            f"{path}: {len(absent)} of {len(patterns)} files are not there, the first is {absent[0]}; copy them there, "
            "or leave them out of the pattern"
        )
    return folder, names


def _patterns(path: str, split: str) -> tuple[str, list[str]]:
    """A folder, and names or patterns of files in it."""
    path = path.rstrip("/")
    try:
        paths = list(dict.fromkeys(braceexpand(path))) if "{" in path else [path]
    except ValueError:
        raise DatasetError(
            f"{path}: a brace is not closed; write a pattern as in 'train-{{000000..000188}}.tar'"
        ) from None
    folders = [path.rpartition("/")[0] for path in paths]
    if len(set(folders)) > 1:
        raise DatasetError(f"{path}: means files in several folders, such as {folders[0]} and {folders[-1]}; index one")
    patterns = [path.rpartition("/")[2] for path in paths]
    if "{" in path or any(sign in patterns[0] for sign in (*_WILD, *_FILES)):
        return folders[0] or ".", patterns
    return path, [f"{split}{rest}" for rest in ("-*.tar", ".tar", "-*.parquet", ".parquet")]


def _format(path: str, shards: Sequence[str]) -> PackFormat:
    """What the files are, as their names say."""
    kinds: dict[str, str] = {}
    for name in shards:
        kind = next((kind for kind in ("tar", "parquet") if name.endswith(f".{kind}")), "other")
        kinds.setdefault(kind, name)
    if "other" in kinds:
        raise DatasetError(
            f"{storage.join(path.rpartition('/')[0], kinds['other'])}: is named neither .tar nor .parquet; "
            "unpack what is compressed to .tar, since images are read from where they lie"
        )
    if len(kinds) > 1:
        raise DatasetError(f"{path}: means {kinds['tar']} as well as {kinds['parquet']}; name one kind with a pattern")
    return "tar" if "tar" in kinds else "parquet"


def _check_categories(output: str, split: str, found: ForeignSplit) -> None:
    """Refuse categories that would have other labels than those of a split in ``output``."""
    ours = _labels(found.categories)
    others = storage.sizes_in(output) if storage.exists(output) else {}
    for name in others:
        if name.endswith(_INDEX) and name != index_name(split):
            other = read_index(output, name.removesuffix(_INDEX))
            theirs = _labels(other.categories)
            both = min(len(ours), len(theirs))
            if ours[:both] != theirs[:both]:
                mine, its = next((a, b) for a, b in zip(ours, theirs, strict=False) if a != b)
                raise DatasetError(
                    f"{output}: category {mine[0]} of split {split!r} would be {mine[1]!r}, and {other.split!r} has "
                    f"{its[0]}, {its[1]!r}, in its place; give both the same names with --names, or another --output"
                )


def _labels(categories: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    return sorted((category["id"], category["name"]) for category in categories)


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

"""WebDataset tars that others wrote, scanned where they lie: headers and JSON members, never an image.

Members whose names agree up to the first dot of the base name are a sample, and what follows the dot tells them apart
(https://github.com/webdataset/webdataset). Here the members of a sample need not be adjacent.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rfstream.dataset import tables
from rfstream.dataset.foreign_classes import categories_of, ids_of, read_categories
from rfstream.dataset.foreign_json import NAMES, Category, Described, columns_of, describe
from rfstream.dataset.index import IMAGE_EXTENSIONS
from rfstream.dataset.remote import at_once
from rfstream.dataset.shards import (
    ForeignSplit,
    WrittenShard,
    crowds_of,
    members_of,
    open_tar,
    sample_table,
    split_name,
)
from rfstream.errors import DatasetError

_JSON = "json"


@dataclass(frozen=True, slots=True)
class _Part:
    """A member of a sample: where its payload lies, bytes, and of the JSON what a table keeps of it."""

    offset: int
    size: int
    stated: tuple[int | None, int | None] = (None, None)
    objects: int = 0
    crowds: Described | None = None


@dataclass(frozen=True, slots=True)
class _Scan:
    """A shard's samples in the order of their images; those that have crowds, by their row in the shard, apart, since
    ids of categories are not known yet; for each category the key of a sample that has it; and the SHA-256 of all JSON
    members in hex."""

    samples: pa.Table
    crowds: dict[int, Described]
    used: dict[Category, str]
    digest: str


def find_tars(urls: Sequence[str], named: Mapping[str, str], names: str | None) -> ForeignSplit:
    """The split in the tars at ``urls``, local paths or fsspec URLs.

    Args:
        urls: the tars, in the split's order.
        named: name of :data:`rfstream.dataset.foreign_json.NAMES` -> extension of the member, or path in the JSON.
        names: path or URL of a JSON file with the names of the categories.

    Raises:
        DatasetError: if a tar is damaged, a sample lacks a part or has one twice, or what is said can't be understood;
            names shard and key.
    """
    unknown = sorted(set(named) - set(NAMES))
    if unknown:
        raise DatasetError(f"--columns: there is nothing {unknown[0]!r} to name in a tar, only {', '.join(NAMES)}")
    given = None if names is None else read_categories(names)
    columns = _columns(urls[0], named)
    scans = at_once(partial(_scan, columns=columns), urls, range(len(urls)))
    _check_keys(urls, scans)
    used: dict[Category, str] = {}
    for url, scan in zip(urls, scans, strict=True):
        used = {category: f"{url}: sample {key}" for category, key in scan.used.items()} | used
    categories = categories_of(used, given)
    ids = ids_of(categories)
    firsts = np.cumsum([0, *(len(scan.samples) for scan in scans)]).tolist()
    shards = [_shard(url, number, firsts[number], scans[number], ids) for number, url in enumerate(urls)]
    return ForeignSplit(columns, categories, sorted({ids[category] for category in used}), shards)


def _columns(url: str, named: Mapping[str, str]) -> dict[str, str]:
    """Where what is said stands, as the first sample has it."""
    ext = named.get("json", _JSON).lower()
    with open_tar(url) as tar:
        for member in members_of(url, tar, _is_skipped):
            if split_name(member.name)[1] == ext:
                break
        else:
            raise DatasetError(
                f"{url}: no sample has a member {ext!r}; say which holds annotations with --columns json=NAME"
            )
        data = _read(url, tar, member)
    try:
        found = columns_of(data, named)
    except ValueError as error:
        raise DatasetError(f"{url}: member {member.name!r} {error}") from None
    return ({"image": named["image"].lower()} if "image" in named else {}) | {"json": ext} | found


def _is_skipped(name: str) -> bool:
    """Whether the member is none of a sample's: hidden, such as the ``._*`` of a Mac; WebDataset's own; without an
    extension."""
    parts = name.split("/")
    hidden = any(part.startswith(".") and part.strip(".") for part in parts)
    return hidden or (parts[0].startswith("__") and parts[0].endswith("__")) or "." not in parts[-1]


def _read(url: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > tables.MAX_SIDECAR:
        raise DatasetError(
            f"{url}: member {member.name!r} has {member.size:,} bytes and one image's annotations may take "
            f"{tables.MAX_SIDECAR:,}; write the shard again, with simpler outlines"
        )
    payload = tar.extractfile(member)
    return payload.read() if payload else b""


def _scan(url: str, number: int, columns: Mapping[str, str]) -> _Scan:
    """What the shard at ``url``, the split's ``number``-th, holds; in one pass."""
    samples: dict[str, dict[str, _Part]] = {}
    used: dict[Category, str] = {}
    content = hashlib.sha256()
    with open_tar(url) as tar:
        for member in members_of(url, tar, _is_skipped):
            key, ext = split_name(member.name)
            parts = samples.setdefault(key, {})
            if ext in parts:
                raise DatasetError(
                    f"{url}: sample {key} has two members {ext!r}, and a key stands for one sample; leave the shard "
                    "out, or write it again"
                )
            parts[ext] = _Part(member.offset_data, member.size)
            if ext == columns["json"]:
                data = _read(url, tar, member)
                content.update(data)
                said = _describe(f"{url}: sample {key}", data, columns)
                used |= {annotation["category_id"]: key for annotation in said.annotations}
                parts[ext] = _part(member, said)
    if not samples:
        raise DatasetError(f"{url}: holds no samples; leave it out")
    rows = [(number, *_row(f"{url}: sample {key}", key, parts, columns)) for key, parts in samples.items()]
    rows.sort(key=itemgetter(3))  # by the image's offset
    crowds = {at: row[-1] for at, row in enumerate(rows) if row[-1] is not None}
    return _Scan(sample_table([(*row[:-1], None) for row in rows]), crowds, used, content.hexdigest())


def _describe(where: str, data: bytes, columns: Mapping[str, str]) -> Described:
    try:
        return describe(data, columns)
    except ValueError as error:
        raise DatasetError(
            f"{where}: its member {columns['json']!r}: {error}; correct it, or leave the shard out"
        ) from None


def _part(member: tarfile.TarInfo, said: Described) -> _Part:
    crowds = [annotation for annotation in said.annotations if annotation.get("iscrowd")]
    kept = replace(said, annotations=crowds) if crowds else None
    return _Part(member.offset_data, member.size, said.stated, len(said.annotations), kept)


def _row(where: str, key: str, parts: Mapping[str, _Part], columns: Mapping[str, str]) -> tuple[Any, ...]:
    """The columns of a sample's row after ``shard``; crowds are not JSON yet."""
    wanted = (columns["image"],) if "image" in columns else IMAGE_EXTENSIONS
    images = [ext for ext in wanted if ext in parts]
    if len(images) > 1:
        raise DatasetError(f"{where} has the images {', '.join(images)}; say which to take with --columns image=NAME")
    for kind, there, name in (
        ("image", images, " or ".join(wanted)),
        ("json", columns["json"] in parts, columns["json"]),
    ):
        if not there:
            raise DatasetError(
                f"{where} has no member {name}, only {', '.join(parts)}; if it goes by another name, say so with "
                f"--columns {kind}=NAME, else leave the shard out"
            )
    image, said = parts[images[0]], parts[columns["json"]]
    return (key, images[0], image.offset, image.size, said.offset, said.size, *said.stated, said.objects, said.crowds)


def _check_keys(urls: Sequence[str], scans: Sequence[_Scan]) -> None:
    """Refuse a key that two shards have."""
    keys = pa.chunked_array([scan.samples["key"].combine_chunks() for scan in scans])
    if pc.count_distinct(keys).as_py() == len(keys):
        return
    shard_of: dict[str, str] = {}
    for url, scan in zip(urls, scans, strict=True):
        for key in scan.samples["key"].to_pylist():
            if key in shard_of:
                raise DatasetError(
                    f"{url}: sample {key} is in {shard_of[key]} too, and a key stands for one sample; leave one of the "
                    "shards out, or write them again with keys of their own"
                )
            shard_of[key] = url


def _shard(url: str, number: int, first: int, scan: _Scan, ids: Mapping[Category, int]) -> WrittenShard:
    """A scanned shard's tables; ``first`` is the row of its first sample."""
    crowds = [
        crowds_of(scan.crowds[at].sidecar(first + at, ids)["annotations"]) if at in scan.crowds else None
        for at in range(len(scan.samples))
    ]
    at = tables.SAMPLES.get_field_index("crowds")
    samples = scan.samples.set_column(at, tables.SAMPLES.field(at), pa.array(crowds, pa.string()))
    digest = hashlib.sha256(json.dumps([scan.digest, samples.to_pylist()]).encode()).hexdigest()
    return WrittenShard(url, digest, samples, _fragments(number, samples))


def _fragments(number: int, samples: pa.Table) -> pa.Table:
    """Fragments of a shard by where its images lie, since the JSON of a sample may be far away."""
    image, image_size, json_size = (samples[name].to_numpy() for name in ("image_offset", "image_size", "json_size"))
    return tables.fragments_of(number, image - tables.BLOCK, image + image_size + json_size)

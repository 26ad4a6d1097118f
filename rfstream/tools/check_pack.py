"""Traits of a packed split: whether index, tables and shards agree, and what its samples hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rfstream.dataset import tables
from rfstream.dataset.index import SplitIndex, read_index, shard_name
from rfstream.dataset.publish import describe_pack
from rfstream.dataset.scan import scan, sidecars
from rfstream.dataset.shards import WrittenShard, sha256
from rfstream.errors import DatasetError
from rfstream.stream.targets import parse_sidecar
from rfstream.tools.check_document import stated_size
from rfstream.tools.check_images import Encoded, read_span
from rfstream.tools.check_traits import Finding

_Scanned = tuple[pa.Table, pa.Table]  # samples and fragments of a shard, as it tells itself


@dataclass
class PackedSplit:
    """A split as its shards hold it: the COCO document that its samples add up to, and their images."""

    findings: list[Finding] = field(default_factory=list)
    shards: tuple[str, ...] = ()
    document: dict[str, list[dict[str, Any]]] | None = None
    """None if the index can't be read."""
    places: list[str] = field(default_factory=list)
    images: list[Encoded] = field(default_factory=list)


def open_split(folder: Path, split: str) -> PackedSplit:
    """Check the structure of ``split`` in the local pack ``folder``, and read all of its annotations."""
    try:
        index = read_index(str(folder), split)
    except DatasetError as error:
        return PackedSplit([("bad-index", str(error))])
    if index.columns is not None:
        raise DatasetError(f"{folder}: split {split!r} has shards that rfstream did not write, which are not checked")
    found = PackedSplit(shards=index.shards)
    scanned = [_scan(index, number, found.findings) for number in range(len(index.shards))]
    whole = [shard for shard in scanned if shard is not None]
    if len(whole) == len(scanned):
        found.findings += _counts(index, whole)
        found.findings += _token(index, whole)
        found.findings += _tables(index, whole)
    sizes = _sizes(index)
    found.document = {"images": [], "annotations": [], "categories": list(index.categories)}
    keys: set[str] = set()
    for samples, _ in whole:
        rows = samples.to_pylist()
        for row, data in zip(rows, sidecars(index, rows[0]["shard"], samples), strict=True):
            if row["key"] in keys:
                found.findings.append(("duplicate-key", f"{index.shards[row['shard']]} {row['key']}"))
            keys.add(row["key"])
            _add_sample(found, found.document, index, row, data, sizes.get(row["key"], {}))
    return found


def _scan(index: SplitIndex, number: int, findings: list[Finding]) -> _Scanned | None:
    """What a shard tells, or None and a finding."""
    url = index.shard_url(number)
    if not Path(url).is_file():
        findings.append(("missing-shard", index.shards[number]))
        return None
    try:
        return scan(index, number)
    except DatasetError as error:
        findings.append(("damaged-shard", str(error).replace(url, index.shards[number])))
        return None


def _counts(index: SplitIndex, scanned: Sequence[_Scanned]) -> Iterator[Finding]:
    counts = [len(samples) for samples, _ in scanned]
    for name, count, expected in zip(index.shards, counts, index.samples_per_shard or counts, strict=True):
        if count != expected:
            yield "wrong-sample-count", f"{name} holds {count} samples, the index says {expected}"
    if sum(counts) != index.num_samples:
        yield "wrong-sample-count", f"{sum(counts)} samples in all shards, the index says {index.num_samples}"


def _token(index: SplitIndex, scanned: Sequence[_Scanned]) -> Iterator[Finding]:
    """Whether the token in the names of the shards, where they have one, is that of the content."""
    if index.shards[0] != shard_name(index.split, index.generation, 0, index.format):
        return
    written = [
        WrittenShard(name, sha256(Path(index.path) / name), *shard)
        for name, shard in zip(index.shards, scanned, strict=True)
    ]
    about = (index.split, index.categories, index.annotated_category_ids, index.category_ids)
    token, _ = describe_pack(*about, written, index.format)
    if token != index.generation:
        yield "changed-content", f"the content's token is {token}, the names have {index.generation}"


def _tables(index: SplitIndex, scanned: Sequence[_Scanned]) -> Iterator[Finding]:
    """Whether both tables say what the shards do."""
    try:
        url = index.table_url("samples")
        index.table_url("fragments")
    except DatasetError as error:
        yield "missing-table", str(error)
        return
    try:
        told = pa.concat_tables(samples for samples, _ in scanned).drop(list(tables.STATED))  # no tar tells those
        if not tables.conform(pq.read_table(url), told.schema).equals(told):
            yield "wrong-table", f"{Path(url).name} does not say where the samples of the shards lie"
    except (OSError, pa.ArrowException) as error:
        yield "wrong-table", f"{Path(url).name}: {error}"
    expected = tables.join_fragments(scanned)
    try:
        fragments = index.fragments()
    except DatasetError as error:
        yield "wrong-table", str(error)
        return
    first, nbytes = (expected[name].to_numpy() for name in ("first", "nbytes"))
    if not (np.array_equal(fragments.starts[:-1], first) and np.array_equal(fragments.nbytes, nbytes)):
        yield "wrong-table", "the fragments are not those of the shards"


def _sizes(index: SplitIndex) -> dict[str, dict[str, int | None]]:
    """Width and height of each sample by key, as the annotations stated them when they were packed."""
    try:
        schema = pa.schema([tables.SAMPLES.field(name) for name in ("key", *tables.STATED)])
        table = tables.conform(pq.read_table(index.table_url("samples")), schema)
    except (DatasetError, OSError, pa.ArrowException):
        return {}  # reported with the structure
    return {row.pop("key"): row for row in table.to_pylist()}


def _add_sample(
    found: PackedSplit,
    document: dict[str, list[dict[str, Any]]],
    index: SplitIndex,
    row: dict[str, Any],
    data: bytes,
    size: dict[str, int | None],
) -> None:
    shard, path = index.shards[row["shard"]], index.shard_url(row["shard"])
    place = f"{shard} {row['key']}"
    try:
        _, name, annotations = parse_sidecar(data)
    except ValueError as error:
        found.findings.append(("bad-sidecar", f"{place}: {error}"))
        return
    image = {"id": json.loads(data).get("image_id"), "file_name": name} | size
    document["images"].append(image)
    document["annotations"] += annotations
    found.places.append(f"{place} ({name})")
    read = partial(read_span, path, row["image_offset"], row["image_size"])
    found.images.append(Encoded(found.places[-1], f"{row['key']}.{row['ext']}", stated_size(image), read))

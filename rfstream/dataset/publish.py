"""Atomic publication of a packed split.

Everything is written to a hidden staging folder inside the destination. Then shards and tables move in under names with
a token of the content, the index replaces the former one in a single rename, and only then do the files of the former
generation go. Whoever dies on the way leaves the former pack whole; what is left of it goes at the next run.

In a bucket nothing can be renamed or locked. There the files of a generation, whose names tell them from any other's,
are written where they belong, then the index; nothing is deleted. What no index names any more goes with
:func:`remove_dead`.

Advisory locks (``flock``) tell the dead from the living: each run holds one on its staging folder, which the kernel
drops when the process ends however it ends. A lock on the destination itself serialises sweeping and publishing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rfstream.dataset import storage, tables
from rfstream.dataset.index import (
    INDEX_VERSION,
    CategoryIds,
    PackFormat,
    SplitIndex,
    index_name,
    read_index,
    shard_name,
)
from rfstream.dataset.shards import WrittenShard
from rfstream.errors import DatasetError

_STAGING = ".rfstream-pack-"


@contextmanager
def staging(destination: Path) -> Iterator[Path]:
    """A staging folder inside ``destination`` that goes when the block ends; those of dead runs go first.

    Raises:
        DatasetError: if the system refuses to make or lock it.
    """
    with _os_errors(destination):
        destination.mkdir(parents=True, exist_ok=True)
        with _locked(destination):
            _sweep(destination)
            folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=destination))
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def _os_errors(destination: Path) -> Iterator[None]:
    """What the system refuses while the block works in ``destination``, in one sentence."""
    try:
        yield
    except OSError as error:
        name = error.filename or destination
        raise DatasetError(f"{destination}: can't be packed to: {name}: {storage.describe(error)}") from error


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock on ``folder``, waiting for it."""
    with _opened(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _sweep(destination: Path) -> None:
    """Remove the staging folders that no living run holds."""
    for folder in destination.glob(f"{_STAGING}*"):
        with suppress(FileNotFoundError, BlockingIOError), _opened(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def describe_pack(
    split: str,
    categories: Sequence[dict[str, Any]],
    annotated: Sequence[int],
    category_ids: CategoryIds,
    shards: Sequence[WrittenShard],
    format: PackFormat = "tar",
) -> tuple[str, dict[str, Any]]:
    """Generation token and index document of a pack, both as RF-DETR's packer makes them.

    The token is 8 hex digits over the index's other fields and the shards' digests.
    """
    counts = [len(shard.samples) for shard in shards]
    about = {
        "split": split,
        "num_samples": sum(counts),
        "categories": list(categories),
        "annotated_category_ids": list(annotated),
        "category_ids": category_ids,
        "samples_per_shard": counts,
    }
    content = json.dumps({"index": about, "digests": [shard.digest for shard in shards]}, sort_keys=True)
    generation = hashlib.sha256(content.encode()).hexdigest()[:8]
    names = [shard_name(split, generation, number, format) for number in range(len(shards))]
    return generation, {"version": INDEX_VERSION, "split": split, "shards": names} | about


def publish(
    destination: Path, folder: Path, generation: str, index: dict[str, Any], shards: Sequence[WrittenShard]
) -> SplitIndex:
    """Move a split staged in ``folder`` into ``destination`` and make it the current one; returns its index.

    Raises:
        DatasetError: if the system refuses a write; the former pack then stays the current one.
    """
    split: str = index["split"]
    with _os_errors(destination):
        told = [(shard.samples, shard.fragments) for shard in shards]
        names = tables.write_tables(str(folder), split, generation, told)
        staged_index = folder / index_name(split)
        with storage.replacing(str(staged_index)) as file:
            file.write(json.dumps(index).encode())
        staged = [*(shard.file for shard in shards), *names]
        final = [*index["shards"], *names]
        with _locked(destination):
            former = _owned(destination, split)
            for source, name in zip(staged, final, strict=True):
                (folder / source).replace(destination / name)
            _sync(destination)
            staged_index.replace(destination / index_name(split))
            _sync(destination)
            for name in former - set(final):
                (destination / name).unlink(missing_ok=True)
    return read_index(str(destination), split)


def publish_remote(url: str, generation: str, index: dict[str, Any], shards: Sequence[WrittenShard]) -> SplitIndex:
    """Make a split whose shards are at ``url`` already the current one there; returns its index.

    Raises:
        DatasetError: if a file can't be written; the former pack then stays the current one.
    """
    split: str = index["split"]
    tables.write_tables(url, split, generation, [(shard.samples, shard.fragments) for shard in shards])
    with storage.replacing(storage.join(url, index_name(split))) as file:
        file.write(json.dumps(index).encode())
    return read_index(url, split)


def remove_dead(path: str) -> list[str]:
    """Remove the shards and tables in the pack at ``path`` that are of its splits and that no index names.

    In a bucket nothing tells those of a run that is under way from those of a dead one: let none be.

    Returns:
        The names of the files removed.

    Raises:
        DatasetError: if an index can't be read, or a file can't be removed.
    """
    local = storage.local_path(path)
    with nullcontext() if local is None else _locked(local):
        names = storage.sizes_in(path)
        indexes = [read_index(path, name.removesuffix("-index.json")) for name in names if name.endswith("-index.json")]
        kept = {
            name for index in indexes for name in (*index.shards, *tables.table_names(index.split, index.generation))
        }
        dead = sorted(
            name for name in names if name not in kept and any(_of(index.split).fullmatch(name) for index in indexes)
        )
        for name in dead:
            storage.remove(storage.join(path, name))
    return dead


def _of(split: str) -> re.Pattern[str]:
    """The names that files of a generation of ``split`` have."""
    return re.compile(re.escape(split) + r"-[0-9a-f]{8}(-\d{6}\.(tar|parquet)|\.(samples|fragments)\.parquet)")


def _owned(destination: Path, split: str) -> set[str]:
    """Files of the split's generations: what the current index lists, and what a killed run may have moved in."""
    listed: set[str] = set()
    with suppress(DatasetError):
        index = read_index(str(destination), split)
        if index.columns is None:  # or the files are others' and stay
            listed = {name for name in index.shards if name.startswith(f"{split}-")}
    return {entry.name for entry in destination.iterdir() if entry.name in listed or _of(split).fullmatch(entry.name)}


def _sync(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    with _opened(folder) as descriptor:
        os.fsync(descriptor)

"""One tar shard: written from files and sidecars, or scanned back into sample rows."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from rfstream.dataset import storage, tables
from rfstream.dataset.exif import is_of_turned_frame
from rfstream.dataset.index import IMAGE_EXTENSIONS, check_inside
from rfstream.errors import DatasetError


@dataclass(frozen=True, slots=True)
class Item:
    """One sample to pack: its image file, and the JSON member that goes beside it.

    ``size`` is the image file's size in bytes when the pack was planned; ``objects`` the number of annotations.
    """

    image: str
    ext: str
    size: int
    sidecar: bytes
    width: int | None
    height: int | None
    objects: int

    @property
    def tar_bytes(self) -> int:
        """What the sample takes up in a tar."""
        return tar_bytes(self.size, len(self.sidecar))

    @property
    def tar_end(self) -> int:
        """The same without what pads its last payload."""
        return 2 * tables.BLOCK + tables.padded(self.size) + len(self.sidecar)


def tar_bytes(image_size: int, sidecar_size: int) -> int:
    """What a sample takes up in a tar: two headers and two padded payloads."""
    return 2 * tables.BLOCK + tables.padded(image_size) + tables.padded(sidecar_size)


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A shard in the staging folder: its file there, the SHA-256 of its bytes in hex, its sample rows and fragments.

    ``turned`` are the image files whose annotations are for the image as EXIF says to show it.
    """

    file: str
    digest: str
    samples: pa.Table
    fragments: pa.Table
    turned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignSplit:
    """A split that others wrote, as its shards tell: where columns are, as in ``SplitIndex``; its categories, and the
    ids of those that annotations use, ascending; and each shard's tables."""

    columns: dict[str, str]
    categories: list[dict[str, Any]]
    annotated_category_ids: list[int]
    shards: list[WrittenShard]


def write_shard(path: Path, number: int, first: int, items: Sequence[Item]) -> WrittenShard:
    """Write ``items``, whose first sample has row ``first``, as shard ``number`` at ``path``.

    The members are those that RF-DETR's packer writes: ``{row:08d}.{ext}`` and ``{row:08d}.json``, mode 0644, and zero
    for times and owners, so equal input gives equal bytes.

    Raises:
        DatasetError: if an image can't be read or changed since the pack was planned, or the shard can't be written.
    """
    rows, turned = [], []
    try:
        with path.open("wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for row, item in enumerate(items, start=first):
                    key, image = f"{row:08d}", read_image(item)
                    image_offset = _add(tar, f"{key}.{item.ext}", image)
                    json_offset = _add(tar, f"{key}.json", item.sidecar)
                    where = (image_offset, item.size, json_offset, len(item.sidecar))
                    if is_of_turned_frame(image, item.width, item.height):
                        turned.append(item.image)
                    crowds = crowds_of(json.loads(item.sidecar)["annotations"])
                    rows.append((number, key, item.ext, *where, item.width, item.height, item.objects, crowds))
            file.flush()
            os.fsync(file.fileno())
        digest = sha256(path)
    except OSError as error:
        raise DatasetError(f"{path}: the shard can't be written ({storage.describe(error)})") from error
    samples = sample_table(rows)
    return WrittenShard(path.name, digest, samples, tar_fragments(number, samples), tuple(turned))


def sha256(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tar_fragments(number: int, samples: pa.Table) -> pa.Table:
    """Fragments of the tar shard ``number`` with those sample rows."""
    return tables.fragments_of(number, *tables.extents(samples))


def scan_shard(url: str, number: int) -> pa.Table:
    """The sample rows of the shard at ``url``, the pack's ``number``-th, from its headers and JSON members.

    A sample is a run of members whose names agree up to the first dot, as WebDataset defines it.

    Raises:
        DatasetError: if the tar is damaged, a member is no plain file or its name leaves the folder, or a sample lacks
            its image or a readable JSON; names shard and key.
    """
    with open_tar(url) as tar:
        rows = [
            (number, *_sample_row(f"{url}: sample {key}", tar, key, list(run)))
            for key, run in groupby(members_of(url, tar), key=lambda member: split_name(member.name)[0])
        ]
    if not rows:
        raise DatasetError(f"{url}: holds no samples; pack it again")
    return sample_table(rows)


@contextmanager
def open_tar(url: str) -> Iterator[tarfile.TarFile]:
    """The tar at ``url``, of which headers are read and small members; a remote one by ranges, without what is large.

    Raises:
        DatasetError: if it can't be read; from within the block too.
    """
    try:
        with (
            storage.open_binary(url, buffer=storage.MAX_GAP) as file,
            tarfile.open(fileobj=file, mode="r:") as tar,
        ):
            yield tar
    except (OSError, tarfile.TarError) as error:
        raise DatasetError(f"{url}: not a whole tar file ({storage.describe(error)}); copy or pack it again") from error


def members_of(
    url: str, tar: tarfile.TarFile, skipped: Callable[[str], bool] = lambda name: False
) -> Iterator[tarfile.TarInfo]:
    """The files of the tar, in order, less directories and those whose name is to be ``skipped``.

    Raises:
        DatasetError: if a member is no plain file or its name leaves the folder.
        tarfile.TarError: if the tar is damaged, or does not end as one does. (Where a header is damaged or cut,
            ``tarfile`` ends without a word.)
    """
    for member in tar:
        if member.isdir() or skipped(member.name):
            continue
        check_inside(member.name, f"{url}: member")
        if not member.isreg() or member.issparse():
            raise DatasetError(
                f"{url}: member {member.name!r} is a link, device or sparse file; a shard holds plain files"
            )
        yield member
    file, end = tar.fileobj, tar.offset
    file.seek(end)
    rest = file.read(storage.MAX_GAP)
    if len(rest) < tables.BLOCK:
        raise tarfile.ReadError(f"it ends at byte {end} without the mark that ends a tar")
    if rest.count(0) < len(rest):
        raise tarfile.ReadError(f"after byte {end} comes what is no header, or another tar was joined to it")


def split_name(name: str) -> tuple[str, str]:
    """A member's key and extension: what stands before and after the first dot of its base name."""
    folder, slash, base = name.rpartition("/")
    stem, _, ext = base.partition(".")
    return folder + slash + stem, ext.lower()


def _sample_row(where: str, tar: tarfile.TarFile, key: str, members: list[tarfile.TarInfo]) -> tuple[object, ...]:
    """The columns of a sample's row after ``shard``; width and height are not in the shard."""
    by_ext = {split_name(member.name)[1]: member for member in members}
    ext = next((ext for ext in IMAGE_EXTENSIONS if ext in by_ext), None)
    if ext is None or "json" not in by_ext:
        kind = "JSON" if ext else f"image ({', '.join(IMAGE_EXTENSIONS)})"
        raise DatasetError(f"{where}: has no {kind} member, only {sorted(by_ext)}; pack it again")
    image, sidecar = by_ext[ext], by_ext["json"]
    if sidecar.size > tables.MAX_SIDECAR:
        raise DatasetError(
            f"{where}: its JSON member has {sidecar.size:,} bytes and one image's annotations may take "
            f"{tables.MAX_SIDECAR:,}; pack it again, with simpler outlines"
        )
    payload = tar.extractfile(sidecar)
    try:
        annotations = json.loads(payload.read() if payload else b"")["annotations"]
        objects, crowds = len(annotations), crowds_of(annotations)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DatasetError(f"{where}: its JSON has no list of annotations ({storage.describe(error)})") from None
    where_it_lies = (image.offset_data, image.size, sidecar.offset_data, sidecar.size)
    return (key, ext, *where_it_lies, None, None, objects, crowds)


def crowds_of(annotations: Sequence[Mapping[str, Any]]) -> str | None:
    """The annotations that mark a crowd as JSON, or None."""
    crowds = [annotation for annotation in annotations if annotation.get("iscrowd")]
    return json.dumps(crowds) if crowds else None


def sample_table(rows: Sequence[tuple[object, ...]], schema: pa.Schema = tables.SAMPLES) -> pa.Table:
    """A table of ``schema`` from rows in the order of its columns."""
    columns = list(zip(*rows, strict=True))
    return pa.table([pa.array(c, field.type) for c, field in zip(columns, schema, strict=True)], schema)


def read_image(item: Item) -> bytes:
    """The bytes of the item's image file.

    Raises:
        DatasetError: if it can't be read, or changed since the pack was planned.
    """
    try:
        data = Path(item.image).read_bytes()
    except OSError as error:
        raise DatasetError(f"{item.image}: the image can't be read ({storage.describe(error)})") from error
    if len(data) != item.size:
        raise DatasetError(f"{item.image}: {item.size} bytes when the pack began, {len(data)} now; pack again")
    return data


def _add(tar: tarfile.TarFile, name: str, payload: bytes) -> int:
    """Append a member; returns the offset of its payload."""
    member = tarfile.TarInfo(name)  # zero times and owners, mode 0644
    member.size = len(payload)
    tar.addfile(member, io.BytesIO(payload))
    return tar.offset - tables.padded(len(payload))

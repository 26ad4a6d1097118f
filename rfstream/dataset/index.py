"""The index of a packed split: RF-DETR's version-1 ``{split}-index.json``, read, checked and interpreted."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rfstream.dataset import storage, tables
from rfstream.dataset.retry import DEADLINE_S
from rfstream.errors import DatasetError
from rfstream.plan.order import Fragments
from rfstream.plan.position import Fingerprint

INDEX_VERSION = 1
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp")
CategoryIds = Literal["remap", "raw"]
PackFormat = Literal["tar", "parquet"]
"""What the shards of a pack are; also the extension of their names."""
PackIds = tuple[tuple[tuple[int, int], ...], ...]
"""For each pack of a mixture by number, category ids in the pack and in the mixture."""

# Under "raw" the label is the category id, and a model has one output for each id up to the largest.
_MAX_RAW_ID = 1_000_000
_NO_PARENT = (None, "", "none", "null")
_Count = Annotated[int, Field(ge=0, lt=2**48)]


class _IndexFile(BaseModel):
    """The JSON schema as RF-DETR writes it; unknown keys are left alone."""

    model_config = ConfigDict(strict=True)

    version: Literal[1]
    split: str
    shards: Annotated[list[str], Field(min_length=1)]
    num_samples: _Count
    categories: list[dict[str, Any]] = []
    annotated_category_ids: list[int] = []
    category_ids: CategoryIds = "remap"
    samples_per_shard: list[_Count] = []
    columns: dict[str, str] | None = None


@dataclass(frozen=True)
class SplitIndex:
    """One packed split, known without opening a shard.

    Attributes:
        path: folder or URL of the pack.
        split: name of the split.
        shards: file names of the shards, in pack order.
        num_samples: samples in all shards.
        categories: COCO categories as the source had them.
        annotated_category_ids: ids of the categories with at least one annotation, ascending.
        category_ids: "remap" (labels are 0, 1, 2, ...) or "raw" (labels are the category ids).
        samples_per_shard: samples of each shard, or empty if the index does not say.
        generation: token in the names of the split's shards and tables.
        digest: first 16 hex digits of the SHA-256 of the index file.
        shards_at: folder or URL that the names of the shards are relative to.
        columns: of shards that ``rfstream index`` found and rfstream did not write, column of the convention -> column
            of a Parquet file, or path in the JSON of a tar's samples; else None.
        deadline_s: how long reading one of the split's files may take, seconds.
    """

    path: str
    split: str
    shards: tuple[str, ...]
    num_samples: int
    categories: tuple[dict[str, Any], ...]
    annotated_category_ids: tuple[int, ...]
    category_ids: CategoryIds
    samples_per_shard: tuple[int, ...]
    generation: str
    digest: str
    shards_at: str = ""
    columns: Mapping[str, str] | None = None
    deadline_s: float = DEADLINE_S

    @property
    def format(self) -> PackFormat:
        """What the shards are, as their names say."""
        return "parquet" if self.shards[0].endswith(".parquet") else "tar"

    @property
    def at_hand(self) -> bool:
        """Whether one sample is read as cheaply as many: its shard is on this machine, and not read by whole row
        groups, as Parquet that others wrote is."""
        by_groups = self.format == "parquet" and self.columns is not None
        return storage.local_path(self.shards_at) is not None and not by_groups

    @property
    def pack_ids(self) -> PackIds:
        """None: the split is of one pack, and its category ids are the pack's."""
        return ()

    def fingerprint(self) -> Fingerprint:
        """What must be equal for the same rows to be the same samples, with the same labels."""
        return {"pack": self.digest}

    def ids(self) -> list[int]:
        """Category ids in the order of ``categories``."""
        return [int(category["id"]) for category in self.categories]

    def label_of(self) -> dict[int, int]:
        """Category id -> label, as RF-DETR assigns them (identity under "raw")."""
        if self.category_ids == "raw":
            return {int(category["id"]): int(category["id"]) for category in self.categories}
        kept = _without_parents(self.categories, set(self.annotated_category_ids))
        return {int(category["id"]): label for label, category in enumerate(kept)}

    def class_names(self) -> list[str]:
        """Category names by label; an empty string where a label has no category."""
        labels = self.label_of()
        if not labels:
            return []
        by_id = {int(category["id"]): str(category["name"]) for category in self.categories}
        names = [""] * (max(labels.values()) + 1)
        for category_id, label in labels.items():
            names[label] = by_id[category_id]
        return names

    def fragments(self) -> Fragments:
        """Contiguous runs of samples of about 8 MiB, in pack order.

        Raises:
            DatasetError: if the table is absent (a pack that another tool wrote) or does not fit the index.
        """
        return tables.read_fragments(self.table_url("fragments"), self.num_samples, self.reindex, self.deadline_s)

    def crowds(self) -> pa.Table:
        """Samples with crowd annotations (see :func:`rfstream.dataset.tables.read_crowds`).

        Raises:
            DatasetError: if the table is absent, unreadable or of an older release.
        """
        return tables.read_crowds(self.table_url("samples"), self.reindex, self.deadline_s)

    def table_url(self, table: tables.TableName) -> str:
        """Path or URL of one of the split's Parquet tables.

        Raises:
            DatasetError: if the pack has none, saying how to make it.
        """
        url = storage.join(self.path, tables.table_name(self.split, self.generation, table))
        if not storage.exists(url, self.deadline_s):
            raise DatasetError(f"{url} does not exist: {self.reindex} once")
        return url

    def shard_url(self, number: int) -> str:
        """Path or URL of a shard."""
        return storage.join(self.shards_at, self.shards[number])

    @property
    def reindex(self) -> str:
        """The command that writes the tables."""
        if self.columns is not None:
            return f"run `rfstream index FILES {self.split} --output {self.path}` again"
        return f"run `rfstream index {self.path} {self.split}`"


def _without_parents(categories: tuple[dict[str, Any], ...], annotated: set[int]) -> list[dict[str, Any]]:
    """Categories by ascending id, less those that only group others.

    A category goes if no annotation uses it and another category names it as its ``supercategory``: Roboflow exports
    begin with such a root. If that would leave none, all stay.
    """
    ordered = sorted(categories, key=lambda category: int(category["id"]))
    parents = {
        category.get("supercategory")
        for category in ordered
        if category.get("supercategory") not in (*_NO_PARENT, category["name"])
    }
    kept = [c for c in ordered if c["name"] not in parents or int(c["id"]) in annotated]
    return kept or ordered


def check_split(split: str) -> str:
    """``split``, if it is fit to be part of a file name.

    Raises:
        DatasetError: if it is empty, a dot name, or holds a path separator, drive, wildcard or control character.
    """
    if not re.fullmatch(r"[^/\\:*?\[\]\x00-\x1f]+", split) or split in (".", ".."):
        raise DatasetError(
            f"split name {split!r} can't be part of a file name: use letters, digits, '-', '_' and '.' only"
        )
    return split


def check_inside(name: str, what: str) -> str:
    """``name``, if as a path it stays inside its folder.

    The check is lexical: a symbolic link below the folder is the user's own business, a crafted name is not.

    Raises:
        DatasetError: if it is absolute or has a drive, a '..' part, no base name or a character that no file name has;
            ``what`` says where it stands.
    """
    parts = name.replace("\\", "/").split("/")
    if parts[0] == "" or name[1:2] == ":" or ".." in parts:
        raise DatasetError(f"{what} {name!r} is absolute or leaves its folder; refusing to open it: correct the name")
    surrogate = not name.isascii() and any("\ud800" <= c <= "\udfff" for c in name)
    if parts[-1] in ("", ".") or "\x00" in name or surrogate:
        raise DatasetError(f"{what} {name!r} can't be the name of a file; correct the name")
    return name


def index_name(split: str) -> str:
    """File name of the split's index."""
    return f"{check_split(split)}-index.json"


def shard_name(split: str, generation: str, number: int, format: PackFormat) -> str:
    """File name of shard ``number``."""
    return f"{split}-{generation}-{number:06d}.{format}"


def has_split(path: str, split: str, deadline_s: float = DEADLINE_S) -> bool:
    """Whether the pack at ``path`` has an index of ``split``."""
    return storage.exists(storage.join(path, index_name(check_split(split))), deadline_s)


def read_index(path: str, split: str, shards_at: str | None = None, deadline_s: float = DEADLINE_S) -> SplitIndex:
    """Read and check the index of ``split`` in the pack at ``path`` (a folder or an fsspec URL).

    The shards are there too, or at ``shards_at``. The index itself can't say that they are elsewhere: what comes with
    data does not decide what is opened. ``deadline_s`` bounds this read, and each later one of the split's other files,
    in seconds.

    Raises:
        DatasetError: if there is none, or a field is malformed, escapes the pack's folder or contradicts another.
    """
    path = str(path)
    url = storage.join(path, index_name(split))
    data = storage.find_bytes(url, deadline_s)
    if data is None:
        raise DatasetError(f"{url} does not exist: no split {split!r} is packed there; run `rfstream pack` first")
    digest = hashlib.sha256(data).hexdigest()[:16]
    return _build(path, shards_at or path, url, split, _parse(url, data), digest, deadline_s)


def _parse(url: str, data: bytes) -> _IndexFile:
    try:
        return _IndexFile.model_validate(json.loads(data))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the document"
        raise DatasetError(f"{url}: not a version-{INDEX_VERSION} index: {field}: {first['msg']}; pack again") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{url}: not a readable JSON file ({storage.describe(error)}); pack again") from None


def _build(
    path: str, shards_at: str, url: str, split: str, raw: _IndexFile, digest: str, deadline_s: float
) -> SplitIndex:
    if raw.split != split:
        raise DatasetError(f"{url}: is an index of split {raw.split!r}, renamed; give that name or pack again")
    for name in raw.shards:
        check_inside(name, f"{url}: shard name")
    if len(set(raw.shards)) != len(raw.shards):
        raise DatasetError(f"{url}: lists a shard twice; pack again")
    if len({name.endswith(".parquet") for name in raw.shards}) > 1:
        raise DatasetError(f"{url}: lists Parquet files and others; pack again")
    counts = raw.samples_per_shard
    if counts and (len(counts) != len(raw.shards) or sum(counts) != raw.num_samples):
        raise DatasetError(
            f"{url}: samples_per_shard ({len(counts)} shards, {sum(counts)} samples) contradicts the list of "
            f"{len(raw.shards)} shards or num_samples={raw.num_samples}; pack again"
        )
    check_categories(url, raw.categories, raw.category_ids)
    pattern = re.compile(re.escape(split) + r"-([0-9a-f]{8})-\d{6}\.(?:tar|parquet)")
    match = pattern.fullmatch(raw.shards[0])
    return SplitIndex(
        path=path,
        split=split,
        shards=tuple(raw.shards),
        num_samples=raw.num_samples,
        categories=tuple(raw.categories),
        annotated_category_ids=tuple(raw.annotated_category_ids),
        category_ids=raw.category_ids,
        samples_per_shard=tuple(counts),
        generation=match.group(1) if match and raw.columns is None else digest[:8],
        digest=digest,
        shards_at=shards_at,
        columns=raw.columns,
        deadline_s=deadline_s,
    )


def check_categories(url: str, categories: list[dict[str, Any]], category_ids: CategoryIds) -> None:
    """Check that every category has a usable ``id`` and ``name``.

    Raises:
        DatasetError: naming the file ``url`` and the category.
    """
    seen: set[int] = set()
    for position, category in enumerate(categories):
        number, name = category.get("id"), category.get("name")
        if not isinstance(number, int) or isinstance(number, bool) or abs(number) >= 2**63:
            raise DatasetError(f"{url}: categories[{position}] has id {number!r}; every category needs an integer id")
        if not isinstance(name, str):
            raise DatasetError(f"{url}: category {number} has name {name!r}; every category needs a name that is text")
        if isinstance(category.get("supercategory"), list | dict):
            raise DatasetError(f"{url}: category {number} has a supercategory that is no text; correct it")
        if number in seen:
            raise DatasetError(f"{url}: two categories have the id {number}; give each category its own id")
        seen.add(number)
        if category_ids == "raw" and not 0 <= number < _MAX_RAW_ID:
            raise DatasetError(
                f"{url}: category id {number} can't be a label under category_ids='raw' (0 to {_MAX_RAW_ID - 1}); "
                "pack with category_ids='remap'"
            )

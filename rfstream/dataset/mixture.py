"""Several packs as one split: their rows pack after pack, and one list of categories for all.

Categories are the same where their names are. The first pack's keep their labels; what only later ones have follows in
their order. A pack may rename some of its own before they are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from rfstream.dataset.index import CategoryIds, PackIds, SplitIndex
from rfstream.dataset.reader import EncodedSample, PackReader, SampleReader
from rfstream.dataset.storage import join
from rfstream.errors import DatasetError, redacted
from rfstream.plan.keys import IntArray
from rfstream.plan.mixture import Mixture, Share
from rfstream.plan.position import Fingerprint


@dataclass(frozen=True)
class MixedPack:
    """One pack's part of a split: its number in the configuration, its index, and how often each of its samples comes
    in an epoch."""

    number: int
    index: SplitIndex
    weight: float

    def share(self) -> Share:
        """What it gives to an epoch.

        Raises:
            DatasetError: see :meth:`SplitIndex.fragments`.
        """
        return Share.of(self.index.fragments(), self.weight)


@dataclass(frozen=True)
class MixedSplit:
    """A split of several packs, known as a :class:`SplitIndex` is, without opening a shard.

    ``categories`` are in COCO's form, and their ids are the labels; ``pack_ids`` are those of all packs, also of packs
    that have no part in the split.
    """

    split: str
    packs: tuple[MixedPack, ...]
    categories: tuple[dict[str, Any], ...]
    pack_ids: PackIds
    category_ids: ClassVar[CategoryIds] = "remap"

    @property
    def num_samples(self) -> int:
        """Samples in all packs, each once."""
        return self.first_rows[-1]

    @property
    def first_rows(self) -> list[int]:
        """The row of each pack's first sample and, last, the number of samples."""
        return [0, *accumulate(pack.index.num_samples for pack in self.packs)]

    @property
    def shards(self) -> list[str]:
        """Paths or URLs of all shards."""
        return [pack.index.shard_url(number) for pack in self.packs for number in range(len(pack.index.shards))]

    @property
    def digest(self) -> str:
        """The packs' digests, numbered as in the configuration."""
        return ", ".join(f"{pack.number}={pack.index.digest}" for pack in self.packs)

    @property
    def at_hand(self) -> bool:
        """See :attr:`SplitIndex.at_hand`."""
        return all(pack.index.at_hand for pack in self.packs)

    def fingerprint(self) -> Fingerprint:
        """See :meth:`SplitIndex.fingerprint`."""
        weights = ", ".join(f"{pack.number}={pack.weight}" for pack in self.packs)
        classes = hashlib.sha256(json.dumps([self.class_names(), self.pack_ids]).encode()).hexdigest()[:16]
        return {"pack": self.digest, "weights": weights, "classes": classes}

    def label_of(self) -> dict[int, int]:
        """Category id -> label: the id itself."""
        return {label: label for label in range(len(self.categories))}

    def class_names(self) -> list[str]:
        """Category names by label."""
        return [str(category["name"]) for category in self.categories]

    def fragments(self) -> Mixture:
        """What each pack gives to an epoch.

        Raises:
            DatasetError: see :meth:`SplitIndex.fragments`.
        """
        return Mixture(tuple(pack.share() for pack in self.packs))

    def crowds(self) -> pa.Table:
        """See :meth:`SplitIndex.crowds`; ``pack`` is the number of each one's pack."""
        parts = []
        for pack, first in zip(self.packs, self.first_rows[:-1], strict=True):
            part = pack.index.crowds()
            row = pa.array(part["row"].to_numpy() + first)
            of_pack = pa.array(np.full(len(part), pack.number, dtype=np.int64))
            parts.append(part.set_column(part.column_names.index("row"), "row", row).append_column("pack", of_pack))
        return pa.concat_tables(parts)


Split = SplitIndex | MixedSplit
"""What is streamed: a split of one pack, or of several."""


class MixedReader(PackReader):
    """Reads samples of several packs by their row in the mixture.

    Keys are unique among all packs: a pack's number stands before each of its keys. Shards are named with their URLs.
    """

    def __init__(self, packs: Sequence[tuple[int, int, str, SampleReader]]) -> None:
        """Of each pack the row of its first sample, its number, where its shards are, and its reader."""
        self._packs = list(packs)
        self._first = np.array([first for first, *_ in packs], dtype=np.int64)

    def read(self, rows: IntArray) -> list[EncodedSample]:
        """See :meth:`SampleReader.read`."""
        of_pack = np.searchsorted(self._first, rows, side="right") - 1
        found: dict[int, EncodedSample] = {}
        for place in np.unique(of_pack).tolist():
            slots = np.flatnonzero(of_pack == place)
            first, number, shards_at, reader = self._packs[place]
            for slot, sample in zip(slots.tolist(), reader.read(rows[slots] - first), strict=True):
                shard, key = redacted(join(shards_at, sample.shard)), f"{number}/{sample.key}"
                found[slot] = replace(sample, shard=shard, key=key, row=sample.row + first, pack=number)
        return [found[slot] for slot in range(len(rows))]


def mixed_categories(
    spaces: Sequence[SplitIndex], renamed: Sequence[Mapping[str, str]]
) -> tuple[tuple[dict[str, Any], ...], PackIds]:
    """One list of categories for several packs, and each pack's category ids with theirs.

    Args:
        spaces: the index of each pack whose categories number its labels.
        renamed: for each pack, names of its categories -> the names that they have in the mixture.

    Raises:
        DatasetError: naming the pack and the category, if it is not clear which categories are the same.
    """
    found: dict[str, dict[str, Any]] = {}
    ids = []
    for space, names in zip(spaces, renamed, strict=True):
        mine = {}
        for category in _labelled(space, names):
            name = names.get(category["name"], category["name"])
            entry = found.setdefault(name, {**category, "id": len(found), "name": name})
            if entry.get("keypoints") != category.get("keypoints"):
                raise DatasetError(
                    f"{space.path}: category {category['name']!r} has other keypoints than {name!r} of a pack before "
                    "it; give it a name of its own with `categories`"
                )
            mine[int(category["id"])] = int(entry["id"])
        ids.append(tuple(sorted(mine.items())))
    _refuse_near_names(list(found))
    return tuple(found.values()), tuple(ids)


def _labelled(space: SplitIndex, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The categories of a pack that have a label, in the order of these."""
    if space.category_ids == "raw":
        raise DatasetError(
            f"{space.path}: was packed with category_ids=raw, so its labels are its ids, which mean other classes in "
            "another pack of the mixture; pack it with category_ids=remap"
        )
    by_id = {int(category["id"]): category for category in space.categories}
    kept = [by_id[number] for number in space.label_of()]
    known = [str(category["name"]) for category in kept]
    twice = next((name for name in known if known.count(name) > 1), None)
    if twice is not None:
        raise DatasetError(
            f"{space.path}: two categories are named {twice!r}, so a mixture can't tell by name which is meant; give "
            "them different names and pack again"
        )
    absent = next((name for name in names if name not in known), None)
    if absent is not None:
        raise DatasetError(
            f"{space.path}: `categories` renames {absent!r}, and the pack has no such class, only "
            f"{', '.join(map(repr, known))}; correct the name"
        )
    yield from kept


def _refuse_near_names(names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(" ".join(name.split()).casefold(), name)
        if other != name:
            raise DatasetError(
                f"data.path: the classes {other!r} and {name!r} differ in case or spaces alone; rename one with "
                "`categories`, to the other's name or to one that is not so near"
            )

"""Which samples of a split go into which shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rfstream.dataset.convention import Convention
from rfstream.dataset.document import SplitSource
from rfstream.dataset.index import PackFormat
from rfstream.dataset.shards import Item
from rfstream.plan.keys import permutation


@dataclass(frozen=True)
class ShardPlan:
    """One task: which samples go into shard ``number``; ``first`` is the row of the first.

    ``nbytes`` are those of the images. ``convention`` says how samples become rows of Parquet; without one the shard is
    a tar.
    """

    number: int
    first: int
    nbytes: int
    items: Sequence[Item]
    convention: Convention | None

    def loaded(self) -> ShardPlan:
        """The same with the annotations of its samples, as a task gets it."""
        return replace(self, items=list(self.items))


def plan_shards(
    split: SplitSource, max_shard_bytes: int, format: PackFormat, shuffle_seed: int | None
) -> list[ShardPlan]:
    """Cut the samples of a split into shards, alike in any format; one ends with the sample that reaches its size.

    With a seed the samples are shuffled before.
    """
    items, convention = split.items, None
    if format == "parquet":
        convention = Convention.of(split.categories, (item.sidecar for item in items))
    if shuffle_seed is not None:
        items = items.taken(permutation(len(items), "rfstream.pack", shuffle_seed))
    plans: list[ShardPlan] = []
    first, nbytes = 0, 0
    for row, tar_bytes in enumerate(items.tar_bytes()):
        nbytes += tar_bytes
        if nbytes >= max_shard_bytes or row == len(items) - 1:
            own = items[first : row + 1]
            plans.append(ShardPlan(len(plans), first, own.nbytes, own, convention))
            first, nbytes = row + 1, 0
    return plans

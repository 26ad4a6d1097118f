"""From a configuration and a role (what code asks for: ``train``, ``val``) to the split that is streamed."""

from __future__ import annotations

from rfstream.config import Config, PackConfig
from rfstream.dataset.index import SplitIndex, has_split, read_index
from rfstream.dataset.mixture import MixedPack, MixedSplit, Split, mixed_categories
from rfstream.errors import ConfigError, DatasetError

_TRAIN = "train"


def split_of(config: Config, role: str) -> Split:
    """The split in ``role``, of one pack or of all packs of a mixture that have a part in it.

    Raises:
        ConfigError: if no pack is configured.
        DatasetError: see :func:`rfstream.dataset.index.read_index` and
            :func:`rfstream.dataset.mixture.mixed_categories`; or if no pack has a part in it.
    """
    if config.data.format != "pack":
        raise ConfigError(f"this trains on images of a pack, and data.format is {config.data.format}")
    packs = config.data.packs
    if isinstance(config.data.path, str):
        return _index(config, packs[0], role)
    having = [(number, pack) for number, pack in enumerate(packs) if config.data.split_name(pack, role) is not None]
    if not having:
        raise DatasetError(f"data.path: no pack of the mixture has a part in {role!r}; name a split of one in `splits`")
    absent = next((pack for _, pack in having if not _has(config, pack, role)), None)
    if absent is not None:
        raise DatasetError(
            f"{absent.path}: no split {config.data.split_name(absent, role)!r} is packed there; correct the path, or "
            f"give this pack `splits: {{{role}: ...}}` with a name that it has, or null to leave it out"
        )
    spaces = [_space(config, pack) for pack in packs]
    categories, ids = mixed_categories(spaces, [pack.categories for pack in packs])
    mixed = [MixedPack(number, _index(config, pack, role), pack.weight) for number, pack in having]
    return MixedSplit(config.data.splits.get(role, role), tuple(mixed), categories, ids)


def has_role(config: Config, role: str) -> bool:
    """Whether a pack has a split in ``role``."""
    return any(_has(config, pack, role) for pack in config.data.packs)


def label_space(config: Config, split: Split) -> Split:
    """The split whose categories number the labels of ``split``: the training split, so that all splits agree.

    Raises:
        DatasetError: if the two splits were packed under different category policies.
    """
    if isinstance(split, MixedSplit):
        return split
    (pack,) = config.data.packs
    if split.split == config.data.split_name(pack, _TRAIN) or not _has(config, pack, _TRAIN):
        return split
    space = _index(config, pack, _TRAIN)
    if space.category_ids != split.category_ids:
        raise DatasetError(
            f"{pack.path}: split {space.split} was packed with category_ids={space.category_ids} and split "
            f"{split.split} with {split.category_ids}, so their labels differ: pack both alike"
        )
    return space


def _space(config: Config, pack: PackConfig) -> SplitIndex:
    """The split whose categories a pack brings to a mixture: that of training, or its first in another role."""
    roles = [_TRAIN, *config.data.splits, *pack.splits]
    return _index(config, pack, next((role for role in roles if _has(config, pack, role)), _TRAIN))


def _has(config: Config, pack: PackConfig, role: str) -> bool:
    name = config.data.split_name(pack, role)
    return name is not None and has_split(pack.path, name, config.stream.deadline_s)


def _index(config: Config, pack: PackConfig, role: str) -> SplitIndex:
    name = config.data.split_name(pack, role)
    return read_index(pack.path, name or role, pack.shards, config.stream.deadline_s)

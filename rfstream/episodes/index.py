"""The chosen episodes of a dataset, laid end to end: what a plan needs of them, and where each row is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rfstream.dataset import storage
from rfstream.dataset.retry import DEADLINE_S
from rfstream.episodes.layout import Layout
from rfstream.episodes.metadata import INFO, EpisodeDataset, FilePlaces
from rfstream.errors import ConfigError, DatasetError
from rfstream.plan.keys import IntArray
from rfstream.plan.position import Fingerprint


@dataclass(frozen=True, eq=False)
class EpisodeIndex:
    """Episodes of one split in the dataset's order; a row is a frame.

    Attributes:
        dataset: the metadata.
        split: name of the split.
        chosen: positions of the episodes in the metadata's tables, int64 (C,), ascending.
        layout: what a sample holds.
        pool_size: episodes whose frames are permuted together.
        deadline_s: how long reading one file may take, seconds.
    """

    dataset: EpisodeDataset
    split: str
    chosen: IntArray
    layout: Layout
    pool_size: int
    deadline_s: float = DEADLINE_S

    @cached_property
    def starts(self) -> IntArray:
        """Row of the first frame of each episode and, last, the number of rows: int64 (C + 1,)."""
        return np.concatenate([[0], np.cumsum(self.dataset.length[self.chosen])]).astype(np.int64)

    @property
    def num_samples(self) -> int:
        """Frames of all episodes."""
        return int(self.starts[-1])

    @cached_property
    def digest(self) -> str:
        """16 hex digits that stand for the metadata, the chosen episodes and the sizes of their files."""
        parts = self.dataset.digest.encode() + self.chosen.tobytes() + self.nbytes.tobytes()
        return hashlib.sha256(parts).hexdigest()[:16]

    @cached_property
    def nbytes(self) -> IntArray:
        """Bytes of each episode on disk, int64 (C,): its share, by frames, of each file that it is read from.

        Raises:
            DatasetError: if one of these files is absent.
        """
        dataset = self.dataset
        trees: list[tuple[FilePlaces, list[str]]] = [
            (dataset.data, [dataset.data_url(at) for at in self.chosen]),
            *((dataset.videos[c], [dataset.video_url(c, at) for at in self.chosen]) for c in self.video_cameras),
        ]
        total = np.zeros(len(self.chosen), dtype=np.int64)
        for places, urls in trees:
            total += _shares(places, urls, dataset.length, self.chosen, self.deadline_s)
        return total

    @property
    def video_cameras(self) -> list[str]:
        """Cameras whose frames lie in video files."""
        return [camera.name for camera in self.layout.cameras if camera.dtype == "video"]

    def fingerprint(self) -> Fingerprint:
        """What must be equal for equal positions to mean equal samples."""
        return {"pack": self.digest, "pool_size": self.pool_size}


def pool_weights(nbytes: IntArray, pool_size: int, block_bytes: int) -> tuple[IntArray, int]:
    """Weights of episodes as fragments, int64 (C,), and the weight of a shuffle block, such that this is a pool:
    ``pool_size`` episodes, or fewer where these have more than ``block_bytes``."""
    least = max(block_bytes // pool_size, 1)
    return np.maximum(nbytes, least), least * pool_size


def index_of(
    dataset: EpisodeDataset,
    split: str,
    select: Sequence[int] | None,
    layout: Layout,
    pool_size: int,
    deadline_s: float = DEADLINE_S,
) -> EpisodeIndex:
    """The episodes of ``split``, or those of them that ``select`` names.

    Raises:
        DatasetError: if there is no such split.
        ConfigError: if ``select`` names an episode that the split has not.
    """
    inside = _of_split(dataset, split)
    if select is not None:
        absent = sorted(set(select) - set(dataset.number[inside].tolist()))
        if absent or not select:
            named = f"episode {absent[0]}" if absent else "episodes, since none is named"
            raise ConfigError(f"episodes.select: split {split!r} of {dataset.root} has no {named}")
        inside &= np.isin(dataset.number, select)
    return EpisodeIndex(dataset, split, np.flatnonzero(inside), layout, pool_size, deadline_s)


def _of_split(dataset: EpisodeDataset, split: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which episodes ``info.json`` counts to ``split``: a range "first:end" of episode numbers."""
    url, splits = storage.join(dataset.root, INFO), dataset.info.splits
    if split not in splits:
        known = ", ".join(splits) or "none"
        raise DatasetError(
            f"{url}: there is no split {split!r} (known here: {known}); name one in data.splits, or leave the "
            "role out there"
        )
    ends = re.fullmatch(r"(\d+):(\d+)", splits[split])
    if not ends:
        raise DatasetError(f"{url}: split {split!r} is {splits[split]!r}, not a range such as '0:12'; correct it")
    inside = (dataset.number >= int(ends[1])) & (dataset.number < int(ends[2]))
    if not inside.any():
        raise DatasetError(f"{url}: split {split!r} ({splits[split]}) holds none of the episodes; correct it")
    return inside


def _shares(places: FilePlaces, urls: Sequence[str], length: IntArray, chosen: IntArray, deadline_s: float) -> IntArray:
    """Bytes of each chosen episode in one tree of files, whose files lie at ``urls``."""
    _, of_file = np.unique(np.stack([places.chunk, places.file]), axis=1, return_inverse=True)
    frames = np.bincount(of_file.reshape(-1), weights=length).astype(np.int64)
    folders = {url.rpartition("/")[0] for url in urls}
    there = [folder for folder in folders if storage.exists(folder, deadline_s)]
    sizes = {f"{folder}/{name}": n for folder in there for name, n in storage.sizes_in(folder).items()}
    absent = next((url for url in urls if url not in sizes), None)
    if absent is not None:
        raise DatasetError(f"{absent} does not exist, and meta/episodes says that episodes lie there; copy it again")
    unsaid = sorted({url for url in urls if sizes[url] is None})
    sizes |= zip(unsaid, storage.sizes_of(unsaid, deadline_s), strict=True)
    nbytes = np.array([sizes[url] for url in urls], dtype=np.int64)
    return nbytes * length[chosen] // frames[of_file.reshape(-1)[chosen]]

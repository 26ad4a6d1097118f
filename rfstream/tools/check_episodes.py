"""What is wrong with a LeRobot dataset: whatever the stream would stop at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from rfstream.dataset.retry import DEADLINE_S
from rfstream.episodes.decode import EpisodeDecoder, EpisodeSpec
from rfstream.episodes.index import EpisodeIndex, index_of
from rfstream.episodes.layout import layout_of
from rfstream.episodes.metadata import INFO, read_dataset
from rfstream.episodes.reader import EpisodeReader, EpisodeReaderSpec
from rfstream.episodes.sample import EncodedStep
from rfstream.errors import DatasetError
from rfstream.stream.bad import BadSampleError
from rfstream.tools.check_traits import Finding

_AT_ONCE = 64  # frames


def is_lerobot(path: Path) -> bool:
    """Whether a folder looks like a LeRobot dataset."""
    return (path / INFO).is_file()


def check_episodes(path: Path, *, frames: bool) -> Iterator[tuple[str, int, list[Finding]]]:
    """Name, number of frames and findings of each split of the dataset at ``path``.

    Every row and every video file's header is read, and with ``frames`` every frame decoded.
    """
    try:
        dataset = read_dataset(str(path))
        layout = layout_of(dataset.info, {}, None)
    except DatasetError as error:
        yield str(path), 0, [("bad-metadata", str(error))]
        return
    for split in dataset.info.splits or {"train": ""}:
        name = f"{path} ({split})"
        try:
            index = index_of(dataset, split, None, layout, pool_size=1)
        except DatasetError as error:
            yield name, 0, [("bad-metadata", str(error))]
            continue
        reader = EpisodeReaderSpec(str(path), split, None, dataset.digest, layout, 1, DEADLINE_S).build()
        decoder = EpisodeSpec(0, layout).build() if frames else None
        yield name, index.num_samples, list(_findings(index, reader, decoder))


def _findings(index: EpisodeIndex, reader: EpisodeReader, decoder: EpisodeDecoder | None) -> Iterator[Finding]:
    for first, end in pairwise(index.starts.tolist()):
        try:
            for steps in reader.parts(np.arange(first, end), _AT_ONCE):
                yield from _undecodable(steps, decoder) if decoder is not None else ()
        except DatasetError as error:
            yield "unreadable-episode", str(error)


def _undecodable(steps: Sequence[EncodedStep], decoder: EpisodeDecoder) -> Iterator[Finding]:
    for step in steps:
        try:
            decoder.sample(step, 0)
        except BadSampleError as error:
            yield "undecodable-frame", str(error.bad)

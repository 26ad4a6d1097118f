"""From rows to encoded samples: windows of numbers, and the ranges of video files that their frames need.

A read task asks for all rows of a pool at once, and gets whole episodes in one range a camera, since an episode lies in
one piece of its file. A decode actor that reads for itself asks for a batch, and gets the groups of pictures of its
frames.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa

from rfstream.dataset import storage
from rfstream.dataset.retry import DEADLINE_S
from rfstream.episodes.container import PacketTable, read_packets
from rfstream.episodes.index import EpisodeIndex, index_of
from rfstream.episodes.layout import Field, Layout
from rfstream.episodes.metadata import read_dataset
from rfstream.episodes.sample import EncodedStep, Picture, Run, Shot
from rfstream.episodes.tabular import EpisodeRows, Wanted, read_episodes, read_footer
from rfstream.errors import DatasetError
from rfstream.plan.keys import IntArray
from rfstream.stream.wire import first_value

_FILES = 64
"""Files of a camera, or of rows, whose packet tables and footers a process keeps at least; the table of an hour at 30
frames a second has 5 MB."""
_POOLS = 2
"""Pools whose rows and packet tables a process keeps: the one that is read, and that of a batch that began in the one
before."""


@dataclass(frozen=True)
class EpisodeReaderSpec:
    """Which episodes to read, and what of them: see :class:`rfstream.stream.source.ReaderSpec`."""

    root: str
    split: str
    select: tuple[int, ...] | None
    digest: str
    layout: Layout
    pool_size: int
    deadline_s: float = DEADLINE_S

    def build(self) -> EpisodeReader:
        """A reader for this process."""
        return EpisodeReader(self)


_Window = tuple[PacketTable, IntArray, IntArray]
"""A window in video: the table of its file, and its frames in the episode and in the file, int64 (T,) each."""


@dataclass(frozen=True)
class _Place:
    """A frame that a row stands for: frame ``frame`` of the ``at``-th episode of the metadata's tables."""

    row: int
    at: int
    frame: int


class EpisodeReader:
    """Reads frames of episodes by their row in the index. See :class:`rfstream.stream.source.BatchReader`."""

    def __init__(self, spec: EpisodeReaderSpec) -> None:
        self._spec = spec
        self._rows: dict[int, EpisodeRows] = {}  # in the order of their last use
        files = _POOLS * spec.pool_size  # each episode may lie in its own
        videos, tables = (lru_cache(max(_FILES, kept)) for kept in (files * len(self._video_cameras), files))
        self._packets = videos(lambda url: read_packets(url, spec.layout.fps, spec.deadline_s))
        self._footers = tables(lambda url: read_footer(url, spec.deadline_s))

    @cached_property
    def index(self) -> EpisodeIndex:
        """The index that the rows were planned on.

        Raises:
            DatasetError: if the dataset has changed since.
        """
        spec = self._spec
        dataset = read_dataset(spec.root, spec.deadline_s)
        if dataset.digest != spec.digest:
            raise DatasetError(f"{spec.root}: the dataset was written again since this run began; start the run again")
        return index_of(dataset, spec.split, spec.select, spec.layout, spec.pool_size, spec.deadline_s)

    def read(self, rows: IntArray) -> list[EncodedStep]:
        """The samples at ``rows``, int64 (n,), in that order.

        Raises:
            DatasetError: if a file is absent, unreadable or not what the metadata says.
        """
        return next(self.parts(rows, len(rows)))

    def parts(self, rows: IntArray, size: int) -> Iterator[list[EncodedStep]]:
        """The same in parts of ``size``; all bytes are fetched first."""
        places = self._places(rows)
        episodes = self._episodes({place.at for place in places})
        windows = {camera.name: [self._window(camera, place) for place in places] for camera in self._video_cameras}
        videos = {name: self._fetched(of_camera) for name, of_camera in windows.items()}
        for first in range(0, len(places), size):
            part = slice(first, first + size)
            shots = {name: self._shots(of_camera[part], videos[name]) for name, of_camera in windows.items()}
            yield self._steps(places[part], episodes, shots)

    @staticmethod
    def to_columns(samples: Sequence[EncodedStep]) -> dict[str, pa.Array]:
        """Samples as the columns of one row: pickled together, so that what they share crosses once."""
        return {"steps": pa.array([pickle.dumps(list(samples), protocol=5)], pa.large_binary())}

    @staticmethod
    def of_columns(columns: Mapping[str, pa.Array]) -> list[EncodedStep]:
        """The samples that :meth:`to_columns` put into a row."""
        steps: list[EncodedStep] = pickle.loads(first_value(columns["steps"]))
        return steps

    @cached_property
    def _video_cameras(self) -> list[Field]:
        return [camera for camera in self._spec.layout.cameras if camera.dtype == "video"]

    def _places(self, rows: IntArray) -> list[_Place]:
        index = self.index
        if len(rows) and (rows.min() < 0 or rows.max() >= index.num_samples):
            raise DatasetError(f"{self._spec.root}: the chosen episodes have rows 0 to {index.num_samples - 1}")
        which = np.searchsorted(index.starts, rows, side="right") - 1
        parts = (rows, index.chosen[which], rows - index.starts[which])
        return [_Place(*place) for place in zip(*(part.tolist() for part in parts), strict=True)]

    def _episodes(self, wanted: set[int]) -> dict[int, EpisodeRows]:
        """Rows of episodes by their place in the metadata's tables."""
        dataset, spec = self.index.dataset, self._spec
        found = {at: self._rows.pop(at) for at in sorted(wanted) if at in self._rows}
        # What is kept of the last read makes room for this one before it begins.
        room = max(self._kept - len(wanted), 0)
        for at in list(self._rows)[: max(len(self._rows) - room, 0)]:
            del self._rows[at]
        of_file: dict[str, list[int]] = defaultdict(list)
        for at in sorted(wanted - found.keys()):
            of_file[dataset.data_url(at)].append(at)
        for url, members in of_file.items():
            columns = [column[members].tolist() for column in (dataset.number, dataset.length, dataset.start)]
            asked = [Wanted(*values) for values in zip(*columns, strict=True)]
            read = read_episodes(url, self._footers(url), asked, spec.layout, len(dataset.tasks), spec.deadline_s)
            found |= {at: read[episode.number] for at, episode in zip(members, asked, strict=True)}
        self._rows |= found
        return found

    @cached_property
    def _kept(self) -> int:
        """Episodes whose rows are kept for the next read; none where these hold images, which are large."""
        pictured = any(camera.dtype == "image" for camera in self._spec.layout.cameras)
        return 1 if pictured else _POOLS * self._spec.pool_size

    def _window(self, camera: Field, place: _Place) -> _Window:
        dataset = self.index.dataset
        table = self._packets(dataset.video_url(camera.name, place.at))
        first, length = (int(column[place.at]) for column in (dataset.videos[camera.name].first, dataset.length))
        if first < 0 or first + length > len(table):
            raise DatasetError(
                f"{table.url}: has {len(table)} frames, and episode {dataset.number[place.at]} has frames {first} to "
                f"{first + length - 1} of it; copy the file again"
            )
        inside, _ = camera.clamped(place.frame, length)
        return table, inside, first + inside

    def _fetched(self, windows: Sequence[_Window]) -> _Bytes:
        """What the frames of a camera's windows need of its files, near ranges in one."""
        spans: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for table, _, frames in windows:
            for packet, key in {(int(table.packet[f]), int(table.key[f])) for f in frames}:
                spans[table.url].add((int(table.offset[key]), int(table.offset[packet] + table.size[packet])))
        near = [(url, span) for url in sorted(spans) for span in storage.merged(spans[url])]
        data = storage.read_ranges([url for url, _ in near], [span for _, span in near], self._spec.deadline_s)
        return _Bytes([(url, begin, part) for (url, (begin, _)), part in zip(near, data, strict=True)])

    def _steps(
        self,
        places: Sequence[_Place],
        episodes: Mapping[int, EpisodeRows],
        videos: Mapping[str, Sequence[tuple[Shot, ...]]],
    ) -> list[EncodedStep]:
        shots = {
            camera.name: videos[camera.name] if camera.dtype == "video" else self._pictures(camera, places, episodes)
            for camera in self._spec.layout.cameras
        }
        dataset, record = self.index.dataset, np.zeros(1, dtype=self._spec.layout.record_type())
        steps = []
        for i, place in enumerate(places):
            rows, number = episodes[place.at], int(dataset.number[place.at])
            rows.write(self._spec.layout, place.frame, record[0])
            steps.append(
                EncodedStep(
                    key=f"{number:06d}-{place.frame:06d}",
                    row=place.row,
                    dataset=dataset.root,
                    episode=number,
                    timestamp=float(rows.timestamp[place.frame]),
                    record=record.tobytes(),
                    shots=tuple(of_camera[i] for of_camera in shots.values()),
                )
            )
        return steps

    def _shots(self, windows: Sequence[_Window], data: _Bytes) -> list[tuple[Shot, ...]]:
        """The pictures of each window, out of ``data``."""
        wanted: dict[tuple[str, int], set[int]] = defaultdict(set)
        for table, _, frames in windows:
            for frame in frames:
                wanted[table.url, int(table.key[frame])].add(int(frame))
        runs = {(url, key): self._run(self._packets(url), key, frames, data) for (url, key), frames in wanted.items()}
        return [
            tuple(
                Shot(runs[table.url, int(table.key[there])], int(table.pts[table.packet[there]]), int(here))
                for here, there in zip(inside, frames, strict=True)
            )
            for table, inside, frames in windows
        ]

    def _run(self, table: PacketTable, key: int, frames: set[int], data: _Bytes) -> Run:
        packets = table.packet[sorted(frames)]
        last = int(packets.max())
        part = slice(key, last + 1)
        start = int(table.offset[key])
        whole = data.of(table.url, start, int(table.offset[last] + table.size[last]))
        spans = zip((table.offset[part] - start).tolist(), table.size[part].tolist(), strict=True)
        return Run(
            file=table.url,
            offset=start,
            codec=table.codec,
            extradata=table.extradata,
            data=b"".join(whole[at : at + size] for at, size in spans),  # sound may lie between
            size=table.size[part],
            pts=table.pts[part],
            dts=table.dts[part],
            wanted=frozenset(table.pts[packets].tolist()),
        )

    def _pictures(
        self, camera: Field, places: Sequence[_Place], episodes: Mapping[int, EpisodeRows]
    ) -> list[tuple[Shot, ...]]:
        """The window of each place in a camera whose images lie in Parquet."""
        shared: dict[tuple[int, int], Picture] = {}
        windows = []
        for place in places:
            rows = episodes[place.at]
            frames = camera.clamped(place.frame, len(rows.task))[0].tolist()
            for frame in frames:
                if (place.at, frame) not in shared:
                    data = rows.pictures[camera.name][frame].as_py()
                    shared[place.at, frame] = Picture(self.index.dataset.data_url(place.at), data)
            windows.append(tuple(Shot(shared[place.at, frame], 0, frame) for frame in frames))
        return windows


class _Bytes:
    """Pieces of files, each with its URL and the byte where it begins, in that order."""

    def __init__(self, pieces: Sequence[tuple[str, int, bytes]]) -> None:
        self._starts = [(url, start) for url, start, _ in pieces]
        self._data = [memoryview(data) for _, _, data in pieces]

    def of(self, url: str, start: int, end: int) -> memoryview:
        """Bytes ``start <= b < end`` of the file at ``url``.

        Raises:
            DatasetError: if the file has become shorter.
        """
        at = bisect_right(self._starts, (url, start)) - 1
        first = self._starts[at][1]
        found = self._data[at][start - first : end - first]
        if len(found) < end - start:
            raise DatasetError(f"{url}: ends before byte {end}, and did not when its header was read; copy it again")
        return found

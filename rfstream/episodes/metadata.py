"""What a LeRobot v3 dataset says of itself: ``meta/info.json``, the tasks and the episodes.

The format is that of LeRobot 0.4 to 0.6 (``codebase_version`` "v3.0"). Data and the videos of each camera are trees of
files that roll over independently: an episode names its place in each.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError

from rfstream.dataset import storage
from rfstream.dataset.index import check_inside
from rfstream.dataset.retry import DEADLINE_S
from rfstream.errors import DatasetError
from rfstream.plan.keys import IntArray

INFO = "meta/info.json"
_TASKS = "meta/tasks.parquet"
_EPISODES = "meta/episodes/chunk-{chunk:03d}"
_UNNAMED = {"task": "__index_level_0__"}
"""Columns that pandas may have as an index without a name, and how it writes one: LeRobot's converter to v3 does so."""
_VERSION = "v3."


class Feature(BaseModel):
    """A feature of ``info.json``: ``dtype`` is a NumPy name, "string", "video" or "image"."""

    dtype: str
    shape: tuple[Annotated[int, Field(ge=1)], ...]
    names: Any = None

    @property
    def is_camera(self) -> bool:
        """Whether it is pictures."""
        return self.dtype in ("video", "image")

    @property
    def picture(self) -> tuple[int, ...]:
        """Height, width and channels of a camera's pictures: the shape is that unless ``names`` says otherwise. Not
        three numbers where it has not three axes."""
        names = [str(name) for name in self.names] if isinstance(self.names, list) else []
        axes = [names.index(axis) if axis in names else at for at, axis in enumerate(("height", "width"))]
        others = [at for at in range(len(self.shape)) if at not in axes]
        return tuple(self.shape[at] for at in (*axes, *others) if at < len(self.shape))


class Info(BaseModel):
    """``meta/info.json``, as far as it is read; unknown keys are left alone."""

    codebase_version: str
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    features: dict[str, Feature]
    total_episodes: int
    data_path: str
    video_path: str | None = None
    splits: dict[str, str] = {}

    def data_file(self, chunk: int, file: int) -> str:
        """Path of a data file inside the dataset."""
        return _filled("data_path", self.data_path, chunk_index=chunk, file_index=file)

    def video_file(self, camera: str, chunk: int, file: int) -> str:
        """Path of a camera's video file inside the dataset."""
        if self.video_path is None:
            raise DatasetError(f"{INFO}: {camera} is a video and video_path says nothing; correct it")
        return _filled("video_path", self.video_path, video_key=camera, chunk_index=chunk, file_index=file)


@dataclass(frozen=True, eq=False)
class FilePlaces:
    """Where each episode lies in one tree of files: ``chunk`` and ``file`` int64 (E,), and in a video ``first``, int64
    (E,): the number of its first frame in the file."""

    chunk: IntArray
    file: IntArray
    first: IntArray


@dataclass(frozen=True, eq=False)
class EpisodeDataset:
    """A dataset's metadata.

    Attributes:
        root: folder or fsspec URL.
        info: ``meta/info.json``.
        tasks: text of each task; a frame's ``task_index`` is the position in it.
        number: ``episode_index`` of each episode, int64 (E,), ascending.
        length: frames of each episode, int64 (E,).
        start: ``index`` of its first frame, int64 (E,).
        data: where its rows are.
        videos: camera -> where its video is.
        digest: first 16 hex digits of a SHA-256 over all of these.
    """

    root: str
    info: Info
    tasks: tuple[str, ...]
    number: IntArray
    length: IntArray
    start: IntArray
    data: FilePlaces
    videos: Mapping[str, FilePlaces]
    digest: str

    def data_url(self, at: int) -> str:
        """Path or URL of the data file of the ``at``-th episode."""
        return storage.join(self.root, self.info.data_file(int(self.data.chunk[at]), int(self.data.file[at])))

    def video_url(self, camera: str, at: int) -> str:
        """Path or URL of a camera's video file of the ``at``-th episode."""
        places = self.videos[camera]
        return storage.join(self.root, self.info.video_file(camera, int(places.chunk[at]), int(places.file[at])))


def read_dataset(root: str, deadline_s: float = DEADLINE_S) -> EpisodeDataset:
    """Read the metadata at ``root``, a folder or an fsspec URL.

    ``deadline_s`` is how long one file may take, seconds.

    Raises:
        DatasetError: if it is no LeRobot v3 dataset, or a file is absent, unreadable or contradicts another.
    """
    info, raw = _read_info(root, deadline_s)
    cameras = [name for name, feature in info.features.items() if feature.dtype == "video"]
    tasks = tuple(_read_table(storage.join(root, _TASKS), {"task": pa.string()}, deadline_s)["task"].to_pylist())
    columns = _episode_columns(root, info, cameras, deadline_s)
    digest = hashlib.sha256(raw + "\0".join(tasks).encode())
    for name in sorted(columns):
        digest.update(columns[name].tobytes())
    number, length = columns["episode_index"], columns["length"]
    _check_episodes(root, info, columns, cameras)
    none = np.zeros(len(number), dtype=np.int64)
    videos = {
        camera: FilePlaces(
            columns[f"videos/{camera}/chunk_index"],
            columns[f"videos/{camera}/file_index"],
            np.rint(columns[f"videos/{camera}/from_timestamp"] * info.fps).astype(np.int64),
        )
        for camera in cameras
    }
    data = FilePlaces(columns["data/chunk_index"], columns["data/file_index"], none)
    start = columns["dataset_from_index"]
    return EpisodeDataset(root, info, tasks, number, length, start, data, videos, digest.hexdigest()[:16])


def _read_info(root: str, deadline_s: float) -> tuple[Info, bytes]:
    url = storage.join(root, INFO)
    raw = storage.find_bytes(url, deadline_s)
    if raw is None:
        raise DatasetError(f"{url} does not exist: {root} is no LeRobot dataset; name its folder in data.path")
    try:
        info = Info.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the document"
        raise DatasetError(f"{url}: {field}: {first['msg']}; correct it") from None
    if not info.codebase_version.startswith(_VERSION):
        raise DatasetError(
            f"{url}: the dataset has codebase_version {info.codebase_version!r} and {_VERSION}0 is read: convert it "
            "with LeRobot's own script"
        )
    return info, raw


def _episode_columns(
    root: str, info: Info, cameras: list[str], deadline_s: float
) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """The columns of the episodes' tables that say where things are, by ascending episode."""
    names = ["episode_index", "length", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"]
    for camera in cameras:
        fields = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
        names += [f"videos/{camera}/{field}" for field in fields]
    kinds = {name: pa.float64() if name.endswith("timestamp") else pa.int64() for name in names}
    tables = [_read_table(url, kinds, deadline_s) for url in _episode_files(root, deadline_s)]
    if not tables:
        raise DatasetError(f"{storage.join(root, _EPISODES.format(chunk=0))}: there are no episodes; copy it again")
    table = pa.concat_tables(tables).sort_by("episode_index")
    return {name: table[name].to_numpy() for name in names}


def _episode_files(root: str, deadline_s: float) -> Iterator[str]:
    for chunk in itertools.count():
        folder = storage.join(root, _EPISODES.format(chunk=chunk))
        if not storage.exists(folder, deadline_s):
            return
        names = sorted(name for name in storage.sizes_in(folder) if name.endswith(".parquet"))
        yield from (storage.join(folder, name) for name in names)


@contextmanager
def readable(url: str) -> Iterator[None]:
    """Raise what PyArrow says of a Parquet file that it can't read as a DatasetError."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{url}: not a readable Parquet file ({storage.describe(error)}); copy it again") from None


def _read_table(url: str, kinds: Mapping[str, pa.DataType], deadline_s: float) -> pa.Table:
    """The columns of a Parquet file that ``kinds`` names, as these types."""
    with readable(url), storage.open_binary(url, deadline_s) as opened:
        file = pq.ParquetFile(opened)
        there = file.schema_arrow.names
        stored = [name if name in there else _UNNAMED.get(name, name) for name in kinds]
        absent = [name for name, column in zip(kinds, stored, strict=True) if column not in there]
        if absent:
            raise DatasetError(f"{url}: has no column {absent[0]!r}; write it again with LeRobot")
        table = file.read(columns=stored).select(stored).rename_columns(list(kinds))
    return pa.table({name: _as_type(url, table, name, kind) for name, kind in kinds.items()})


def _as_type(url: str, table: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    """A column of metadata as ``kind``, text or numbers."""
    column = table[name]
    if column.null_count:
        raise DatasetError(f"{url}: column {name!r} has rows without a value; write it again with LeRobot")
    try:
        if _is_text(column.type) == _is_text(kind):
            return column.cast(kind)
        reason = "text and numbers are not taken for each other"
    except pa.ArrowException as error:
        reason = storage.describe(error)
    raise DatasetError(f"{url}: column {name!r} is {column.type}, not {kind} ({reason}); write it again with LeRobot")


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _check_episodes(root: str, info: Info, columns: Mapping[str, Any], cameras: list[str]) -> None:
    """Raise DatasetError where what the metadata says of an episode contradicts itself."""
    number, length = columns["episode_index"], columns["length"]
    where = storage.join(root, "meta/episodes")
    if len(number) != info.total_episodes or len(np.unique(number)) != len(number):
        raise DatasetError(
            f"{where}: {len(np.unique(number))} episodes in {len(number)} rows, and {INFO} says total_episodes="
            f"{info.total_episodes}; copy the dataset again"
        )
    spans = {"rows in data": columns["dataset_to_index"] - columns["dataset_from_index"]}
    for camera in cameras:
        seconds = columns[f"videos/{camera}/to_timestamp"] - columns[f"videos/{camera}/from_timestamp"]
        spans[f"frames at fps={info.fps:g} in the video of {camera}"] = np.rint(seconds * info.fps)
    for what, span in spans.items():
        wrong = np.flatnonzero((span != length) | (length < 1))
        if len(wrong):
            at = wrong[0]
            raise DatasetError(
                f"{where}: episode {number[at]} has length {length[at]} and {span[at]:g} {what}: correct fps, or "
                "write the episode again"
            )


def _filled(key: str, template: str, **values: Any) -> str:
    try:
        name = template.format(**values)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise DatasetError(f"{INFO}: {key} {template!r} is no template for {', '.join(values)} ({error})") from None
    return check_inside(name, f"{INFO}: {key}")

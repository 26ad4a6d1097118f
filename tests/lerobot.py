"""What the tests of episodes share: configurations, a reader that knows nothing of ours, and datasets made odd."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rfstream.config import Config
from rfstream.episodes.batch import EpisodeBatch
from rfstream.loader import maker_of
from rfstream.stream.decode import BatchDecoder
from rfstream.stream.pipeline import Pipeline, build_pipeline
from rfstream.stream.source import reader_of

FRAMES = 736
LENGTHS = [64, 40, 90, 53, 71, 47, 85, 6, 66, 58, 77, 79]
FRONT, WRIST = "observation.images.front", "observation.images.wrist"
FIRST_VIDEO = f"videos/{FRONT}/chunk-000/file-000.mp4"  # episodes 0, 1 and 2 of ds_video
FIRST_DATA = "data/chunk-000/file-000.parquet"  # the same


def config(root: Path | str, *, actors: int = 1, stream: dict[str, Any] | None = None, **episodes: Any) -> Config:
    return Config(
        data={"path": str(root), "format": "lerobot"},
        stream={"batch_size": 8, "timeout_s": 300, **(stream or {})},
        decode={"actors": (actors, actors)},
        episodes=episodes,
    )


def training(cfg: Config, world_size: int = 1) -> Pipeline:
    return build_pipeline(cfg, "train", world_size, training=True)


def decode(pipeline: Pipeline, rows: Any, *, policy: bool = False) -> EpisodeBatch:
    """The samples at ``rows`` as one batch, read and decoded in this process; bad ones replaced under ``policy``."""
    encoded = reader_of(pipeline.reader).read(np.asarray(rows, dtype=np.int64))
    wire = BatchDecoder.of(pipeline.decode, pipeline.substitutes if policy else None).batch(encoded, 0, 0, 0)
    batch: EpisodeBatch = maker_of(pipeline)(wire, step=0, window_end=True)
    return batch


@cache
def video_frames(path: Path) -> npt.NDArray[np.uint8]:
    """All frames of a video in the order they are shown in, uint8 (F, 3, H, W), as PyAV plays the file."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames).transpose(0, 3, 1, 2)


def copied(source: Path, target: Path) -> Path:
    """A copy of a dataset that may be changed."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def edit_rows(path: Path, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    pq.write_table(change(pq.read_table(path)), path, **options)


def edit_info(root: Path, **changes: Any) -> None:
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_value(table: pa.Table, column: str, row: int, value: Any) -> pa.Table:
    values = table[column].to_pylist()
    values[row] = value
    return set_column(table, column, pa.array(values, table[column].type))


def set_column(table: pa.Table, column: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(column), column, values)


def encode(
    path: Path,
    frames: npt.NDArray[np.uint8],
    codec: str,
    fps: int = 30,
    format: str = "mp4",
    flags: str = "",
    **options: str,
) -> None:
    """Write frames uint8 (F, 3, H, W) as a video file; ``flags`` are FFmpeg's ``movflags``."""
    with av.open(str(path), "w", format=format, options={"movflags": flags} if flags else {}) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt, stream.options = *frames.shape[2:], "yuv420p", options
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame.transpose(1, 2, 0)), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())

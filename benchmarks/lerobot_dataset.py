"""A LeRobot v3 dataset of any size, generated: drifting textures for video, sine waves for joints.

    python benchmarks/lerobot_dataset.py OUT --episodes 200 --codec av1 --gop 2
    python benchmarks/lerobot_dataset.py OUT --episodes 200 --codec h264 --gop 250 --b-frames 3 --lengths 250 300

Encoding is what costs, so each camera has a few clips of different lengths, encoded once. An episode is one of them,
and those of a file are joined by stream copy, as LeRobot joins them. So an episode begins with a key frame, and a group
of pictures is never longer than its episode.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import av
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from PIL import Image

Codec = Literal["h264", "av1"]
Column = npt.NDArray[Any]
os.environ.setdefault("SVT_LOG", "1")  # errors alone
TASKS = ("stack the cups", "open the drawer")
JOINTS = 6
_CLIPS = 5
_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


@dataclass(frozen=True)
class Recipe:
    """What to generate. ``lengths``: frames of the shortest and the longest episode; ``gop``: frames from one key frame
    to the next; ``b_frames``: how many in a row H.264 may predict from both sides (AV1 decides for itself)."""

    episodes: int = 200
    cameras: int = 3
    height: int = 480
    width: int = 640
    fps: int = 10
    lengths: tuple[int, int] = (60, 100)
    codec: Codec = "av1"
    gop: int = 2
    b_frames: int = 0
    per_file: int = 50
    seed: int = 0

    def names(self) -> list[str]:
        return [f"observation.images.camera_{camera}" for camera in range(self.cameras)]

    def clip_lengths(self) -> list[int]:
        return [int(length) for length in np.linspace(*self.lengths, _CLIPS).round()]

    def options(self) -> dict[str, str]:
        """Of the encoder."""
        if self.codec == "av1":
            return {"g": str(self.gop), "crf": "30", "preset": "9"}
        frames = {"g": str(self.gop), "keyint_min": str(self.gop), "sc_threshold": "0", "bf": str(self.b_frames)}
        return frames | {"crf": "23", "preset": "veryfast"}


def make_dataset(root: Path, recipe: Recipe) -> Path:
    """Write the dataset into ``root``, a folder that is not there yet."""
    rng = np.random.default_rng(recipe.seed)
    root.mkdir(parents=True)
    lengths = recipe.clip_lengths()
    for name in recipe.names():
        clips = []
        for clip, length in enumerate(lengths):
            clips.append(root / f"clip-{clip}.mp4")
            encode(clips[-1], drifting(rng, length, recipe.height, recipe.width), recipe)
        for file, first in enumerate(range(0, recipe.episodes, recipe.per_file)):
            chosen = range(first, min(first + recipe.per_file, recipe.episodes))
            join(
                [clips[episode % _CLIPS] for episode in chosen], [lengths[e % _CLIPS] for e in chosen], root, name, file
            )
        for clip in clips:
            clip.unlink()
    write_tables(root, recipe, np.resize(lengths, recipe.episodes))
    return root


def drifting(rng: np.random.Generator, count: int, height: int, width: int) -> Iterator[npt.NDArray[np.uint8]]:
    """``count`` frames uint8 (H, W, 3): a window that circles over a coarse and a fine texture, with noise."""
    tall, wide = height + height // 4, width + width // 4
    texture = np.zeros((tall, wide, 3), dtype=np.float32)
    for cells, share in ((8, 0.7), (64, 0.3)):
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        texture += share * np.asarray(coarse.resize((wide, tall), Image.Resampling.BICUBIC))
    for frame in range(count):
        turn = 2 * np.pi * frame / max(count, 60)
        top, left = (int((1 + f(turn)) / 2 * edge) for f, edge in ((np.sin, height // 4), (np.cos, width // 4)))
        noise = rng.normal(0, 2, (height, width, 1)).astype(np.float32)
        yield (texture[top : top + height, left : left + width] + noise).clip(0, 255).astype(np.uint8)


def encode(path: Path, frames: Iterator[npt.NDArray[np.uint8]], recipe: Recipe) -> None:
    """Write ``frames`` as a video."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream({"h264": "libx264", "av1": "libsvtav1"}[recipe.codec], rate=recipe.fps)
        stream.height, stream.width, stream.pix_fmt = recipe.height, recipe.width, "yuv420p"
        stream.options = recipe.options()
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def join(clips: list[Path], lengths: list[int], root: Path, camera: str, file: int) -> None:
    """Lay ``clips`` end to end in a camera's ``file``, without decoding them."""
    path = root / _VIDEO.format(video_key=camera, chunk_index=0, file_index=file)
    path.parent.mkdir(parents=True, exist_ok=True)
    first = 0
    with av.open(str(path), "w") as joined:
        out = None
        for clip, length in zip(clips, lengths, strict=True):
            with av.open(str(clip)) as container:
                stream = container.streams.video[0]
                out = out or joined.add_stream_from_template(stream, opaque=True)  # no encoder is needed
                per_frame = 1 / stream.average_rate / stream.time_base
                for packet in container.demux(stream):
                    if packet.size:
                        packet.pts, packet.dts = (int(at + first * per_frame) for at in (packet.pts, packet.dts))
                        packet.stream = out
                        joined.mux(packet)
            first += length


def write_tables(root: Path, recipe: Recipe, lengths: Column) -> None:
    """Write rows and metadata: a data file for each file of video, and a row group an episode."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for file, first in enumerate(range(0, recipe.episodes, recipe.per_file)):
        path = root / _DATA.format(chunk_index=0, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = [
            rows_of(recipe, e, int(lengths[e]), int(starts[e]))
            for e in range(first, min(first + recipe.per_file, recipe.episodes))
        ]
        with pq.ParquetWriter(path, parts[0].schema) as writer:
            for part in parts:
                writer.write_table(part)
    episodes = root / "meta/episodes/chunk-000/file-000.parquet"
    episodes.parent.mkdir(parents=True)
    pq.write_table(pa.table(episode_columns(recipe, lengths, starts)), episodes)
    tasks = pd.DataFrame({"task_index": range(len(TASKS))}, index=pd.Index(TASKS, name="task"))
    tasks.to_parquet(root / "meta/tasks.parquet")
    (root / "meta/info.json").write_text(json.dumps(info_of(recipe, int(starts[-1])), indent=1))


def rows_of(recipe: Recipe, episode: int, length: int, start: int) -> pa.Table:
    frame = np.arange(length)
    phase = frame[:, None] / recipe.fps + np.arange(JOINTS) + episode
    vectors = {"observation.state": np.sin(phase), "action": np.sin(phase + 1 / recipe.fps)}
    columns: dict[str, Any] = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(values.astype(np.float32).ravel()), JOINTS)
        for name, values in vectors.items()
    }
    columns |= {
        "timestamp": (frame / recipe.fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": np.full(length, episode),
        "index": start + frame,
        "task_index": np.full(length, episode % len(TASKS)),
    }
    return pa.table(columns)


def episode_columns(recipe: Recipe, lengths: Column, starts: Column) -> dict[str, Any]:
    number = np.arange(recipe.episodes)
    file = number // recipe.per_file
    first = starts[:-1] - starts[file * recipe.per_file]
    nowhere = np.zeros(recipe.episodes, dtype=np.int64)
    columns = {
        "episode_index": number,
        "tasks": [[TASKS[episode % len(TASKS)]] for episode in number],
        "length": lengths,
        "dataset_from_index": starts[:-1],
        "dataset_to_index": starts[1:],
        "data/chunk_index": nowhere,
        "data/file_index": file,
        "meta/episodes/chunk_index": nowhere,
        "meta/episodes/file_index": nowhere,
    }
    for name in recipe.names():
        columns |= {
            f"videos/{name}/chunk_index": nowhere,
            f"videos/{name}/file_index": file,
            f"videos/{name}/from_timestamp": first / recipe.fps,
            f"videos/{name}/to_timestamp": (first + lengths) / recipe.fps,
        }
    return columns


def info_of(recipe: Recipe, frames: int) -> dict[str, Any]:
    """``meta/info.json``."""
    camera = {
        "dtype": "video",
        "shape": [recipe.height, recipe.width, 3],
        "names": ["height", "width", "channels"],
        "info": {
            "video.height": recipe.height,
            "video.width": recipe.width,
            "video.codec": recipe.codec,
            "video.pix_fmt": "yuv420p",
            "video.fps": recipe.fps,
            "video.channels": 3,
            "video.is_depth_map": False,
            "has_audio": False,
        },
    }
    vector = {"dtype": "float32", "shape": [JOINTS], "names": [f"joint_{joint}" for joint in range(JOINTS)]}
    counts = dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
    return {
        "codebase_version": "v3.0",
        "robot_type": "none",
        "total_episodes": recipe.episodes,
        "total_frames": frames,
        "total_tasks": len(TASKS),
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": recipe.fps,
        "splits": {"train": f"0:{recipe.episodes}"},
        "data_path": _DATA,
        "video_path": _VIDEO,
        "features": {
            "observation.state": vector,
            "action": vector,
            **dict.fromkeys(recipe.names(), camera),
            **{
                name: {"dtype": dtype, "shape": [1], "names": None}
                for name, dtype in ({"timestamp": "float32"} | counts).items()
            },
        },
    }


def main(
    out: Path,
    episodes: int = 200,
    cameras: int = 3,
    size: Annotated[tuple[int, int], typer.Option(help="height and width")] = (480, 640),
    fps: int = 10,
    lengths: Annotated[tuple[int, int], typer.Option(help="frames of the shortest and longest episode")] = (
        60,
        100,
    ),
    codec: Codec = "av1",
    gop: int = 2,
    b_frames: int = 0,
    per_file: Annotated[int, typer.Option(help="episodes of a file")] = 50,
    seed: int = 0,
) -> None:
    """Write a dataset into OUT, which must not be there yet."""
    recipe = Recipe(episodes, cameras, *size, fps, lengths, codec, gop, b_frames, per_file, seed)
    make_dataset(out, recipe)
    nbytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(f"{out}: {nbytes / 1e6:.0f} MB of {asdict(recipe)}")


if __name__ == "__main__":
    typer.run(main)

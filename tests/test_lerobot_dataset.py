"""Datasets that ``benchmarks/lerobot_dataset.py`` generates: in the format, and streamed frame for frame."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lerobot import config, video_frames

import rfstream
from benchmarks.lerobot_dataset import TASKS, Recipe, make_dataset
from rfstream.episodes.container import read_packets
from rfstream.loader import RankLoader

SMALL = {"episodes": 7, "cameras": 2, "height": 64, "width": 96, "lengths": (6, 14), "per_file": 3}
RECIPES = {
    "av1": Recipe(codec="av1", gop=2, **SMALL),  # type: ignore[arg-type]
    "h264": Recipe(codec="h264", gop=250, b_frames=3, **SMALL),  # type: ignore[arg-type]
}
LENGTHS = [6, 8, 10, 12, 14, 6, 8]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    for name, recipe in RECIPES.items():
        make_dataset(folder / name, recipe)
    return folder


def videos(root: Path, camera: str) -> list[Path]:
    return sorted((root / "videos" / camera).rglob("*.mp4"))


@pytest.mark.parametrize("name", RECIPES)
def test_key_frames_and_b_frames_are_those_of_the_recipe(made: Path, name: str) -> None:
    files = videos(made / name, RECIPES[name].names()[0])
    assert len(files) == 3
    starts = {0, 6, 14}  # of the first file's episodes
    packets = read_packets(str(files[0]), RECIPES[name].fps, 10)
    keys = {int(key) for key in packets.key}
    reordered = bool((packets.pts != packets.dts).any())
    assert (keys, reordered) == ({*range(0, 24, 2)}, False) if name == "av1" else (starts, True)


@pytest.mark.parametrize("name", RECIPES)
def test_it_streams_what_its_files_play(made: Path, ray_session: None, name: str) -> None:
    cameras = RECIPES[name].names()
    played = {c: np.concatenate([video_frames(path) for path in videos(made / name, c)]) for c in cameras}
    assert {len(frames) for frames in played.values()} == {sum(LENGTHS)}
    seen: list[int] = []
    cfg = config(made / name, pool_size=2, stream={"tail": "drop", "batch_size": 8}, delta_timestamps={"action": [0.1]})
    loader = rfstream.ray_loader(cfg)
    assert isinstance(loader, RankLoader)
    with loader:
        for batch in loader:
            index = batch["index"].numpy()
            for camera in cameras:
                assert np.array_equal(batch[camera][:, 0].numpy(), played[camera][index])
            assert batch.task == [TASKS[episode % len(TASKS)] for episode in batch["episode_index"].tolist()]
            seen += index.tolist()
    assert len(set(seen)) == len(seen) == sum(LENGTHS) == 64

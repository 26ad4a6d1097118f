"""A policy trained on real episodes under each launcher, and data loaded without one: whole, interrupted, resumed."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import recording
import torch
import yaml
from lerobot import FRAMES, FRONT, copied, decode, edit_info, training
from packing import pack_here
from test_train_launchers import BIN, ROOT, environment, free_port

from rfstream.config import Config
from rfstream.episodes.batch import EpisodeBatch
from rfstream.errors import ConfigError, DatasetError, StreamError
from rfstream.tools.scenes import make_scenes
from rfstream.train import policy
from rfstream.train.run import Metrics, train, without_model

pytestmark = pytest.mark.timeout(900)  # as in test_train_launchers.py

GLOBAL, STEPS, EPOCHS = 32, 23, 2
"""736 frames in windows of 32."""
WINDOWS = {"observation.state": [-0.1, 0.0], "action": [0.0, 0.1, 0.2, 0.3]}
SMALL = {"image_size": 32, "width": 8, "lr": 0.003}
VALIDATED = range(522, FRAMES)
"""Frames of the last three episodes, which are trained on too."""
Notes = list[dict[str, Any]]


class Run(NamedTuple):
    output: Path
    metrics: Metrics


@pytest.fixture(scope="module")
def dataset(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = copied(shared_data / "lerobot/ds_video", tmp_path_factory.mktemp("episodes") / "dataset")
    edit_info(root, splits={"train": "0:12", "val": "9:12"})
    return root


def values(
    dataset: Path, output: Path, *, ranks: int = 1, val: bool = False, fail_at: Any = None, **run: Any
) -> dict[str, Any]:
    noted = {"folder": str(output) + "-notes", "fail_at": fail_at}
    return {
        "data": {
            "path": str(dataset),
            "format": "lerobot",
            "splits": {"train": "train"} | ({"val": "val"} if val else {}),
        },
        "stream": {"batch_size": GLOBAL // ranks, "global_batch": GLOBAL, "seed": 3, "timeout_s": 300},
        "decode": {"actors": [1, 1]},
        "episodes": {"pool_size": 12, "cameras": [FRONT], "delta_timestamps": WINDOWS},
        "train": {
            "model": "tests.cloning:policy",
            "model_args": {**SMALL, **noted},
            "epochs": EPOCHS,
            "output": str(output),
            "accelerator": "cpu",
            **run,
        },
    }


def notes(output: Path) -> Notes:
    """Steps of all ranks in order."""
    return sorted(recording.notes(Path(f"{output}-notes")), key=lambda n: (n["epoch"], n["step"], n["rank"]))


def losses(noted: Notes) -> list[float]:
    """The loss of each optimizer step: the mean over ranks."""
    ranks = 1 + max(n["rank"] for n in noted)
    return np.array([n["loss"] for n in noted]).reshape(-1, ranks).mean(1).tolist()


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    saved: dict[str, torch.Tensor] = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    return saved


def falls(noted: Notes) -> bool:
    first, second = np.array(losses(noted)).reshape(EPOCHS, STEPS).mean(1)
    return bool(second < 0.85 * first)


def command(program: list[str], config: dict[str, Any], folder: Path, *more: str) -> str:
    """What ``pipelines/train_episodes.py`` printed for ``config``."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    script = str(ROOT / "pipelines" / "train_episodes.py")
    done = subprocess.run(
        [*program, script, "--config", str(file), *more],
        env=environment(RAY_ADDRESS="local"),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# The policy


def test_padded_steps_teach_nothing(dataset: Path) -> None:
    pipeline = training(Config(**values(dataset, Path("unused"))))
    torch.manual_seed(0)
    model = policy.build(pipeline.index, **SMALL)
    batch = decode(pipeline, [0, 30, 62, 63])  # of an episode of 64 frames
    pad = batch["action_is_pad"]
    assert pad.sum(1).tolist() == [0, 0, 3, 3]
    assert model(batch).shape == batch["action"].shape == (4, 4, 6)
    loss = model.loss(batch)
    batch["action"][pad] += 100
    assert torch.equal(model.loss(batch), loss)
    batch["action"][~pad] += 100
    assert not torch.equal(model.loss(batch), loss)


def test_a_window_s_gradient_does_not_depend_on_how_ranks_share_it(dataset: Path) -> None:
    pipeline = training(Config(**values(dataset, Path("unused"))))
    model = policy.build(pipeline.index, **SMALL)
    rows = [0, 30, 62, 63]
    whole, first, second = (gradient(model, decode(pipeline, part)) for part in (rows, rows[:2], rows[2:]))
    assert whole.abs().max() > 1e-3
    assert torch.allclose((first + second) / 2, whole, atol=1e-6)


def gradient(model: torch.nn.Module, batch: EpisodeBatch) -> torch.Tensor:
    """Of the batch's loss by all weights, end to end."""
    slopes = torch.autograd.grad(model.loss(batch), list(model.parameters()))
    return torch.cat([slope.flatten() for slope in slopes])


def test_actions_come_in_the_dataset_s_units(dataset: Path) -> None:
    pipeline = training(Config(**values(dataset, Path("unused"))))
    model = policy.build(pipeline.index, **SMALL)
    batch = decode(pipeline, range(64))
    exact = model.action_scale.undo(model.action_scale(batch["action"]))
    assert torch.allclose(exact, batch["action"], atol=1e-5)
    stats = json.loads((dataset / "meta/stats.json").read_text())["action"]
    assert torch.allclose(model.action_scale.undo(torch.zeros(6)), torch.tensor(stats["mean"], dtype=torch.float32))


def test_what_the_policy_can_t_use_is_one_sentence(dataset: Path, tmp_path: Path) -> None:
    def refused(kind: type[Exception], message: str, root: Path = dataset, **changes: Any) -> None:
        config = values(root, tmp_path / "out")
        config["episodes"] |= changes.pop("episodes", {})
        config["train"] |= {"model": "rfstream.train.policy:build", "model_args": changes}
        with pytest.raises(kind, match=message):
            train(Config(**config))

    refused(ConfigError, "model_args.state: no feature 'pose' is streamed .known here: observation.state", state="pose")
    refused(ConfigError, "no window for action, which is the chunk", episodes={"delta_timestamps": {}})
    refused(ConfigError, "can't be built with model_args {'depth': 3}", depth=3)
    bare = copied(dataset, tmp_path / "bare")
    (bare / "meta/stats.json").write_text('{"action": {"mean": [1.0]}}')
    refused(DatasetError, r"bare/meta/stats.json: there are no mean and std of observation.state, of shape \[6\]", bare)
    config = values(dataset, tmp_path / "out", model=None)
    with pytest.raises(ConfigError, match=r"train.model is required.*\(episode_index, \*\*model_args\)"):
        train(Config(**config))
    with pytest.raises(ConfigError, match=r"augment.device has no part in data.format: lerobot"):
        Config(**values(dataset, tmp_path / "out"), augment={"device": {"normalize": "none"}})


# Training


@pytest.fixture(scope="module")
def alone(dataset: Path, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run in one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    return Run(out, train(Config(**values(dataset, out, val=True))))


def test_in_one_process_the_loss_falls(alone: Run) -> None:
    noted = notes(alone.output)
    assert [(n["epoch"], n["step"]) for n in noted] == [(e, s) for e in range(EPOCHS) for s in range(STEPS)]
    assert all(len({key for n in noted if n["epoch"] == e for key in n["keys"]}) == FRAMES for e in range(EPOCHS))
    assert falls(noted)


def test_validation_is_the_mean_over_its_frames(dataset: Path, alone: Run) -> None:
    pipeline = training(Config(**values(dataset, Path("unused"))))
    model = policy.build(pipeline.index, **SMALL)
    model.load_state_dict(weights(alone.output / "checkpoints/last.ckpt"))
    with torch.no_grad():
        loss = model.loss(decode(pipeline, VALIDATED))
    assert alone.metrics["val/loss"] == pytest.approx(float(loss), rel=1e-4)


def test_interrupted_and_resumed_equals_the_whole_run(dataset: Path, alone: Run, tmp_path: Path) -> None:
    """A checkpoint every 5 steps: the run goes on after the 25th, inside the second epoch."""
    out, again = tmp_path / "out", tmp_path / "again"
    with pytest.raises(RuntimeError, match="no luck"):
        train(Config(**values(dataset, out, fail_at=[1, 3], checkpoint_steps=5)))
    saved = out / "checkpoints/last.ckpt"
    done = torch.load(saved, weights_only=True)["global_step"]
    assert done == 25
    train(Config(**values(dataset, again, resume=str(saved))))
    assert notes(again) == notes(alone.output)[done:]
    resumed, whole = (weights(folder / "checkpoints/last.ckpt") for folder in (again, alone.output))
    assert resumed.keys() == whole.keys() and all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_ray_workers_and_torchrun_after_them_learn_what_one_process_learns(
    dataset: Path, alone: Run, tmp_path: Path
) -> None:
    """Two Ray Train workers are interrupted in the second epoch; two of torchrun go on from their 25th step."""
    out, again, done = tmp_path / "out", tmp_path / "again", 25
    run: dict[str, Any] = {"launcher": "ray", "workers": 2, "checkpoint_steps": 5}
    with pytest.raises(StreamError, match=r"training on 2 Ray workers failed: .*no luck"):
        train(Config(**values(dataset, out, ranks=2, val=True, fail_at=[1, 3], **run)))
    torchrun = [str(BIN / "torchrun"), "--master-port", str(free_port()), "--nproc-per-node", "2"]
    resume = {"launcher": "torchrun", "resume": str(out / "checkpoints/last.ckpt")}
    printed = command(torchrun, values(dataset, again, ranks=2, val=True, **resume), tmp_path)
    before, noted, expected = notes(out), notes(again), notes(alone.output)
    repeated = before[2 * done :]
    assert repeated and noted[: len(repeated)] == repeated, "what was trained after the checkpoint is not repeated"
    noted = before[: 2 * done] + noted
    assert len(noted) == 2 * EPOCHS * STEPS and falls(noted)
    for at, whole in enumerate(expected):
        assert noted[2 * at]["keys"] + noted[2 * at + 1]["keys"] == whole["keys"]
    assert losses(noted) == pytest.approx(losses(expected), rel=1e-2)
    (validated,) = re.findall(r"val/loss=([0-9.e+-]+)", printed)
    assert float(validated) == pytest.approx(alone.metrics["val/loss"], rel=1e-2)


# Loading alone


def test_a_dummy_run_goes_on_where_one_was_interrupted(dataset: Path, ray_session: None, tmp_path: Path) -> None:
    interrupted = values(dataset, tmp_path / "first", fail_at=[0, 13], checkpoint_steps=5, model="tests.cloning:dummy")
    interrupted["train"]["model_args"] = {k: v for k, v in interrupted["train"]["model_args"].items() if k not in SMALL}
    with pytest.raises(RuntimeError, match="no luck"):
        train(Config(**interrupted))
    saved = str(tmp_path / "first/checkpoints/last.ckpt")
    printed = command([sys.executable], values(dataset, tmp_path / "out", resume=saved), tmp_path, "--dummy")
    assert f"time/images={EPOCHS * FRAMES - 10 * GLOBAL}  " in printed
    assert (tmp_path / "out/dummy/checkpoints/last.ckpt").exists()
    with (tmp_path / "out/dummy/metrics.csv").open() as file:
        rates = [float(row["dummy/samples_per_s"]) for row in csv.DictReader(file) if row["dummy/samples_per_s"]]
    assert len(rates) > 1 and min(rates) > 0


def test_images_can_be_loaded_without_a_model_too(ray_session: None, tmp_path: Path) -> None:
    make_scenes(tmp_path / "scenes", train=12, val=1, seed=2)
    pack_here(tmp_path / "scenes", tmp_path / "pack", per_shard=10, split="train")
    run = {"model": "nowhere:none", "model_args": {"lr": 1}, "output": str(tmp_path / "out"), "accelerator": "cpu"}
    config = Config(
        data={"path": str(tmp_path / "pack"), "splits": {"train": "train"}},
        stream={"batch_size": 4, "timeout_s": 300},
        decode={"actors": [1, 1]},
        train=run,
    )
    assert train(without_model(config))["time/images"] == 12

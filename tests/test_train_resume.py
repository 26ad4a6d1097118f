"""Resuming again and again, and on other ranks: a real trainer and a real plan, with places in batches' stead."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from packing import pack_here

from rfstream.config import Config
from rfstream.errors import ConfigError, StateError
from rfstream.loader import RankLoader
from rfstream.plan.position import Position
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.ranks import alone
from rfstream.stream.split import HandOver
from rfstream.tools.scenes import make_scenes
from rfstream.train.data import TrainerBatches, TrainingStream
from rfstream.train.fit import newest_checkpoint
from rfstream.train.lightning import pl
from rfstream.train.run import _refuse_too_few_cpus, _refuse_too_few_gpus

SAMPLES = 16
Place = tuple[int, int]


class Places(RankLoader[torch.Tensor]):
    """A rank's loader that yields (epoch, step) where another would decode."""

    def _next(self, at: Position) -> torch.Tensor:
        return torch.tensor([at.epoch, at.batch])


class Streamed(pl.LightningDataModule):
    """Rank 0 of ``ranks``."""

    def __init__(self, pack: Path, ranks: int, accumulate: int, batch_size: int) -> None:
        super().__init__()
        stream = {"batch_size": batch_size, "grad_accum": accumulate}
        config = Config(data={"path": str(pack)}, stream=stream)
        self.pipeline = build_pipeline(config, "train", ranks, training=True)
        self.stream: TrainingStream[torch.Tensor] = TrainingStream(self)

    def train_dataloader(self) -> TrainerBatches[torch.Tensor]:
        return self.stream.open(Places(self.pipeline, HandOver(self.pipeline, alone())))

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stream.load_state_dict(state_dict)

    def teardown(self, stage: str) -> None:
        self.stream.finish()


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[Place] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        epoch, step = batch.tolist()
        assert (epoch, step) == (self.trainer.current_epoch, batch_idx)
        self.trained.append((epoch, step))
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(pl.Callback):
    """A checkpoint after every batch, after each validation and at each epoch's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, trainer: Any, name: str) -> None:
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: torch.Tensor, _: int) -> None:
        epoch, step = batch.tolist()
        self.save(trainer, f"step{epoch}.{step}")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        self.save(trainer, f"validated{trainer.current_epoch}.{done}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, f"epoch{trainer.current_epoch}")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    make_scenes(folder / "scenes", train=SAMPLES, val=1, seed=1)
    pack_here(folder / "scenes", folder / "pack", per_shard=10, split="train")
    return folder / "pack"


def fit(
    pack: Path,
    save: Path | None,
    resume: Path | None = None,
    *,
    ranks: int = 1,
    accumulate: int = 1,
    batch_size: int = 1,
    epochs: int = 2,
    **options: Any,
) -> list[Place]:
    """What rank 0 trained, with checkpoints in ``save``."""
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Save(save)] if save else [],
        **options,
    )
    trainer.fit(model, datamodule=Streamed(pack, ranks, accumulate, batch_size), ckpt_path=resume)
    assert trainer.current_epoch == epochs
    return model.trained


def test_resuming_twice_from_any_step_trains_what_was_left(pack: Path, tmp_path: Path) -> None:
    """3 epochs of 3 batches. The end of an epoch counts as much as its inside."""
    sizes: dict[str, Any] = {"batch_size": 6, "epochs": 3}
    places = fit(pack, tmp_path / "first", **sizes)
    assert places == [(epoch, step) for epoch in range(3) for step in range(3)]
    for done, (epoch, step) in enumerate(places[:-1], 1):
        second = tmp_path / f"second{done}"
        assert fit(pack, second, tmp_path / "first" / f"step{epoch}.{step}.ckpt", **sizes) == places[done:]
        for again, (later, at) in enumerate(places[done:-1], done + 1):
            assert fit(pack, None, second / f"step{later}.{at}.ckpt", **sizes) == places[again:]


def left(ranks: int, epoch: int, samples: int) -> list[Place]:
    """Rank 0's places of two epochs after ``samples`` samples of ``epoch``, with batches of one sample."""
    steps = [(e, s) for e in range(2) for s in range(SAMPLES // ranks)]
    return [(e, s) for e, s in steps if e * SAMPLES + s * ranks >= epoch * SAMPLES + samples]


@pytest.fixture(scope="module")
def two_ranks(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run on two ranks: 8 batches an epoch, validated after the 4th and the 8th."""
    folder = tmp_path_factory.mktemp("two")
    assert fit(pack, folder, ranks=2, accumulate=2, val_check_interval=4) == left(2, 0, 0)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "epoch", "samples"),
    [
        ("step0.3", 0, 8),
        ("step0.5", 0, 12),
        ("step0.7", 1, 0),
        ("validated0.8", 1, 0),
        ("epoch0", 1, 0),
        ("step1.3", 1, 8),
        ("step1.7", 2, 0),
        ("epoch1", 2, 0),
    ],
)
def test_resume_on_other_ranks(
    pack: Path, two_ranks: Path, tmp_path: Path, ranks: int, name: str, epoch: int, samples: int
) -> None:
    sizes: dict[str, Any] = {"ranks": ranks, "accumulate": 4 // ranks}
    expected = left(ranks, epoch, samples)
    assert fit(pack, tmp_path, two_ranks / f"{name}.ckpt", **sizes) == expected
    for done, (e, s) in enumerate(expected, 1):
        if s == SAMPLES // ranks - 1:  # and what this run saved at an epoch's end, on two ranks again
            again = fit(pack, None, tmp_path / f"step{e}.{s}.ckpt", ranks=2, accumulate=2)
            assert again == left(2, e + 1, 0), done


def test_a_step_before_an_epoch_s_end_on_fewer_ranks(pack: Path, two_ranks: Path) -> None:
    assert fit(pack, None, two_ranks / "step0.6.ckpt", accumulate=4) == left(1, 0, 14)


def test_a_step_before_an_epoch_s_end_is_inside_a_step_of_more_ranks(pack: Path, two_ranks: Path) -> None:
    with pytest.raises(StateError, match="14"):
        fit(pack, None, two_ranks / "step0.6.ckpt", ranks=4)


@pytest.mark.parametrize(("name", "epoch"), [("validated0.4", 0), ("validated1.4", 1)])
@pytest.mark.parametrize("save", [True, False])
def test_a_validation_inside_an_epoch_is_no_place_for_more_ranks(
    pack: Path, two_ranks: Path, tmp_path: Path, name: str, epoch: int, save: bool
) -> None:
    """Lightning takes the 4 batches of two ranks for the whole epoch of four: never end or go on in silence."""
    message = f"data stand in epoch {epoch} and its training loop in epoch {epoch + 1}: .*saved on a training step"
    with pytest.raises(StateError, match=message):
        fit(pack, tmp_path if save else None, two_ranks / f"{name}.ckpt", ranks=4)
    assert not list(tmp_path.iterdir())


def test_a_validation_inside_an_epoch_is_a_place_for_fewer_ranks(pack: Path, two_ranks: Path) -> None:
    assert fit(pack, None, two_ranks / "validated0.4.ckpt", accumulate=4) == left(1, 0, 8)


def test_a_part_of_each_epoch(pack: Path, tmp_path: Path) -> None:
    """``limit_train_batches``: the trainer's epoch ends before the stream's."""
    places = fit(pack, tmp_path, batch_size=4, limit_train_batches=3)
    assert places == [(epoch, step) for epoch in range(2) for step in range(3)]
    for name, done in (("step0.1", 2), ("step0.2", 3), ("validated0.3", 3), ("epoch0", 3), ("step1.0", 4)):
        assert fit(pack, None, tmp_path / f"{name}.ckpt", batch_size=4, limit_train_batches=3) == places[done:], name


def test_checkpoints_in_a_bucket(pack: Path) -> None:
    bucket = "memory://bucket/run"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=pl.loggers.CSVLogger(bucket, name="", version=""),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[newest_checkpoint(bucket)],
    )
    trainer.fit(Model(), datamodule=Streamed(pack, 1, 1, 4))
    assert MemoryFileSystem().exists("/bucket/run/checkpoints/last.ckpt")
    assert not Path("memory:").exists()


def ray_run(accelerator: str) -> Config:
    run = {"launcher": "ray", "workers": 4, "accelerator": accelerator}
    return Config(data={"path": "pack"}, decode={"actors": [2, 8]}, train=run)


def test_workers_without_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.workers=4 with train.accelerator=gpu need.*may grow to 3"):
        _refuse_too_few_gpus(ray_run("gpu"), 3)
    _refuse_too_few_gpus(ray_run("gpu"), 4)
    _refuse_too_few_gpus(ray_run("gpu"), math.inf)  # an autoscaler may add them


def test_gpu_workers_need_no_cpus() -> None:
    with pytest.raises(ConfigError, match=r"train.workers=4 and decode.actors of at least 2 need 6 CPUs.*grow to 5"):
        _refuse_too_few_cpus(ray_run("cpu"), 5, use_gpu=False)
    _refuse_too_few_cpus(ray_run("gpu"), 2, use_gpu=True)
    with pytest.raises(ConfigError, match=r"^decode.actors of at least 2 need 2 CPUs.*grow to 1"):
        _refuse_too_few_cpus(ray_run("gpu"), 1, use_gpu=True)

"""The data module under a real trainer: exact resume at any step, whatever Lightning builds first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import pack_here

from rfstream.config import Config
from rfstream.errors import ConfigError, StateError
from rfstream.tools.scenes import make_scenes
from rfstream.train.data import StreamDataModule
from rfstream.train.lightning import pl

EPOCHS, STEPS = 2, 6
"""24 scenes, batches of 4: 6 steps an epoch, 3 windows of 2."""


class Recorder(pl.LightningModule):
    """The smallest model that trains; keeps the keys and a fingerprint of the pixels of every batch it is given."""

    def __init__(self, schedule: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.schedule = schedule
        self.trained: list[tuple[int, int, tuple[str, ...], float]] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert batch.images.dtype == torch.float32 and batch_idx == batch.step
        self.trained.append((batch.epoch, batch.step, tuple(batch.keys), float(batch.images.sum())))
        return ((batch.images.mean((0, 2, 3)) - self.weight) ** 2).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch.image_ids.tolist()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.schedule:
            return optimizer
        # What builds the loader before the checkpoint is restored.
        steps = int(self.trainer.estimated_stepping_batches)
        assert steps == EPOCHS * STEPS // 2
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


class SaveEachStep(pl.Callback):
    """A checkpoint after every batch, after each validation and at each epoch's end."""

    def __init__(self, folder: Path, stop_after: int | None = None) -> None:
        self.folder = folder
        self.stop_after = stop_after

    def save(self, trainer: Any, name: str) -> None:
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self.save(trainer, f"step{done}")
        if done == self.stop_after:
            raise KeyError("interrupted")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, f"validated{trainer.current_epoch}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, f"epoch{trainer.current_epoch}")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    make_scenes(folder / "scenes", train=24, val=7, seed=1)
    for split in ("train", "val"):
        pack_here(folder / "scenes", folder / "pack", per_shard=10, split=split)
    return folder / "pack"


def config(pack: Path, **stream: Any) -> Config:
    resize = "rfstream.tools.scenes:{}_transform"
    return Config(
        data={"path": str(pack)},
        stream={"batch_size": 4, "grad_accum": 2, "seed": 11, "block_bytes": "60KiB", "timeout_s": 300, **stream},
        decode={"actors": [1, 1]},
        augment={
            "cpu": {"transform": resize.format("train"), "args": {"size": 48}},
            "eval": {"transform": resize.format("eval"), "args": {"size": 48}},
            "device": {"kornia": [{"name": "ColorJiggle", "brightness": 0.3, "p": 0.7}]},
        },
    )


def trainer(callbacks: Sequence[Any] = (), **options: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **{"max_epochs": EPOCHS, "accumulate_grad_batches": 2, **options},
    )


@pytest.fixture(scope="module")
def whole(pack: Path, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorder, Path]:
    """An uninterrupted run, with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = Recorder(schedule=True)
    trainer([SaveEachStep(folder)]).fit(model, datamodule=StreamDataModule(config(pack)))
    return model, folder


def test_an_epoch_s_batches_in_order_and_each_validation_image_once(whole: tuple[Recorder, Path]) -> None:
    model, _ = whole
    assert [(e, s) for e, s, _, _ in model.trained] == [(e, s) for e in range(EPOCHS) for s in range(STEPS)]
    for epoch in range(EPOCHS):
        keys = [key for e, _, batch, _ in model.trained if e == epoch for key in batch]
        assert len(keys) == len(set(keys)) == 24
    assert model.validated == [*range(1, 8)] * EPOCHS


@pytest.mark.parametrize("step", [1, 5, 6, 8])
def test_resume_after_any_step_gives_what_was_left(pack: Path, whole: tuple[Recorder, Path], step: int) -> None:
    model, folder = whole
    resumed = Recorder(schedule=True)
    run = trainer()
    run.fit(resumed, datamodule=StreamDataModule(config(pack)), ckpt_path=folder / f"step{step}.ckpt")
    assert resumed.trained == model.trained[step:]
    if step % 2 == 0:  # Lightning keeps no accumulated gradients: equal weights only from an optimizer step on
        assert torch.equal(resumed.weight, model.weight)
        assert run.global_step == EPOCHS * STEPS // 2


@pytest.mark.parametrize("name", ["validated0", "epoch0"])
def test_resume_from_an_epoch_s_end_begins_the_next(pack: Path, whole: tuple[Recorder, Path], name: str) -> None:
    model, folder = whole
    saved = torch.load(folder / f"{name}.ckpt", weights_only=True)["StreamDataModule"]
    assert (saved["epoch"], saved["samples"]) == (1, 0)
    resumed = Recorder(schedule=True)
    trainer().fit(resumed, datamodule=StreamDataModule(config(pack)), ckpt_path=folder / f"{name}.ckpt")
    assert resumed.trained == model.trained[STEPS:]
    assert resumed.validated == [*range(1, 8)]
    assert torch.equal(resumed.weight, model.weight)


def test_interrupted_for_real(pack: Path, whole: tuple[Recorder, Path], tmp_path: Path) -> None:
    model, _ = whole
    before, after = Recorder(schedule=True), Recorder(schedule=True)
    with pytest.raises(KeyError, match="interrupted"):
        trainer([SaveEachStep(tmp_path, stop_after=4)]).fit(before, datamodule=StreamDataModule(config(pack)))
    trainer().fit(after, datamodule=StreamDataModule(config(pack)), ckpt_path=tmp_path / "step4.ckpt")
    assert before.trained + after.trained == model.trained
    assert torch.equal(after.weight, model.weight)


@pytest.mark.parametrize(("name", "done"), [("step3", 3), ("step8", 8), ("epoch0", 6)])
def test_another_batch_size_resumes_with_the_same_samples(
    pack: Path, whole: tuple[Recorder, Path], name: str, done: int
) -> None:
    """Windows of 8 samples as before, cut into 4 batches of 2: what a run does that resumes on other ranks."""
    model, folder = whole
    resumed = Recorder(schedule=True)
    run = trainer(accumulate_grad_batches=4)
    data = StreamDataModule(config(pack, batch_size=2, grad_accum=4))
    run.fit(resumed, datamodule=data, ckpt_path=folder / f"{name}.ckpt")
    expected = [(epoch, key) for epoch, _, keys, _ in model.trained[done:] for key in keys]
    assert [(epoch, key) for epoch, _, keys, _ in resumed.trained for key in keys] == expected
    assert run.global_step == EPOCHS * STEPS // 2 and run.current_epoch == EPOCHS


def test_another_stream_s_checkpoint_is_refused(pack: Path, whole: tuple[Recorder, Path]) -> None:
    _, folder = whole
    with pytest.raises(StateError, match="seed was 11, is 12"):
        trainer().fit(
            Recorder(schedule=True),
            datamodule=StreamDataModule(config(pack, seed=12)),
            ckpt_path=folder / "step2.ckpt",
        )


def test_the_trainer_must_accumulate_as_the_stream_does(pack: Path) -> None:
    with pytest.raises(ConfigError, match=r"accumulates 1 batches an optimizer step.*windows of 2.*set Trainer"):
        trainer(accumulate_grad_batches=1).fit(Recorder(schedule=False), datamodule=StreamDataModule(config(pack)))
    values = config(pack).model_dump(mode="json", exclude_unset=True)
    del values["stream"]["grad_accum"]
    whole_window = Config(**{**values, "stream": {**values["stream"], "global_batch": 8}})
    with pytest.raises(ConfigError, match=r"windows of 2.*or stream.global_batch=4$"):
        trainer(accumulate_grad_batches=1).fit(Recorder(schedule=False), datamodule=StreamDataModule(whole_window))


def test_no_validation_split_no_validation(pack: Path, ray_session: None) -> None:
    values = config(pack).model_dump(mode="json", exclude_unset=True)
    values["data"]["splits"] = {"train": "train"}
    model = Recorder(schedule=False)
    trainer(max_epochs=1).fit(model, datamodule=StreamDataModule(Config(**values)))
    assert len(model.trained) == STEPS and not model.validated

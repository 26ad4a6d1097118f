"""Fitting on one rank: what trains, with which callbacks, and how checkpoints are saved."""

from __future__ import annotations

import errno
import inspect
import os
from pathlib import Path
from typing import Any

import torch

from rfstream.config import Config
from rfstream.dataset import storage
from rfstream.dataset.mixture import Split
from rfstream.episodes.index import EpisodeIndex
from rfstream.errors import ConfigError
from rfstream.imports import import_object
from rfstream.stream.pipeline import build_pipeline
from rfstream.train.data import StreamDataModule
from rfstream.train.lightning import pl, ray_lightning
from rfstream.train.timing import Timing

_KNOWN = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
_DDP: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False}
"""Otherwise every forward pass of a model with buffers is a collective, in validation too, where ranks may have
different numbers of batches: they would wait for each other for ever. :class:`_SameBuffers` does it before each one.

Torch renamed the option in 2.14."""


def fit(
    config: Config, *, world_size: int, resume: str | None, checkpoints: pl.Callback | None = None, **options: Any
) -> dict[str, float]:
    """Fit ``config.train`` on this rank, and return the last epoch's metrics.

    ``checkpoints`` saves them; by default the newest, as ``{output}/checkpoints/last.ckpt``. ``options`` are the
    trainer's.

    Raises:
        ConfigError: if what is to be trained can't be built, or there is no room for what is saved.
        RFStreamError: whatever the stream refuses.
    """
    entry = _fit_model if config.train.entry is None else import_object(config.train.entry, "train.entry")
    try:
        metrics: dict[str, float] = entry(
            config, world_size=world_size, resume=resume, checkpoints=checkpoints, **options
        )
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise _no_room(error.errno, config.train.output) from error
    return metrics


def fit_ray_worker(config: Config) -> None:
    """Fit in a Ray Train worker; after a failure, from the checkpoint that was reported last."""
    import ray.train

    ours = ray_lightning()
    options: dict[str, Any] = {
        "devices": "auto",
        "strategy": ours.RayDDPStrategy(**_DDP),
        "plugins": [ours.RayLightningEnvironment()],
        "enable_progress_bar": False,
    }
    world = ray.train.get_context().get_world_size()
    report = ours.RayTrainReportCallback()
    reported = ray.train.get_checkpoint()
    if reported is None:
        fit(config, world_size=world, resume=config.train.resume, checkpoints=report, **options)
        return
    with reported.as_directory() as folder:
        fit(config, world_size=world, resume=str(Path(folder) / report.CHECKPOINT_NAME), checkpoints=report, **options)


def ddp() -> pl.strategies.DDPStrategy:
    """Lightning's strategy for a rank of ``torchrun``."""
    return pl.strategies.DDPStrategy(**_DDP)


class _SameBuffers(pl.Callback):
    """Gives every rank the buffers of rank 0 (running statistics, say) before each evaluation."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Collective over all ranks."""
        if trainer.world_size > 1:
            for buffer in pl_module.buffers():
                torch.distributed.broadcast(buffer, src=0)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _no_room(number: int, output: str) -> ConfigError:
    last = storage.join(output, "checkpoints/last.ckpt")
    resume = f"train.resume={last}" if storage.exists(last) else "the last checkpoint, if there is one"
    return ConfigError(
        f"train.output={output}: {os.strerror(number)}, so the run can't save what it reached: make room or name "
        f"another folder, and go on with {resume}"
    )


def _fit_model(
    config: Config, *, world_size: int, resume: str | None, checkpoints: pl.Callback | None, **options: Any
) -> dict[str, float]:
    """Fit ``config.train.model``."""
    run = config.train
    pl.seed_everything(config.stream.seed, verbose=False)
    pipeline = build_pipeline(config, "train", world_size, training=True)
    index = pipeline.index
    assert isinstance(index, EpisodeIndex | Split)
    model = _model(config, index if isinstance(index, EpisodeIndex) else index.class_names())
    checkpoints = checkpoints or newest_checkpoint(run.output)
    inside = [] if run.checkpoint_steps is None else [_StepCheckpoint(run.output, run.checkpoint_steps)]
    trainer = pl.Trainer(
        accelerator=run.accelerator,
        max_epochs=run.epochs,
        accumulate_grad_batches=pipeline.plan.windows.grad_accum,
        # Callbacks run in this order: what is saved or reported at an epoch's end comes last.
        callbacks=[Timing(), _SameBuffers(), *inside, checkpoints],
        enable_checkpointing=isinstance(checkpoints, pl.callbacks.ModelCheckpoint),
        logger=pl.loggers.CSVLogger(run.output, name="", version=""),
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, datamodule=StreamDataModule(config), ckpt_path=resume)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def newest_checkpoint(output: str) -> pl.callbacks.ModelCheckpoint:
    """Saves each epoch's end as ``checkpoints/last.ckpt`` in ``output``, a local folder or any fsspec URL."""
    folder = storage.join(output, "checkpoints")
    return pl.callbacks.ModelCheckpoint(
        folder, save_last=True, save_on_train_epoch_end=True, enable_version_counter=False
    )


class _StepCheckpoint(pl.Callback):
    """Saves every ``steps`` optimizer steps under the same name.

    Only where the optimizer has stepped: Lightning's own callback may save between two steps of a resumed run, and then
    loses the gradients that were accumulated.
    """

    def __init__(self, output: str, steps: int) -> None:
        self._path = storage.join(output, "checkpoints/last.ckpt")
        self._steps = steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Collective over all ranks."""
        if batch.window_end and trainer.global_step % self._steps == 0:
            trainer.save_checkpoint(self._path)


def _model(config: Config, data: list[str] | EpisodeIndex) -> pl.LightningModule:
    name, arguments = config.train.model, config.train.model_args
    assert name is not None
    builder = import_object(name, "train.model")
    try:
        model = builder(data, **arguments)
    except TypeError as error:
        raise ConfigError(f"train.model={name!r} can't be built with model_args {arguments}: {error}") from error
    if not isinstance(model, pl.LightningModule):
        raise ConfigError(
            f"train.model={name!r} returned {type(model).__name__}, not a pytorch_lightning.LightningModule"
        )
    return model

"""One training run from one :class:`Config`, in this process, under Ray Train, or as a rank of ``torchrun``."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel

from rfstream.config import Config, import_object
from rfstream.dataset import storage
from rfstream.dataset.mixture import Split
from rfstream.episodes.index import EpisodeIndex
from rfstream.errors import ConfigError, StreamError
from rfstream.session import ensure_ray, most_of, own_sentence
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.ranks import peers_of_group
from rfstream.train.data import StreamDataModule
from rfstream.train.lightning import pl, ray_lightning
from rfstream.train.timing import Timing

Metrics = dict[str, float]
S = TypeVar("S", bound=BaseModel)


def train(config: Config) -> Metrics:
    """Train as ``config.train.launcher`` says, and return the last epoch's metrics.

    Raises:
        ConfigError: if launcher, workers, model and cluster do not fit together.
        RFStreamError: whatever the stream refuses.
    """
    if config.train.model is None and config.train.entry is None:
        first = "class_names" if config.data.format == "pack" else "episode_index"
        raise ConfigError(f"train.model is required: package.module:name of a callable ({first}, **model_args)")
    if config.train.resume is not None and not storage.exists(config.train.resume):
        raise ConfigError(f"train.resume={config.train.resume} does not exist: name a checkpoint file")
    return {"local": _local, "ray": _ray, "torchrun": _torchrun}[config.train.launcher](located(config))


def located(config: Config) -> Config:
    """``config`` with local paths made absolute: Ray's workers have working folders of their own."""
    data, stream, run = config.data, config.stream, config.train
    path = data.path if isinstance(data.path, str) else [_absolute(pack, "path", "shards") for pack in data.path]
    cache = None if data.cache is None else _absolute(data.cache, "folder")
    data = data.model_copy(update={"path": path, "cache": cache})
    return config.model_copy(
        update={
            "data": _absolute(data, "path", "shards"),
            "stream": _absolute(stream, "quarantine"),
            "train": _absolute(run, "output", "resume"),
        }
    )


def _absolute(section: S, *keys: str) -> S:
    """``section`` with those of ``keys`` that hold a local path made absolute."""
    values = {key: getattr(section, key) for key in keys}
    local = {key: storage.local_path(value) for key, value in values.items() if isinstance(value, str)}
    return section.model_copy(update={key: str(path.absolute()) for key, path in local.items() if path is not None})


def _local(config: Config) -> Metrics:
    if config.train.workers > 1:
        raise ConfigError(
            f"train.workers={config.train.workers} needs train.launcher=ray or torchrun; local is one process"
        )
    return _fit(config, world_size=1, resume=config.train.resume, devices=1)


def _torchrun(config: Config) -> Metrics:
    try:
        world, local = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    except KeyError:
        raise ConfigError(
            "train.launcher=torchrun, but this process was not started by torchrun: start it with "
            "`torchrun --nproc-per-node N pipelines/train.py ...`"
        ) from None
    options: dict[str, Any] = {
        "devices": local,
        "num_nodes": world // local,
        "strategy": pl.strategies.DDPStrategy(**_DDP),
    }
    signal.signal(signal.SIGTERM, _leave)
    try:
        return _fit(config, world_size=world, resume=config.train.resume, **options)
    except (Exception, SystemExit) as error:
        # torchrun terminates the ranks that are left when one has failed: they shall come to say why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        peers = peers_of_group()
        if isinstance(error, SystemExit) and (first := peers.failure()):
            raise StreamError(f"rank {peers.rank} can't go on: {first}") from error
        raise


def _leave(number: int, _: Any) -> None:
    sys.exit(128 + number)


def _ray(config: Config) -> Metrics:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    workers = config.train.workers
    ensure_ray(workers + config.decode.actors[0])
    enough_gpus = ray.cluster_resources().get("GPU", 0) >= workers
    use_gpu = config.train.accelerator in ("gpu", "cuda") or (config.train.accelerator == "auto" and enough_gpus)
    if use_gpu:
        _refuse_too_few_gpus(config, most_of("GPU"))
    _refuse_too_few_cpus(config, most_of("CPU"), use_gpu=use_gpu)
    trainer = TorchTrainer(
        _ray_worker,
        train_loop_config=config.model_dump(mode="json", exclude_unset=True),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(
            # Ray continues a run of the same name by itself: a new name, so that train.resume alone decides.
            name=time.strftime("ray-%Y%m%d-%H%M%S"),
            storage_path=config.train.output,
            failure_config=FailureConfig(max_failures=config.train.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        result = trainer.fit()
    except Exception as error:  # Ray Train wraps a worker's error in kinds of its own
        raise StreamError(f"training on {workers} Ray workers failed: {_reason(error)}") from error
    return {name: value for name, value in (result.metrics or {}).items() if isinstance(value, (int, float))}


def _ray_worker(values: dict[str, Any]) -> None:
    """What each Ray Train worker runs; after a failure, from the checkpoint that was reported last."""
    import ray.train

    ours = ray_lightning()
    config = Config(**values)
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
        _fit(config, world_size=world, resume=config.train.resume, checkpoints=report, **options)
        return
    with reported.as_directory() as folder:
        _fit(config, world_size=world, resume=str(Path(folder) / report.CHECKPOINT_NAME), checkpoints=report, **options)


_KNOWN = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
_DDP: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False}
"""Otherwise every forward pass of a model with buffers is a collective, in validation too, where ranks may have
different numbers of batches: they would wait for each other for ever. :class:`_SameBuffers` does it before each one.

Torch renamed the option in 2.14."""


class _SameBuffers(pl.Callback):
    """Gives every rank the buffers of rank 0 (running statistics, say) before each evaluation."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Collective over all ranks."""
        if trainer.world_size > 1:
            for buffer in pl_module.buffers():
                torch.distributed.broadcast(buffer, src=0)


def _fit(
    config: Config, *, world_size: int, resume: str | None, checkpoints: pl.Callback | None = None, **options: Any
) -> Metrics:
    """Fit on this rank. ``checkpoints`` saves them; by default the newest, as ``{output}/checkpoints/last.ckpt``."""
    entry = _fit_model if config.train.entry is None else import_object(config.train.entry, "train.entry")
    try:
        metrics: Metrics = entry(config, world_size=world_size, resume=resume, checkpoints=checkpoints, **options)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise _no_room(error.errno, config.train.output) from error
    return metrics


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
) -> Metrics:
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


def _refuse_too_few_cpus(config: Config, cpus: float, *, use_gpu: bool) -> None:
    actors = config.decode.actors[0]
    workers = 0 if use_gpu else config.train.workers  # Ray Train asks for no CPU beside a worker's GPU
    if workers + actors > cpus:
        ranks = "" if use_gpu else f"train.workers={workers} and "
        raise ConfigError(
            f"{ranks}decode.actors of at least {actors} need {workers + actors} CPUs and the Ray cluster has or may "
            f"grow to {cpus:g}: ask for fewer, or add nodes"
        )


def _refuse_too_few_gpus(config: Config, gpus: float) -> None:
    if config.train.workers > gpus:
        raise ConfigError(
            f"train.workers={config.train.workers} with train.accelerator={config.train.accelerator} need as many GPUs "
            f"and the Ray cluster has or may grow to {gpus:g}: lower train.workers, add nodes, or set "
            "train.accelerator=cpu"
        )


def _reason(error: BaseException) -> str:
    """What an error of our own says, else the last line of what Ray says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return own_sentence(error) or (lines[-1] if lines else type(error).__name__)

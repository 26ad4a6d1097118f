"""One training run from one :class:`Config`, in this process, under Ray Train, or as a rank of ``torchrun``.

Only processes that train import Lightning, which takes seconds: the driver of Ray's workers does not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, TypeVar

from pydantic import BaseModel

from rfstream.config import Config
from rfstream.dataset import storage
from rfstream.errors import ConfigError, StreamError
from rfstream.session import ensure_ray, most_of, own_sentence

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


def without_model(config: Config) -> Config:
    """``config`` for a run that only loads data: :class:`rfstream.train.dummy.Dummy` in its model's place, and an
    output folder ``dummy`` inside its own.

    Raises:
        ConfigError: if what trains decodes its own way.
    """
    run = config.train
    if run.entry is not None:
        raise ConfigError(
            f"--dummy streams what train.model is given, but train.entry={run.entry} decodes its own way: leave out one"
        )
    update: dict[str, Any] = {
        "model": "rfstream.train.dummy:build",
        "model_args": {},
        "output": storage.join(run.output, "dummy"),
    }
    return config.model_copy(update={"train": run.model_copy(update=update)})


def _local(config: Config) -> Metrics:
    if config.train.workers > 1:
        raise ConfigError(
            f"train.workers={config.train.workers} needs train.launcher=ray or torchrun; local is one process"
        )
    from rfstream.train.fit import fit

    return fit(config, world_size=1, resume=config.train.resume, devices=1)


def _torchrun(config: Config) -> Metrics:
    try:
        world, local = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    except KeyError:
        raise ConfigError(
            "train.launcher=torchrun, but this process was not started by torchrun: start it with "
            "`torchrun --nproc-per-node N pipelines/train.py ...`"
        ) from None
    from rfstream.stream.ranks import peers_of_group
    from rfstream.train.fit import ddp, fit

    options: dict[str, Any] = {"devices": local, "num_nodes": world // local, "strategy": ddp()}
    signal.signal(signal.SIGTERM, _leave)
    try:
        return fit(config, world_size=world, resume=config.train.resume, **options)
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
    """What each Ray Train worker runs."""
    from rfstream.train.fit import fit_ray_worker

    fit_ray_worker(Config(**values))


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

"""RF-DETR trained on a stream: its one-line ``train``, and a launcher's run from one configuration."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import rfdetr.config
import rfdetr.training
from rfdetr.config import KeypointTrainConfig, ModelConfig, SegmentationTrainConfig, TrainConfig

from rfstream.config import Config, load_config
from rfstream.dataset import storage
from rfstream.dataset.index import INDEX_VERSION, index_name
from rfstream.dataset.mixture import MixedSplit, Split
from rfstream.dataset.roles import split_of
from rfstream.errors import ConfigError
from rfstream.train.lightning import pl
from rfstream.train.rfdetr.data import RFStreamDataModule
from rfstream.train.rfdetr.labels import class_names, keypoint_schema, labels_of


def train(model: Any, *, stream: Config | Mapping[str, Any] | str | Path, **kwargs: Any) -> None:
    """``model.train(**kwargs)`` with the data streamed: everything but where the data comes from is RF-DETR's own.

    Class count, class names and keypoint schema come from the pack's index, as RF-DETR takes them from a dataset.

    Args:
        model: an ``rfdetr`` model, such as ``RFDETRNano()``.
        stream: the stream's configuration, its fields as a mapping, or a YAML file with them.
        kwargs: what ``model.train`` takes, less ``dataset_dir`` and ``dataset_file``.

    Raises:
        ConfigError, DatasetError: if configuration and pack do not fit together.
    """
    config = stream_config(stream)
    for name in ("dataset_dir", "dataset_file"):
        if name in kwargs:
            raise ConfigError(f"{name} has no meaning here: the data is at stream's data.path, {config.data.name}")
    space = split_of(config, "train")
    _check_output(str(kwargs.get("output_dir", "")))
    if model.model_config.use_grouppose_keypoints:
        kwargs = _with_schema(model, space, kwargs)
    with _index_folder(space) as folder, _streaming(config):
        model.train(dataset_file="webdataset", dataset_dir=folder, **kwargs)


def fit(
    config: Config, *, world_size: int, resume: str | None, checkpoints: pl.Callback | None = None, **options: Any
) -> dict[str, float]:
    """One rank's run under a launcher: ``train.entry`` of a configuration (see ``configs/train/rfdetr-nano.yaml``).

    ``train.model`` names a configuration class of RF-DETR, ``train.model_args`` its fields under ``model`` and those of
    its training configuration under ``train``. Epochs, output folder and accelerator are the run's; checkpoints, EMA,
    schedule, metrics and logs are RF-DETR's, and what ``checkpoints`` does besides.

    Raises:
        ConfigError: if the two configurations can't be built or do not fit together.
    """
    pl.seed_everything(config.stream.seed, verbose=False)
    model_config, train_config = rfdetr_configs(config, world_size)
    module = rfdetr.training.RFDETRModelModule(model_config, train_config)
    if "strategy" in options:  # RF-DETR leaves parameters unused, and evaluates in step on all ranks
        options["strategy"] = type(options["strategy"])(find_unused_parameters=True)
    trainer = rfdetr.training.build_trainer(train_config, model_config, **options)
    if checkpoints is not None:
        trainer.callbacks.append(checkpoints)
    trainer.fit(module, datamodule=RFStreamDataModule(model_config, train_config, config), ckpt_path=resume)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def rfdetr_configs(config: Config, world_size: int) -> tuple[ModelConfig, TrainConfig]:
    """RF-DETR's two configurations for a run of ``config``, with the pack's class count and schema filled in.

    Raises:
        ConfigError: if a class or a field is unknown, or a value refused.
    """
    run = config.train
    model_class = getattr(rfdetr.config, run.model or "", None)
    if not (isinstance(model_class, type) and issubclass(model_class, ModelConfig)):
        raise ConfigError(f"train.model={run.model!r} is not a model configuration of rfdetr.config (RFDETRNanoConfig)")
    unknown = set(run.model_args) - {"model", "train"}
    if unknown:
        raise ConfigError(f"train.model_args.{min(unknown)} is unknown: fields of RF-DETR go under model or train")
    model_values, train_values = (dict(run.model_args.get(part) or {}) for part in ("model", "train"))
    _check_output(str(train_values.get("output_dir", run.output)))
    space, stream = split_of(config, "train"), config.stream
    try:
        model_config = model_class(**model_values)
        if model_config.use_grouppose_keypoints and "num_keypoints_per_class" not in model_values:
            schema = keypoint_schema(space)
            model_config.num_keypoints_per_class = schema.num_keypoints_per_class
            train_values.setdefault("keypoint_flip_pairs", list(schema.keypoint_flip_pairs))
        if "num_classes" not in model_values:
            model_config.num_classes = len(class_names(space, labels_of(space, model_config)))
        train_config = _train_class(model_config)(
            **{
                "dataset_file": "webdataset",
                "dataset_dir": config.data.name,
                "output_dir": run.output,
                "epochs": run.epochs,
                "batch_size": stream.batch_size,
                "grad_accum_steps": stream.accumulation(world_size),
                "accelerator": run.accelerator,
                "seed": stream.seed,
                **train_values,
            }
        )
    except ValueError as error:
        raise ConfigError(f"train.model_args: {' '.join(str(error).split())}") from None
    return model_config, train_config


def _check_output(folder: str) -> None:
    """RF-DETR takes any URL for a local path and makes a folder of that name.

    Raises:
        ConfigError: if ``folder`` is a URL.
    """
    if storage.local_path(folder) is None:
        raise ConfigError(
            f"RF-DETR writes to a local or mounted folder, not to {folder}: set train.output (or output_dir) to one"
        )


def _train_class(model_config: ModelConfig) -> type[TrainConfig]:
    kind: type[TrainConfig] = SegmentationTrainConfig if model_config.segmentation_head else TrainConfig
    return KeypointTrainConfig if model_config.use_grouppose_keypoints else kind


def stream_config(stream: Config | Mapping[str, Any] | str | Path) -> Config:
    """The configuration that ``stream`` is, holds the fields of, or names the file of."""
    if isinstance(stream, Config):
        return stream
    return Config(**stream) if isinstance(stream, Mapping) else load_config(stream)


def _with_schema(model: Any, space: Split, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Give a keypoint model the pack's schema, where the caller gave it none."""
    schema = keypoint_schema(space)
    if "num_keypoints_per_class" not in model.model_config.model_fields_set:
        model.model_config.num_keypoints_per_class = schema.num_keypoints_per_class
        model.model.args.num_keypoints_per_class = schema.num_keypoints_per_class
    return {"keypoint_flip_pairs": list(schema.keypoint_flip_pairs)} | kwargs


@contextmanager
def _index_folder(space: Split) -> Iterator[str]:
    """A local folder in which RF-DETR finds the index of ``train``: the pack, or a copy of the index where it lies
    elsewhere or under another name, or is that of a mixture."""
    if isinstance(space, MixedSplit):
        document = _index_document(space)
    else:
        local = storage.local_path(space.path)
        if local is not None and space.split == "train":
            yield str(local)
            return
        document = json.loads(storage.read_bytes(storage.join(space.path, index_name(space.split))))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / index_name("train")).write_text(json.dumps(document | {"split": "train"}))
        yield folder


def _index_document(space: MixedSplit) -> dict[str, Any]:
    """An index with the mixture's categories: RF-DETR reads no shard by it."""
    return {
        "version": INDEX_VERSION,
        "shards": space.shards,
        "num_samples": space.num_samples,
        "categories": list(space.categories),
        "annotated_category_ids": list(space.label_of()),
        "category_ids": space.category_ids,
    }


@contextmanager
def _streaming(config: Config) -> Iterator[None]:
    """Let ``RFDETR.train``, which looks its data module up when it is called, find ours."""
    stock = rfdetr.training.RFDETRDataModule
    rfdetr.training.RFDETRDataModule = partial(RFStreamDataModule, stream=config)
    try:
        yield
    finally:
        rfdetr.training.RFDETRDataModule = stock

"""RF-DETR's data module on a stream: its interface, hooks and batches, without its datasets and workers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from rfdetr.config import ModelConfig, TrainConfig
from rfdetr.datasets.kornia_transforms import is_gpu_postprocess
from rfdetr.training.module_data import _MIN_TRAIN_BATCHES, RFDETRDataModule
from rfdetr.utilities.logger import get_logger
from rfdetr.utilities.tensors import NestedTensor
from torch import Tensor
from torch.utils.data import DistributedSampler

from rfstream.config import Config
from rfstream.dataset.mixture import Split
from rfstream.dataset.roles import has_role, label_space, split_of
from rfstream.errors import ConfigError
from rfstream.loader import EvaluationLoader, RankLoader, hand_over_of
from rfstream.plan.keys import key_of
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.ranks import group_place
from rfstream.train.data import TrainerBatches, TrainingStream
from rfstream.train.rfdetr.batch import RFDETRBatch, rfdetr_batch_of
from rfstream.train.rfdetr.labels import PackedSplit, class_names, labels_of
from rfstream.train.rfdetr.settings import Settings
from rfstream.train.rfdetr.spec import RFDETRSpec
from rfstream.train.transfer import transferred

Role = Literal["train", "val", "test"]
logger = get_logger()


class RFStreamDataModule(RFDETRDataModule):  # type: ignore[misc]
    """Takes the place of ``RFDETRDataModule``: same arguments, same batches, same hooks, and the data from a pack.

    Batch size, accumulation and seed are RF-DETR's (``batch_size``, ``eval_batch_size``, ``grad_accum_steps`` or the
    trainer's, ``seed``); ``stream`` may say the same or leave them out. Of ``stream``, ``decode.masks``,
    ``decode.pad_multiple``, ``decode.shrink_to`` and ``augment`` have no part here: RF-DETR's configurations decide.

    A checkpoint holds the place that the trainer reached (see :class:`rfstream.train.data.TrainingStream`).

    Args:
        model_config: RF-DETR's model configuration.
        train_config: RF-DETR's training configuration; ``dataset_dir`` and ``dataset_file`` are not read.
        stream: where the pack is, and how it is streamed.
    """

    _dataset_train: PackedSplit | None
    _dataset_val: PackedSplit | None
    _dataset_test: PackedSplit | None

    def __init__(self, model_config: ModelConfig, train_config: TrainConfig, stream: Config) -> None:
        super().__init__(model_config, train_config)
        self.stream = stream
        self._training: TrainingStream[RFDETRBatch] = TrainingStream(self)
        self._at = (0, 0)

    # What RF-DETR's setup builds datasets for

    def setup(self, stage: str) -> None:
        """Read the indexes: milliseconds, whatever the size of the dataset.

        Raises:
            DatasetError: if the pack lacks a split or an index is damaged.
            ImportError, RuntimeError, ValueError: RF-DETR's own, for a backend or class names that don't fit.
        """
        if stage == "fit":
            self._dataset_train = self._dataset_train or self._packed("train")
        if stage == "test":
            self._dataset_test = self._dataset_test or self._packed("test")
        else:
            self._dataset_val = self._dataset_val or self._packed("val")
        super().setup(stage)

    def _dataset_label_space(self) -> tuple[list[str] | None, bool]:
        """Names by label, and whether labels are remapped ids: from the training split's index alone."""
        space = label_space(self.stream, self._index("train"))
        labels = labels_of(space, self.model_config)
        return class_names(space, labels), labels is not None

    def _packed(self, role: Role) -> PackedSplit:
        index = self._index(role)
        space = label_space(self.stream, index)
        return PackedSplit(index, space, labels_of(space, self.model_config))

    def _present(self, role: Role) -> Role:
        """The role whose split is read for ``role``: as in RF-DETR, ``val`` for a ``test`` that is not there."""
        if role == "test" and not has_role(self.stream, role):
            name = self.stream.data.splits.get(role, role)
            logger.warning("No split %r in %s; evaluating the 'val' split instead.", name, self.stream.data.name)
            return "val"
        return role

    def _index(self, role: Role) -> Split:
        return split_of(self.stream, self._present(role))

    # Loaders

    def train_dataloader(self) -> TrainerBatches[RFDETRBatch]:
        """This rank's training batches, from where the trainer stands.

        Raises:
            ConfigError: if ``stream`` and RF-DETR's configuration disagree.
            StateError: if the checkpoint belongs to another stream.
        """
        self._training.close()
        _, world_size = group_place()
        accumulated = self._effective_grad_accum_steps()
        config = self._streamed(batch_size=self._resolve_batch_size(), grad_accum=accumulated)
        pipeline = build_pipeline(config, "train", world_size, training=True, decode=self._spec(config, "train"))
        if pipeline.plan.windows.grad_accum != accumulated:
            raise ConfigError(
                f"stream.global_batch={config.stream.global_batch} makes windows of {pipeline.plan.windows.grad_accum} "
                f"batches of {config.stream.batch_size} on {world_size} ranks, and RF-DETR accumulates {accumulated}: "
                "set grad_accum_steps to that, or leave global_batch out"
            )
        if pipeline.plan.windows.windows < _MIN_TRAIN_BATCHES:
            logger.info(
                "An epoch has %d optimizer steps: the dataset once. RF-DETR's own loader would repeat it to make %d.",
                pipeline.plan.windows.windows,
                _MIN_TRAIN_BATCHES,
            )
        to_batch = partial(rfdetr_batch_of, normalize=not self._kornia)
        return self._training.open(RankLoader(pipeline, hand_over_of(pipeline), to_batch))

    def val_dataloader(self) -> RFDETREvaluation:
        """This rank's part of the validation split."""
        return self._evaluation("val")

    def test_dataloader(self) -> RFDETREvaluation:
        """This rank's part of the test split, or of the validation split where there is none."""
        return self._evaluation("test")

    def predict_dataloader(self) -> RFDETREvaluation:
        """The validation split, as in RF-DETR."""
        return self._evaluation("val")

    def _evaluation(self, role: Role) -> RFDETREvaluation:
        rank, world_size = group_place()
        config = self._streamed(batch_size=self._resolve_eval_batch_size(), grad_accum=1, training=False)
        decode = self._spec(config, role)
        pipeline = build_pipeline(config, self._present(role), world_size, training=False, decode=decode)
        to_batch = partial(rfdetr_batch_of, normalize=True)
        return RFDETREvaluation(EvaluationLoader(pipeline, rank, world_size, to_batch, even=True))

    def _streamed(self, *, batch_size: int, grad_accum: int, training: bool = True) -> Config:
        """``stream`` with RF-DETR's batch size, accumulation and seed.

        Raises:
            ConfigError: if ``stream`` sets another.
        """
        stream = self.stream.stream
        values = {"batch_size": batch_size, "grad_accum": grad_accum}
        if self.train_config.seed is not None:
            values["seed"] = self.train_config.seed
        for name, value in values.items() if training else ():
            if name in stream.model_fields_set and getattr(stream, name) != value:
                raise ConfigError(
                    f"stream.{name}={getattr(stream, name)}, but RF-DETR trains with {value}: leave it out of the "
                    "stream's configuration, or set RF-DETR's (batch_size, grad_accum_steps, seed) to the same"
                )
        return self.stream.model_copy(update={"stream": stream.model_copy(update=values)})

    def _spec(self, config: Config, role: Role) -> RFDETRSpec:
        index = self._index(role)
        labels = labels_of(label_space(config, index), self.model_config)
        return RFDETRSpec(
            settings=Settings.of(self.model_config, self.train_config).to_json(),
            split=role,
            seed=config.stream.seed,
            labels=None if labels is None else tuple(sorted(labels.items())),
            exif=config.decode.exif,
            max_pixels=config.decode.max_pixels,
            pack_ids=index.pack_ids,
        )

    # Hooks

    def transfer_batch_to_device(
        self, batch: RFDETRBatch, device: torch.device, dataloader_idx: int
    ) -> tuple[NestedTensor, list[dict[str, Tensor]]]:
        """Copy bytes, then make RF-DETR's floats, masks and targets of them on the device.

        A GPU copies beside the steps that it still computes.
        """
        self._at = (batch.epoch, batch.step)
        moved = transferred(batch, device)
        return moved.samples(), moved.targets()

    def on_after_batch_transfer(self, batch: tuple[Any, Any], dataloader_idx: int) -> tuple[Any, Any]:
        """RF-DETR's Kornia augmentation where it is on, its draws a function of (seed, epoch, number of the batch)."""
        if self._kornia_pipeline is None or self.trainer is None or not self.trainer.training:
            return batch
        epoch, step = self._at
        device = batch[0].tensors.device
        seed = self.stream.stream.seed if self.train_config.seed is None else self.train_config.seed
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(key_of("rfstream.device", seed, epoch, self._training.number_of(step)) & (2**63 - 1))
            augmented: tuple[Any, Any] = super().on_after_batch_transfer(batch, dataloader_idx)
        return augmented

    @property
    def _kornia(self) -> bool:
        return self._resolved_augmentation_backend is not None and is_gpu_postprocess(
            self._resolved_augmentation_backend
        )

    # Position

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that the trainer consumed; empty if there is no training stream."""
        return self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the place of a checkpoint: the stream is checked against it when the first batch is asked for."""
        self._training.load_state_dict(state_dict)

    def teardown(self, stage: str) -> None:
        """End the stream.

        Raises:
            StateError: if the trainer ended without the batches that were left at the checkpoint.
        """
        self._training.finish()

    def on_exception(self, exception: BaseException) -> None:
        """End the stream: Lightning tears nothing down after an exception.

        Raises:
            StreamError: if another rank failed before, with its reason.
        """
        self._training.fail(exception)


class RFDETREvaluation:
    """Evaluation batches of this rank, as many as on any other rank, since RF-DETR's evaluation is collective.

    What fills a rank up is not scored: ``sampler`` tells RF-DETR's COCO callback how many samples count, in the form
    in which the sampler of a ``DataLoader`` does. Lightning asks who has one for ``batch_sampler`` too.
    """

    batch_sampler = None

    def __init__(self, loader: EvaluationLoader[RFDETRBatch]) -> None:
        self._loader = loader
        self.sampler: DistributedSampler[int] | None = None
        if loader.filler:
            self.sampler = DistributedSampler(range(loader.samples), num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]
            self.sampler.total_size += loader.filler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[RFDETRBatch]:
        return iter(self._loader)

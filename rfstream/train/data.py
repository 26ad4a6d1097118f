"""The Lightning data module: loaders, device stage, and the data position inside Lightning's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic

import torch

from rfstream.batch import Batch
from rfstream.config import Config
from rfstream.episodes.batch import EpisodeBatch
from rfstream.errors import ConfigError, StateError, StreamError
from rfstream.loader import B, EvaluationLoader, RankLoader, ray_loader
from rfstream.plan.position import Position
from rfstream.plan.windows import evaluation_batches
from rfstream.stream.ranks import peers_of_group
from rfstream.train.device import DeviceBatch, DeviceStage
from rfstream.train.lightning import pl
from rfstream.train.transfer import transferred

StreamBatch = Batch | EpisodeBatch
"""What a stream yields, by ``data.format``."""


class StreamDataModule(pl.LightningDataModule):
    """Streams of one :class:`Config` for a ``pytorch_lightning.Trainer``.

    A checkpoint holds the place that the *trainer* reached: what was prefetched doesn't count. The module carries it,
    not the loader, because Lightning restores a loader's own state only if it built the loader after the checkpoint was
    read, and ``trainer.estimated_stepping_batches`` builds it before (Lightning #20550).

    A run resumed inside an epoch gets the remaining batches of that epoch. Lightning keeps no accumulated gradients, so
    save on an optimizer step (``ModelCheckpoint(every_n_train_steps=...)`` does) for the same weights afterwards.

    A model's steps receive a :class:`rfstream.train.device.DeviceBatch` of images, or of episodes an
    :class:`rfstream.episodes.batch.EpisodeBatch`, on the training device.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self._stage = DeviceStage(config.augment.device, seed=config.stream.seed)
        self._stream: TrainingStream[StreamBatch] = TrainingStream(self)
        self._loader: RankLoader[StreamBatch] | None = None

    def train_dataloader(self) -> TrainerBatches[StreamBatch]:
        """This rank's training batches, from where the trainer stands.

        Raises:
            ConfigError: if the trainer accumulates other batches an optimizer step than the stream puts in a window.
            StateError: if the checkpoint belongs to another stream.
        """
        if self._loader is None:  # one for a whole fit, since its hand-over holds a process group
            loader = ray_loader(self.config, "train")
            assert isinstance(loader, RankLoader)
            self._loader = loader
        windows, its = self._loader.windows_of_epoch, self._trainer.accumulate_grad_batches
        if windows.grad_accum != its:
            setting = f"stream.grad_accum={its}"
            if self.config.stream.global_batch is not None:
                setting = f"stream.global_batch={its * windows.world_size * windows.batch_size}"
            raise ConfigError(
                f"the trainer accumulates {its} batches an optimizer step and the stream makes windows of "
                f"{windows.grad_accum}: set Trainer(accumulate_grad_batches={windows.grad_accum}), or {setting}"
            )
        return self._stream.open(self._loader)

    def val_dataloader(self) -> EvaluationBatches | list[Any]:
        """This rank's part of the split in the role ``val``; none if the configuration has no such role."""
        return self._evaluation("val")

    def test_dataloader(self) -> EvaluationBatches | list[Any]:
        """This rank's part of the split in the role ``test``; none if the configuration has no such role."""
        return self._evaluation("test")

    def transfer_batch_to_device(self, batch: StreamBatch, device: torch.device, dataloader_idx: int) -> StreamBatch:
        """Copy to ``device``: to a GPU beside the steps that it still computes."""
        return transferred(batch, device)

    def on_after_batch_transfer(self, batch: StreamBatch, dataloader_idx: int) -> DeviceBatch | EpisodeBatch:
        """Scale, augment (in training alone) and normalise images on the device.

        Episodes stay as they are: :meth:`rfstream.episodes.batch.EpisodeBatch.pixels` scales what a model looks at.
        """
        if isinstance(batch, EpisodeBatch):
            return batch
        training = self._trainer.training
        number = self._stream.number_of(batch.step) if training else 0
        stage = self._stage.to(batch.images.device)
        out: DeviceBatch = stage(batch, augment=training, number=number)
        return out

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that the trainer consumed; empty if there is no training stream."""
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the place of a checkpoint: the stream is checked against it when the first batch is asked for."""
        self._stream.load_state_dict(state_dict)

    def teardown(self, stage: str) -> None:
        """End the stream.

        Raises:
            StateError: if the trainer ended without the batches that were left at the checkpoint.
        """
        self._loader = None
        self._stream.finish()

    def on_exception(self, exception: BaseException) -> None:
        """End the stream: Lightning tears nothing down after an exception.

        Raises:
            StreamError: if another rank failed before, with its reason.
        """
        self._loader = None
        self._stream.fail(exception)

    @property
    def _trainer(self) -> Any:
        if self.trainer is None:
            raise ConfigError("StreamDataModule needs a trainer: pass it as Trainer.fit(model, datamodule=...)")
        return self.trainer

    def _evaluation(self, role: str) -> EvaluationBatches | list[Any]:
        if not self.config.data.names_role(role):
            return []
        loader = ray_loader(self.config, role)
        assert isinstance(loader, EvaluationLoader)
        return EvaluationBatches(loader, self.config.stream.batch_size)


def consumed(trainer: Any) -> Position:
    """Where ``trainer`` stands: the epoch, and the batches of it that it has processed."""
    epochs = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress
    if epochs.started <= epochs.processed:  # between two epochs the batch counter still holds the finished one's
        return Position(epochs.processed, 0)
    if batches.is_last_batch and batches.current.processed == batches.current.ready:
        return Position(epochs.processed + 1, 0)  # the trainer's last: with limit_train_batches not the loader's
    return Position(epochs.processed, batches.current.processed)


class TrainingStream(Generic[B]):
    """The training stream of a data module: begins where the trainer stands, and keeps that place in checkpoints."""

    def __init__(self, module: pl.LightningDataModule) -> None:
        self._module = module
        self._loader: RankLoader[B] | None = None
        self._restored: dict[str, Any] | None = None

    def open(self, loader: RankLoader[B]) -> TrainerBatches[B]:
        """What the trainer iterates, with ``loader`` in the former one's place."""
        if loader is not self._loader:
            self.close()
        self._loader = loader
        return TrainerBatches(self, loader)

    def close(self) -> None:
        """End the execution, if one runs."""
        if self._loader is not None:
            self._loader.close()

    def fail(self, exception: BaseException) -> None:
        """End the execution after ``exception``, of which the other ranks get to know.

        Raises:
            StreamError: if another rank failed before, with its reason: without it this rank's own is but a sign of
                that, such as a connection that is gone.
        """
        if isinstance(exception, KeyboardInterrupt):
            self.close()
            return
        peers = peers_of_group()
        first = peers.failure()
        peers.failed(exception)
        self.close()
        if first is not None and first not in str(exception):
            raise StreamError(f"rank {peers.rank} can't go on: {first}") from exception

    def finish(self) -> None:
        """End the execution after the trainer's work.

        Raises:
            StateError: if the trainer ended without the batches that were left at the checkpoint.
        """
        self.close()
        self._refuse_skipped()

    def number_of(self, step: int) -> int:
        """The number over all ranks of the batch that is this rank's micro-step ``step``."""
        if self._loader is None:
            return 0
        return self._loader.windows_of_epoch.batch_of(self._loader.rank, step)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that the trainer consumed; empty if there is no stream.

        Raises:
            StateError: if the trainer went on to another epoch without the batches that were left at the checkpoint.
        """
        if self._restored:  # no batch since; the trainer's counters may be those of other ranks
            self._refuse_skipped()
            return self._restored
        if self._loader is None or self._module.trainer is None:
            return {}
        at = consumed(self._module.trainer)
        return self._loader.state_at(at.epoch, at.batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember the place of a checkpoint, to be checked when the first batch is asked for.

        Weights that are only evaluated leave the training where it is.
        """
        trainer = self._module.trainer
        if trainer is None or trainer.state.fn == pl.trainer.states.TrainerFn.FITTING:
            self._restored = dict(state)

    def start(self, loader: RankLoader[B]) -> bool:
        """Put ``loader`` where the checkpoint stands, if there was one, and else where the trainer does.

        Returns whether the trainer's epoch has batches left. A checkpoint of other ranks, saved after their last batch
        and before the epoch's end, leaves the trainer in an epoch that has none.

        Raises:
            StateError: if the checkpoint is another stream's, or its data and its training loop are not of one epoch.
        """
        trainer: Any = self._module.trainer
        if trainer is None:
            return True  # someone looks at the data without training
        at = consumed(trainer)
        if self._restored:
            saved = loader.place_of(self._restored)
            if saved.epoch != at.epoch:
                raise _of_two_epochs(saved.epoch, at.epoch)
            if at.epoch > trainer.fit_loop.epoch_progress.current.processed:
                return False
            self._restored = None
            at = saved
        loader.load_state_dict(loader.state_at(at.epoch, at.batch))
        if trainer.training:
            _count_from(trainer, at.batch)
        return True

    def _refuse_skipped(self) -> None:
        if not self._restored or self._module.trainer is None:
            return
        saved, at = self._restored.get("epoch"), consumed(self._module.trainer)
        if saved in range(at.epoch):
            raise _of_two_epochs(saved, at.epoch)


def _of_two_epochs(data: Any, loop: int) -> StateError:
    return StateError(
        f"the checkpoint's data stand in epoch {data} and its training loop in epoch {loop}: resume from another "
        "checkpoint, and with another number of ranks from one that was saved on a training step or at an epoch's end"
    )


def _count_from(trainer: Any, batch: int) -> None:
    """Tell ``trainer`` that it is in an epoch, after ``batch`` batches of it.

    A checkpoint counts a rank's batches, of which an epoch has others with other ranks or batch sizes. And Lightning
    begins no epoch when it resumes from one saved on an epoch's last batch, so that later ones would miss an epoch.
    """
    loop: Any = trainer.fit_loop
    for epochs in (loop.epoch_progress.current, loop.epoch_progress.total):
        epochs.ready = epochs.started = epochs.processed + 1
    batches = loop.epoch_loop.batch_progress
    counted = batches.current
    loop._data_fetcher.fetched += batch - counted.ready
    counted.ready = counted.started = counted.processed = counted.completed = batch
    batches.is_last_batch = False


class TrainerBatches(Generic[B]):
    """What the trainer iterates: each ``iter()`` begins, at its first batch, where the trainer then stands.

    The trainer makes its first iterator before it has restored its own counters, and keeps it.
    """

    def __init__(self, stream: TrainingStream[B], loader: RankLoader[B]) -> None:
        self._stream = stream
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[B]:
        if self._stream.start(self._loader):
            yield from self._loader

    def state_dict(self) -> dict[str, Any]:
        """The module's: tells Lightning that the loader can be resumed."""
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: the module's state, restored in every case, is the one that counts."""


class EvaluationBatches:
    """Evaluation batches of this rank, with the length of the rank that has most.

    Lightning skips the whole evaluation, hooks included, on a rank whose loader is empty, and the others would wait for
    it in the epoch's end for ever. The iterator ends after this rank's own batches.
    """

    def __init__(self, loader: EvaluationLoader[StreamBatch], batch_size: int) -> None:
        self._loader = loader
        self._length = len(evaluation_batches(loader.index.num_samples, loader.world_size, batch_size, rank=0))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[StreamBatch]:
        return iter(self._loader)

"""A small policy for robotics episodes, learned by behaviour cloning.

Behaviour cloning (Pomerleau 1989) is regression of what the demonstrator did on what was seen. As in ACT (Zhao et al.
2023, arXiv:2304.13705), one forward pass predicts a chunk of actions, under an L1 loss that leaves out padded steps.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rfstream.dataset import storage
from rfstream.episodes.batch import EpisodeBatch
from rfstream.episodes.index import EpisodeIndex
from rfstream.episodes.layout import PAD, Field
from rfstream.errors import ConfigError, DatasetError
from rfstream.train.lightning import pl

STATS = "meta/stats.json"
CAMERA_FEATURES = 64
"""What is kept of a camera's window."""


def build(index: EpisodeIndex, **model_args: Any) -> Policy:
    """The policy for the episodes of ``index``; ``model_args`` are those of :class:`Policy`."""
    return Policy(index, **model_args)


class Policy(pl.LightningModule):
    """About 0.1 million weights. Takes :class:`rfstream.episodes.batch.EpisodeBatch` and looks at all of its cameras.

    Args:
        index: what the samples hold; the dataset's own statistics standardise state and action.
        state: feature that says how the robot stands.
        action: feature that is learned; it needs a window in ``episodes.delta_timestamps``, which is the chunk.
        image_size: cameras are scaled to squares of this many pixels on the device.
        lr: learning rate (AdamW).
        width: channels of the first convolution.

    Raises:
        ConfigError: if there is no such feature, or the action has no window.
        DatasetError: if the dataset has no statistics of a feature.
    """

    def __init__(
        self,
        index: EpisodeIndex,
        state: str = "observation.state",
        action: str = "action",
        image_size: int = 64,
        lr: float = 1e-3,
        width: int = 16,
    ) -> None:
        super().__init__()
        seen, learned = _field(index, "state", state), _field(index, "action", action)
        if learned.steps is None:
            raise ConfigError(
                f"episodes.delta_timestamps has no window for {action}, which is the chunk that the policy predicts: "
                "give one, such as [0.0, 0.1]"
            )
        self.state, self.action, self.image_size, self.lr = state, action, image_size, lr
        self.cameras = [camera.name for camera in index.layout.cameras]
        self.state_scale, self.action_scale = _Scale(index, seen), _Scale(index, learned)
        self.eyes = nn.ModuleList(_eye(3 * _steps(camera), width) for camera in index.layout.cameras)
        self.chunk = (_steps(learned), *learned.shape)
        inputs = _steps(seen) * math.prod(seen.shape) + CAMERA_FEATURES * len(self.cameras)
        self.head = _mlp(inputs, 128, math.prod(self.chunk))
        self._validated = (0.0, 0)

    def forward(self, batch: EpisodeBatch) -> Tensor:
        """Chunks of actions, float32 (B, T, *shape) in the dataset's units."""
        return self.action_scale.undo(self._predict(batch))

    def training_step(self, batch: EpisodeBatch, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(batch))
        return loss

    def on_validation_epoch_start(self) -> None:
        """Forget the last evaluation."""
        self._validated = (0.0, 0)

    def validation_step(self, batch: EpisodeBatch, batch_idx: int) -> None:
        """Add to this rank's sum. No collective here: ranks may have different numbers of batches."""
        total, samples = self._validated
        self._validated = (total + float(self.loss(batch)) * len(batch), samples + len(batch))

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss`` over all ranks' samples, equal on every rank."""
        validated = torch.tensor(self._validated, device=self.device)
        total, samples = self.trainer.strategy.reduce(validated, reduce_op="sum")
        self.log("val/loss", total / samples, prog_bar=True, sync_dist=True, batch_size=1)

    def loss(self, batch: EpisodeBatch) -> Tensor:
        """Mean L1 distance of standardised actions; padded steps count as learned.

        They stay in the mean's denominator, so that ranks with more or less padding weigh the same: the gradient of a
        window does not depend on how many ranks share it.
        """
        wanted = self.action_scale(batch[self.action])
        learned = ~batch[self.action + PAD].view(*wanted.shape[:2], *[1] * (wanted.dim() - 2))
        return (F.l1_loss(self._predict(batch), wanted, reduction="none") * learned).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def _predict(self, batch: EpisodeBatch) -> Tensor:
        seen = [self.state_scale(batch[self.state]).reshape(len(batch), -1)]
        for camera, eye in zip(self.cameras, self.eyes, strict=True):
            frames = batch.pixels(camera).flatten(1, 2)  # the steps of a window as channels
            seen.append(eye(F.interpolate(frames, size=(self.image_size, self.image_size), mode="area")))
        chunk: Tensor = self.head(torch.cat(seen, dim=1))
        return chunk.view(-1, *self.chunk)


class _Scale(nn.Module):
    """Standardises a feature (..., *shape) by the dataset's statistics. What never varies is only centred."""

    mean: Tensor
    std: Tensor

    def __init__(self, index: EpisodeIndex, field: Field) -> None:
        super().__init__()
        mean, std = _statistics(index, field)
        self.register_buffer("mean", mean)
        self.register_buffer("std", torch.where(std > 1e-6, std, 1.0))

    def forward(self, values: Tensor) -> Tensor:
        return (values.float() - self.mean) / self.std

    def undo(self, values: Tensor) -> Tensor:
        """What :meth:`forward` was given."""
        return values * self.std + self.mean


def _field(index: EpisodeIndex, key: str, name: str) -> Field:
    known = {field.name: field for field in index.layout.tabular}
    if name not in known:
        raise ConfigError(f"train.model_args.{key}: no feature {name!r} is streamed (known here: {', '.join(known)})")
    return known[name]


def _steps(field: Field) -> int:
    return len(field.steps or (0,))


def _statistics(index: EpisodeIndex, field: Field) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a feature over the whole dataset, float32 of its shape."""
    url = storage.join(index.dataset.root, STATS)
    raw = storage.find_bytes(url, index.deadline_s)
    try:
        stats = json.loads(raw or b"{}")[field.name]
        mean, std = (torch.tensor(stats[name], dtype=torch.float32).reshape(field.shape) for name in ("mean", "std"))
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise DatasetError(
            f"{url}: there are no mean and std of {field.name}, of shape {list(field.shape)}, to standardise it with; "
            "have LeRobot compute the statistics"
        ) from None
    return mean, std


def _eye(channels: int, width: int) -> nn.Sequential:
    """(B, channels, size, size) to (B, :data:`CAMERA_FEATURES`). Without batch statistics, which ranks would not
    share."""
    sizes = (channels, width, 2 * width, 2 * width)
    layers = [
        layer
        for inputs, outputs in itertools.pairwise(sizes)
        for layer in (nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, CAMERA_FEATURES))


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )

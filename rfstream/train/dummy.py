"""A run that only loads data: what the stream gives where no model takes time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from rfstream.train.lightning import pl


def build(data: Any) -> Dummy:
    """A :class:`Dummy`, whatever the data are."""
    return Dummy()


class Dummy(pl.LightningModule):
    """Takes batches to the training device, and logs how many samples a second arrive at this rank.

    Its one weight is there for what trains weights, and does not change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self._began = 0.0
        self._samples = 0

    def on_train_start(self) -> None:
        """Count from the first batch on."""
        self._began = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log the mean rate since the first batch, which Ray's start delays."""
        now = time.perf_counter()
        if not self._began:
            self._began, self._samples = now, 0
        else:
            self._samples += len(batch)
            rate = self._samples / (now - self._began)
            self.log("dummy/samples_per_s", rate, prog_bar=True, batch_size=len(batch))
        return 0 * self.weight

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing: the batch is here."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One that has nothing to do."""
        return torch.optim.SGD(self.parameters(), lr=0.0)

"""Where a run's time goes, measured from Lightning's hooks."""

from __future__ import annotations

import time
from typing import Any

from rfstream.train.lightning import pl


class Timing(pl.Callback):
    """Measures throughput, waiting and the pause between epochs, on this rank.

    Between the end of one training step and the start of the next the trainer waits for the next batch, its copy to the
    device and the device stage. Validation is counted apart, and so is the wait for a run's first batch.
    """

    def __init__(self) -> None:
        self.images = 0
        """Images trained on."""

        self.waiting_s = 0.0
        """Between steps of one epoch."""
        self.stepping_s = 0.0
        """In steps."""
        self.between_epochs_s: list[float] = []
        """From an epoch's last step to the next one's first, without validation."""
        self.validating_s = 0.0
        self.first_batch_s = 0.0
        """From the start of training to the first step."""
        self._mark = 0.0
        self._validation_began = 0.0
        self._gap_validation = 0.0
        self._steps = 0
        self._epoch_began = False

    @property
    def images_per_s(self) -> float:
        """Images a second over all epochs, this rank; without the first wait and without validation."""
        spent = self.waiting_s + self.stepping_s + sum(self.between_epochs_s)
        return self.images / spent if spent else 0.0

    @property
    def waiting_share(self) -> float:
        """The part of an epoch's time, 0..1, in which the trainer waited for data."""
        spent = self.waiting_s + self.stepping_s
        return self.waiting_s / spent if spent else 0.0

    def report(self) -> dict[str, float]:
        """All figures, as they are logged at each epoch's end; ``time/between_epochs_s`` is the mean."""
        gaps = self.between_epochs_s
        return {
            "time/images": float(self.images),
            "time/images_per_s": self.images_per_s,
            "time/waiting_share": self.waiting_share,
            "time/between_epochs_s": sum(gaps) / len(gaps) if gaps else 0.0,
            "time/first_batch_s": self.first_batch_s,
            "time/validation_s": self.validating_s,
        }

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock."""
        self._mark = time.perf_counter()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """The next step is an epoch's first."""
        self._epoch_began = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch has arrived."""
        now = time.perf_counter()
        waited = now - self._mark
        if not self._steps:
            self.first_batch_s = waited
        elif self._epoch_began:
            self.between_epochs_s.append(waited - self._gap_validation)
        else:
            self.waiting_s += waited - self._gap_validation
        self._epoch_began = False
        self._gap_validation = 0.0
        self._mark = now

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step is done."""
        now = time.perf_counter()
        self.stepping_s += now - self._mark
        self._mark = now
        self._steps += 1
        self.images += len(batch[1] if isinstance(batch, tuple) else batch)  # RF-DETR's: (samples, targets)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the run so far: the mean over ranks."""
        pl_module.log_dict(self.report(), sync_dist=True)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the training clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Start the training clock again."""
        spent = time.perf_counter() - self._validation_began
        self.validating_s += spent
        self._gap_validation += spent

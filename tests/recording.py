"""A model for tests of launchers: writes down what each rank is given, and can die once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ray.train
import torch

from rfstream.train.lightning import pl


def build(
    class_names: list[str],
    folder: str,
    die_at: tuple[int, int] | None = None,
    fail_at: tuple[int, int] | None = None,
    linger_s: float = 0,
) -> Recording:
    assert class_names == ["disc", "square", "triangle", "star"]
    return Recording(Path(folder), die_at, fail_at, linger_s)


class Recording(pl.LightningModule):
    """Appends one line a batch to ``{folder}/rank{r}.jsonl``.

    Rank 1 dies before (epoch, step) ``die_at``, once, and raises in ``fail_at``. Rank 0 takes ``linger_s`` seconds to
    end after an exception.
    """

    def __init__(
        self, folder: Path, die_at: tuple[int, int] | None, fail_at: tuple[int, int] | None, linger_s: float
    ) -> None:
        super().__init__()
        self.folder = folder
        self.die_at = die_at
        self.fail_at = fail_at
        self.linger_s = linger_s
        self.layer = torch.nn.BatchNorm2d(3)  # with buffers, which DDP would keep equal by a collective a forward

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.die_at is not None and [batch.epoch, batch.step] == list(self.die_at) and self.global_rank == 1:
            marker = self.folder / "died"
            if not marker.exists():
                ray.train.get_all_reported_checkpoints()  # waits until Ray has the epoch's
                marker.touch()
                os._exit(1)
        if self.fail_at is not None and [batch.epoch, batch.step] == list(self.fail_at) and self.global_rank == 1:
            self._note("failed", at=time.time())
            raise RuntimeError("no luck in this step")
        self._note("train", epoch=batch.epoch, step=batch.step, keys=batch.keys, pixels=float(batch.images.sum()))
        return self.layer(batch.images).pow(2).mean() + self.layer.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch.images)
        self._note("val", epoch=self.current_epoch, images=batch.image_ids.tolist())

    def on_validation_end(self) -> None:
        self._note("buffers", epoch=self.current_epoch, mean=self.layer.running_mean.tolist())

    def configure_callbacks(self) -> list[pl.Callback]:
        return [_Lingering(self.linger_s)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def _note(self, kind: str, **values: Any) -> None:
        with (self.folder / f"rank{self.global_rank}.jsonl").open("a") as out:
            out.write(json.dumps({"kind": kind, "rank": self.global_rank, **values}) + "\n")


class _Lingering(pl.Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if trainer.global_rank == 0:
            time.sleep(self.seconds)


def notes(folder: Path) -> list[dict[str, Any]]:
    """All lines of all ranks."""
    return [json.loads(line) for path in sorted(folder.glob("rank*.jsonl")) for line in path.read_text().splitlines()]

"""Models for tests of training on episodes: they write down each step, and can stop a run at one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from rfstream.episodes.batch import EpisodeBatch
from rfstream.episodes.index import EpisodeIndex
from rfstream.train.dummy import Dummy
from rfstream.train.policy import Policy


class _Noted:
    """Appends a line for each step to ``{folder}/rank{r}.jsonl``, and raises before (epoch, step) ``fail_at``."""

    folder: Path
    fail_at: list[int] | None

    def training_step(self, batch: EpisodeBatch, batch_idx: int) -> Tensor:
        if [batch.epoch, batch.step] == self.fail_at:
            raise RuntimeError("no luck in this step")
        loss: Tensor = super().training_step(batch, batch_idx)
        rank: int = self.global_rank
        note = {"epoch": batch.epoch, "step": batch.step, "rank": rank, "keys": batch.keys, "loss": loss.item()}
        with (self.folder / f"rank{rank}.jsonl").open("a") as out:
            out.write(json.dumps(note) + "\n")
        return loss


class NotedPolicy(_Noted, Policy):
    pass


class NotedDummy(_Noted, Dummy):
    pass


def policy(index: EpisodeIndex, folder: str, fail_at: list[int] | None = None, **args: Any) -> NotedPolicy:
    return _noting(NotedPolicy(index, **args), folder, fail_at)


def dummy(index: EpisodeIndex, folder: str, fail_at: list[int] | None = None) -> NotedDummy:
    return _noting(NotedDummy(), folder, fail_at)


def _noting(model: Any, folder: str, fail_at: list[int] | None) -> Any:
    model.folder, model.fail_at = Path(folder), fail_at
    model.folder.mkdir(exist_ok=True)
    return model

"""What is read together: contiguous batches of an epoch, with all that their order depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rfstream.plan.keys import IntArray
from rfstream.plan.mixture import Mixture
from rfstream.plan.order import Block, EpochOrder, Fragments, epoch_order, rows_at
from rfstream.plan.position import Position
from rfstream.plan.windows import Windows


@dataclass(frozen=True)
class Task:
    """Batches ``lo <= m < hi`` of an epoch. Small: it travels to whoever reads them."""

    epoch: int
    lo: int
    hi: int
    batch_size: int
    samples: int
    blocks: tuple[Block, ...]

    def rows(self, lo: int, hi: int) -> IntArray:
        """Index rows of batches ``lo <= m < hi``, int64 ((hi - lo) * batch_size,)."""
        return rows_at(self.blocks, self.samples, lo * self.batch_size, hi * self.batch_size)


@dataclass(frozen=True)
class StreamPlan:
    """All epochs of a training stream."""

    fragments: Fragments | Mixture
    windows: Windows
    seed: int
    shuffle: bool
    block_bytes: int

    def order(self, epoch: int) -> EpochOrder:
        """The order of ``epoch``."""
        fragments = self.fragments.of_epoch(self.seed, epoch, self.shuffle)
        return epoch_order(fragments, seed=self.seed, epoch=epoch, block_bytes=self.block_bytes, shuffle=self.shuffle)

    def tasks(self, start: Position, epochs: int, batches_per_task: int | None) -> Iterator[Task]:
        """Tasks from ``start`` to the end of ``epochs`` epochs (the first included), in order.

        ``batches_per_task`` cuts each epoch into that many batches a task; ``None`` cuts at the edges of shuffle
        blocks, a batch that crosses one belonging to the later block and the tail to the last.
        """
        for epoch in range(start.epoch, start.epoch + epochs):
            order = self.order(epoch)
            first = start.batch * self.windows.world_size if epoch == start.epoch else 0
            for lo, hi in pairwise(self._edges(order, first, batches_per_task)):
                yield self.task(order, lo, hi)

    def task(self, order: EpochOrder, lo: int, hi: int) -> Task:
        """Batches ``lo <= m < hi`` of ``order``'s epoch."""
        size = self.windows.batch_size
        blocks = tuple(order.block(b) for b in order.covering(lo * size, hi * size))
        return Task(order.epoch, lo, hi, size, order.samples, blocks)

    def _edges(self, order: EpochOrder, first: int, batches_per_task: int | None) -> Iterator[int]:
        last = self.windows.batches
        if batches_per_task is not None:
            yield from range(first, last, batches_per_task)
        else:
            yield first
            # A block's batches are those that end inside it: batch m ends at position (m + 1) * B.
            inner = order.starts[1:-1] // self.windows.batch_size
            yield from np.unique(inner[(inner > first) & (inner < last)]).tolist()
        yield last

"""Batches, windows and ranks: how an epoch's order is cut up. Integers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rfstream.errors import PlanError

Tail = Literal["wrap", "drop"]


@dataclass(frozen=True)
class Windows:
    """How ``samples`` are dealt to ``world_size`` ranks in windows of ``grad_accum`` batches of ``batch_size`` each.

    Batch m (of the whole world) holds positions ``m * B <= p < (m + 1) * B`` and is micro-step ``m // W`` of rank ``m
    % W``. A window is complete or absent. ``tail="wrap"`` completes the last one with further samples of the same
    epoch, ``tail="drop"`` leaves the incomplete one out.

    Raises:
        PlanError: under ``drop`` when the samples do not fill one window.
    """

    samples: int
    world_size: int
    grad_accum: int
    batch_size: int
    tail: Tail

    def __post_init__(self) -> None:
        if min(self.world_size, self.grad_accum, self.batch_size) < 1:
            raise PlanError("world size, grad_accum and batch_size must be at least 1")
        if self.samples < 1:
            raise PlanError("the split has no samples")
        if self.windows == 0:
            raise PlanError(
                f"{self.samples} samples do not fill one window of {self.window_samples} = world size "
                f"{self.world_size} x "
                f"stream.grad_accum {self.grad_accum} x stream.batch_size {self.batch_size}: lower one of them, or set "
                "stream.tail=wrap"
            )

    @property
    def window_samples(self) -> int:
        """G: samples that one optimizer step consumes over all ranks."""
        return self.world_size * self.grad_accum * self.batch_size

    @property
    def windows(self) -> int:
        """Optimizer steps in an epoch."""
        whole, rest = divmod(self.samples, self.window_samples)
        return whole + (1 if rest and self.tail == "wrap" else 0)

    @property
    def positions(self) -> int:
        """Positions an epoch emits over all ranks; under ``wrap`` those from ``samples`` on repeat the epoch's
        first."""
        return self.windows * self.window_samples

    @property
    def batches(self) -> int:
        """Batches in an epoch over all ranks."""
        return self.windows * self.grad_accum * self.world_size

    @property
    def batches_per_rank(self) -> int:
        """Batches in an epoch for one rank: ``len(loader)``, equal on all ranks."""
        return self.windows * self.grad_accum

    def batch_of(self, rank: int, step: int) -> int:
        """The batch that is micro-step ``step`` of ``rank``."""
        return step * self.world_size + rank


def accumulation(global_batch: int, world_size: int, batch_size: int) -> int:
    """``grad_accum`` such that a window holds exactly ``global_batch`` samples.

    Raises:
        PlanError: if it does not divide.
    """
    per_step = world_size * batch_size
    if global_batch % per_step:
        raise PlanError(
            f"stream.global_batch {global_batch} is not a multiple of world size {world_size} x stream.batch_size "
            f"{batch_size} = {per_step}: change one of them"
        )
    return global_batch // per_step


def evaluation_batches(
    samples: int, world_size: int, batch_size: int, rank: int, *, even: bool = False
) -> list[tuple[int, int]]:
    """Index rows ``(lo, hi)`` of each evaluation batch of ``rank``: every sample exactly once over all ranks.

    The last batch may be short, and ranks may differ by one batch: nothing is padded, dropped or repeated. With
    ``even``, a rank that is one short gets the split's first batch again, for evaluations that are collective.
    """
    starts = list(range(rank * batch_size, samples, world_size * batch_size))
    if even and len(starts) < len(range(0, samples, world_size * batch_size)):
        starts.append(0)
    return [(lo, min(lo + batch_size, samples)) for lo in starts]

"""A batch's way to the training device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor


class Movable(Protocol):
    """A batch of tensors."""

    def moved(self: M, move: Callable[[Tensor], Tensor]) -> M:
        """The batch with what ``move`` makes of each tensor that belongs on the device."""
        ...


M = TypeVar("M", bound=Movable)


def transferred(batch: M, device: torch.device) -> M:
    """``batch`` on ``device``, for whatever is then launched on its current stream.

    A GPU copies from page-locked memory on a stream of its own, beside the steps that it still computes: the CPU does
    not wait for the copy, only what is launched after it does.
    """
    if device.type != "cuda":
        return batch.moved(lambda tensor: tensor.to(device))
    copies, steps = _copy_stream(device), torch.cuda.current_stream(device)

    def copied(tensor: Tensor) -> Tensor:
        there = tensor.pin_memory().to(device, non_blocking=True)
        there.record_stream(steps)  # or the next batch would be copied into its memory while steps still read it
        return there

    with torch.cuda.stream(copies):
        moved = batch.moved(copied)
    steps.wait_stream(copies)
    return moved


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

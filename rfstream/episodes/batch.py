"""A batch of episodes' samples as the training process holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rfstream.batch import copied_pixels
from rfstream.episodes.layout import RECORDS, TASK
from rfstream.stream.wire import WireBatch


@dataclass(frozen=True, eq=False)
class EpisodeBatch:
    """B samples, each a frame of an episode with its windows.

    ``tensors``: by LeRobot's names, each feature of numbers as (B, T, *shape) of its own dtype, or (B, *shape) if it
    has no window; ``{feature}_is_pad`` bool (B, T) for those that have one; each of ``cameras`` as uint8
    (B, T, 3, H, W). ``task``: B texts. ``keys``: "episode-frame". ``step`` is this rank's micro-step in ``epoch``;
    ``window_end`` says that the optimizer steps after it. The memory belongs to the batch: in-place operations are
    safe.
    """

    tensors: dict[str, Tensor]
    cameras: tuple[str, ...]
    task: list[str]
    keys: list[str]
    epoch: int
    step: int
    window_end: bool

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor by its name."""
        return self.tensors[name]

    def pixels(self, camera: str) -> Tensor:
        """A camera's frames as LeRobot gives them: float32 of 0 to 1, on the device where the batch is."""
        return self.tensors[camera].float() / 255

    def compared(self, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """Pixels and numbers of the sample in ``slot``: what a ledger records."""
        numbers = [values[slot] for name, values in sorted(self.tensors.items()) if name not in self.cameras]
        return [self.tensors[camera][slot] for camera in self.cameras], numbers

    def to(self, device: torch.device | str, non_blocking: bool = False) -> EpisodeBatch:
        """The batch on ``device``; ``non_blocking`` overlaps the copy when the batch is pinned."""
        return self.moved(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> EpisodeBatch:
        """The batch in page-locked memory (needs CUDA)."""
        return self.moved(Tensor.pin_memory)

    def moved(self, move: Callable[[Tensor], Tensor]) -> EpisodeBatch:
        """The batch with what ``move`` makes of each tensor that belongs on the device."""
        return replace(self, tensors={name: move(values) for name, values in self.tensors.items()})


def episode_batch_of(tasks: Sequence[str], wire: WireBatch, *, step: int, window_end: bool) -> EpisodeBatch:
    """Copy a batch off the wire once, into tensors of its own; ``tasks`` are the dataset's."""
    records = wire.arrays[RECORDS]
    names = [name for name in records.dtype.names or () if name != TASK]
    tensors = {name: torch.from_numpy(np.array(records[name])) for name in names}
    cameras = tuple(name for name in wire.arrays if name != RECORDS)
    tensors |= {camera: copied_pixels(wire.arrays[camera]) for camera in cameras}
    task = [tasks[at] for at in records[TASK]]
    return EpisodeBatch(tensors, cameras, task, wire.keys, wire.epoch, step, window_end)

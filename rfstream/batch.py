"""A batch as the training process holds it: torch tensors over a few contiguous buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rfstream import recycle
from rfstream.stream.wire import WireBatch

_FRAME_FIELDS = ("images", "sizes", "orig_sizes", "image_ids", "offsets")


@dataclass(frozen=True, eq=False)
class Targets(Sequence[dict[str, Tensor]]):
    """Targets of all images of a batch, laid end to end; indexing gives one image's as views, made on demand.

    ``flat``: boxes float32 (N, 4) xyxy in pixels of the padded frame, labels int64 (N,), area float32 (N,) square
    pixels, iscrowd int64 (N,), and with masks, masks uint8 (N, ceil(H * W / 8)): eight pixels a byte, most significant
    bit first. ``offsets`` int64 (B + 1,): objects ``offsets[i]:offsets[i + 1]`` belong to image i. ``frame``: (H, W)
    of the batch.
    """

    flat: dict[str, Tensor]
    offsets: Tensor
    frame: tuple[int, int]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Tensor]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Image ``index``'s fields; ``masks`` unpacked to bool (n, H, W)."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of a batch of {len(self)}")
        lo, hi = self.offsets[index % len(self)], self.offsets[index % len(self) + 1]
        fields = {name: values[lo:hi] for name, values in self.flat.items()}
        if "masks" in fields:
            fields["masks"] = unpack_masks(fields["masks"], *self.frame)
        return fields

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, eq=False)
class Batch:
    """``images`` uint8 (B, 3, H, W), padded with zeros at the bottom and right to a common size.

    ``sizes`` int64 (B, 2): height and width of each image inside the frame; ``orig_sizes`` int64 (B, 2): those of the
    whole image in its file; ``image_ids`` int64 (B,); ``keys``: sample keys. ``step`` is this rank's micro-step in
    ``epoch``; ``window_end`` says that the optimizer steps after it. The memory belongs to the batch: in-place
    operations are safe.
    """

    images: Tensor
    sizes: Tensor
    orig_sizes: Tensor
    image_ids: Tensor
    targets: Targets
    keys: list[str]
    epoch: int
    step: int
    window_end: bool

    def __len__(self) -> int:
        return len(self.images)

    @property
    def mask(self) -> Tensor:
        """Padding mask, bool (B, H, W): True where there is no image."""
        height, width = self.images.shape[-2:]
        device = self.images.device
        below = torch.arange(height, device=device)[None, :] >= self.sizes[:, :1]
        right = torch.arange(width, device=device)[None, :] >= self.sizes[:, 1:]
        return below[:, :, None] | right[:, None, :]

    def compared(self, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """Pixels and targets of the image in ``slot``, without what pads the batch: what a ledger records."""
        height, width = self.sizes[slot].tolist()
        target = self.targets[slot]
        if "masks" in target:
            target["masks"] = target["masks"][:, :height, :width]
        return [self.images[slot, :, :height, :width]], [values for _, values in sorted(target.items())]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on ``device``; ``non_blocking`` overlaps the copy when the batch is pinned."""
        return self.moved(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory (needs CUDA)."""
        return self.moved(Tensor.pin_memory)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with what ``move`` makes of each tensor that belongs on the device."""
        targets = replace(
            self.targets,
            flat={name: move(values) for name, values in self.targets.flat.items()},
            offsets=self.targets.offsets,  # slicing reads it on the CPU
        )
        return replace(
            self,
            images=move(self.images),
            sizes=move(self.sizes),
            orig_sizes=move(self.orig_sizes),
            image_ids=move(self.image_ids),
            targets=targets,
        )


def unpack_masks(packed: Tensor, height: int, width: int) -> Tensor:
    """Bit-packed masks uint8 (n, ceil(height * width / 8)) to bool (n, height, width), on the masks' own device."""
    bits = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=packed.device)
    pixels = (packed[:, :, None] & bits).bool().flatten(1)
    return pixels[:, : height * width].view(len(packed), height, width)


def batch_of(wire: WireBatch, *, step: int, window_end: bool) -> Batch:
    """Copy a batch off the wire once, into tensors of its own: a view of shared memory must not leave the loader."""
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in wire.arrays.items() if name != "images"}
    images = copied_pixels(wire.arrays["images"])
    flat = {name: values for name, values in tensors.items() if name not in _FRAME_FIELDS}
    return Batch(
        images=images,
        sizes=tensors["sizes"],
        orig_sizes=tensors["orig_sizes"],
        image_ids=tensors["image_ids"],
        targets=Targets(flat, tensors["offsets"], (images.shape[2], images.shape[3])),
        keys=wire.keys,
        epoch=wire.epoch,
        step=step,
        window_end=window_end,
    )


def copied_pixels(pixels: npt.NDArray[np.uint8]) -> Tensor:
    """A copy in memory that is used again once no tensor holds it: page-locked where this process uses a GPU already,
    so that the copy to it needs none before."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.from_numpy(recycle.copied(pixels))
    # PyTorch itself keeps page-locked memory; the device, since a default of "cuda" would be taken here too.
    copy = torch.empty(pixels.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
    copy.numpy()[...] = pixels
    return copy

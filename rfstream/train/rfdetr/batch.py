"""An RF-DETR batch on the rank: uint8 and bit-packed until it is on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import cv2
import numpy as np
import numpy.typing as npt
import torch
from rfdetr.datasets.transforms import Normalize
from rfdetr.utilities.tensors import NestedTensor, PackedTargets
from torch import Tensor
from torchvision.transforms.v2 import ToDtype

from rfstream import recycle
from rfstream.batch import copied_pixels
from rfstream.stream.wire import WireBatch
from rfstream.train.rfdetr.decode import FIELD, SHAPE

_TO_FLOAT = ToDtype(torch.float32, scale=True)
_NORMALIZE = Normalize()


@dataclass(frozen=True, eq=False)
class RFDETRBatch:
    """``images`` uint8 (B, 3, H, W), zero where there is padding; ``sizes`` int64 (B, 2): height and width of each.

    ``flat``: each target field laid end to end over the batch, one-dimensional, in the dtypes of RF-DETR's targets;
    masks as bits, eight pixels a byte, most significant first. ``shapes``: each image's shape of each field.
    ``normalize``: whether RF-DETR's normalisation is part of the batch (not where its Kornia pipeline comes after).
    ``step`` is this rank's micro-step in ``epoch``; ``window_end`` says that the optimizer steps after it.

    It unpacks as RF-DETR's own batch does: ``samples, targets = batch``.
    """

    images: Tensor
    sizes: Tensor
    flat: dict[str, Tensor]
    shapes: dict[str, list[list[int]]]
    keys: list[str]
    epoch: int
    step: int
    window_end: bool
    normalize: bool

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[NestedTensor | PackedTargets]:
        return iter(self.collated("cpu"))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RFDETRBatch:
        """The batch on ``device``, still packed: one transfer a buffer."""
        return self.moved(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RFDETRBatch:
        """The batch in page-locked memory (needs CUDA)."""
        return self.moved(Tensor.pin_memory)

    def samples(self) -> NestedTensor:
        """RF-DETR's images on the batch's device: float32 (B, 3, H, W), mask bool (B, H, W), true in the padding.

        The same bits as RF-DETR makes of each image before it pads.
        """
        height, width = self.images.shape[-2:]
        images = (
            _from_table(self.images, self.normalize) if self.images.is_cpu else _floats(self.images, self.normalize)
        )
        no_padding = bool((self.sizes == torch.tensor([height, width])).all())
        mask = torch.zeros((len(images), height, width), dtype=torch.bool, device=images.device)
        if not no_padding:
            for image, padding, (h, w) in zip(images, mask, self.sizes.tolist(), strict=True):
                image[:, h:], image[:, :, w:] = 0, 0
                padding[h:], padding[:, w:] = True, True
        return NestedTensor(images, mask, no_padding)

    def collated(self, device: torch.device | str) -> tuple[NestedTensor, PackedTargets]:
        """What RF-DETR's collate function returns, on ``device``."""
        moved = self.to(device)
        flat = dict(moved.flat)
        if "masks" in flat:
            flat["masks"] = _bits(flat["masks"], 0, sum(map(_numel, self.shapes["masks"])))
        return moved.samples(), PackedTargets(flat, self.shapes, len(self))

    def targets(self) -> list[dict[str, Tensor]]:
        """Each image's target on the batch's device, as views of the flat fields; masks unpacked one image at a
        time."""
        targets: list[dict[str, Tensor]] = [{} for _ in range(len(self))]
        for name, flat in self.flat.items():
            first = 0
            for target, shape in zip(targets, self.shapes[name], strict=True):
                last = first + _numel(shape)
                values = _bits(flat, first, last) if name == "masks" else flat[first:last]
                target[name] = values.reshape(shape)
                first = last
        return targets

    def moved(self, move: Callable[[Tensor], Tensor]) -> RFDETRBatch:
        """The batch with what ``move`` makes of each tensor that belongs on the device."""
        # Sizes stay on the CPU, where they are read.
        return replace(self, images=move(self.images), flat={name: move(flat) for name, flat in self.flat.items()})


def rfdetr_batch_of(wire: WireBatch, *, step: int, window_end: bool, normalize: bool) -> RFDETRBatch:
    """Copy a batch off the wire once, into tensors of its own: a view of shared memory must not leave the loader."""
    arrays = wire.arrays
    names = [name.removeprefix(FIELD) for name in arrays if name.startswith(FIELD)]
    return RFDETRBatch(
        images=copied_pixels(arrays["images"]),
        sizes=torch.from_numpy(np.array(arrays["sizes"])),
        flat={name: torch.from_numpy(np.array(arrays[FIELD + name])) for name in names},
        shapes={name: arrays[SHAPE + name].tolist() for name in names},
        keys=wire.keys,
        epoch=wire.epoch,
        step=step,
        window_end=window_end,
        normalize=normalize,
    )


def _floats(images: Tensor, normalize: bool) -> Tensor:
    """RF-DETR's arithmetic on uint8 (B, 3, H, W)."""
    scaled: Tensor = _TO_FLOAT(images)
    return _NORMALIZE(scaled)[0] if normalize else scaled


@cache
def _table(normalize: bool) -> npt.NDArray[np.float32]:
    """What :func:`_floats` makes of each of the 256 values in each channel, float32 (3, 256)."""
    values = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
    table: npt.NDArray[np.float32] = _floats(values[None], normalize)[0, :, 0].numpy()
    return table


def _from_table(images: Tensor, normalize: bool) -> Tensor:
    """:func:`_floats` on the CPU, in one pass instead of four: the same bits for an eighth of the time."""
    source, table = images.numpy(), _table(normalize)
    floats = recycle.empty(source.shape, np.float32)
    for image, out in zip(source, floats, strict=True):
        for plane, values, result in zip(image, table, out, strict=True):
            cv2.LUT(plane, values, result)
    return torch.from_numpy(floats)


def _bits(packed: Tensor, first: int, last: int) -> Tensor:
    """Bits ``first <= i < last`` of ``packed`` as bool (last - first,), in one allocation of a byte a bit."""
    covering = packed[first // 8 : -(-last // 8), None]
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    bits = (covering >> shifts).bitwise_and_(1).view(torch.bool).flatten()
    return bits[first % 8 : first % 8 + last - first]


def _numel(shape: list[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))

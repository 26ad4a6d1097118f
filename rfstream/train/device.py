"""The stage on the training device: uint8 to float, Kornia augmentation, normalisation.

It runs after the copy to the device, so a quarter of the bytes cross. Boxes, instance masks and the padding mask move
with the pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rfstream.batch import Batch, unpack_masks
from rfstream.config import DeviceConfig, Normalize
from rfstream.errors import ConfigError
from rfstream.plan.keys import key_of

IMAGENET = Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""Channel statistics of ImageNet's training images, scaled to 0..1: what torchvision's weights were trained with."""


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """A batch as the model takes it, on the training device.

    ``images`` float32 (B, 3, H, W), normalised, 0 where there is padding; ``mask`` bool (B, H, W), true where there is
    padding; ``targets[i]``: boxes float32 (n, 4) xyxy in pixels of the frame, labels int64 (n,), area float32 (n,),
    iscrowd int64 (n,), and masks bool (n, H, W) where asked for. The rest as in :class:`rfstream.batch.Batch`.
    """

    images: Tensor
    mask: Tensor
    targets: Sequence[Mapping[str, Tensor]]
    image_ids: Tensor
    orig_sizes: Tensor
    keys: list[str]
    epoch: int
    step: int
    window_end: bool

    def __len__(self) -> int:
        return len(self.images)


class DeviceStage(nn.Module):
    """Turns a :class:`Batch` into a :class:`DeviceBatch` on whatever device it lies.

    Without Kornia, the arithmetic is that of torchvision's ``ToDtype(float32, scale=True)`` and ``Normalize``, bit for
    bit.

    Random draws are a function of (seed, epoch, number of the batch over all ranks) and of nothing else, so a resumed
    run repeats them; the global generators are left as they were. They are drawn for a whole batch at once: unlike the
    CPU augmentation they change with ``stream.batch_size``.

    Raises:
        ConfigError: if a Kornia augmentation does not exist, can't be built, or can't carry boxes and masks along.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: DeviceConfig, *, seed: int) -> None:
        super().__init__()
        self.seed = seed
        statistics = IMAGENET if config.normalize == "imagenet" else config.normalize
        self.normalize = isinstance(statistics, Normalize)
        if isinstance(statistics, Normalize):
            self.register_buffer("mean", torch.tensor(statistics.mean).view(3, 1, 1), persistent=False)
            self.register_buffer("std", torch.tensor(statistics.std).view(3, 1, 1), persistent=False)
        self.kornia = _sequence(config.kornia) if config.kornia else None

    @torch.no_grad()
    def forward(self, batch: Batch, *, augment: bool, number: int = 0) -> DeviceBatch:
        """Scale, augment where ``augment`` says so, normalise. ``number`` counts the epoch's batches over all ranks."""
        images = batch.images.to(torch.float32).mul_(1.0 / 255)
        mask = batch.mask
        targets: Sequence[Mapping[str, Tensor]] = batch.targets
        if augment and self.kornia is not None:
            images, mask, targets = self._augment(images, mask, batch, number)
        if self.normalize:
            images = images.sub_(self.mean).div_(self.std)
        return DeviceBatch(
            images=images.masked_fill_(mask[:, None], 0),
            mask=mask,
            targets=targets,
            image_ids=batch.image_ids,
            orig_sizes=batch.orig_sizes,
            keys=batch.keys,
            epoch=batch.epoch,
            step=batch.step,
            window_end=batch.window_end,
        )

    def _augment(
        self, images: Tensor, mask: Tensor, batch: Batch, number: int
    ) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
        assert self.kornia is not None
        rows = _Rows(batch.targets.offsets, images.device)
        # Kornia's own boxes count pixels inclusively: a flip maps x to W - 1 - x, one pixel off for edges. Corners as
        # points about pixel centres (x - 1/2) are exact under every transform.
        corners = rows.pad(batch.targets.flat["boxes"][:, [0, 1, 2, 1, 2, 3, 0, 3]].view(-1, 4, 2)) - 0.5
        planes = ~mask[:, None]
        if "masks" in batch.targets.flat:
            instances = unpack_masks(batch.targets.flat["masks"], *batch.targets.frame)
            planes = torch.cat([planes, rows.pad(instances)], dim=1)
        frame = images.shape
        cuda = [images.device] if images.is_cuda else []
        with torch.random.fork_rng(devices=cuda), torch.autocast(images.device.type, enabled=False):
            torch.manual_seed(key_of("rfstream.device", self.seed, batch.epoch, number) & (2**63 - 1))
            images, points, moved = self.kornia(images, corners.flatten(1, 2), planes.float())
        if images.shape != frame:
            raise ConfigError(
                f"augment.device.kornia turns {frame[3]}x{frame[2]} images into {images.shape[3]}x{images.shape[2]}: "
                "the frame must stay, so resize in augment.cpu"
            )
        shown = moved > 0.5
        boxes = rows.flat(points.view(rows.batch, rows.most, 4, 2) + 0.5)
        whole = torch.cat([boxes.amin(1), boxes.amax(1)], dim=1)
        matrix: Tensor = self.kornia.transform_matrix  # type: ignore[assignment]
        growth = torch.linalg.det(matrix[:, :2, :2]).abs()[rows.image]
        masks = rows.flat(shown[:, 1:]) if "masks" in batch.targets.flat else None
        return images, ~shown[:, 0], rows.split(_clip(batch.targets.flat, whole, growth, masks, frame))


def _clip(
    flat: Mapping[str, Tensor], boxes: Tensor, growth: Tensor, masks: Tensor | None, frame: torch.Size
) -> tuple[dict[str, Tensor], Tensor]:
    """All fields with boxes clipped to the frame, and which objects stay.

    An object goes when less than a pixel of its width or height is left, unless it was as small before. Its area grows
    as the transform does and shrinks as its box is clipped: exact for shapes that fill their box evenly, close for
    others.
    """
    edges = boxes.new_tensor([frame[3], frame[2], frame[3], frame[2]])
    clipped = torch.minimum(boxes.clamp(min=0), edges)
    before, after = boxes[:, 2:] - boxes[:, :2], clipped[:, 2:] - clipped[:, :2]
    keep = ((after > 0) & (after >= before.clamp(max=1))).all(1)
    share = after.prod(1) / before.prod(1).clamp(min=1e-9)
    fields = {**flat, "boxes": clipped, "area": flat["area"] * growth * share}
    if masks is not None:
        fields["masks"] = masks
    return fields, keep


class _Rows:
    """Objects laid end to end against objects by image: (N, ...) and (B, most objects of an image, ...)."""

    def __init__(self, offsets: Tensor, device: torch.device) -> None:
        counts = offsets.diff()
        self.batch = len(counts)
        self.most = int(counts.max()) if len(counts) else 0
        image = torch.repeat_interleave(torch.arange(self.batch), counts)
        place = torch.arange(len(image)) - offsets[:-1][image]
        self.image, self.place = image.to(device), place.to(device)

    def pad(self, values: Tensor) -> Tensor:
        """(N, ...) to (B, most, ...), zeros where an image has fewer."""
        padded = values.new_zeros(self.batch, self.most, *values.shape[1:])
        padded[self.image, self.place] = values
        return padded

    def flat(self, values: Tensor) -> Tensor:
        """(B, most, ...) to (N, ...)."""
        return values[self.image, self.place]

    def split(self, fields_keep: tuple[dict[str, Tensor], Tensor]) -> list[dict[str, Tensor]]:
        """One dict an image of the objects that stay."""
        fields, keep = fields_keep
        counts = torch.bincount(self.image[keep], minlength=self.batch).tolist()
        parts = {name: torch.split(values[keep], counts) for name, values in fields.items()}
        return [{name: values[i] for name, values in parts.items()} for i in range(self.batch)]


def _sequence(specs: Sequence[Mapping[str, Any]]) -> nn.Module:
    import kornia.augmentation as K  # slow to import, and only needed here

    operations = [_operation(K, dict(spec), f"augment.device.kornia[{i}]") for i, spec in enumerate(specs)]
    return K.AugmentationSequential(*operations, data_keys=["input", "keypoints", "mask"])  # type: ignore[no-any-return]


def _operation(kornia: Any, spec: dict[str, Any], key: str) -> nn.Module:
    from kornia.augmentation._2d.geometric.base import GeometricAugmentationBase2D
    from kornia.augmentation._2d.intensity.base import IntensityAugmentationBase2D

    name = spec.pop("name", None)
    kind = getattr(kornia, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type):
        raise ConfigError(
            f"{key}: kornia.augmentation has no {name!r}; write it as {{name: RandomHorizontalFlip, p: 0.5}}"
        )
    if not issubclass(kind, (GeometricAugmentationBase2D, IntensityAugmentationBase2D)):
        raise ConfigError(
            f"{key}: {name} does not move boxes and masks with the pixels; take a change of colour, or an affine one"
        )
    try:
        return kind(**spec)  # type: ignore[no-any-return]
    except Exception as error:  # Kornia raises whatever its constructors raise
        raise ConfigError(f"{key}: {name} can't be built with {spec}: {error}") from error

"""A small anchor-free detector that trains in minutes on a CPU: enough to show that the data teach something.

One heatmap a class marks object centres, and every cell near a centre says how far the box's sides are: the centres and
focal loss of CenterNet (Zhou et al. 2019, arXiv:1904.07850), boxes learned in a Gaussian neighbourhood with a GIoU loss
as in TTFNet (Liu et al. 2020, arXiv:1909.00700), which is what makes it learn within a few epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rfstream.train.lightning import pl
from rfstream.train.metrics import Judged, gather, judged, mean_average_precision

STRIDE = 4
"""Input pixels per output cell, each way."""
REACH = 16.0
"""A box side's distance from its cell is predicted in units of this many pixels."""
MAX_FOUND = 50
"""Most detections of one image."""
BOX_WEIGHT = 2.0


class Found(NamedTuple):
    """Detections of one image, best first: boxes float32 (n, 4) xyxy pixels, labels int64 (n,), scores float32 (n,)."""

    boxes: Tensor
    labels: Tensor
    scores: Tensor


def build(class_names: Sequence[str], **model_args: Any) -> TinyDetector:
    """The detector for ``class_names``; ``model_args`` are those of :class:`TinyDetector`."""
    return TinyDetector(class_names, **model_args)


class TinyDetector(pl.LightningModule):
    """About 0.2 million weights. Takes :class:`rfstream.train.device.DeviceBatch` as it leaves the device stage.

    Args:
        class_names: one name a label, label 0 first.
        lr: peak of a one-cycle learning rate (AdamW).
        width: channels of the first stage.
    """

    def __init__(self, class_names: Sequence[str], lr: float = 4e-3, width: int = 16) -> None:
        super().__init__()
        self.class_names = list(class_names)
        self.lr = lr
        self.network = _Network(len(self.class_names), width).to(memory_format=torch.channels_last)  # faster on a CPU
        self._judged: dict[int, Judged] = {}

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Of (B, 3, H, W): class logits (B, C, H/4, W/4), pixels from each cell to its box's sides (B, 4, H/4, W/4)."""
        heat, sides = self.network(images.contiguous(memory_format=torch.channels_last))
        return heat, F.softplus(sides) * REACH

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        heat, sides = self(batch.images)
        goal = _goal(batch.targets, heat.shape, heat.device)
        heat_loss = _focal_loss(heat, goal.heat, ~_cells(batch.mask))
        box_loss = _giou_loss(_boxes(sides), goal)
        self.log_dict({"train/heat": heat_loss, "train/box": box_loss}, prog_bar=True, batch_size=len(batch.images))
        return heat_loss + BOX_WEIGHT * box_loss

    def on_validation_epoch_start(self) -> None:
        """Forget the images of the last evaluation."""
        self._judged = {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Keep what is there and what was found. No collective here: ranks may have different numbers of batches."""
        detections = self.detect(batch.images, batch.mask)
        for image, target, found in zip(batch.image_ids.tolist(), batch.targets, detections, strict=True):
            self._judged[image] = judged(target, found.boxes, found.labels, found.scores)

    def on_validation_epoch_end(self) -> None:
        """Gather all ranks' images once, and log ``val/mAP50`` and ``val/mAP50_95``, equal on every rank."""
        images = gather(self._judged)
        metrics = mean_average_precision(images, self.class_names)
        values = {f"val/{name}": value for name, value in metrics.items()}
        self.log_dict(values, prog_bar=True, sync_dist=True, batch_size=1)

    @torch.no_grad()
    def detect(self, images: Tensor, mask: Tensor) -> list[Found]:
        """Objects in normalised images (B, 3, H, W); ``mask`` bool (B, H, W) is true where there is padding."""
        heat, sides = self(images)
        score = heat.sigmoid()
        score = score * (score == F.max_pool2d(score, 3, stride=1, padding=1))
        score = score.masked_fill(_cells(mask), 0)
        batch, classes, height, width = score.shape
        top, index = score.flatten(1).topk(min(MAX_FOUND, classes * height * width), dim=1)
        cell = index % (height * width)
        boxes = _boxes(sides).flatten(2).gather(2, cell[:, None].expand(-1, 4, -1)).transpose(1, 2)
        return [
            Found(boxes[i][keep], (index[i] // (height * width))[keep], top[i][keep])
            for i in range(batch)
            for keep in [top[i] > 0.01]
        ]

    def configure_optimizers(self) -> Any:
        """AdamW under a one-cycle schedule over all steps of the run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps, pct_start=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Network(nn.Module):
    """Four stages down to stride 16 and one path back up to stride 4."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.down2 = _conv(3, width, stride=2)
        self.down4 = nn.Sequential(_conv(width, 2 * width, stride=2), _Residual(2 * width))
        self.down8 = nn.Sequential(_conv(2 * width, 3 * width, stride=2), _Residual(3 * width))
        self.down16 = nn.Sequential(_conv(3 * width, 4 * width, stride=2), _Residual(4 * width))
        self.lateral8 = nn.Conv2d(4 * width, 3 * width, 1)
        self.lateral4 = nn.Conv2d(3 * width, 2 * width, 1)
        self.merge = _conv(2 * width, 2 * width)
        self.heat = nn.Conv2d(2 * width, classes, 1)
        self.sides = nn.Conv2d(2 * width, 4, 1)
        # Start from a heat of 0.01 everywhere, so that the many empty cells don't drown the first steps.
        nn.init.constant_(self.heat.bias, -math.log(99))  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x4 = self.down4(self.down2(images))
        x8 = self.down8(x4)
        x16 = self.down16(x8)
        x8 = x8 + F.interpolate(self.lateral8(x16), size=x8.shape[2:], mode="nearest")
        x4 = x4 + F.interpolate(self.lateral4(x8), size=x4.shape[2:], mode="nearest")
        features = self.merge(x4)
        return self.heat(features), self.sides(features)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv(width, width), *_conv(width, width)[:2])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:

    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class _Goal(NamedTuple):
    """What the network should say: heat (B, C, h, w); boxes (B, 4, h, w) xyxy pixels; weight (B, h, w), 0 = no box."""

    heat: Tensor
    boxes: Tensor
    weight: Tensor


def _goal(targets: Sequence[Mapping[str, Tensor]], shape: torch.Size, device: torch.device) -> _Goal:
    """Gaussians about the centres of the boxes, wide in proportion to each; the smallest box wins a shared cell."""
    batch, classes, height, width = shape
    heat = torch.zeros(batch, classes, height, width, device=device)
    boxes = torch.zeros(batch, 4, height, width, device=device)
    weight = torch.zeros(batch, height, width, device=device)
    y = (torch.arange(height, device=device) + 0.5)[None, :, None]
    x = (torch.arange(width, device=device) + 0.5)[None, None, :]
    for i, target in enumerate(targets):
        plain = target["iscrowd"] == 0
        box, label = target["boxes"][plain], target["labels"][plain]
        if not len(box):
            continue
        centre = (box[:, :2] + box[:, 2:]) / 2 / STRIDE
        sigma = ((box[:, 2:] - box[:, :2]) / STRIDE * 0.09).clamp(min=0.4)
        # The cell that holds the centre is the peak: distances count from its middle.
        peak = centre.floor() + 0.5
        distance = ((x - peak[:, 0, None, None]) / sigma[:, 0, None, None]) ** 2
        distance = distance + ((y - peak[:, 1, None, None]) / sigma[:, 1, None, None]) ** 2
        gaussian = torch.exp(-distance / 2)
        heat[i].scatter_reduce_(0, label[:, None, None].expand_as(gaussian), gaussian, "amax")
        size = (box[:, 2:] - box[:, :2]).prod(1)
        near = torch.where(gaussian > 0.1, size[:, None, None].expand_as(gaussian), math.inf)
        owner = near.argmin(0)
        boxes[i] = box[owner].permute(2, 0, 1)
        chosen = gaussian.gather(0, owner[None])[0]
        total = torch.zeros(len(box), device=device).index_add(
            0, owner.flatten(), torch.where(chosen > 0.1, chosen, 0.0).flatten()
        )
        weight[i] = torch.where(chosen > 0.1, chosen / total[owner].clamp(min=1e-6), 0.0)
    return _Goal(heat, boxes, weight)


def _focal_loss(logits: Tensor, goal: Tensor, valid: Tensor) -> Tensor:
    """CenterNet's penalty-reduced focal loss, over cells that are not padding, per object."""
    p = logits.sigmoid()
    peak = goal == 1
    positive = F.logsigmoid(logits) * (1 - p) ** 2 * peak
    negative = F.logsigmoid(-logits) * p**2 * (1 - goal) ** 4 * (~peak & valid)
    return -(positive.sum() + negative.sum()) / peak.sum().clamp(min=1)


def _boxes(sides: Tensor) -> Tensor:
    """Boxes (B, 4, h, w) xyxy in pixels from distances left, top, right, bottom of each cell's middle."""
    height, width = sides.shape[2:]
    y = ((torch.arange(height, device=sides.device) + 0.5) * STRIDE)[:, None].expand(height, width)
    x = ((torch.arange(width, device=sides.device) + 0.5) * STRIDE)[None].expand(height, width)
    left, top, right, bottom = sides.unbind(1)
    return torch.stack([x - left, y - top, x + right, y + bottom], dim=1)


def _giou_loss(boxes: Tensor, goal: _Goal) -> Tensor:
    """Generalised IoU loss (Rezatofighi et al. 2019) of the weighted cells; each object weighs the same."""
    at = goal.weight > 0
    p, q = (value.permute(0, 2, 3, 1)[at] for value in (boxes, goal.boxes))
    size = (torch.min(p[:, 2:], q[:, 2:]) - torch.max(p[:, :2], q[:, :2])).clamp(min=0)
    hull = (torch.max(p[:, 2:], q[:, 2:]) - torch.min(p[:, :2], q[:, :2])).prod(1)
    overlap = size.prod(1)
    union = (p[:, 2:] - p[:, :2]).prod(1) + (q[:, 2:] - q[:, :2]).prod(1) - overlap
    giou = overlap / union.clamp(min=1e-6) - (hull - union) / hull.clamp(min=1e-6)
    weight = goal.weight[at]
    return ((1 - giou) * weight).sum() / weight.sum().clamp(min=1)


def _cells(mask: Tensor) -> Tensor:
    """Output cells that hold padding, bool (B, 1, h, w), of a padding mask (B, H, W)."""
    return F.max_pool2d(mask[:, None].float(), STRIDE, ceil_mode=True) > 0

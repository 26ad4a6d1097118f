"""RF-DETR's own evaluation of a pack under torchrun, of predictions that are a function of the targets alone: what each
rank count makes of the same ones. Run as ``torchrun ... rfdetr_evaluate.py FOLDER``, which holds the ``pack``; writes
``metrics.json`` beside it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from rfdetr.config import RFDETRNanoConfig, TrainConfig
from rfdetr.training import RFDETRModelModule, build_trainer
from rfdetr.utilities.box_ops import box_cxcywh_to_xyxy

from rfstream import Config
from rfstream.train.rfdetr import RFStreamDataModule


class Oracle(RFDETRModelModule):
    """Predicts each object somewhat beside its place, by more from image to image, and every fifth not at all."""

    def validation_step(self, batch: tuple[Any, Any], batch_idx: int) -> dict[str, Any]:
        samples, targets = batch
        assert len(samples.tensors) == len(targets)
        return {"results": [predicted(target) for target in targets], "targets": targets}


def predicted(target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    height, width = target["orig_size"].tolist()
    image_id = int(target["image_id"])
    boxes = box_cxcywh_to_xyxy(target["boxes"]) * torch.tensor([width, height, width, height])
    count = torch.arange(len(boxes)) + image_id
    shift = (count % 7)[:, None] * 0.04 * (boxes[:, 2:] - boxes[:, :2])
    kept = count % 5 > 0
    # No two alike: what equal scores count depends on the order of images, with RF-DETR's own loader too.
    scores = torch.rand(len(boxes), generator=torch.Generator().manual_seed(image_id & (2**63 - 1)))
    return {"boxes": (boxes + shift.repeat(1, 2))[kept], "labels": target["labels"][kept], "scores": scores[kept]}


def evaluated(pack: Path, ranks: int) -> dict[str, float]:
    """The metrics of ``pack``, on one of ``ranks`` ranks."""
    pl.seed_everything(0, verbose=False)
    model = RFDETRNanoConfig(
        pretrain_weights=None, num_classes=80, resolution=64, positional_encoding_size=4, device="cpu", num_queries=50,
        num_select=50, group_detr=1, dec_layers=1,
    )  # fmt: skip
    train = TrainConfig(
        dataset_file="webdataset", dataset_dir=str(pack), output_dir=str(pack.parent), eval_batch_size=2, use_ema=False,
        multi_scale="off", augmentation_backend="torchvision", tensorboard=False, num_workers=0,
    )  # fmt: skip
    alone = {"strategy": "auto"}
    trainer = build_trainer(
        train,
        model,
        accelerator="cpu",
        devices=ranks,
        enable_progress_bar=False,
        **(alone if ranks == 1 else {"strategy": DDPStrategy(process_group_backend="gloo")}),
    )
    data = RFStreamDataModule(model, train, Config(data={"path": str(pack)}, decode={"actors": [1, 1]}))
    return dict(trainer.validate(Oracle(model, train), data, verbose=False)[0])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    metrics = evaluated(folder / "pack", int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        (folder / "metrics.json").write_text(json.dumps(metrics))

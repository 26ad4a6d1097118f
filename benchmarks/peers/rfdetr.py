"""RF-DETR Nano's training data: its own loader on loose files or on tar shards, and the stream in its place; default
torchvision augmentation, all three ending in the float tensors that the model is given, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rfdetr.config import RFDETRNanoConfig, TrainConfig
from rfdetr.training.module_data import RFDETRDataModule

from peers.work import Delivered, Job
from rfstream import Config
from rfstream.train.rfdetr import RFStreamDataModule

CPU = torch.device("cpu")


def module_of(job: Job, kind: str, model: dict[str, Any] | None = None, **fields: Any) -> Any:
    """RF-DETR's data module, or ours for ``stream``; ``model`` and ``fields``: more of its two configurations."""
    nano = RFDETRNanoConfig(**{"pretrain_weights": None, "device": "cpu", "resolution": job.size} | (model or {}))
    train = TrainConfig(
        dataset_file="webdataset" if kind == "tar" else "roboflow",
        dataset_dir=str(job.pack if kind == "tar" else job.data / "loose"),
        batch_size=job.batch_size,
        num_workers=job.workers,
        augmentation_backend="torchvision",
        seed=0,
        **fields,
    )
    if kind != "stream":
        return RFDETRDataModule(nano, train)
    actors = {"actors": [job.workers, job.workers]}
    return RFStreamDataModule(nano, train, Config(data={"path": str(job.pack)}, decode=actors))


def batches(job: Job, kind: str) -> Iterator[Delivered]:
    module = module_of(job, kind)
    module.setup("fit")
    for batch in module.train_dataloader():
        samples, targets = module.transfer_batch_to_device(batch, CPU, 0)
        offsets = torch.tensor([0, *(len(target["labels"]) for target in targets)]).cumsum(0)
        boxes, labels = (torch.cat([target[name] for target in targets]) for name in ("boxes", "labels"))
        yield Delivered(samples.tensors, boxes, labels, offsets)
    module.teardown("fit")

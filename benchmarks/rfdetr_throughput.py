"""Images a second and CPU-seconds that RF-DETR's training data costs: its own DataLoader on loose files against the
stream, in turn, both ending in what the model is given.

    python benchmarks/rfdetr_throughput.py ../shared/data/cards
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import rfdetr.config
import torch
import typer
from common import cpu_seconds, in_turn, report
from rfdetr.training.module_data import RFDETRDataModule

import rfstream
from rfstream import Config
from rfstream.train.rfdetr import RFStreamDataModule

CPU = torch.device("cpu")


def configs(source: str, batch_size: int, workers: int) -> tuple[Any, Any]:
    """RF-DETR Nano at its own resolution, default torchvision augmentation."""
    model = rfdetr.config.RFDETRNanoConfig(pretrain_weights=None, device="cpu")
    train = rfdetr.config.TrainConfig(
        dataset_file="roboflow",
        dataset_dir=source,
        batch_size=batch_size,
        num_workers=workers,
        augmentation_backend="torchvision",
        seed=0,
    )
    return model, train


def consume(module: RFDETRDataModule, batches: Iterable[Any], before: float, began: float) -> dict[str, float]:
    """One epoch as the trainer takes it; the rate counts from the first batch."""
    images, first = 0, 0.0
    for batch in batches:
        samples, targets = module.transfer_batch_to_device(batch, CPU, 0)
        first = first or time.perf_counter()
        assert len(samples.tensors) == len(targets)
        images += len(targets)
    rate = (images - len(targets)) / (time.perf_counter() - first)
    return {"images/s": rate, "first batch, s": first - began, "CPU-s": cpu_seconds() - before}


def main(source: str, batch_size: int = 8, workers: int = 2, repetitions: int = 3) -> None:
    """Pack SOURCE's train and valid splits and measure an epoch of each."""
    with tempfile.TemporaryDirectory() as folder:
        pack = str(Path(folder) / "pack")
        rfstream.pack(source, pack, splits="train,valid:val", progress=False)
        model, train = configs(source, batch_size, workers)

        def stock() -> dict[str, float]:
            module = RFDETRDataModule(model, train)
            before, began = cpu_seconds(), time.perf_counter()
            module.setup("fit")
            return consume(module, module.train_dataloader(), before, began)

        def ours() -> dict[str, float]:
            module = RFStreamDataModule(
                model, train, Config(data={"path": pack}, decode={"actors": [workers, workers]})
            )
            before, began = cpu_seconds(), time.perf_counter()
            module.setup("fit")
            try:
                return consume(module, module.train_dataloader(), before, began)
            finally:
                module.teardown("fit")

        variants: dict[str, Callable[[], dict[str, float]]] = {
            f"RF-DETR, {workers} workers": stock,
            f"rfstream, {workers} actors": ours,
        }
        title = "rfdetr throughput: one epoch of RF-DETR Nano's training data"
        report(title, in_turn(variants, repetitions), {"source": source, "batch_size": batch_size})


if __name__ == "__main__":
    typer.run(main)

"""Images a second and CPU-seconds that RF-DETR's training data costs: its own DataLoader on loose files against the
stream, in turn, both ending in what the model is given.

    python benchmarks/rfdetr_throughput.py ../shared/data/cards
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any

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


def measure(source: str, pack: str, variant: str, batch_size: int, workers: int) -> dict[str, float]:
    """Two epochs as the trainer takes them: the first from nothing, the second for rate and cost."""
    model, train = configs(source, batch_size, workers)
    stream = Config(data={"path": pack}, decode={"actors": [workers, workers]})
    began = time.perf_counter()
    module = RFDETRDataModule(model, train) if variant == "RF-DETR" else RFStreamDataModule(model, train, stream)
    module.setup("fit")
    loader = module.train_dataloader()
    first, images = 0.0, 0
    for epoch in range(2):
        mark, spent = time.perf_counter(), cpu_seconds()
        for batch in loader:
            samples, targets = module.transfer_batch_to_device(batch, CPU, 0)
            first = first or time.perf_counter() - began
            assert len(samples.tensors) == len(targets)
            images += len(targets) * epoch
    reading = {
        "images/s": images / (time.perf_counter() - mark),
        "CPU-s per 1000 images": (cpu_seconds() - spent) / images * 1000,
        "first batch, s": first,
    }
    module.teardown("fit")
    return reading


def main(
    source: str,
    batch_size: int = 8,
    workers: int = 2,
    repetitions: int = 3,
    child: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Pack SOURCE's train and valid splits; measure each way of reading them in a process of its own."""
    if child:
        typer.echo(json.dumps(measure(source, folder, child, batch_size, workers)))
        return
    with tempfile.TemporaryDirectory() as made:
        rfstream.pack(source, made, splits="train,valid:val", progress=False)

        def variant(name: str) -> dict[str, float]:
            sizes = [f"--batch-size={batch_size}", f"--workers={workers}"]
            command = [sys.executable, __file__, source, *sizes, f"--child={name}", f"--folder={made}"]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            reading: dict[str, float] = json.loads(out.strip().splitlines()[-1])
            return reading

        variants = {name: lambda name=name: variant(name) for name in ("RF-DETR", "rfstream")}  # type: ignore[misc]
        title = f"rfdetr throughput: an epoch of RF-DETR Nano's training data, {workers} workers or actors"
        report(title, in_turn(variants, repetitions), {"source": source, "batch_size": batch_size, "workers": workers})


if __name__ == "__main__":
    typer.run(main)

"""Images a second and CPU-seconds that RF-DETR's training data costs: its own DataLoader on loose files and on tar
shards against the stream, in turn, all ending in the tensors that the model is given, on the CPU.

    python benchmarks/rfdetr_throughput.py ../shared/data/cards
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import rfdetr.config
import torch
import typer
from common import cpu_seconds, in_turn, report
from rfdetr.training.module_data import RFDETRDataModule

from rfstream import Config
from rfstream.train.rfdetr import RFStreamDataModule

CPU = torch.device("cpu")
WARM_UP = 10
"""Batches before the clock starts: workers and actors are up by then."""


def repeated(source: Path, folder: Path, at_least: int) -> None:
    """SOURCE's train and valid splits in ``folder``, the former's images listed often enough to be ``at_least``."""
    for split in ("train", "valid"):
        document = json.loads((source / split / "_annotations.coco.json").read_text())
        images, annotations = document["images"], document["annotations"]
        copies = -(-at_least // len(images)) if split == "train" else 1
        (folder / split).mkdir(parents=True)
        document["images"], document["annotations"] = [], []
        ids = max(image["id"] for image in images) + 1
        for copy in range(copies):
            for image in images:
                name = f"{copy}-{image['file_name']}"
                (folder / split / name).symlink_to((source / split / image["file_name"]).resolve())
                document["images"].append({**image, "id": image["id"] + copy * ids, "file_name": name})
            for annotation in annotations:
                number, image_id = len(document["annotations"]), annotation["image_id"] + copy * ids
                document["annotations"].append({**annotation, "id": number, "image_id": image_id})
        (folder / split / "_annotations.coco.json").write_text(json.dumps(document))


def configs(data: Path, variant: str, resolution: int, batch_size: int, workers: int) -> tuple[Any, Any]:
    """RF-DETR Nano at ``resolution``, default torchvision augmentation."""
    model = rfdetr.config.RFDETRNanoConfig(pretrain_weights=None, device="cpu", resolution=resolution)
    train = rfdetr.config.TrainConfig(
        dataset_file="webdataset" if variant == "tar" else "roboflow",
        dataset_dir=str(data / ("pack" if variant == "tar" else "loose")),
        batch_size=batch_size,
        num_workers=workers,
        augmentation_backend="torchvision",
        seed=0,
    )
    return model, train


def measure(data: Path, variant: str, resolution: int, batch_size: int, workers: int) -> dict[str, float]:
    """Two epochs as the trainer takes them, the clock running from batch :data:`WARM_UP` on."""
    model, train = configs(data, variant, resolution, batch_size, workers)
    stream = Config(data={"path": str(data / "pack")}, decode={"actors": [workers, workers]})
    began = time.perf_counter()
    module = RFStreamDataModule(model, train, stream) if variant == "stream" else RFDETRDataModule(model, train)
    module.setup("fit")
    loader = module.train_dataloader()
    first, images, batches = 0.0, 0, 0
    mark = spent = 0.0
    for _ in range(2):
        for batch in loader:
            samples, targets = module.transfer_batch_to_device(batch, CPU, 0)
            first = first or time.perf_counter() - began
            assert samples.tensors.dtype == torch.float32 and len(samples.tensors) == len(targets)
            batches += 1
            images += len(targets) * (batches > WARM_UP)
            if batches == WARM_UP:
                mark, spent = time.perf_counter(), cpu_seconds()
    reading = {
        "images/s": images / (time.perf_counter() - mark),
        "CPU-s per 1000 images": (cpu_seconds() - spent) / images * 1000,
        "first batch, s": first,
    }
    module.teardown("fit")
    return reading


def main(
    source: Path,
    resolution: int = 576,
    batch_size: int = 16,
    workers: Annotated[list[int], typer.Option(help="DataLoader workers to try")] = [2],  # noqa: B006
    actors: int = 2,
    images: Annotated[int, typer.Option(help="repeat the source to at least this many")] = 1000,
    repetitions: int = 3,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Repeat and pack SOURCE; measure each way of reading it in a process of its own."""
    if child:
        typer.echo(json.dumps(measure(source, child, resolution, batch_size, workers[0])))
        return
    with tempfile.TemporaryDirectory() as made:
        data = Path(made)
        repeated(source, data / "loose", images)
        # Many shards: RF-DETR deals whole ones to its workers.
        shard = sum(file.stat().st_size for file in (data / "loose" / "train").iterdir()) // 24
        pack = [str(data / "loose"), str(data / "pack"), "--splits=train,valid:val", f"--max-shard-bytes={shard}"]
        subprocess.run([sys.executable, "-m", "rfstream.cli", "pack", *pack], check=True)

        def variant(name: str, number: int) -> dict[str, float]:
            sizes = [f"--resolution={resolution}", f"--batch-size={batch_size}", f"--workers={number}"]
            command = [sys.executable, __file__, str(data), *sizes, f"--child={name}"]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            reading: dict[str, float] = json.loads(out.strip().splitlines()[-1])
            return reading

        variants = {f"rfstream, {actors} actors": lambda: variant("stream", actors)}
        for name in ("loose", "tar"):
            for number in workers:
                variants[f"RF-DETR {name}, {number} workers"] = lambda n=name, w=number: variant(n, w)  # type: ignore[misc]
        title = f"rfdetr throughput {source.name} {resolution}: RF-DETR Nano's training data, batch {batch_size}"
        report(title, in_turn(variants, repetitions), {"source": str(source), "images": images})


if __name__ == "__main__":
    typer.run(main)

"""What a segmentation batch weighs: bytes that cross processes, and the most that a device holds while it becomes
what the model is given. Counted by torch's allocator events and, for what NumPy allocates, by tracemalloc; a copy on
the CPU stands for the copy to a device.

    python benchmarks/rfdetr_masks.py ../shared/data/facade
"""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from common import report
from rfdetr.config import RFDETRSegNanoConfig, SegmentationTrainConfig
from rfdetr.training.module_data import RFDETRDataModule
from torch.profiler import ProfilerActivity, profile

import rfstream
from rfstream.dataset.index import read_index
from rfstream.dataset.tar import TarReader
from rfstream.stream.decode import BatchDecoder
from rfstream.train.rfdetr.batch import rfdetr_batch_of
from rfstream.train.rfdetr.settings import Settings
from rfstream.train.rfdetr.spec import RFDETRSpec


def peak(work: Callable[[], Any]) -> int:
    """The most bytes that torch and that NumPy have allocated at a time while ``work`` runs, its result included."""
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        kept = work()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept is not None
    sizes = [e.nbytes() for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    return int(max(np.cumsum(sizes))) + most


def main(source: str, batch_size: int = 8) -> None:
    """Pack SOURCE and weigh its first validation batch, in which both have the same masks."""
    model = RFDETRSegNanoConfig(pretrain_weights=None, device="cpu")
    train = SegmentationTrainConfig(dataset_dir=source, augmentation_backend="torchvision", multi_scale="off")
    stock = RFDETRDataModule(model, train)
    stock.setup("validate")
    dataset: Any = stock._dataset_val
    with tempfile.TemporaryDirectory() as folder:
        rfstream.pack(source, str(Path(folder) / "pack"), splits="valid:val", progress=False)
        index = read_index(str(Path(folder) / "pack"), "val")
        spec = RFDETRSpec(Settings.of(model, train).to_json(), "val", 0, tuple(index.label_of().items()))
        samples = TarReader(index.path, "val", index.digest).read(np.arange(batch_size))
        wire = BatchDecoder.of(spec).batch(samples, 0, 0, 0)
    batch = rfdetr_batch_of(wire, step=0, window_end=False, normalize=True)
    ids = [int(target["image_id"]) for target in batch.targets()]
    nested, targets = stock._collate_fn([dataset[dataset.ids.index(number)] for number in ids])

    def theirs() -> Any:
        return nested.tensors.clone(), nested.mask.clone(), targets.to_list("cpu")

    def ours() -> Any:
        moved = batch.moved(torch.clone)
        return moved, moved.samples(), moved.targets()

    across = sum(tensor.nbytes for tensor in (nested.tensors, nested.mask, *targets.fields.values()))
    readings = {
        "RF-DETR": {"MB across": [across / 1e6], "MB at the peak": [peak(theirs) / 1e6]},
        "rfstream": {
            "MB across": [sum(array.nbytes for array in wire.arrays.values()) / 1e6],
            "MB at the peak": [peak(ours) / 1e6],
        },
    }
    masks = sum(len(target["labels"]) for target in targets)
    setting = {"source": source, "batch_size": batch_size, "resolution": model.resolution, "masks": masks}
    report(f"rfdetr masks: {batch_size} images with {masks} masks at {model.resolution} px", readings, setting)


if __name__ == "__main__":
    typer.run(main)

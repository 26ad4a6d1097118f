"""Ray Data as its documentation teaches it: ``read_images``, ``map``, ``iter_torch_batches``. A worker is a CPU of
Ray's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch

from peers.square import square
from peers.work import Delivered, Job, loose_files
from rfstream.dataset.index import read_index
from rfstream.stream.targets import parse_sidecar, targets_of


def batches(job: Job) -> Iterator[Delivered]:
    ray.init(address="local", num_cpus=job.workers, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    sidecars = {item.file: item.sidecar for item in loose_files(job)}
    labels = read_index(str(job.pack), "train").label_of()
    transform = square(job.size)

    def augmented(row: dict[str, Any]) -> dict[str, Any]:
        _, _, annotations = parse_sidecar(sidecars[row["path"]])
        target = targets_of(annotations, labels, *row["image"].shape[:2], masks=False)
        image, target = transform(row["image"], target, None)
        planes = np.ascontiguousarray(image.transpose(2, 0, 1))
        return {"image": planes, "boxes": target["boxes"], "labels": target["labels"]}

    files = ray.data.read_images(list(sidecars), include_paths=True, mode="RGB", shuffle="files")
    for tensors in files.map(augmented).iter_torch_batches(batch_size=job.batch_size, collate_fn=_gathered):
        yield Delivered(**tensors)


def _gathered(rows: dict[str, Any]) -> dict[str, torch.Tensor]:
    boxes, labels = (np.concatenate(list(rows[name])) for name in ("boxes", "labels"))
    offsets = np.cumsum([0, *map(len, rows["labels"])])
    arrays = {"images": np.stack(list(rows["image"])), "boxes": boxes, "labels": labels, "offsets": offsets}
    return {name: torch.from_numpy(values) for name, values in arrays.items()}

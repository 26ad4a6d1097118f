"""torch's DataLoader over loose files: shuffled, workers that prefetch, a batch of four tensors."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
from torch.utils.data import DataLoader, Dataset

from peers.work import Delivered, Job, Loose, collate, load, loose_files
from rfstream.stream import decode
from rfstream.stream.image import Decoded, decode_scaled


class LooseFiles(Dataset[Any]):
    def __init__(self, job: Job) -> None:
        self._job = job
        self._files: list[Loose] = loose_files(job)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        return load(self._job, self._files[index])


def as_floats(job: Job, samples: Sequence[Any]) -> Delivered:
    """As most training code has it: floats from the worker on."""
    batch = collate(job, samples)
    return batch._replace(images=batch.images.float().div_(255))


def decode_with_pillow(_: int) -> None:
    """Let this worker decode as code with a DataLoader commonly does: to the same pixels, without rfstream's part."""
    assert decode.decode_scaled is decode_scaled, "what is replaced here is not what decodes"
    decode.decode_scaled = pillow


def pillow(data: bytes, max_pixels: int, shrink_to: int | None) -> Decoded:
    """As :func:`rfstream.stream.image.decode_scaled`, of files that nothing is asked of but their pixels."""
    pixels = np.array(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    return Decoded(pixels, (pixels.shape[0], pixels.shape[1]), 1)


def batches(job: Job, kind: str, decoder: str = "rfstream") -> Iterator[Delivered]:
    gather = partial(as_floats if kind == "float" else collate, job)
    begin = decode_with_pillow if decoder == "pillow" else None
    dataset = LooseFiles(job)
    yield from DataLoader(
        dataset, job.batch_size, shuffle=True, num_workers=job.workers, collate_fn=gather, worker_init_fn=begin
    )

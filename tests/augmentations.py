"""Transforms that tests name by import path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import numpy.typing as npt


def crop_flip_jitter(size: int = 256) -> A.Compose:
    return A.Compose([A.RandomCrop(size, size, pad_if_needed=True), A.HorizontalFlip(p=0.5), A.ColorJitter(p=1.0)])


def resize(size: int = 128) -> A.Compose:
    return A.Compose([A.Resize(size, size)])


def noise() -> Any:
    def add(
        image: npt.NDArray[np.uint8], target: dict[str, Any], rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        return image ^ rng.integers(0, 2, image.shape, dtype=np.uint8), target

    return add


def noted(file: str) -> Any:
    """Appends a line to ``file`` for each image: the first number that its generator gives."""

    def note(
        image: npt.NDArray[np.uint8], target: dict[str, Any], rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        with Path(file).open("a") as out:
            out.write(f"{rng.integers(2**62)}\n")
        return image, target

    return note


def not_a_transform() -> int:
    return 3


def floats() -> A.Compose:
    return A.Compose([A.Normalize()])


def never() -> A.Compose:
    return A.Compose([A.HorizontalFlip(p=1.0)], p=0.0)


def large_crop() -> A.Compose:
    return A.Compose([A.RandomCrop(4000, 4000)])

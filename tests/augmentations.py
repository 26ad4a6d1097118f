"""Transforms that tests name by import path, without Albumentations: its import is most of what a decode actor takes to
start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt


def resize(size: int = 128) -> Any:
    def to_square(
        image: npt.NDArray[np.uint8], target: dict[str, Any], rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        scale = np.float32([size, size]) / image.shape[1::-1]
        boxes, area = target["boxes"] * np.tile(scale, 2), target["area"] * scale.prod()
        scaled = {"boxes": boxes.astype(np.float32), "area": area.astype(np.float32)}
        return cv2.resize(image, (size, size)), {**target, **scaled}

    return to_square


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


def invert() -> Any:
    """Writes to the image that it is given."""

    def turned(
        image: npt.NDArray[np.uint8], target: dict[str, Any], rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        return np.bitwise_not(image, out=image), target

    return turned


def any_height() -> Any:
    """Keeps a random number of rows of whatever is not black."""

    def cut(
        image: npt.NDArray[np.uint8], target: dict[str, Any], rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        return image[: rng.integers(8, 32) if image.any() else 32], target

    return cut

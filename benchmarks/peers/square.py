"""The augmentation that every loader of the bench does. Apart from the rest, which needs torch: decode actors don't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np

from rfstream.stream.augment import Image, Target

GRID = 64
"""Every so many pixels in both axes one enters a checksum."""


def square(size: int) -> Callable[[Image, Target, Any], tuple[Image, Target]]:
    """Resize to ``size`` squared, and mirror about every second image: its own pixels say whether, so that it is the
    same ones wherever a loader puts them."""
    cv2.setNumThreads(1)  # a worker is a core's worth

    def augment(image: Image, target: Target, _: Any) -> tuple[Image, Target]:
        height, width = image.shape[:2]
        mirrored = int(image[::GRID, ::GRID].sum()) % 2
        image = cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR)
        boxes = target["boxes"] * np.float32([size / width, size / height] * 2)
        if mirrored:
            image = cv2.flip(image, 1)
            boxes = np.float32([size, 0, size, 0]) + boxes[:, [2, 1, 0, 3]] * np.float32([-1, 1, -1, 1])
        return image, {**target, "boxes": boxes}

    return augment

"""Where an image's points and masks lie once it has been decoded at 1/2, 1/4 or 1/8 of its size."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from rfstream.dataset.exif import LEFT_WAS_END, TOP_WAS_END


def factor_for(height: int, width: int, shrink_to: int | None) -> int:
    """The largest of 8, 4 and 2 by which an image can be made smaller and its shorter side keep ``shrink_to`` pixels;
    1 if there is none. These are the ones for which libjpeg-turbo has vector code; others take longer."""
    if shrink_to is None:
        return 1
    return next((factor for factor in (8, 4, 2) if min(height, width) >= factor * shrink_to), 1)


@dataclass(frozen=True)
class Scaling:
    """One pixel of the scaled image for each ``factor`` x ``factor`` of the whole one.

    libjpeg rounds sizes up: the last column and row of what is stored may reach beyond the whole image. So a point is
    divided by ``factor``, and not by the sizes' ratio, which would move it by up to a pixel. In an image that has been
    turned since, that column or row may be the first: there ``left`` and ``top`` pixels lie before the whole image.
    """

    factor: int = 1
    left: int = 0
    top: int = 0

    @staticmethod
    def of(factor: int, height: int, width: int, orientation: int) -> Scaling:
        """That of an image turned from EXIF ``orientation``, whose whole size is now ``height`` x ``width``."""
        return Scaling(
            factor,
            -width % factor if orientation in LEFT_WAS_END else 0,
            -height % factor if orientation in TOP_WAS_END else 0,
        )

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the scaled image, of those of the whole one."""
        return -(-height // self.factor), -(-width // self.factor)

    def points(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Coordinates (..., 2 k), x and y in turn."""
        before = np.tile(np.array([self.left, self.top], dtype=np.float64), values.shape[-1] // 2)
        return (values + before) / self.factor

    def mask(self, mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A mask of 0 and 1, uint8 (H, W): 1 where half of a pixel or more is covered."""
        if self.factor == 1:
            return mask
        height, width = mask.shape
        rows, columns = self.size(height, width)
        framed = np.zeros((rows * self.factor, columns * self.factor), dtype=np.uint8)
        framed[self.top : self.top + height, self.left : self.left + width] = mask
        covered = cv2.resize(framed * 255, (columns, rows), interpolation=cv2.INTER_AREA)
        return (covered > 127).astype(np.uint8)


WHOLE = Scaling()
"""Of an image that is as large as its file says."""

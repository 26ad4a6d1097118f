"""Pictures of what a detector found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

ENLARGE = 2
TRUTH = (255, 255, 255)
COLOURS = ((230, 60, 60), (40, 130, 240), (250, 170, 0), (30, 170, 90), (170, 80, 220), (0, 170, 180))


@dataclass(frozen=True)
class Boxes:
    """Boxes float32 (n, 4) xyxy in pixels, labels int64 (n,), scores float32 (n,) or None where there are none."""

    boxes: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Panel:
    """One image uint8 (H, W, 3) with what is there and what was found."""

    image: npt.NDArray[np.uint8]
    truth: Boxes
    found: Boxes


def draw_panels(panels: Sequence[Panel], class_names: Sequence[str], columns: int = 4) -> Image.Image:
    """Panels in rows: truths as thin white boxes, detections in the colour of their class with name and score."""
    drawn = [_draw(panel, class_names) for panel in panels]
    width, height = max(d.width for d in drawn), max(d.height for d in drawn)
    rows = -(-len(drawn) // columns)
    sheet = Image.new("RGB", (columns * (width + 4), rows * (height + 4)), (24, 24, 24))
    for i, picture in enumerate(drawn):
        sheet.paste(picture, (i % columns * (width + 4), i // columns * (height + 4)))
    return sheet


def _draw(panel: Panel, class_names: Sequence[str]) -> Image.Image:
    height, width = panel.image.shape[:2]
    picture = Image.fromarray(panel.image).resize((width * ENLARGE, height * ENLARGE), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    font = ImageFont.load_default(11)
    for box in panel.truth.boxes * ENLARGE:
        pen.rectangle([float(v) for v in box], outline=TRUTH, width=1)
    scores = panel.found.scores if panel.found.scores is not None else np.ones(len(panel.found.labels), np.float32)
    for box, label, score in zip(
        panel.found.boxes * ENLARGE, panel.found.labels.tolist(), scores.tolist(), strict=True
    ):
        colour = COLOURS[label % len(COLOURS)]
        x, y = float(box[0]), float(box[1])
        pen.rectangle([float(v) for v in box], outline=colour, width=2)
        text = f"{class_names[label]} {score:.2f}"
        at = (x, max(0.0, y - 13))
        pen.rectangle(pen.textbbox(at, text, font=font), fill=colour)
        pen.text(at, text, fill=TRUTH, font=font)
    return picture

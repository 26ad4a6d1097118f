"""Draw scenes, pack them, train a small detector on them, and show what it finds: `python pipelines/demo.py`.

Needs no network and no GPU. Everything lands in the configuration's `train.output`.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from rfstream import Config, RFStreamError, load_config, pack, ray_loader
from rfstream.tools.draw import Boxes, Panel, draw_panels
from rfstream.tools.scenes import make_scenes
from rfstream.train.detector import build
from rfstream.train.device import DeviceStage
from rfstream.train.run import Metrics, train

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "train" / "demo.yaml"
TRAIN, VAL = 480, 96
ENOUGH = 0.5
"""mAP50 below which the demo counts as failed."""
SHOWN = 8
CONFIDENT = 0.4
NEAR = 8.0
"""Pixels between two detections' centres below which only the better one is drawn."""


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, applied over the demo's file.")
    ] = None,
) -> None:
    """Run the whole demo; exit with status 1 if the detector learned too little."""
    quiet()
    console = Console()
    began = time.perf_counter()
    try:
        config = load_config(CONFIG, overrides or [])
        output = Path(config.train.output)
        console.rule("1  draw and pack")
        make_scenes(output / "scenes", train=TRAIN, val=VAL, seed=config.stream.seed)
        pack(str(output / "scenes"), config.data.path)
        console.rule("2  train")
        metrics = train(config)
        console.rule("3  what it found")
        picture = output / "predictions.png"
        draw_predictions(config, picture)
    except RFStreamError as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    console.print(summary(config, metrics, time.perf_counter() - began))
    console.print(f"picture: {picture}")
    if metrics["val/mAP50"] < ENOUGH:
        console.print(f"mAP50 {metrics['val/mAP50']:.3f} is below {ENOUGH}: the detector did not learn", style="red")
        raise typer.Exit(1)


def quiet() -> None:
    """Leave the progress bars alone on the screen."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")


def summary(config: Config, metrics: Metrics, seconds: float) -> Table:
    """The run in figures."""
    table = Table(title="demo", show_header=False)
    for name, value in (
        ("epochs", f"{config.train.epochs}"),
        ("images trained on", f"{metrics['time/images']:.0f}"),
        ("mAP50 on validation", f"{metrics['val/mAP50']:.3f}"),
        ("images a second, validation apart", f"{metrics['time/images_per_s']:.0f}"),
        ("time spent waiting for data", f"{metrics['time/waiting_share']:.1%}"),
        ("seconds lost between epochs", f"{metrics['time/between_epochs_s']:.2f}"),
        ("seconds to the first batch", f"{metrics['time/first_batch_s']:.1f}"),
        ("seconds in all", f"{seconds:.0f}"),
    ):
        table.add_row(name, value)
    return table


@torch.no_grad()
def draw_predictions(config: Config, path: Path) -> None:
    """The last checkpoint's detections on validation images, beside the truth."""
    loader = ray_loader(config, "val")
    names = loader.index.class_names()
    model = build(names, **config.train.model_args).eval()
    saved = torch.load(Path(config.train.output) / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)
    model.load_state_dict(saved["state_dict"])
    stage = DeviceStage(config.augment.device, seed=config.stream.seed)
    panels: list[Panel] = []
    for batch in loader:
        ready = stage(batch, augment=False)
        for image, target, found in zip(
            batch.images, batch.targets, model.detect(ready.images, ready.mask), strict=True
        ):
            centres = (found.boxes[:, :2] + found.boxes[:, 2:]) / 2
            second_guess = (torch.cdist(centres, centres) < NEAR).tril(-1).any(1)  # the better one stands before it
            sure = (found.scores > CONFIDENT) & ~second_guess
            panels.append(
                Panel(
                    image.permute(1, 2, 0).numpy(),
                    Boxes(target["boxes"].numpy(), target["labels"].numpy()),
                    Boxes(*(value[sure].numpy() for value in found)),
                )
            )
        if len(panels) >= SHOWN:
            break
    draw_panels(panels[:SHOWN], names).save(path)


if __name__ == "__main__":
    typer.run(main)

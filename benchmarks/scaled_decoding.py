"""Large photos through the stream, decoded whole and as small as the resize after it allows (``decode.shrink_to``), in
turn; and how far the pixels of either are from the whole photo's, averaged over areas.

    python benchmarks/scaled_decoding.py ../shared/data/cards

SOURCE, in Roboflow's layout, has no photos of 12 megapixels: its own are mirrored at their edges until they are as
large. As they are, for files full of detail; and enlarged three times before, for softer ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import cv2
import numpy as np
import typer
from common import RESULTS, in_turn, reading, report
from loaders import timed
from peers.work import Delivered, Job, config_of
from PIL import Image

from rfstream import RankLoader, ray_loader
from rfstream.config import MAX_PIXELS, Config
from rfstream.stream.image import decode_scaled

HEIGHT, WIDTH, QUALITY = 3000, 4000, 90
ZOOMS = (1, 3)


def enlarge(source: Path, folder: Path, photos: int, zoom: int) -> list[Path]:
    """The first ``photos`` of SOURCE's train split, ``zoom`` times as large and mirrored to 12 megapixels, as a dataset
    in ``folder``. Boxes stay where they were: nobody looks at them."""
    document = json.loads((source / "train" / "_annotations.coco.json").read_text())
    (folder / "train").mkdir(parents=True)
    document["images"] = document["images"][:photos]
    own = {image["id"] for image in document["images"]}
    document["annotations"] = [each for each in document["annotations"] if each["image_id"] in own]
    for image in document["images"]:
        photo = Image.open(source / "train" / image["file_name"]).convert("RGB")
        pixels = np.asarray(photo.resize((photo.width * zoom, photo.height * zoom)))[:HEIGHT, :WIDTH]
        around = ((0, HEIGHT - len(pixels)), (0, WIDTH - pixels.shape[1]), (0, 0))
        name = f"{image['id']}.jpg"
        Image.fromarray(np.pad(pixels, around, "symmetric")).save(folder / "train" / name, quality=QUALITY)
        image |= {"file_name": name, "width": WIDTH, "height": HEIGHT}
    (folder / "train" / "_annotations.coco.json").write_text(json.dumps(document))
    return [folder / "train" / image["file_name"] for image in document["images"]]


def difference(files: list[Path], size: int, shrink_to: int | None) -> dict[str, float]:
    """Of photos decoded and resized as the stream does, from whole ones whose pixels are averaged: levels of 255."""
    apart = []
    for file in files:
        data = file.read_bytes()
        whole, pixels = (decode_scaled(data, MAX_PIXELS, to).pixels for to in (None, shrink_to))
        averaged = cv2.resize(whole, (size, size), interpolation=cv2.INTER_AREA)
        apart.append(cv2.resize(pixels, (size, size)).astype(float) - averaged)
    squared = float(np.mean(np.square(apart)))
    return {"mean difference": float(np.mean(np.abs(apart))), "PSNR, dB": 10 * np.log10(255**2 / squared)}


def batches(config: Config, images: int) -> Iterator[Delivered]:
    """``images`` images of the stream, over as many epochs as that takes."""
    loader = ray_loader(config)
    assert isinstance(loader, RankLoader)
    with loader:
        for _ in range(-(-images // (len(loader) * config.stream.batch_size))):
            for batch in loader:
                flat = batch.targets.flat
                yield Delivered(batch.images, flat["boxes"], flat["labels"], batch.targets.offsets)


def main(
    source: Path,
    images: Annotated[int, typer.Option(help="images of a reading, over several epochs")] = 480,
    photos: Annotated[int, typer.Option(help="different ones; a multiple of the batch size")] = 32,
    size: Annotated[int, typer.Option(help="pixels a side, and decode.shrink_to")] = 576,
    batch_size: int = 8,
    workers: int = 2,
    repetitions: int = 3,
    out: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Enlarge SOURCE's photos and stream them both ways in turn."""
    if child:
        config = Config(**json.loads(child))
        figures = timed(batches(config, images), images, size, time.perf_counter())
        typer.echo(json.dumps({name: value for name, value in figures.items() if name != "checksum"}))
        return
    options = (f"--images={images}", f"--size={size}")
    variants: dict[str, Callable[[], dict[str, Any]]] = {}
    apart: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as made:
        for zoom in ZOOMS:
            job = Job(Path(made) / str(zoom), size, batch_size, workers)
            files = enlarge(source, job.data / "loose", photos, zoom)
            pack = [str(job.data / "loose"), str(job.pack), "--splits=train"]
            subprocess.run([sys.executable, "-m", "rfstream.cli", "pack", *pack], check=True)
            megabytes = sum(file.stat().st_size for file in files) / len(files) / 1e6
            for shrink_to in (None, size):
                name = f"{megabytes:.1f} MB, {f'decode.shrink_to={shrink_to}' if shrink_to else 'whole'}"
                config = config_of(job).model_dump(mode="json", exclude_defaults=True)
                config["decode"]["shrink_to"] = shrink_to
                variants[name] = partial(reading, __file__, str(source), *options, f"--child={json.dumps(config)}")
                apart[name] = difference(files, size, shrink_to)
        readings = in_turn(variants, repetitions)
    for name, figures in apart.items():
        readings[name] |= {figure: [value] for figure, value in figures.items()}
    title = f"scaled decoding: photos of {WIDTH} x {HEIGHT} pixels, by the size of their files, to {size} px squared"
    setting = {"source": source.name, "images": images, "photos": photos, "quality": QUALITY, "workers": workers}
    report(title, readings, {**setting, "batch_size": batch_size}, out)


if __name__ == "__main__":
    typer.run(main)

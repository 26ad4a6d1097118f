"""Seconds and memory until RF-DETR's training loader stands, for a dataset of the size of COCO: its own, from the
annotation file, against the stream, from the index. Each reading is a process of its own; imports do not count.

    python benchmarks/rfdetr_startup.py
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import pyarrow as pa
import typer
from common import in_turn, reading, report

IMAGES, OBJECTS, SHARDS = 118_000, 860_000, 190


def generate(folder: Path, images: int, objects: int) -> None:
    """A Roboflow layout without photos (no start-up opens one) and the index and tables of its pack."""
    from rfstream.dataset import tables
    from rfstream.dataset.publish import describe_pack
    from rfstream.dataset.shards import WrittenShard, tar_fragments

    categories = [{"id": i, "name": f"class {i}", "supercategory": "none"} for i in range(1, 81)]
    for split, count in (("train", images), ("valid", images // 25)):
        (folder / "loose" / split).mkdir(parents=True)
        document = {"categories": categories, **annotations(count, objects * count // images)}
        (folder / "loose" / split / "_annotations.coco.json").write_text(json.dumps(document))
    (folder / "pack").mkdir()
    for split, count in (("train", images), ("val", images // 25)):
        samples = [sample_rows(number, rows) for number, rows in enumerate(np.array_split(np.arange(count), SHARDS))]
        fragments = [tar_fragments(number, rows) for number, rows in enumerate(samples)]
        shards = [WrittenShard("", f"{i:064x}", samples[i], fragments[i]) for i in range(SHARDS)]
        generation, index = describe_pack(split, categories, list(range(1, 81)), "remap", shards)
        tables.write_tables(str(folder / "pack"), split, generation, list(zip(samples, fragments, strict=True)))
        (folder / "pack" / f"{split}-index.json").write_text(json.dumps(index))


def annotations(images: int, objects: int) -> dict[str, Any]:
    """Images of 640 x 480 and boxes with a polygon of eight points, at random."""
    rng = np.random.default_rng(0)
    of_image, category = rng.integers(1, images + 1, objects).tolist(), rng.integers(1, 81, objects).tolist()
    polygons = rng.uniform(0, 480, (objects, 16)).round(2).tolist()
    return {
        "images": [{"id": i, "file_name": f"{i:012d}.jpg", "width": 640, "height": 480} for i in range(1, images + 1)],
        "annotations": [
            {
                "id": i + 1,
                "image_id": of_image[i],
                "category_id": category[i],
                "bbox": [*polygons[i][:2], 100.0, 100.0],
                "area": 7000.5,
                "iscrowd": 0,
                "segmentation": [polygons[i]],
            }
            for i in range(objects)
        ],
    }


def sample_rows(shard: int, rows: Any) -> pa.Table:
    """Sample rows of a shard of images of 160 kB."""
    from rfstream.dataset.shards import sample_table

    return sample_table(
        [
            (shard, f"{row:08d}", "jpg", 512 + i * 170_000, 160_000, 163_000 + i * 170_000, 4_000, 640, 480, 7, None)
            for i, row in enumerate(rows.tolist())
        ]
    )


def measure(folder: Path, variant: str) -> dict[str, float]:
    """What one rank does before its first batch."""
    from rfdetr.config import RFDETRNanoConfig, TrainConfig
    from rfdetr.training.module_data import RFDETRDataModule

    from rfstream.config import Config
    from rfstream.train.rfdetr import RFStreamDataModule

    model = RFDETRNanoConfig(pretrain_weights=None, device="cpu")
    train = TrainConfig(dataset_dir=str(folder / "loose"), augmentation_backend="torchvision", num_workers=2)
    stream = Config(data={"path": str(folder / "pack")})
    process = psutil.Process()
    memory, began = process.memory_info().rss, time.perf_counter()
    module = RFDETRDataModule(model, train) if variant == "RF-DETR" else RFStreamDataModule(model, train, stream)
    module.setup("fit")
    length = len(module.train_dataloader())
    seconds, grown = time.perf_counter() - began, process.memory_info().rss - memory
    assert length > 0
    return {"seconds": seconds, "MB": grown / 1e6}


def main(
    repetitions: int = 3,
    images: int = IMAGES,
    objects: int = OBJECTS,
    child: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Generate the dataset and measure."""
    if child:
        typer.echo(json.dumps(measure(Path(folder), child)))
        return
    with tempfile.TemporaryDirectory() as made:
        generate(Path(made), images, objects)

        variants = {
            name: partial(reading, __file__, f"--child={name}", f"--folder={made}") for name in ("RF-DETR", "rfstream")
        }
        title = "rfdetr startup: one rank, until the training loader stands"
        report(title, in_turn(variants, repetitions), {"images": images, "objects": objects})


if __name__ == "__main__":
    typer.run(main)

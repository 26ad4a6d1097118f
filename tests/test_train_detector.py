"""The detector learns, and its metric is COCO's, each image counted once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rfstream.batch import Batch, Targets
from rfstream.config import DeviceConfig
from rfstream.tools.draw import Boxes, Panel, draw_panels
from rfstream.tools.scenes import CLASSES, draw_scene
from rfstream.train.detector import STRIDE, TinyDetector, _boxes, _goal, build
from rfstream.train.device import DeviceBatch, DeviceStage
from rfstream.train.lightning import pl
from rfstream.train.metrics import Judged, gather, mean_average_precision
from rfstream.train.timing import Timing

PLAIN = DeviceStage(DeviceConfig(), seed=0)


def scenes(count: int, seed: int) -> Batch:
    """Scenes of different sizes in one padded frame."""
    rng = np.random.default_rng(seed)
    drawn = [draw_scene(rng) for _ in range(count)]
    frame = np.zeros((count, 3, 256, 256), np.uint8)
    boxes, labels, offsets, sizes = [], [], [0], []
    for i, (picture, shapes) in enumerate(drawn):
        frame[i, :, : picture.height, : picture.width] = np.asarray(picture).transpose(2, 0, 1)
        sizes.append((picture.height, picture.width))
        boxes += [np.concatenate([outline.min(0), outline.max(0)]) for _, outline in shapes]
        labels += [label for label, _ in shapes]
        offsets.append(len(labels))
    all_boxes = torch.tensor(np.array(boxes).reshape(-1, 4), dtype=torch.float32)
    flat = {
        "boxes": all_boxes,
        "labels": torch.tensor(labels, dtype=torch.int64),
        "area": (all_boxes[:, 2:] - all_boxes[:, :2]).prod(1),
        "iscrowd": torch.zeros(len(labels), dtype=torch.int64),
    }
    return Batch(
        images=torch.from_numpy(frame),
        sizes=torch.tensor(sizes),
        orig_sizes=torch.tensor(sizes),
        image_ids=torch.arange(count) + 2**33,
        targets=Targets(flat, torch.tensor(offsets), (256, 256)),
        keys=[str(i) for i in range(count)],
        epoch=0,
        step=0,
        window_end=True,
    )


class Repeated:
    """The same batches every epoch."""

    def __init__(self, batches: list[Any], times: int = 1, delay: float = 0.0) -> None:
        self.batches = batches * times
        self.delay = delay

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for batch in self.batches:
            time.sleep(self.delay)
            yield batch


class Given(pl.LightningDataModule):
    """Batches that have passed the device stage already."""

    def __init__(self, train: Repeated, val: Repeated) -> None:
        super().__init__()
        self.train_dataloader = lambda: train
        self.val_dataloader = lambda: val

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


def trainer(**options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, **quiet, **options)


def test_learns_a_few_padded_scenes_by_heart() -> None:
    pl.seed_everything(0, verbose=False)
    batch = PLAIN(scenes(8, seed=5), augment=False)
    assert batch.mask.any()
    model = build(CLASSES, lr=1e-2)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    data = Given(Repeated([batch], times=60), Repeated([batch, batch]))  # validates each image twice, to count it once
    run = trainer(max_epochs=1, limit_val_batches=0)
    before = trainer().validate(model, datamodule=data, verbose=False)[0]
    assert before["val/mAP50"] < 0.05
    run.fit(model, datamodule=data)
    after = trainer().validate(model, datamodule=data, verbose=False)[0]
    assert after["val/mAP50"] > 0.8
    assert len(model._judged) == 8
    for found, mask in zip(model.detect(batch.images, batch.mask), batch.mask, strict=True):
        sure = found.boxes[found.scores > 0.3]
        centre = ((sure[:, :2] + sure[:, 2:]) / 2).long().clamp(0, 255)
        assert not mask[centre[:, 1], centre[:, 0]].any(), "nothing is found in the padding"


def test_batches_without_objects() -> None:
    empty = scenes(2, seed=1)
    no = Targets({k: v[:0] for k, v in empty.targets.flat.items()}, torch.zeros(3, dtype=torch.int64), (256, 256))
    batch = PLAIN(Batch(**{**vars(empty), "targets": no}), augment=False)
    model = TinyDetector(CLASSES)
    run = trainer(max_epochs=1)
    run.fit(model, datamodule=Given(Repeated([batch]), Repeated([batch])))
    assert run.callback_metrics["val/mAP50"] == 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_goal_peaks_at_each_centre_and_gives_its_box_back() -> None:
    batch = scenes(6, seed=9)
    shape = torch.Size([6, len(CLASSES), 256 // STRIDE, 256 // STRIDE])
    goal = _goal(batch.targets, shape, torch.device("cpu"))
    for i, target in enumerate(batch.targets):
        centre = ((target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2 / STRIDE).long()
        for box, label, (x, y) in zip(target["boxes"], target["labels"], centre.tolist(), strict=True):
            assert goal.heat[i, label, y, x] == 1 and goal.weight[i, y, x] > 0
            assert torch.equal(goal.boxes[i, :, y, x], box)
        assert torch.isclose(goal.weight[i].sum(), torch.tensor(float(len(centre)))), "each object weighs the same"
    zero = _boxes(torch.zeros(1, 4, 3, 5))
    assert zero[0, :, 2, 4].tolist() == [18.0, 10.0, 18.0, 10.0]


def judged(
    boxes: list[list[float]], labels: list[int], found: list[list[float]], names: list[int], crowd: int = 0
) -> Judged:
    def f(rows: list[list[float]]) -> np.ndarray:
        return np.array(rows, np.float32).reshape(-1, 4)

    scores = np.linspace(0.9, 0.5, len(found)).astype(np.float32)
    crowds = np.full(len(boxes), crowd, np.int64)
    return Judged(f(boxes), np.array(labels, np.int64), crowds, f(found), np.array(names, np.int64), scores)


def test_mean_average_precision_is_pycocotools() -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rng = np.random.default_rng(0)
    images = {}
    for image in range(20):
        corner = rng.uniform(0, 80, (5, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(10, 40, (5, 2))], axis=1)
        found = boxes[:4] + rng.normal(0, 3, (4, 4))
        labels = rng.integers(0, 3, 5)
        images[image + 2**40] = judged(boxes.tolist(), labels.tolist(), found.tolist(), labels[:4].tolist())
    truth = COCO()
    truth.dataset = {
        "images": [{"id": i} for i in images],
        "categories": [{"id": c} for c in range(3)],
        "annotations": [
            {
                "id": n + 1,
                "image_id": i,
                "category_id": int(c),
                "bbox": [*b[:2], *(b[2:] - b[:2])],
                "area": 1e3,
                "iscrowd": 0,
            }
            for n, (i, b, c) in enumerate(
                (i, b, c) for i, v in images.items() for b, c in zip(v.boxes, v.labels, strict=True)
            )
        ],
    }
    truth.createIndex()
    results = truth.loadRes(
        [
            {"image_id": i, "category_id": int(c), "bbox": [*b[:2], *(b[2:] - b[:2])], "score": float(s)}
            for i, v in images.items()
            for b, c, s in zip(v.found_boxes, v.found_labels, v.found_scores, strict=True)
        ]
    )
    reference = COCOeval(truth, results, "bbox")
    reference.evaluate()
    reference.accumulate()
    reference.summarize()
    ours = mean_average_precision(images, ["a", "b", "c"])
    assert ours["mAP50_95"] == pytest.approx(reference.stats[0], abs=1e-6) and 0.1 < ours["mAP50_95"] < 0.9
    assert ours["mAP50"] == pytest.approx(reference.stats[1], abs=1e-6)


def test_mean_average_precision_at_the_edges() -> None:
    box, far = [10.0, 10.0, 30.0, 40.0], [60.0, 60.0, 90.0, 90.0]
    names = ["a", "b"]
    assert mean_average_precision({1: judged([box], [1], [box], [1])}, names)["mAP50"] == pytest.approx(1)
    assert mean_average_precision({1: judged([box], [1], [box], [0])}, names)["mAP50"] == 0
    assert mean_average_precision({1: judged([box], [0], [], [])}, names)["mAP50"] == 0
    assert mean_average_precision({1: judged([], [], [box], [0])}, names)["mAP50"] == 0
    assert mean_average_precision({}, names) == {"mAP50_95": 0.0, "mAP50": 0.0}
    mixed = {1: judged([box], [0], [box], [0]), 2: judged([far], [0], [far], [0], crowd=1)}
    assert mean_average_precision(mixed, names)["mAP50"] == pytest.approx(1), (
        "what lies in a crowd is not held against it"
    )
    assert gather(mixed) == mixed


GATHERING = """
import sys
import numpy as np
import torch.distributed as dist
from rfstream.train.metrics import Judged, gather
store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
value = Judged(*[np.arange(3)] * 6)
found = gather({} if rank else {4: value, 9: value})
print(sorted(found), found[9].labels.tolist())
"""


def test_a_rank_without_images_takes_part(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GATHERING, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [text.splitlines()[-1] for text in printed] == ["[4, 9] [0, 1, 2]"] * 2


def test_timing_tells_waiting_from_stepping() -> None:
    batch = PLAIN(scenes(1, seed=2), augment=False)

    class Slow(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: DeviceBatch, batch_idx: int) -> torch.Tensor:
            time.sleep(0.2)
            return self.weight.sum()

        def validation_step(self, batch: DeviceBatch, batch_idx: int) -> None:
            time.sleep(1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    timing = Timing()
    run = trainer(max_epochs=3, callbacks=[timing])
    began = time.monotonic()
    run.fit(Slow(), datamodule=Given(Repeated([batch], times=5, delay=0.06), Repeated([batch])))
    wall = time.monotonic() - began
    report = timing.report()
    assert report["time/images"] == 15 and len(timing.between_epochs_s) == 2
    assert report["time/first_batch_s"] >= 0.06
    assert timing.waiting_s >= 0.06 * 12 and timing.stepping_s >= 0.2 * 15
    assert timing.waiting_s + timing.stepping_s + report["time/validation_s"] <= wall, "some time is counted twice"
    assert report["time/validation_s"] >= 3
    assert all(gap >= 0.06 for gap in timing.between_epochs_s)
    assert sum(timing.between_epochs_s) < 2, "validation is not lost time between epochs"
    assert run.callback_metrics["time/images"] == 15


def test_the_picture_shows_boxes_and_names(tmp_path: Path) -> None:
    image = np.full((60, 80, 3), 100, np.uint8)
    boxes = np.array([[10, 20, 40, 50]], np.float32)
    truth = Boxes(boxes, np.array([0], np.int64))
    found = Boxes(boxes + 3, np.array([1], np.int64), np.array([0.75], np.float32))
    sheet = draw_panels([Panel(image, truth, found)] * 3, ["a", "b"], columns=2)
    assert sheet.size == (2 * 164, 2 * 124)
    pixels = np.asarray(sheet)
    assert tuple(pixels[40, 20]) == (255, 255, 255)  # corner of the truth, enlarged twice
    assert tuple(pixels[100, 86]) == (40, 130, 240)  # right edge of the detection, in its class's colour
    sheet.save(tmp_path / "sheet.png")

"""The bench in its quick mode: what loaders deliver is equal, and what it measures is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.work import Delivered, checksum
from rfstream.tools.scenes import make_scenes

ROOT = Path(__file__).resolve().parents[1]
ROWS = ["rfstream-fused", "dataloader-uint8"]
IMAGES = 32


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes in Roboflow's layout."""
    folder = make_scenes(tmp_path_factory.mktemp("scenes"), train=20, val=2, seed=0)
    (folder / "val").rename(folder / "valid")
    for split, name in (("train", "train"), ("valid", "val")):
        (folder / "annotations" / f"instances_{name}.json").rename(folder / split / "_annotations.coco.json")
    return folder


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rfstream.cli", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_rows_deliver_the_same_images(scenes: Path, tmp_path: Path) -> None:
    sizes = [f"--images={IMAGES}", "--size=128", "--batch-size=4", "--repetitions=1", "--workers=1"]
    done = bench("loaders", str(scenes), *sizes, f"--rows={','.join(ROWS)}", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.iterdir()
    document: dict[str, Any] = json.loads(file.read_text())
    assert set(document["checksums"]) == set(ROWS)
    assert len(set(document["checksums"].values())) == 1
    for name in ROWS:
        assert document["readings"][name]["images/s"][0] > 0
        assert document["readings"][name]["CPU-s per 1000 images"][0] > 0
    assert document["readings"]["rfstream-fused"]["object store, MB"][0] > 0


def test_checksum_sees_content_and_not_order() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 3, 128, 128), dtype=torch.uint8, generator=generator)
    boxes, labels = torch.tensor([[1.0, 2, 30, 40], [5, 6, 70, 80]]), torch.tensor([1, 3])
    batch = Delivered(images, boxes, labels, torch.tensor([0, 1, 2]))
    same = checksum(batch)
    assert checksum(Delivered(images.flip(0), boxes.flip(0), labels.flip(0), batch.offsets)) == same
    assert checksum(batch._replace(images=images.float() / 255)) == same
    for other in (images.flip(1), images.flip(3), images[:, :, :, 1:]):  # channels, mirror image, shift
        assert checksum(batch._replace(images=other)) != same
    assert checksum(batch._replace(boxes=boxes + 1)) != same
    assert checksum(batch._replace(boxes=boxes.flip(0))) != same  # each with the other's label
    assert checksum(batch._replace(images=images[:1])) != same


def test_unknown_table_is_one_sentence() -> None:
    done = bench("speed")
    assert done.returncode == 1
    assert done.stderr.startswith("rfstream: no table 'speed' in benchmarks/") and "loaders" in done.stderr
    assert done.stderr.count("\n") == 1

"""RF-DETR Nano, small, from one configuration under Ray Train and torchrun: several ranks, for real, on CPU."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rfdetr_evaluate import evaluated
from rfdetr_reference import pack_in_process

from rfstream.config import Config
from rfstream.errors import ConfigError
from rfstream.tools.scenes import make_scenes
from rfstream.train.rfdetr.run import rfdetr_configs

pytestmark = pytest.mark.timeout(900)  # each starts a Ray, ranks and an actor that imports RF-DETR

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SMALL = [
    "pretrain_weights=null",
    "resolution=64",
    "positional_encoding_size=4",
    "num_queries=50",
    "num_select=50",
    "group_detr=1",
    "dec_layers=1",
    "device=cpu",
]
QUICK = ["use_ema=false", "multi_scale=off", "augmentation_backend=torchvision"]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of 24 training images and one for validation, fewer than there are ranks."""
    folder = tmp_path_factory.mktemp("scenes")
    make_scenes(folder / "scenes", train=24, val=1, seed=1)
    for role in ("train", "val"):
        pack_in_process(folder / "scenes", folder / "pack", role)
    return folder / "pack"


def command(pack: Path, output: Path, *overrides: str) -> list[str]:
    return [
        "pipelines/train.py",
        "--config=configs/train/rfdetr-nano.yaml",
        f"data.path={pack}",
        f"train.output={output}",
        "stream.batch_size=4",
        "stream.grad_accum=1",
        "decode.actors=[1,1]",
        "train.epochs=1",
        "train.accelerator=cpu",
        *(f"train.model_args.model.{value}" for value in SMALL),
        *(f"train.model_args.train.{value}" for value in QUICK),
        *overrides,
    ]


def run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, cwd=ROOT, text=True, capture_output=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def metrics(output: Path) -> dict[str, str]:
    """All that RF-DETR logged to its CSV file, the last value of each."""
    with (output / "metrics.csv").open() as file:
        return {name: value for row in csv.DictReader(file) for name, value in row.items() if value}


def test_two_ranks_under_ray_train(pack: Path, tmp_path: Path) -> None:
    out = run([sys.executable, *command(pack, tmp_path, "train.launcher=ray", "train.workers=2")])
    assert "val/mAP_50_95=" in out
    assert {"train/loss", "val/mAP_50_95"} <= set(metrics(tmp_path))


def test_two_ranks_under_torchrun(pack: Path, tmp_path: Path) -> None:
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node=2", "--standalone"]
    out = run([*torchrun, *command(pack, tmp_path, "train.launcher=torchrun")])
    assert out.count("val/mAP_50_95=") == 1
    assert {"train/loss", "val/mAP_50_95"} <= set(metrics(tmp_path))


def test_evaluation_gives_the_same_figures_on_any_number_of_ranks(
    shared_data: Path, ray_session: None, tmp_path: Path
) -> None:
    """49 images in batches of 2: on 3 ranks one is a batch short, and the last batch is not full."""
    pack_in_process(shared_data / "coco_cc", tmp_path / "pack", "train")
    pack_in_process(shared_data / "coco_cc", tmp_path / "pack", "val")
    alone = evaluated(tmp_path / "pack", ranks=1)
    run([str(BIN / "torchrun"), "--nproc-per-node=3", "--standalone", "tests/rfdetr_evaluate.py", str(tmp_path)])
    assert json.loads((tmp_path / "metrics.json").read_text()) == alone
    assert 0.2 < alone["val/mAP_50_95"] < 0.9, alone


def test_configurations_that_rfdetr_refuses(pack: Path) -> None:
    def refused(message: str, **run: object) -> None:
        with pytest.raises(ConfigError, match=message):
            rfdetr_configs(Config(data={"path": str(pack)}, train={"model": "RFDETRNanoConfig", **run}), 1)

    refused("train.model='RFDETRPico' is not a model configuration of rfdetr.config", model="RFDETRPico")
    refused(r"train.model_args.resolution is unknown", model_args={"resolution": 64})
    refused(r"train.model_args: .*lerning_rate", model_args={"train": {"lerning_rate": 0.1}})
    refused(r"RF-DETR writes to a local or mounted folder, not to gs://bucket/run", output="gs://bucket/run")

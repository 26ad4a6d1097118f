"""RF-DETR trained from a pack, for real and small: data module, one-line route, label spaces, crowds."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rfdetr.datasets.aug_configs import AUG_AGGRESSIVE
from rfdetr_reference import configs, pack_in_process

from rfstream.config import Config
from rfstream.dataset.index import read_index
from rfstream.errors import ConfigError, StateError
from rfstream.loader import RankLoader
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.ranks import Peers, threads
from rfstream.stream.split import HandOver
from rfstream.tools.ledger import _crc
from rfstream.tools.scenes import make_scenes
from rfstream.train.lightning import pl

pytestmark = pytest.mark.filterwarnings("ignore:RF-DETR has changed", "ignore:.*pretrain_weights=None")

TINY = {"resolution": 64, "num_queries": 50, "num_select": 50, "group_detr": 1, "dec_layers": 1, "num_classes": 4}
TRAIN, EPOCHS = 24, 2


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    make_scenes(folder / "scenes", train=TRAIN, val=5, seed=1)
    for role in ("train", "val"):
        pack_in_process(folder / "scenes", folder / "pack", role)
    return folder / "pack"


def tiny(output: Path, **options: Any) -> tuple[Any, Any]:
    """Configurations of the smallest RF-DETR that trains."""
    values = {**TINY, "multi_scale": "off", "epochs": EPOCHS, "use_ema": False, "accelerator": "cpu", "seed": 3}
    return configs(output, output_dir=str(output), **{**values, **options})


def stream(pack: Path, **values: Any) -> Config:
    return Config(data={"path": str(pack)}, decode={"actors": [1, 1]}, stream={"timeout_s": 300, **values})


class Witness(pl.Callback):
    """Writes down the bits of every batch that the model is given; saves and stops where it is told."""

    def __init__(self, save_in: Path | None = None, stop_after: int | None = None) -> None:
        self.trained: list[tuple[int, ...]] = []
        self.validated: list[int] = []
        self.save_in, self.stop_after = save_in, stop_after

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        samples, targets = batch
        of_images = [int(t["image_id"]) for t in targets]
        fields = [_crc(value) for target in targets for _, value in sorted(target.items())]
        self.trained.append((trainer.current_epoch, batch_idx, *of_images, _crc(samples.tensors), *fields))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if self.save_in is not None:
            trainer.save_checkpoint(self.save_in / f"step{done}.ckpt", weights_only=False)
        if done == self.stop_after:
            raise KeyError("interrupted")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.validated += [int(t["image_id"]) for t in outputs["targets"]]


def fit(
    pack: Path,
    output: Path,
    witness: Witness,
    *,
    resume: Path | None = None,
    config: Config | None = None,
    **options: Any,
) -> Any:
    """Train through RF-DETR's own module and trainer on our data module."""
    from rfdetr.training import RFDETRModelModule, build_trainer

    from rfstream.train.rfdetr import RFStreamDataModule

    pl.seed_everything(3, verbose=False)  # the weights to begin with
    model, train = tiny(output, **options)
    trainer = build_trainer(train, model, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    trainer.callbacks.append(witness)
    data = RFStreamDataModule(model, train, config or stream(pack))
    trainer.fit(RFDETRModelModule(model, train), data, ckpt_path=resume)
    return trainer


class Trivial(pl.LightningModule):
    """Takes RF-DETR's batches and learns one number, so that what is tested is the data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (batch[0].tensors.mean() - self.weight).pow(2).sum()

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)  # builds the loader before a checkpoint is restored
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


def small_fit(
    pack: Path,
    output: Path,
    witness: Witness,
    *,
    resume: Path | None = None,
    config: Config | None = None,
    **options: Any,
) -> None:
    """Train the trivial module on our data module."""
    from rfstream.train.rfdetr import RFStreamDataModule

    limits = {name: options.pop(name) for name in ("limit_val_batches",) if name in options}
    model, train = tiny(output, **options)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=train.epochs,
        accumulate_grad_batches=train.grad_accum_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[witness],
        **limits,
    )
    trainer.fit(Trivial(), RFStreamDataModule(model, train, config or stream(pack)), ckpt_path=resume)


@pytest.mark.timeout(900)  # each resumed run starts a decode actor, which imports torch and RF-DETR
def test_resume_inside_a_window(pack: Path, ray_session: None, tmp_path: Path) -> None:
    """A run resumed inside a window is given what the uninterrupted one was given after it, bit for bit."""
    options = {"grad_accum_steps": 2, "batch_size": 8, "limit_val_batches": 0}
    whole = Witness(save_in=tmp_path)
    small_fit(pack, tmp_path, whole, **options)
    assert len(whole.trained) == EPOCHS * 4
    after = Witness()
    small_fit(pack, tmp_path, after, resume=tmp_path / "step3.ckpt", **options)
    assert after.trained == whole.trained[3:]


def test_interrupted_and_resumed_with_rfdetr_s_own_model(pack: Path, ray_session: None, tmp_path: Path) -> None:
    whole, before, after = Witness(), Witness(save_in=tmp_path, stop_after=8), Witness()
    one = fit(pack, tmp_path / "whole", whole)
    assert len(whole.trained) == one.global_step == EPOCHS * 6
    for epoch in range(EPOCHS):
        seen = [number for at, _, *rest in whole.trained if at == epoch for number in rest[:4]]
        assert len(seen) == len(set(seen)) == TRAIN
    assert sorted(whole.validated) == sorted([1, 2, 3, 4, 5] * EPOCHS)
    assert {"train/loss", "val/mAP_50_95"} <= set(one.callback_metrics), set(one.callback_metrics)
    with pytest.raises(KeyError, match="interrupted"):
        fit(pack, tmp_path / "parts", before)
    two = fit(pack, tmp_path / "parts", after, resume=tmp_path / "step8.ckpt")
    assert before.trained + after.trained == whole.trained
    weights, resumed = (t.lightning_module.model.state_dict() for t in (one, two))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_another_stream_s_checkpoint_is_refused(pack: Path, ray_session: None, tmp_path: Path) -> None:
    options = {"batch_size": 8, "limit_val_batches": 0}
    small_fit(pack, tmp_path, Witness(save_in=tmp_path), epochs=1, **options)
    with pytest.raises(StateError, match=r"rfdetr was .*scale_jitter"):
        small_fit(pack, tmp_path, Witness(), resume=tmp_path / "step2.ckpt", scale_jitter=False, **options)


def test_stream_and_rfdetr_must_not_disagree(pack: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stream\.batch_size=16, but RF-DETR trains with 4"):
        small_fit(pack, tmp_path, Witness(), config=stream(pack, batch_size=16))


def test_the_one_line_route(pack: Path, ray_session: None, tmp_path: Path) -> None:
    from rfdetr import RFDETRNano
    from rfdetr.training import RFDETRDataModule

    from rfstream.train.rfdetr import train

    size = {name: value for name, value in TINY.items() if name != "num_classes"}
    model = RFDETRNano(pretrain_weights=None, device="cpu", positional_encoding_size=4, **size)
    run = {"multi_scale": "per-batch", "expanded_scales": False, "output_dir": str(tmp_path), "tensorboard": False}
    train(model, stream=stream(pack), epochs=1, batch_size=4, grad_accum_steps=2, device="cpu", use_ema=True, **run)
    assert model.model.class_names == ["disc", "square", "triangle", "star"]
    assert model.model_config.num_classes == 4
    written = json.loads((tmp_path / "training_config.json").read_text())
    assert written["class_names"] == model.model.class_names
    assert (tmp_path / "checkpoint_best_total.pth").exists()
    assert __import__("rfdetr.training").training.RFDETRDataModule is RFDETRDataModule
    with pytest.raises(ConfigError, match="dataset_dir has no meaning here"):
        train(model, stream=stream(pack), dataset_dir="somewhere")


def streamed(pack: Path, tmp_path: Path, *, actors: int, world_size: int, **options: Any) -> list[tuple[Any, ...]]:
    """Two epochs of the data module's training stream on ``world_size`` ranks (threads): the bits of every sample."""
    from rfstream.train.rfdetr.batch import rfdetr_batch_of
    from rfstream.train.rfdetr.settings import Settings
    from rfstream.train.rfdetr.spec import RFDETRSpec

    _, train = tiny(tmp_path, **options)
    model, _ = tiny(tmp_path)
    batch = 8 // world_size
    config = Config(
        data={"path": str(pack)},
        decode={"actors": [actors, actors]},
        stream={"batch_size": batch, "seed": 9, "timeout_s": 300},
    )
    labels = tuple(read_index(str(pack), "train").label_of().items())
    spec = RFDETRSpec(Settings.of(model, train).to_json(), "train", 9, labels)
    pipeline = build_pipeline(config, "train", world_size, training=True, decode=spec)

    def run(peers: Peers) -> list[tuple[Any, ...]]:
        rows = []
        to_batch = partial(rfdetr_batch_of, normalize=True)
        with RankLoader(pipeline, HandOver(pipeline, peers), to_batch) as loader:
            for got in (got for _ in range(2) for got in loader):
                for slot, target in enumerate(got.targets()):
                    place = (got.epoch, (got.step * world_size + peers.rank) * batch + slot, got.keys[slot])
                    fields = tuple(_crc(value) for _, value in sorted(target.items()))
                    rows.append((*place, _crc(got.images[slot]), *fields))
            peers.meet({}, 240, "to end")
        return rows

    with ThreadPoolExecutor(world_size) as pool:
        return sorted(row for part in pool.map(run, threads(world_size)) for row in part)


def test_albumentations_give_equal_bytes_at_any_actor_count(pack: Path, ray_session: None, tmp_path: Path) -> None:
    options = {"augmentation_backend": "albumentations", "aug_config": AUG_AGGRESSIVE}
    one = streamed(pack, tmp_path, actors=1, world_size=1, **options)
    assert len(one) == 48 and len({row[3] for row in one}) == 48
    assert one == streamed(pack, tmp_path, actors=2, world_size=2, **options)

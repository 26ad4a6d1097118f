"""Transforms of cameras: one draw for a sample's window, a function of (seed, epoch, position) and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import pyarrow as pa
import pytest
from lerobot import FRONT, WRIST, config, training

import rfstream
from rfstream.config import load_config
from rfstream.errors import ConfigError, StateError
from rfstream.loader import RankLoader, hand_over_of, maker_of
from rfstream.plan.keys import camera_key, sample_key
from rfstream.plan.position import Position
from rfstream.stream.decode import BatchDecoder
from rfstream.stream.pipeline import Pipeline, build_pipeline
from rfstream.stream.source import StagedDecode, reader_of, training_functions
from rfstream.stream.wire import WireBatch, from_row, to_row
from rfstream.tools.ledger import SCHEMA, first_difference, ledger_rows, make_ledger
from rfstream.tools.report import try_batches

WINDOW = {FRONT: [-0.5, -1 / 30, 0.0], WRIST: [0.0, 0.2]}
NOISE = {"transform": "tests.augmentations:noise"}
CROP = A.Compose([A.RandomCrop(64, 80), A.HorizontalFlip(p=0.5), A.ColorJitter(p=1.0)])
ROWS = [0, 5, 63, 70, 200, 735]


@pytest.fixture(scope="module")
def dataset(shared_data: Path) -> Path:
    return shared_data / "lerobot/ds_video"


def decoded(pipeline: Pipeline, rows: list[int], epoch: int = 0, position: int = 0) -> WireBatch:
    """``rows`` at ``position`` and after of an epoch, by a decoder that has decoded nothing before."""
    encoded = reader_of(pipeline.reader).read(np.array(rows))
    return BatchDecoder.of(pipeline.decode, pipeline.substitutes).batch(encoded, epoch, 0, position)


def noisy(dataset: Path, **episodes: Any) -> Pipeline:
    return training(config(dataset, delta_timestamps=WINDOW, transforms={FRONT: NOISE, WRIST: NOISE}, **episodes))


# One draw for a window


@pytest.mark.parametrize("name", ["ds_video", "ds_image"])
def test_frames_of_a_window_share_a_draw_and_nothing_else_does(dataset: Path, name: str) -> None:
    root = dataset.parent / name
    plain = decoded(training(config(root, delta_timestamps=WINDOW)), ROWS)
    changed = decoded(noisy(root), ROWS)
    drawn = {camera: plain.arrays[camera] ^ changed.arrays[camera] for camera in (FRONT, WRIST)}
    for masks in drawn.values():
        assert masks.any(axis=(2, 3, 4)).all()
        assert (masks == masks[:, :1]).all()
    single = [mask[0].tobytes() for masks in drawn.values() for mask in masks]
    assert len(set(single)) == 2 * len(ROWS)  # a draw for each sample and each camera
    assert np.array_equal(plain.arrays["records"], changed.arrays["records"])


def test_albumentations_sees_a_window_as_it_sees_a_video(dataset: Path) -> None:
    plain = decoded(training(config(dataset, delta_timestamps=WINDOW)), ROWS)
    transforms = {FRONT: {"albumentations": A.to_dict(CROP)}}
    pipeline = training(config(dataset, delta_timestamps=WINDOW, transforms=transforms, stream={"seed": 3}))
    changed = decoded(pipeline, ROWS, epoch=2, position=40)
    for sample in range(len(ROWS)):
        CROP.set_random_seed(camera_key(sample_key(3, 2, 40 + sample), FRONT) & 0xFFFFFFFF)
        video = CROP(images=plain.arrays[FRONT][sample].transpose(0, 2, 3, 1))["images"]
        assert np.array_equal(changed.arrays[FRONT][sample], video.transpose(0, 3, 1, 2))
    assert np.array_equal(changed.arrays[WRIST], plain.arrays[WRIST])  # it has no transform


def test_a_transform_may_write_to_frames_that_others_share(dataset: Path) -> None:
    episodes = {"delta_timestamps": {FRONT: [-0.1, 0.0, 0.0]}, "cameras": [FRONT]}
    for name in ("ds_video", "ds_image"):
        plain, inverted = (
            decoded(training(config(dataset.parent / name, transforms=transforms, **episodes)), [0, 0, 1])
            for transforms in ({}, {FRONT: {"transform": "tests.augmentations:invert"}})
        )
        assert np.array_equal(inverted.arrays[FRONT], ~plain.arrays[FRONT])


# Of (seed, epoch, position) alone


def test_nothing_but_seed_epoch_and_position_enters(dataset: Path) -> None:
    pipeline = noisy(dataset)
    whole = decoded(pipeline, ROWS, epoch=1, position=10).arrays[FRONT]
    for at, row in enumerate(ROWS):
        assert np.array_equal(decoded(pipeline, [row], epoch=1, position=10 + at).arrays[FRONT][0], whole[at])
    front = config(dataset, delta_timestamps={FRONT: WINDOW[FRONT]}, cameras=[FRONT], transforms={FRONT: NOISE})
    alone = decoded(training(front), ROWS, epoch=1, position=10)
    assert np.array_equal(alone.arrays[FRONT], whole)  # which other cameras are there does not enter
    for epoch, position in ((2, 10), (1, 11)):
        assert not (decoded(pipeline, ROWS, epoch, position).arrays[FRONT] == whole).all(axis=(1, 2, 3, 4)).any()


def one_by_one(rows: Iterable[pa.Table]) -> list[pa.Table]:
    """Each batch of ``rows`` in a row of its own."""
    return [to_row([wire]) for row in rows for wire in from_row(row)]


def test_the_stream_is_the_same_from_any_step_in_both_assemblies(dataset: Path) -> None:
    pipeline = noisy(dataset, select=[1, 7], pool_size=1)
    fixed = (1, 4, pipeline.reader)

    def fused(step: int) -> list[Any]:
        functions = training_functions(pipeline.plan, Position(1, step), *fixed, pipeline.decode, None)
        return one_by_one(row for function, _ in functions for row in function())

    full = fused(0)
    for step in (1, 4):
        assert fused(step) == full[step:]
    stage = StagedDecode(pipeline.reader, pipeline.decode, None, pipeline.batches_per_row)
    encoded = training_functions(pipeline.plan, Position(1, 0), *fixed, None, None)
    assert one_by_one(out for function, _ in encoded for row in function() for out in stage(row)) == full


def test_two_ranks_and_actors_get_what_one_process_makes(dataset: Path, ray_session: None) -> None:
    transforms = {FRONT: {"albumentations": A.to_dict(CROP)}, WRIST: NOISE}
    cfg = config(dataset, actors=2, select=[1, 7], delta_timestamps=WINDOW, transforms=transforms)
    pipeline = training(cfg, world_size=2)
    make = maker_of(pipeline)
    functions = training_functions(pipeline.plan, Position(), 2, 4, pipeline.reader, pipeline.decode, None)
    wires = [wire for function, _ in functions for row in function() for wire in from_row(row)]
    batches = [(make(wire, step=wire.batch // 2, window_end=True), wire.batch % 2) for wire in wires]
    expected = pa.Table.from_pylist([row for batch, rank in batches for row in ledger_rows(batch, rank, 2)], SCHEMA)
    assert len(expected) == 2 * 48
    assert first_difference(expected, make_ledger(cfg, epochs=2, world_size=2)) is None
    pixels = {(row["key"], row["pixels"]) for row in expected.to_pylist()}
    assert len(pixels) == len(expected)  # new draws in the second epoch, and where the last window wraps


# Sizes


def test_batches_layout_and_plan_have_the_size_that_comes_out(dataset: Path) -> None:
    small = {"transform": "tests.augmentations:resize", "args": {"size": 40}}
    plain, resized = (
        training(config(dataset, delta_timestamps=WINDOW, transforms=transforms)) for transforms in ({}, {FRONT: small})
    )
    assert decoded(resized, ROWS).arrays[FRONT].shape == (6, 3, 3, 40, 40)
    assert [c.shape for c in resized.index.layout.cameras] == [(40, 40), (96, 128)]  # type: ignore[attr-defined]
    assert resized.index.digest == plain.index.digest
    announced = [try_batches(pipeline, pipeline.plan.order(0)).batch_bytes for pipeline in (plain, resized)]
    assert announced[0] - announced[1] == 8 * 3 * 3 * (96 * 128 - 40 * 40)


def test_evaluation_has_transforms_of_its_own(dataset: Path) -> None:
    small = {"transform": "tests.augmentations:resize", "args": {"size": 40}}
    cfg = config(dataset, delta_timestamps=WINDOW, transforms={WRIST: NOISE}, eval_transforms={FRONT: small})
    plain = build_pipeline(config(dataset, delta_timestamps=WINDOW), "train", 1, training=False)
    changed = build_pipeline(cfg, "train", 1, training=False)
    assert decoded(changed, ROWS).arrays[FRONT].shape == (6, 3, 3, 40, 40)
    assert np.array_equal(decoded(changed, ROWS).arrays[WRIST], decoded(plain, ROWS).arrays[WRIST])
    assert decoded(training(cfg), ROWS).arrays[FRONT].shape == (6, 3, 3, 96, 128)


# What a state says of them


def test_a_state_of_other_transforms_is_refused(dataset: Path) -> None:
    def loader(allow: list[str], **episodes: Any) -> RankLoader[Any]:
        pipeline = training(config(dataset, stream={"allow_mismatch": allow}, **episodes))
        return RankLoader(pipeline, hand_over_of(pipeline))

    plain, changed = loader([]), loader([], transforms={FRONT: NOISE})
    assert "transforms" not in plain.fingerprint
    assert changed.fingerprint == {**plain.fingerprint, "transforms": changed.fingerprint["transforms"]}
    state = changed.state_at(0, 3)
    swapped = {WRIST: NOISE, FRONT: NOISE}, {FRONT: NOISE, WRIST: NOISE}
    assert loader([], transforms=swapped[0]).fingerprint == loader([], transforms=swapped[1]).fingerprint
    with pytest.raises(StateError, match=r"transforms was .*augmentations:noise.*, is None"):
        plain.load_state_dict(state)
    loader(["transforms"]).load_state_dict(state)


# What is refused


def test_a_camera_that_is_not_streamed_is_refused(dataset: Path) -> None:
    for section in ("transforms", "eval_transforms"):
        with pytest.raises(
            ConfigError, match=rf"episodes.{section}: no camera 'top' is streamed \(known here: .*front"
        ):
            training(config(dataset, **{section: {"top": NOISE}}))
    with pytest.raises(ConfigError, match=f"no camera '{FRONT}' is streamed .known here: {WRIST}"):
        training(config(dataset, cameras=[WRIST], transforms={FRONT: NOISE}))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "pipelines:floats",
            r"fails on a black frame of 128 x 96 \(ValueError: it returned an image that is float32 of shape",
        ),
        ("pipelines:large_crop", r"fails on a black frame of 128 x 96 \(CropSizeError: "),
        ("augmentations:not_a_transform", r"returned int, not an A.Compose or a function"),
        ("augmentations:absent", r"module tests.augmentations has no absent"),
    ],
)
def test_a_transform_that_can_not_be_used_is_refused_before_anything_runs(
    dataset: Path, name: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^episodes.transforms.{FRONT}.*{sentence}"):
        training(config(dataset, transforms={FRONT: {"transform": f"tests.{name}"}}))


def test_frames_of_different_sizes_are_refused(dataset: Path) -> None:
    transforms = {FRONT: {"transform": "tests.augmentations:any_height"}}
    stream = {"on_bad_sample": "replace"}  # it is the transform that is bad, not the sample
    pipeline = training(config(dataset, delta_timestamps={FRONT: [0.1]}, transforms=transforms, stream=stream))
    with pytest.raises(ConfigError) as caught:
        decoded(pipeline, [66])
    said = str(caught.value)
    for part in (f"episodes.transforms.{FRONT}", str(dataset), "episode 1, frame 5 ", "and 128 x 32 of a black frame"):
        assert part in said
    assert "\n" not in said


def test_a_file_may_name_them(dataset: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"data: {{path: {dataset}, format: lerobot}}\n"
        "episodes:\n"
        f"  transforms: {{{FRONT}: {{transform: 'tests.augmentations:resize', args: {{size: 40}}}}}}\n"
    )
    pipeline = training(load_config(path))
    assert decoded(pipeline, [3]).arrays[FRONT].shape == (1, 1, 3, 40, 40)
    with pytest.raises(ConfigError, match=r"unknown key episodes.transforms.front.p \(known here: transform, args, "):
        rfstream.Config(data={"path": "x"}, episodes={"transforms": {"front": {**NOISE, "p": 1}}})

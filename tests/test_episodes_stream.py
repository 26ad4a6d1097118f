"""Episodes through the plan and through Ray: every frame once, the same at any size, resumed exactly."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lerobot import FRAMES, FRONT, LENGTHS, config, training

import rfstream
from rfstream.episodes.batch import EpisodeBatch
from rfstream.episodes.index import pool_weights
from rfstream.errors import StateError
from rfstream.loader import EvaluationLoader, RankLoader, maker_of
from rfstream.plan.order import Fragments, epoch_order
from rfstream.plan.position import Position
from rfstream.stream.pipeline import Pipeline
from rfstream.stream.source import StagedDecode, training_functions
from rfstream.stream.wire import from_row, to_row
from rfstream.tools.ledger import first_difference, ledger_rows, make_ledger

WINDOWS = {"action": [-0.1, 0.0, 0.2], FRONT: [-0.1, 0.0]}
ENDS = np.cumsum(LENGTHS)
GRID = list(itertools.product([1, 2, 3, 4], [1, 3, 12], ["wrap", "drop"]))


@pytest.fixture(scope="module")
def dataset(shared_data: Path) -> Path:
    return shared_data / "lerobot/ds_video"


def rows_of(pipeline: Pipeline, epoch: int, per_task: int | None = None, first: int = 0) -> np.ndarray[Any, Any]:
    """Rows of an epoch, from micro-step ``first`` of all ranks on."""
    tasks = pipeline.plan.tasks(Position(epoch, first), 1, per_task)
    return np.concatenate([task.rows(task.lo, task.hi) for task in tasks])


# The plan


@pytest.mark.parametrize(("world_size", "pool_size", "tail"), GRID)
def test_each_frame_exactly_once_an_epoch(dataset: Path, world_size: int, pool_size: int, tail: str) -> None:
    stream = {"batch_size": 5, "grad_accum": 2, "tail": tail}
    pipeline = training(config(dataset, pool_size=pool_size, stream=stream), world_size)
    windows, order = pipeline.plan.windows, pipeline.plan.order(0)
    assert order.blocks == -(-12 // pool_size)
    whole = FRAMES // windows.window_samples
    assert windows.windows == whole + (tail == "wrap" and FRAMES % windows.window_samples > 0)
    assert windows.batches == windows.batches_per_rank * world_size
    rows = [rows_of(pipeline, epoch) for epoch in (0, 1)]
    for epoch in rows:
        assert len(epoch) == windows.positions
        once = epoch[:FRAMES]
        assert len(set(once.tolist())) == len(once)
        assert np.array_equal(epoch[FRAMES:], epoch[: max(windows.positions - FRAMES, 0)])
    assert not np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows_of(pipeline, 0, per_task=4))  # as fused tasks cut it


@pytest.mark.parametrize("pool_size", [1, 3, 12])
def test_a_pool_is_whole_episodes_in_random_order(dataset: Path, pool_size: int) -> None:
    pipeline = training(config(dataset, pool_size=pool_size))
    rows = rows_of(pipeline, 0)[:FRAMES]
    episodes = np.searchsorted(ENDS, rows, side="right")
    order = pipeline.plan.order(0)
    seen: list[int] = []
    for lo, hi in itertools.pairwise(order.starts.tolist()):
        pool = sorted(set(episodes[lo:hi].tolist()))
        assert len(pool) == pool_size
        assert hi - lo == sum(LENGTHS[episode] for episode in pool)
        assert hi - lo < 20 or np.count_nonzero(np.diff(rows[lo:hi]) == 1) < 0.1 * (hi - lo)
        seen += pool
    assert sorted(seen) == list(range(12))


def test_without_shuffle_the_order_is_the_datasets(dataset: Path) -> None:
    pipeline = training(config(dataset, pool_size=3, select=[9, 2], stream={"shuffle": False, "seed": 5}))
    assert rows_of(pipeline, 3)[: 90 + 58].tolist() == list(range(90 + 58))


def test_large_episodes_make_smaller_pools(dataset: Path) -> None:
    def pools(block_bytes: int) -> np.ndarray[Any, Any]:
        pipeline = training(config(dataset, pool_size=4, stream={"block_bytes": block_bytes}))
        return np.diff(pipeline.plan.order(0).edges)

    assert pools(10**9).tolist() == [4, 4, 4]
    nbytes = training(config(dataset)).index.nbytes  # type: ignore[attr-defined]
    assert 400_000 < nbytes.sum() < 700_000
    assert pools(int(nbytes.max())).max() < 4
    assert pools(1).tolist() == [1] * 12


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1000)), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(8, 3000),
)
def test_a_pool_keeps_to_its_episodes_and_bytes(
    episodes: list[tuple[int, int]], pool_size: int, block_bytes: int
) -> None:
    lengths, nbytes = (np.array(column, dtype=np.int64) for column in zip(*episodes, strict=True))
    weights, limit = pool_weights(nbytes, pool_size, block_bytes)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    order = epoch_order(Fragments(starts, weights), seed=0, epoch=0, block_bytes=limit, shuffle=True)
    for lo, hi in itertools.pairwise(order.edges.tolist()):
        of_pool = nbytes[order.fragment_order[lo:hi]]
        assert len(of_pool) <= pool_size
        assert of_pool[:-1].sum() <= block_bytes  # the last may be the one that fills it
    if nbytes.max() <= limit // pool_size:
        assert np.diff(order.edges)[:-1].tolist() == [pool_size] * (order.blocks - 1)


# Interrupted and resumed, in this process


@pytest.mark.parametrize(("pool_size", "tail"), [(3, "wrap"), (12, "drop")])
def test_interrupted_at_every_step_the_rest_is_the_same(dataset: Path, pool_size: int, tail: str) -> None:
    stream = {"batch_size": 16, "tail": tail}
    cfg = config(dataset, pool_size=pool_size, cameras=[], delta_timestamps={"action": [-0.1, 0.0]}, stream=stream)
    pipeline = training(cfg, world_size=2)
    make = maker_of(pipeline)

    def batches(start: Position) -> list[list[dict[str, Any]]]:
        functions = training_functions(pipeline.plan, start, 1, 4, pipeline.reader, pipeline.decode, None)
        wires = [wire for function, _ in functions for row in function() for wire in from_row(row)]
        made = [(wire, make(wire, step=wire.batch // 2, window_end=False)) for wire in wires]
        return [ledger_rows(batch, wire.batch % 2, 2) for wire, batch in made]

    full = batches(Position(1, 0))
    assert len(full) == pipeline.plan.windows.batches
    for step in range(pipeline.plan.windows.batches_per_rank):
        assert batches(Position(1, step)) == full[2 * step :]


@pytest.mark.parametrize("name", ["ds_video", "ds_image"])
def test_both_assemblies_make_the_same_batches(dataset: Path, name: str) -> None:
    pipeline = training(config(dataset.parent / name, pool_size=5, delta_timestamps=WINDOWS, stream={"batch_size": 16}))
    asked = (pipeline.plan, Position(0, 30), 1, 4, pipeline.reader)
    counted = list(training_functions(*asked, pipeline.decode, None))
    rows = [list(function()) for function, _ in counted]
    assert [len(each) for each in rows] == [count for _, count in counted]
    fused = [to_row([wire]) for row in itertools.chain(*rows) for wire in from_row(row)]
    decode = StagedDecode(pipeline.reader, pipeline.decode, None, pipeline.batches_per_row)
    counted = list(training_functions(*asked, None, None))
    encoded = [list(function()) for function, _ in counted]
    assert [len(rows) for rows in encoded] == [count for _, count in counted]
    staged = [to_row([wire]) for row in itertools.chain(*encoded) for out in decode(row) for wire in from_row(out)]
    assert len(staged) == len(fused) == 16
    assert staged == fused


# Through Ray


@pytest.fixture(scope="module")
def reference(dataset: Path, ray_session: None) -> pa.Table:
    """Two epochs: one actor, one rank, windows of 24, pools of 3."""
    return make_ledger(streamed(dataset, 1, 24), epochs=2, world_size=1)


def streamed(dataset: Path, actors: int, batch_size: int, pool_size: int = 3, **stream: Any) -> rfstream.Config:
    stream = {"batch_size": batch_size, "global_batch": 24, **stream}
    return config(dataset, actors=actors, pool_size=pool_size, delta_timestamps=WINDOWS, stream=stream)


def test_the_ledger_is_complete(reference: pa.Table) -> None:
    assert len(reference) == 2 * 744  # 736 frames fill 31 windows of 24
    keys = [[row["key"] for row in reference.to_pylist() if row["epoch"] == epoch] for epoch in (0, 1)]
    expected = {f"{episode:06d}-{frame:06d}" for episode, length in enumerate(LENGTHS) for frame in range(length)}
    for epoch in keys:
        assert set(epoch[:FRAMES]) == expected
        assert epoch[FRAMES:] == epoch[:8]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("world_size", "actors", "batch_size", "assembly"),
    [(2, 3, 12, "fused"), (3, 2, 4, "staged"), (4, 1, 6, "staged")],
)
def test_the_ledger_is_the_same_at_any_size(
    dataset: Path, reference: pa.Table, world_size: int, actors: int, batch_size: int, assembly: str
) -> None:
    cfg = streamed(dataset, actors, batch_size, assembly=assembly)
    table = make_ledger(cfg, epochs=2, world_size=world_size)
    assert first_difference(reference, table) is None
    counts = [sum(row["rank"] == rank for row in table.to_pylist()) for rank in range(world_size)]
    assert counts == [2 * 744 // world_size] * world_size


def test_another_pool_and_tail(dataset: Path, ray_session: None) -> None:
    tables = [
        make_ledger(streamed(dataset, actors, 24 // ranks, pool_size=1, tail="drop"), epochs=1, world_size=ranks)
        for ranks, actors in [(1, 2), (3, 1)]
    ]
    assert first_difference(*tables) is None
    keys = tables[0]["key"].to_pylist()
    assert len(keys) == len(set(keys)) == 720


def test_resume_equals_the_uninterrupted_run(dataset: Path, reference: pa.Table) -> None:
    expected = reference.to_pylist()
    cfg = streamed(dataset, 2, 24)
    for stop in (17, 31):
        with train_loader(cfg) as loader:
            batches = iter(loader)
            before = [row for _ in range(stop) for row in ledger_rows(next(batches), 0, 1)]
            state = loader.state_dict()
        with train_loader(cfg) as loader:
            loader.load_state_dict(state)
            after = [row for batch in loader for row in ledger_rows(batch, 0, 1)]
        assert before + after == expected[: len(before + after)]
        assert len(before + after) == (744 if stop < 31 else 2 * 744)


def train_loader(cfg: rfstream.Config) -> RankLoader[EpisodeBatch]:
    loader = rfstream.ray_loader(cfg)
    assert isinstance(loader, RankLoader)
    return loader


def test_resume_of_another_stream_is_refused(dataset: Path) -> None:
    state = train_loader(streamed(dataset, 1, 24)).state_dict()
    plain: dict[str, Any] = {"pool_size": 3, "delta_timestamps": WINDOWS}
    for changed, difference in (
        ({"pool_size": 5}, "pool_size was 3, is 5"),
        ({"cameras": [FRONT]}, "cameras was"),
        ({"delta_timestamps": {}}, "delta_timestamps was"),
        ({"select": [1, 2]}, "pack was"),
    ):
        cfg = config(dataset, stream={"batch_size": 24, "global_batch": 24}, **(plain | changed))
        with pytest.raises(StateError, match=difference):
            train_loader(cfg).load_state_dict(state)


def test_a_batch(dataset: Path, ray_session: None) -> None:
    with train_loader(config(dataset, delta_timestamps=WINDOWS)) as loader:
        batch = next(iter(loader))
    assert isinstance(batch, EpisodeBatch)
    assert len(batch) == len(batch.task) == 8
    assert batch[FRONT].shape == (8, 2, 3, 96, 128)
    assert batch["observation.images.wrist"].shape == (8, 1, 3, 96, 128)
    assert batch["action"].shape == (8, 3, 6)
    batch[FRONT].add_(1)  # its own memory: a view of shared memory would end the process here
    batch["action"].mul_(2)


@pytest.mark.parametrize("name", ["ds_image", "ds_video"])
def test_evaluation_sees_each_frame_exactly_once(dataset: Path, ray_session: None, name: str) -> None:
    cfg = config(dataset.parent / name, select=[1, 7, 9], cameras=[FRONT], stream={"batch_size": 20})
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"splits": {"val": "train"}})})
    seen: list[int] = []
    for rank in range(2):
        loader = rfstream.ray_loader(cfg, "val", rank=rank, world_size=2)
        assert isinstance(loader, EvaluationLoader)
        seen += [index for batch in loader for index in batch["index"].tolist()]
    assert sorted(seen) == [*range(64, 104), *range(450, 456), *range(522, 580)]

"""The plan: windows, order, tasks and position are pure functions, checked for every small size."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfstream.errors import PlanError, StateError
from rfstream.plan.keys import camera_key, permutation, sample_key
from rfstream.plan.order import Fragments, epoch_order, rows_at
from rfstream.plan.position import Position, position_of, state_of
from rfstream.plan.substitute import substitute_rows
from rfstream.plan.tasks import StreamPlan
from rfstream.plan.windows import Windows, accumulation, evaluation_batches

SIZES = {
    "samples": st.integers(1, 40),
    "batch_size": st.integers(1, 5),
    "grad_accum": st.integers(1, 4),
    "world_size": st.integers(1, 4),
    "tail": st.sampled_from(["wrap", "drop"]),
}


def fragments_of(counts: list[int], nbytes: int = 100) -> Fragments:
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Fragments(starts, np.array(counts, dtype=np.int64) * nbytes)


def small_plan(
    counts: list[int], windows: Windows, block_bytes: int = 700, seed: int = 3, shuffle: bool = True
) -> StreamPlan:
    return StreamPlan(fragments_of(counts), windows, seed, shuffle, block_bytes)


@given(**SIZES)
def test_length_is_exact_and_windows_are_whole(
    samples: int, batch_size: int, grad_accum: int, world_size: int, tail: str
) -> None:
    if tail == "drop" and samples < batch_size * grad_accum * world_size:
        with pytest.raises(PlanError, match="do not fill one window"):
            Windows(samples, world_size, grad_accum, batch_size, tail)  # type: ignore[arg-type]
        return
    windows = Windows(samples, world_size, grad_accum, batch_size, tail)  # type: ignore[arg-type]
    ranks = [[windows.batch_of(r, s) for s in range(windows.batches_per_rank)] for r in range(world_size)]
    assert sorted(m for steps in ranks for m in steps) == list(range(windows.batches))
    assert all(m % world_size == r for r, steps in enumerate(ranks) for m in steps)
    assert windows.batches_per_rank % grad_accum == 0
    whole, rest = divmod(samples, windows.window_samples)
    assert windows.windows == whole + (tail == "wrap" and rest > 0)
    assert windows.positions == windows.windows * windows.window_samples


@given(**SIZES, counts=st.lists(st.integers(1, 6), min_size=1, max_size=9), per_task=st.sampled_from([None, 1, 3, 4]))
def test_tasks_yield_each_batch_once_with_the_epochs_samples(
    samples: int,
    batch_size: int,
    grad_accum: int,
    world_size: int,
    tail: str,
    counts: list[int],
    per_task: int | None,
) -> None:
    total = sum(counts)
    if tail == "drop" and total < batch_size * grad_accum * world_size:
        return
    windows = Windows(total, world_size, grad_accum, batch_size, tail)  # type: ignore[arg-type]
    plan = small_plan(counts, windows)
    tasks = list(plan.tasks(Position(), 2, per_task))
    for epoch in (0, 1):
        mine = [t for t in tasks if t.epoch == epoch]
        assert [m for t in mine for m in range(t.lo, t.hi)] == list(range(windows.batches))
        rows = np.concatenate([t.rows(t.lo, t.hi) for t in mine])
        order = plan.order(epoch)
        whole = rows_at(tuple(order.block(b) for b in range(order.blocks)), total, 0, windows.positions)
        assert rows.tolist() == whole.tolist()
        seen = rows[:total]
        assert len(set(seen.tolist())) == len(seen)  # nothing twice before all were seen
        if tail == "wrap":
            assert set(seen.tolist()) == set(range(total))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(1, 12), st.data())
def test_a_task_that_starts_midway_holds_the_same_samples(counts: list[int], batch: int, data: st.DataObject) -> None:
    windows = Windows(sum(counts), 2, 1, 2, "wrap")
    plan = small_plan(counts, windows)
    start = Position(1, data.draw(st.integers(0, windows.batches_per_rank - 1)))
    for per_task in (None, 3):
        full = np.concatenate([t.rows(t.lo, t.hi) for t in plan.tasks(Position(1, 0), 2, per_task)])
        rest = np.concatenate([t.rows(t.lo, t.hi) for t in plan.tasks(start, 2, per_task)])
        assert rest.tolist() == full[start.batch * windows.world_size * windows.batch_size :].tolist()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(1, 5))
def test_batches_of_a_block_task_end_in_one_block(counts: list[int], batch_size: int) -> None:
    total = sum(counts)
    plan = small_plan(counts, Windows(total, 1, 1, batch_size, "wrap"))
    starts = plan.order(0).starts
    for task in plan.tasks(Position(), 1, None):
        last = [(m + 1) * batch_size - 1 for m in range(task.lo, min(task.hi, total // batch_size))]
        assert len(set(np.searchsorted(starts, last, side="right"))) <= 1


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5))
def test_evaluation_covers_every_sample_exactly_once(samples: int, batch_size: int, world_size: int) -> None:
    spans = [b for rank in range(world_size) for b in evaluation_batches(samples, world_size, batch_size, rank)]
    rows = [row for lo, hi in spans for row in range(lo, hi)]
    assert sorted(rows) == list(range(samples))
    assert all(0 < hi - lo <= batch_size for lo, hi in spans)


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2), (4, 1)])
def test_windows_hold_the_same_samples_at_any_world_size(sizes: tuple[int, int]) -> None:
    world_size, grad_accum = sizes
    windows = Windows(50, world_size, grad_accum, 3, "wrap")
    plan = small_plan([7] * 7 + [1], windows)
    rows = np.concatenate([t.rows(t.lo, t.hi) for t in plan.tasks(Position(), 1, None)]).reshape(windows.windows, -1)
    reference = small_plan([7] * 7 + [1], Windows(50, 1, 4, 3, "wrap"))
    expected = np.concatenate([t.rows(t.lo, t.hi) for t in reference.tasks(Position(), 1, 4)]).reshape(rows.shape)
    assert rows.tolist() == expected.tolist()


def test_order_is_pinned() -> None:
    # The order is a promise to saved checkpoints: these numbers may only change with STATE_VERSION.
    assert permutation(8, "rfstream.block", 0, 0, 0).tolist() == PINNED_PERMUTATION
    assert sample_key(7, 1, 2) == PINNED_KEY
    assert camera_key(2**64 - 1, "observation.images.front") == PINNED_CAMERA_KEY
    order = epoch_order(fragments_of([2] * 6), seed=1, epoch=2, block_bytes=400, shuffle=True)
    assert order.fragment_order.tolist() == PINNED_FRAGMENTS
    assert rows_at(tuple(order.block(b) for b in range(3)), 12, 0, 12).tolist() == PINNED_ROWS


def test_substitutes_are_pinned() -> None:
    # As above. One draw for each word of the key: another attempt, position, epoch or seed is another row.
    drawn = [list(substitute_rows(10**6, 5, seed, epoch, position)) for seed, epoch, position in PINNED_SUBSTITUTES]
    assert [rows[:2] for rows in drawn] == list(PINNED_SUBSTITUTES.values())


PINNED_PERMUTATION = [1, 3, 5, 2, 0, 6, 7, 4]
PINNED_KEY = 919448233629802432
PINNED_CAMERA_KEY = 12684403464225740144
PINNED_FRAGMENTS = [4, 5, 0, 1, 2, 3]
PINNED_ROWS = [10, 8, 11, 9, 3, 1, 0, 2, 4, 5, 6, 7]
PINNED_SUBSTITUTES = {
    (0, 0, 0): [431675, 646396],
    (0, 0, 1): [278411, 639511],
    (0, 1, 0): [833690, 64539],
    (1, 0, 0): [476254, 605018],
}


def test_permutations_are_uniform_over_positions() -> None:
    counts = np.zeros((5, 5))
    for epoch in range(4000):
        counts[np.arange(5), permutation(5, "rfstream.epoch", 0, epoch)] += 1
    # Each cell is binomial(4000, 1/5): 800 with a standard deviation of 25.
    assert np.abs(counts - 800).max() < 5 * 25.3


def test_small_dataset_is_one_block_and_epochs_differ() -> None:
    order = epoch_order(fragments_of([5, 5, 5]), seed=0, epoch=0, block_bytes=10_000, shuffle=True)
    assert order.blocks == 1
    rows = [
        rows_at(
            (epoch_order(fragments_of([15]), seed=0, epoch=e, block_bytes=10**6, shuffle=True).block(0),), 15, 0, 15
        )
        for e in (0, 1)
    ]
    assert sorted(rows[0]) == sorted(rows[1])
    assert rows[0].tolist() != rows[1].tolist()


def test_without_shuffle_the_order_is_the_index() -> None:
    windows = Windows(10, 1, 1, 4, "wrap")
    plan = small_plan([4, 3, 3], windows, shuffle=False)
    rows = np.concatenate([t.rows(t.lo, t.hi) for t in plan.tasks(Position(), 1, None)])
    assert rows.tolist() == [*range(10), 0, 1]


@given(**SIZES, batch=st.integers(0, 100), epoch=st.integers(0, 5))
def test_position_survives_json_and_another_world_size_of_the_same_window(
    samples: int, batch_size: int, grad_accum: int, world_size: int, tail: str, batch: int, epoch: int
) -> None:
    windows = Windows(samples, world_size, grad_accum, batch_size, "wrap")
    place = Position(epoch, batch % (windows.batches_per_rank + 1))
    state = json.loads(json.dumps(state_of(place, windows, {"pack": "a"})))
    assert position_of(state, windows, {"pack": "a"}) == place.normalised(windows.batches_per_rank)
    alone = Windows(samples, 1, grad_accum * world_size, batch_size, "wrap")
    moved = position_of(state, alone, {"pack": "a"})
    assert moved == Position(epoch, place.batch * world_size).normalised(alone.batches_per_rank)


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    windows = Windows(40, 2, 1, 2, "wrap")
    assert position_of(state_of(Position(3, 10), windows, {}), windows, {}) == Position(4, 0)
    assert position_of(state_of(Position(3, 9), windows, {}), windows, {}) == Position(3, 9)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "version None"),
        ({"version": 2, "epoch": 0, "samples": 0, "fingerprint": {}}, "version 2"),
        ({"version": 1, "epoch": -1, "samples": 0, "fingerprint": {}}, "damaged"),
        ({"version": 1, "epoch": 0, "samples": True, "fingerprint": {}}, "damaged"),
        (
            {"version": 1, "epoch": 0, "samples": 0, "fingerprint": {"pack": "b", "seed": 1}},
            "pack was 'b', is 'a'; seed was 1",
        ),
        ({"version": 1, "epoch": 0, "samples": 3, "fingerprint": {"pack": "a"}}, "not a step"),
        ({"version": 1, "epoch": 0, "samples": 400, "fingerprint": {"pack": "a"}}, "past the epoch's 40"),
    ],
)
def test_a_foreign_or_damaged_state_is_refused_by_name(state: dict[str, object], message: str) -> None:
    with pytest.raises(StateError, match=message):
        position_of(state, Windows(40, 2, 1, 2, "wrap"), {"pack": "a"})


def test_a_state_without_its_window_is_damaged() -> None:
    windows = Windows(40, 2, 1, 2, "wrap")
    with pytest.raises(StateError, match=r"damaged \(fingerprint.window_samples\)"):
        position_of(state_of(Position(1, 3), windows, {}), windows, {"window_samples": 4}, ["window_samples"])


def test_a_mismatch_is_let_pass_only_by_name() -> None:
    windows = Windows(40, 2, 1, 2, "wrap")
    state = state_of(Position(1, 3), windows, {"pack": "a", "seed": 1})
    now: dict[str, str | int | bool] = {"pack": "b", "seed": 2}
    with pytest.raises(StateError, match=r"seed was 1, is 2\. .* set stream\.allow_mismatch=\[seed\]"):
        position_of(state, windows, now, ["pack"])
    assert position_of(state, windows, now, ["pack", "seed"]) == Position(1, 3)


@given(**SIZES, batch=st.integers(0, 100), other=st.integers(1, 12))
def test_another_window_goes_on_where_one_of_both_begins(
    samples: int, batch_size: int, grad_accum: int, world_size: int, tail: str, batch: int, other: int
) -> None:
    was = Windows(samples, world_size, grad_accum, batch_size, "wrap")
    now = Windows(samples, 1, other, 1, "wrap")
    place = Position(2, batch % was.batches_per_rank)
    saved = state_of(place, was, {"window_samples": was.window_samples})
    shared = [s for s in range(saved["samples"], now.positions + 1) if s % was.window_samples == s % other == 0]
    mine: dict[str, str | int | bool] = {"window_samples": other}
    if other == was.window_samples:
        assert position_of(saved, now, mine) == Position(2, saved["samples"]).normalised(now.batches_per_rank)
    elif shared:
        assert position_of(saved, now, mine, ["window_samples"]) == Position(2, shared[0]).normalised(now.positions)
    else:
        with pytest.raises(StateError, match="no window of"):
            position_of(saved, now, mine, ["window_samples"])


def test_accumulation_divides_or_says_what_does_not() -> None:
    assert accumulation(32, 4, 2) == 4
    with pytest.raises(PlanError, match="global_batch 30 is not a multiple of world size 4 x"):
        accumulation(30, 4, 2)


@pytest.mark.parametrize("counts", [([0, 3], [1, 1]), ([1, 3], [1]), ([0, 3, 3], [1, 1]), ([0, 2], [-1])])
def test_impossible_fragments_are_refused(counts: tuple[list[int], list[int]]) -> None:
    with pytest.raises(PlanError):
        Fragments(np.array(counts[0], dtype=np.int64), np.array(counts[1], dtype=np.int64))


def test_plan_needs_neither_ray_nor_torch() -> None:
    import subprocess
    import sys

    code = "import sys, rfstream.plan.tasks, rfstream.plan.position; print({'ray', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"

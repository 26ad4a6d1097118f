"""What an epoch takes of each pack of a mixture: integers, checked for small sizes of every kind."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import fragments_of

from rfstream.plan.keys import IntArray
from rfstream.plan.mixture import RUNS, Mixture, Share
from rfstream.plan.order import epoch_order, rows_at
from rfstream.plan.position import Position
from rfstream.plan.tasks import StreamPlan
from rfstream.plan.windows import Windows

PACK = st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.floats(0.02, 3.5))
PACKS = st.lists(PACK, min_size=1, max_size=4)
Packs = list[tuple[list[int], float]]


def mixture_of(packs: Packs) -> Mixture:
    return Mixture(tuple(Share.of(fragments_of(counts), weight) for counts, weight in packs))


def plan_of(packs: Packs, world_size: int = 1, grad_accum: int = 1, shuffle: bool = True) -> StreamPlan:
    mixture = mixture_of(packs)
    return StreamPlan(mixture, Windows(mixture.total, world_size, grad_accum, 2, "wrap"), 3, shuffle, 700)


def rows_of(plan: StreamPlan, epoch: int) -> IntArray:
    """The rows of an epoch in its order, before any tail."""
    order = plan.order(epoch)
    return rows_at(tuple(order.block(b) for b in range(order.blocks)), order.samples, 0, order.samples)


def counts_of(packs: Packs, rows: IntArray) -> list[IntArray]:
    """How often each sample of each pack is among ``rows``."""
    edges = np.cumsum([0, *(sum(counts) for counts, _ in packs)])
    assert rows.min() >= 0 and rows.max() < edges[-1]
    return np.split(np.bincount(rows, minlength=edges[-1]), edges[1:-1])


@given(PACKS, st.integers(0, 5), st.integers(1, 4), st.booleans())
def test_each_pack_gives_its_share_and_its_samples_come_alike_often(
    packs: Packs, first: int, epochs: int, shuffle: bool
) -> None:
    plan = plan_of(packs, shuffle=shuffle)
    each = [counts_of(packs, rows_of(plan, epoch)) for epoch in range(first, first + epochs)]
    for pack, (counts, weight) in enumerate(packs):
        for of_epoch in each:
            assert of_epoch[pack].sum() == math.ceil(Fraction(str(weight)) * sum(counts))
        times = np.sum([of_epoch[pack] for of_epoch in each], axis=0)
        assert times.max() - times.min() <= 1


@given(PACK, st.integers(0, 5), st.booleans())
def test_a_fraction_covers_the_pack_from_any_epoch_on(pack: tuple[list[int], float], first: int, shuffle: bool) -> None:
    plan = plan_of([pack], shuffle=shuffle)
    epochs = range(first, first + math.ceil(1 / Fraction(str(pack[1]))))
    (times,) = counts_of([pack], np.concatenate([rows_of(plan, epoch) for epoch in epochs]))
    assert times.min() >= 1


@pytest.mark.parametrize(
    ("weight", "samples"), [(0.07, 7), (0.1, 10), (0.55, 55), (1.1, 110), (0.001, 1), (2.001, 201)]
)
def test_a_weight_is_the_decimal_number_that_is_written(weight: float, samples: int) -> None:
    assert Share.of(fragments_of([100]), weight).per_epoch == samples


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_half_a_third_or_a_quarter_comes_once_in_as_many_epochs(parts: int) -> None:
    pack = ([5, 7, 12], 1 / parts)
    taken = [rows_of(plan_of([pack]), epoch) for epoch in range(2 * parts)]
    assert sorted(np.concatenate(taken[:parts]).tolist()) == list(range(24))
    assert sorted(np.concatenate(taken[1 : parts + 1]).tolist()) == list(range(24))
    assert sorted(taken[0].tolist()) != list(range(24 // parts)), "the part is not drawn"


@given(PACKS, st.integers(0, 3))
def test_the_order_is_a_function_of_seed_and_epoch_at_any_world_size(packs: Packs, epoch: int) -> None:
    expected = rows_of(plan_of(packs), epoch)
    for world_size, grad_accum in ((1, 4), (2, 2), (4, 1)):
        plan = plan_of(packs, world_size, grad_accum)
        windows = plan.windows
        tasks = list(plan.tasks(Position(epoch), 1, 3))
        rows = np.concatenate([task.rows(task.lo, task.hi) for task in tasks])
        assert len(rows) == windows.positions == -(-len(expected) // 8) * 8
        assert rows.tolist() == [expected[place % len(expected)] for place in range(windows.positions)]


@given(PACKS, st.integers(0, 3), st.data())
def test_a_task_that_starts_midway_holds_the_same_samples(packs: Packs, epoch: int, data: st.DataObject) -> None:
    plan = plan_of(packs, 2, 2)
    start = data.draw(st.integers(0, plan.windows.batches_per_rank - 1))
    for per_task in (None, 3):
        full = np.concatenate([t.rows(t.lo, t.hi) for t in plan.tasks(Position(epoch), 2, per_task)])
        rest = np.concatenate([t.rows(t.lo, t.hi) for t in plan.tasks(Position(epoch, start), 2, per_task)])
        assert rest.tolist() == full[start * 4 :].tolist()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(0, 3))
def test_one_pack_of_weight_one_is_the_pack_alone(counts: list[int], epoch: int) -> None:
    alone = epoch_order(fragments_of(counts), seed=3, epoch=epoch, block_bytes=700, shuffle=True)
    mixed = plan_of([(counts, 1.0)]).order(epoch)
    assert [mixed.block(b) for b in range(mixed.blocks)] == [alone.block(b) for b in range(alone.blocks)]


@given(PACKS, st.integers(0, 3))
def test_runs_have_the_bytes_of_their_samples(packs: Packs, epoch: int) -> None:
    fragments = mixture_of(packs).of_epoch(3, epoch, True)
    assert fragments.nbytes.tolist() == (100 * np.diff(fragments.starts)).tolist()


def test_a_small_pack_is_drawn_by_samples_and_a_large_one_by_fragments() -> None:
    def drawn(counts: list[int]) -> IntArray:
        return np.diff(mixture_of([(counts, 0.5)]).of_epoch(0, 0, True).starts)

    assert set(drawn([2 * RUNS - 1])) == {1}
    assert set(drawn([5 * RUNS])) == {5}
    assert np.count_nonzero(drawn([30] * 2 * RUNS) == 30) == RUNS


def test_the_parts_are_pinned() -> None:
    # A promise to saved checkpoints, as the order of an epoch is: these may only change with STATE_VERSION.
    plan = plan_of([([4, 4], 0.5), ([3, 3], 1.5)])
    assert [rows_of(plan, epoch).tolist() for epoch in (0, 1)] == PINNED


PINNED = [[9, 0, 10, 12, 8, 10, 1, 8, 11, 6, 12, 13, 7], [2, 11, 10, 8, 9, 3, 9, 13, 12, 11, 4, 5, 13]]

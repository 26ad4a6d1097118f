"""What ranks tell each other: meetings, failures, and where each stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rfstream.errors import PlanError, StreamError
from rfstream.stream.ranks import Peers, threads


def together(ranks: list[Peers], act: Callable[[Peers], Any]) -> list[Any]:
    """What ``act`` returns or raises on each of ``ranks``, which are threads."""

    def outcome(peers: Peers) -> Any:
        try:
            return act(peers)
        except StreamError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, ranks))


def meets(timeout_s: float = 30.0, times: int = 1) -> Callable[[Peers], Any]:
    return lambda peers: [peers.meet({"n": 10 * peers.rank + i}, timeout_s, "to begin") for i in range(times)]


def test_each_meeting_brings_what_each_rank_gave() -> None:
    met = together(threads(3), meets(times=3))
    assert met == [[[{"n": i}, {"n": 10 + i}, {"n": 20 + i}] for i in range(3)]] * 3


def test_an_error_that_one_brings_is_raised_on_all() -> None:
    said = together(threads(2), lambda p: p.meet({"error": "no room"} if p.rank == 0 else {}, 30.0, "to begin"))
    assert said == ["rank 0 failed to begin: no room"] * 2


def test_a_rank_that_does_not_come_is_named_and_all_can_meet_later() -> None:
    ranks = threads(3)
    said = together(ranks[:2], meets(0.3))
    assert said == [
        f"rank {rank} waited for the other ranks to begin: rank 2 did not come within stream.timeout_s=0.3 s"
        for rank in (0, 1)
    ]
    assert together(ranks, meets())[2] == [[{"n": 0}, {"n": 10}, {"n": 20}]]


def test_the_first_failure_is_what_the_others_hear_of_until_that_rank_comes_again() -> None:
    ranks = threads(3)
    ranks[2].failed(ValueError("boom\nand more"))
    ranks[1].failed(PlanError("a consequence"))
    ranks[2].failed(ValueError("again"))
    assert [peers.failure() for peers in ranks] == ["rank 2 failed: ValueError: boom"] * 2 + [None]
    said = together(ranks[:2], meets(0.3))
    assert all(re.fullmatch(r"rank \d waited .* to begin: rank 2 failed: ValueError: boom", text) for text in said)
    assert len(together(ranks, meets())[0][0]) == 3
    assert [peers.failure() for peers in ranks] == [None] * 3


def test_where_the_others_stood() -> None:
    ranks = threads(3)
    assert ranks[0].places() == ""
    ranks[2].reached("step 4 of epoch 1")
    assert ranks[0].places() == "rank 2 was given step 4 of epoch 1 0 s ago"


@pytest.mark.parametrize("act", [meets(), lambda p: p.failed(ValueError("boom")), lambda p: p.failure()])
def test_a_single_rank_waits_for_nobody(act: Callable[[Peers], Any]) -> None:
    assert act(threads(1)[0]) in ([[{"n": 0}]], None)

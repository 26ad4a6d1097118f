"""Memory of batches is used again when nobody holds it, and never before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rfstream import recycle


@pytest.fixture(autouse=True)
def none_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recycle, "_kept", [])
    yield


def test_memory_comes_back_when_the_last_view_of_it_is_gone() -> None:
    array = recycle.empty((4, 5), np.float32)
    where = array.ctypes.data
    view = torch.from_numpy(array)[1:].T
    del array
    assert recycle.empty((4, 5), np.float32).ctypes.data != where
    del view
    assert recycle.empty((10, 2), np.int32).ctypes.data == where


def test_batches_that_are_held_keep_their_values() -> None:
    held = [torch.from_numpy(recycle.copied(np.full((2, 3, 8, 8), i, dtype=np.uint8))) for i in range(12)]
    assert all((batch == i).all() for i, batch in enumerate(held))


def test_memory_that_is_much_too_large_is_not_taken() -> None:
    where = recycle.empty((1000,), np.uint8).ctypes.data
    assert recycle.empty((100,), np.uint8).ctypes.data != where


def test_as_many_come_back_as_were_held_together() -> None:
    held = [recycle.empty((1000,), np.uint8) for _ in range(9)]
    where = {array.ctypes.data for array in held}
    held.clear()
    assert {array.ctypes.data for array in [recycle.empty((1000,), np.uint8) for _ in range(9)]} == where


def test_few_that_fit_nothing_are_kept() -> None:
    for size in range(20):
        recycle.empty((4**size % 10**7 + 1,), np.uint8)
    assert len(recycle._kept) <= recycle._SPARE + 1

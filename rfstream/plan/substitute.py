"""Which sample takes the place of one that can't be decoded: a pure function of integers."""

from __future__ import annotations

from collections.abc import Iterator

from rfstream.plan.keys import key_of

ATTEMPTS = 16
"""Substitutes that are tried for one position. Where half of all samples are bad, one in 65,536 positions runs out."""


def substitute_rows(rows: int, bad: int, seed: int, epoch: int, position: int) -> Iterator[int]:
    """Index rows to try, in this order, at ``position`` of an epoch's order, whose own row ``bad`` can't be decoded.

    Each is drawn from all ``rows`` of the split but ``bad``. There are none if it is the only one.
    """
    for attempt in range(ATTEMPTS if rows > 1 else 0):
        row = key_of("rfstream.replace", seed, epoch, position, attempt) % (rows - 1)
        yield row + (row >= bad)

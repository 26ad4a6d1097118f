"""A mixture of packs: what each of them gives to an epoch. Integers only.

The samples of each pack stand on a ring, in an order that the seed gives. An epoch takes the next ``per_epoch`` of
them: whole turns, and a part of one that begins where that of the epoch before ended. So all epochs are equally long,
and over any number of them in a row, over one too, no two samples of a pack differ by more than one in how often they
came.

What goes round is not single samples but runs of them, so that a pack of millions is planned in thousands of integers
and read in large pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rfstream.plan.keys import IntArray, permutation
from rfstream.plan.order import Fragments

RUNS = 1024
"""A pack with fewer fragments is cut into about as many runs where a part of it is taken: one that has fewer samples
than twice this into single ones."""

_Runs = tuple[IntArray, IntArray, IntArray]
"""Of each run the index row of its first sample, its samples, and its bytes: int64 (n,) each."""


@dataclass(frozen=True)
class Share:
    """One pack of a mixture, and how many samples it gives to each epoch."""

    fragments: Fragments
    per_epoch: int

    @staticmethod
    def of(fragments: Fragments, weight: float) -> Share:
        """A pack whose samples each occur ``weight`` times an epoch; in all that is rounded up to whole samples, so
        that any ceil(1 / weight) epochs in a row hold all of the pack."""
        return Share(fragments, math.ceil(Fraction(str(weight)) * fragments.total))  # 0.07 x 100 is 7, and no more

    def runs(self, seed: int, number: int, epoch: int, shuffle: bool) -> Iterator[_Runs]:
        """What ``epoch`` takes of the pack, which is the mixture's ``number``-th: whole turns, then part of one."""
        total = self.fragments.total
        turns, part = divmod(self.per_epoch, total)
        for _ in range(turns):
            yield _runs(self.fragments)
        if part:
            runs = _cut(self.fragments, max(1, total // RUNS))
            count = len(runs[0])
            ring = permutation(count, "rfstream.ring", seed, number) if shuffle else np.arange(count, dtype=np.int64)
            start = epoch * part % total
            yield _between(runs, ring, start, min(start + part, total))
            yield _between(runs, ring, 0, start + part - total)


@dataclass(frozen=True)
class Mixture:
    """Packs of which an epoch takes what their shares say. Rows of the index count through them, pack after pack."""

    shares: tuple[Share, ...]

    @property
    def total(self) -> int:
        """Samples in each epoch, before any tail."""
        return sum(share.per_epoch for share in self.shares)

    def of_epoch(self, seed: int, epoch: int, shuffle: bool) -> Fragments:
        """What ``epoch`` reads, each run as often as it comes, pack after pack."""
        taken, row = list[_Runs](), 0
        for number, share in enumerate(self.shares):
            for first, samples, nbytes in share.runs(seed, number, epoch, shuffle):
                taken.append((first + row, samples, nbytes))
            row += share.fragments.total
        first, samples, nbytes = (np.concatenate(arrays) for arrays in zip(*taken, strict=True))
        return Fragments(np.concatenate([[0], np.cumsum(samples)]).astype(np.int64), nbytes, first)


def _runs(fragments: Fragments) -> _Runs:
    return fragments.starts[:-1], np.diff(fragments.starts), fragments.nbytes


def _cut(fragments: Fragments, longest: int) -> _Runs:
    """The fragments in runs of ``longest`` samples, the last of each shorter where it must be."""
    first, samples, nbytes = _runs(fragments)
    if samples.max() <= longest:
        return first, samples, nbytes
    pieces = -(-samples // longest)
    of = np.repeat(np.arange(len(pieces)), pieces)
    inside = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * longest
    length = np.minimum(longest, samples[of] - inside)
    return first[of] + inside, length, nbytes[of] * length // samples[of]


def _between(runs: _Runs, ring: IntArray, lo: int, hi: int) -> _Runs:
    """What stands at places ``lo <= p < hi`` where ``runs`` stand in the order ``ring``; the first and the last of them
    cut there."""
    first, samples, nbytes = runs
    edges = np.concatenate([[0], np.cumsum(samples[ring])])
    a, b = int(np.searchsorted(edges, lo, side="right")) - 1, int(np.searchsorted(edges, hi))
    at = ring[a:b]
    begin = np.maximum(edges[a:b], lo)
    length = np.minimum(edges[a + 1 : b + 1], hi) - begin
    return first[at] + begin - edges[a:b], length, nbytes[at] * length // samples[at]

"""The epoch's order: fragments permuted, grouped into shuffle blocks, samples permuted within each block.

Who plans holds O(fragments) integers; only who reads a block computes the permutation of its samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rfstream.errors import PlanError
from rfstream.plan.keys import IntArray, permutation


@dataclass(frozen=True)
class Fragments:
    """Contiguous runs of samples, in index order.

    ``starts`` int64 (F + 1,): fragment f holds index rows ``starts[f] <= row < starts[f + 1]``; ``nbytes`` int64 (F,).
    Those that an epoch of a mixture takes do not follow each other in the index: then ``first`` int64 (F,) is the index
    row where each begins, and ``starts`` counts the samples before it.
    """

    starts: IntArray
    nbytes: IntArray
    first: IntArray | None = None

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.nbytes) + 1 or self.starts[0] != 0:
            raise PlanError("the fragments' edges and sizes do not fit together")
        if len(self.nbytes) and ((self.starts[1:] <= self.starts[:-1]).any() or self.nbytes.min() < 0):
            raise PlanError("a fragment has no samples or a negative size")

    @property
    def total(self) -> int:
        """Samples in all fragments."""
        return int(self.starts[-1])

    def __len__(self) -> int:
        return len(self.nbytes)

    def of_epoch(self, seed: int, epoch: int, shuffle: bool) -> Fragments:
        """What ``epoch`` reads of a single pack: all of them, once."""
        return self


@dataclass(frozen=True)
class Block:
    """One shuffle block of one epoch, small enough to travel inside a read task.

    ``start`` is the position of its first sample in the epoch's order; ``first`` and ``samples`` describe its
    fragments.
    """

    seed: int
    epoch: int
    index: int
    start: int
    first: tuple[int, ...]
    samples: tuple[int, ...]
    shuffle: bool

    @property
    def size(self) -> int:
        """Samples in the block."""
        return sum(self.samples)


@lru_cache(maxsize=8)
def block_rows(block: Block) -> IntArray:
    """Index rows of the block's samples in the epoch's order, int64 (block.size,), read-only."""
    rows = np.concatenate(
        [np.arange(f, f + n, dtype=np.int64) for f, n in zip(block.first, block.samples, strict=True)]
    )
    if block.shuffle:
        rows = rows[permutation(len(rows), "rfstream.block", block.seed, block.epoch, block.index)]
    rows.flags.writeable = False
    return rows


@dataclass(frozen=True)
class EpochOrder:
    """An epoch's order over ``fragments``.

    ``fragment_order`` int64 (F,) lists fragments as read; block b is ``fragment_order[edges[b]:edges[b + 1]]`` and
    starts at position ``starts[b]``; ``starts[-1]`` is the number of samples.
    """

    fragments: Fragments
    seed: int
    epoch: int
    shuffle: bool
    fragment_order: IntArray
    edges: IntArray
    starts: IntArray

    @property
    def samples(self) -> int:
        """Samples in the epoch, before any tail."""
        return int(self.starts[-1])

    @property
    def blocks(self) -> int:
        """Number of shuffle blocks."""
        return len(self.edges) - 1

    def block(self, b: int) -> Block:
        """Block ``b``, self-contained."""
        chosen = self.fragment_order[self.edges[b] : self.edges[b + 1]]
        starts = self.fragments.starts
        return Block(
            seed=self.seed,
            epoch=self.epoch,
            index=b,
            start=int(self.starts[b]),
            first=tuple((starts if self.fragments.first is None else self.fragments.first)[chosen].tolist()),
            samples=tuple((starts[chosen + 1] - starts[chosen]).tolist()),
            shuffle=self.shuffle,
        )

    def block_bytes(self, nbytes: IntArray) -> IntArray:
        """Encoded bytes of each block, int64 (blocks,), of fragments that have ``nbytes`` int64 (F,)."""
        return np.add.reduceat(nbytes[self.fragment_order], self.edges[:-1])

    def covering(self, lo: int, hi: int) -> Iterator[int]:
        """Blocks that hold positions ``lo <= p < hi`` of the order, once each; positions past the end wrap around."""
        n = self.samples
        if hi - lo >= n:
            yield from range(self.blocks)
            return
        a, b = lo % n, (hi - 1) % n
        first, last = (int(np.searchsorted(self.starts, p, side="right")) - 1 for p in (a, b))
        if a <= b:
            yield from range(first, last + 1)
        else:
            yield from range(last + 1)
            yield from range(max(first, last + 1), self.blocks)


def epoch_order(fragments: Fragments, *, seed: int, epoch: int, block_bytes: int, shuffle: bool) -> EpochOrder:
    """The order of ``epoch``: a pure function of its arguments.

    Fragment k of the permuted sequence belongs to block ``(bytes before it) // block_bytes``, so a block holds about
    ``block_bytes`` and a dataset smaller than that is one block, perfectly shuffled.

    Raises:
        PlanError: if there is no sample at all.
    """
    if len(fragments) == 0:
        raise PlanError("the split has no samples: pack it from a folder with images")
    if shuffle:
        order = permutation(len(fragments), "rfstream.epoch", seed, epoch)
    else:
        order = np.arange(len(fragments), dtype=np.int64)
    # Two arrays serve every step: at tens of millions of fragments, fresh memory costs more than the arithmetic.
    ordered = fragments.nbytes[order]
    work = np.cumsum(ordered)
    work -= ordered
    work //= block_bytes
    edges = np.concatenate([[0], np.flatnonzero(work[1:] != work[:-1]) + 1, [len(order)]]).astype(np.int64)
    counts = np.subtract(fragments.starts[1:], fragments.starts[:-1], out=work)
    in_block = np.add.reduceat(np.take(counts, order, out=ordered, mode="clip"), edges[:-1])
    starts = np.concatenate([[0], np.cumsum(in_block)]).astype(np.int64)
    return EpochOrder(fragments, seed, epoch, shuffle, order, edges, starts)


def rows_at(blocks: tuple[Block, ...], samples: int, lo: int, hi: int) -> IntArray:
    """Index rows at positions ``lo <= p < hi`` of an epoch of ``samples``, from the blocks that cover them.

    Positions past the end wrap around to the epoch's beginning, which is how a window is completed.
    """
    at = np.arange(lo, hi, dtype=np.int64) % samples
    rows = np.empty(len(at), dtype=np.int64)
    found = np.zeros(len(at), dtype=bool)
    for block in blocks:
        inside = (at >= block.start) & (at < block.start + block.size)
        rows[inside] = block_rows(block)[at[inside] - block.start]
        found |= inside
    if not found.all():
        raise PlanError(f"positions {lo}..{hi} of the epoch are not covered by the blocks given")
    return rows

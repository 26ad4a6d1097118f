"""A rank's iterator of batches: exact in length, resumable, closed without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch.distributed as dist
from ray.data import DataIterator

from rfstream.batch import Batch, batch_of
from rfstream.config import Config
from rfstream.dataset.index import SplitIndex
from rfstream.errors import PlanError, StreamError
from rfstream.plan.position import Fingerprint, Position, position_of, state_of
from rfstream.plan.windows import Windows, evaluation_batches
from rfstream.session import ensure_ray
from rfstream.stream.pipeline import Pipeline, build_pipeline
from rfstream.stream.split import Feed, GroupHandOver, HandOver, LocalHandOver, split_feed
from rfstream.stream.wire import from_row


class RankLoader:
    """Training batches of one rank, an epoch per ``iter()``.

    Nothing starts before the first ``next``: Lightning makes an iterator before seeds and epoch are set. One Ray
    execution spans many epochs, so the next epoch's first batches are decoded while this one's last are consumed.
    ``len`` is the batches of a whole epoch, equal on all ranks. Close it (or use it as a context manager) to end the
    execution at once.
    """

    def __init__(self, pipeline: Pipeline, rank: int, hand_over: HandOver) -> None:
        self.index: SplitIndex = pipeline.index
        self.windows_of_epoch: Windows = pipeline.plan.windows
        self.rank = rank
        self.epoch = 0
        self._pipeline = pipeline
        self._hand_over = hand_over
        self._feed: Feed | None = None
        self._feed_at = Position()
        self._consumed = Position()
        self._resume: Position | None = None

    def __len__(self) -> int:
        return self.windows_of_epoch.batches_per_rank

    def __iter__(self) -> Iterator[Batch]:
        start = self._resume or Position(self.epoch, 0)
        self._resume = None
        self.epoch = start.epoch
        self._consumed = start
        for step in range(start.batch, len(self)):
            batch = self._next(Position(start.epoch, step))
            self._consumed = Position(start.epoch, step + 1)
            if step == len(self) - 1:  # now, since who counts batches never asks for one more
                self.epoch = start.epoch + 1
            yield batch

    def windows(self) -> Iterator[list[Batch]]:
        """The epoch as lists of ``grad_accum`` batches, one list per optimizer step."""
        window: list[Batch] = []
        for batch in self:
            window.append(batch)
            if batch.window_end:
                yield window
                window = []

    def set_epoch(self, epoch: int) -> None:
        """Begin the next ``iter()`` at ``epoch``."""
        if self._resume is None or self._resume.epoch != epoch:
            self._resume = None
            self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was handed out, as a JSON-able dict."""
        consumed = self._resume or self._consumed
        return self.state_at(consumed.epoch, consumed.batch)

    def state_at(self, epoch: int, batches: int) -> dict[str, Any]:
        """The state of a rank that has consumed ``batches`` batches of ``epoch``."""
        place = Position(epoch, batches).normalised(len(self))
        return state_of(place, self.windows_of_epoch, self.fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next ``iter()`` where ``state`` stands; nothing is replayed or decoded and thrown away.

        Raises:
            StateError: if it belongs to another stream.
        """
        self._resume = position_of(state, self.windows_of_epoch, self.fingerprint)
        self.epoch = self._resume.epoch

    @property
    def fingerprint(self) -> Fingerprint:
        """What must be equal for a saved place to mean the same samples and pixels."""
        plan, decode = self._pipeline.plan, self._pipeline.decode
        return {
            "pack": self.index.digest,
            "seed": plan.seed,
            "shuffle": plan.shuffle,
            "block_bytes": plan.block_bytes,
            "window_samples": plan.windows.window_samples,
            "tail": plan.windows.tail,
            **decode.fingerprint(),
        }

    def close(self) -> None:
        """End the execution and its thread. The loader can be iterated again; that starts a new one."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def __enter__(self) -> RankLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self, at: Position) -> Batch:
        number = self.windows_of_epoch.batch_of(self.rank, at.batch)
        waiting_for = f"rank {self.rank}: batch {number} of epoch {at.epoch} (its step {at.batch})"
        if self._feed is None or self._feed_at != at:
            self._open(at)
        assert self._feed is not None
        row = self._feed.next(waiting_for)
        if row is None:  # this execution's epochs are over
            self._open(at)
            row = self._feed.next(waiting_for)
        if row is None:
            raise StreamError(f"{waiting_for}: the stream ended before it")
        wire = from_row(row)
        if (wire.epoch, wire.batch) != (at.epoch, number):
            raise StreamError(f"{waiting_for}: the stream delivered batch {wire.batch} of epoch {wire.epoch} instead")
        self._feed_at = Position(at.epoch, at.batch + 1).normalised(len(self))
        window_end = (at.batch + 1) % self.windows_of_epoch.grad_accum == 0
        return batch_of(wire, step=at.batch, window_end=window_end)

    def _open(self, at: Position) -> None:
        self.close()
        split: DataIterator = self._hand_over.iterator(at)
        self._feed = split_feed(split, self._pipeline.config.stream.timeout_s, owner=self.rank == 0)


class EvaluationLoader:
    """Evaluation batches of one rank: over all ranks every sample exactly once, in the index's order.

    ``len`` is this rank's number of batches, which may be one less than another's, or none.
    """

    def __init__(self, pipeline: Pipeline, rank: int, world_size: int) -> None:
        self.index: SplitIndex = pipeline.index
        self.rank = rank
        self.world_size = world_size
        self._pipeline = pipeline
        self._batches = evaluation_batches(
            pipeline.index.num_samples, world_size, pipeline.config.stream.batch_size, rank
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        if not self._batches:
            return
        ensure_ray(self._pipeline.config.decode.actors[1])
        dataset = self._pipeline.evaluation(self.rank, self.world_size)

        def rows() -> Any:
            return dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)

        feed = Feed(rows, lambda: None, self._pipeline.config.stream.timeout_s)
        try:
            for step, (lo, hi) in enumerate(self._batches):
                waiting_for = f"rank {self.rank}: evaluation samples {lo} to {hi - 1} of split {self.index.split}"
                row = feed.next(waiting_for)
                if row is None:
                    raise StreamError(f"{waiting_for}: the stream ended before them")
                yield batch_of(from_row(row), step=step, window_end=False)
        finally:
            feed.close()

    def close(self) -> None:
        """Nothing outlives an iteration."""


def ray_loader(
    config: Config, split: str = "train", *, rank: int | None = None, world_size: int | None = None
) -> RankLoader | EvaluationLoader:
    """The loader of ``split`` for this rank: training batches for ``"train"``, evaluation batches for any other role.

    ``rank`` and ``world_size`` come from ``torch.distributed`` when its group is up, else 0 and 1. A local Ray starts
    when the first batch is asked for and no cluster is there.

    Raises:
        ConfigError, DatasetError, PlanError: if configuration, pack and sizes do not fit together.
    """
    grouped = dist.is_available() and dist.is_initialized()
    if world_size is None:
        world_size = dist.get_world_size() if grouped else 1
    if rank is None:
        rank = dist.get_rank() if grouped else 0
    if not 0 <= rank < world_size:
        raise PlanError(f"rank {rank} is not one of {world_size}")
    training = split == "train"
    pipeline = build_pipeline(config, split, world_size, training=training)
    if not training:
        return EvaluationLoader(pipeline, rank, world_size)
    if world_size == 1:
        return RankLoader(pipeline, rank, LocalHandOver(pipeline))
    if not grouped:
        raise PlanError(
            f"a training loader for {world_size} ranks needs an initialised torch.distributed group to hand "
            f"the stream over"
        )
    return RankLoader(pipeline, rank, GroupHandOver(pipeline))

"""A rank's iterator of batches: exact in length, resumable, closed without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol

from typing_extensions import TypeVar

from rfstream.batch import Batch, batch_of
from rfstream.config import Config
from rfstream.episodes.batch import episode_batch_of
from rfstream.episodes.index import EpisodeIndex
from rfstream.errors import PlanError, StreamError
from rfstream.plan.position import Fingerprint, Position, position_of, state_of
from rfstream.plan.windows import Windows, evaluation_batches
from rfstream.stream.feed import Feed
from rfstream.stream.pipeline import Pipeline, StreamIndex, build_pipeline
from rfstream.stream.quarantine import BadSampleRecord
from rfstream.stream.ranks import alone, group_place, peers_of_group
from rfstream.stream.split import HandOver
from rfstream.stream.wire import WireBatch

B = TypeVar("B", default=Batch)
B_co = TypeVar("B_co", default=Batch, covariant=True)


class ToBatch(Protocol[B_co]):
    """Makes what a loader yields of a batch off the wire; must copy what it keeps."""

    def __call__(self, wire: WireBatch, *, step: int, window_end: bool) -> B_co:
        """The batch that is this rank's micro-step ``step``; ``window_end``: the optimizer steps after it."""
        ...


class RankLoader(Generic[B]):
    """Training batches of one rank, an epoch per ``iter()``; one that was left early begins again.

    Nothing starts before the first ``next``: Lightning makes an iterator before seeds and epoch are set. One Ray
    execution spans many epochs, so the next epoch's first batches are decoded while this one's last are consumed.
    ``len`` is the batches of a whole epoch, equal on all ranks. Close it (or use it as a context manager) to end the
    execution at once.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        hand_over: HandOver,
        to_batch: ToBatch[B] = batch_of,  # type: ignore[assignment]  # B's default goes with it
    ) -> None:
        self.index: StreamIndex = pipeline.index
        self.windows_of_epoch: Windows = pipeline.plan.windows
        self.rank = hand_over.peers.rank
        self.epoch = 0
        self._pipeline = pipeline
        self._hand_over = hand_over
        self._bad_samples = BadSampleRecord(pipeline.config.stream, self.index.split, self.index.digest, self.rank)
        self._to_batch = to_batch
        self._feed: Feed | None = None
        self._feed_at = Position()
        self._consumed = Position()
        self._resume: Position | None = None

    def __len__(self) -> int:
        return self.windows_of_epoch.batches_per_rank

    def __iter__(self) -> Iterator[B]:
        start = self._resume or Position(self.epoch, 0)
        self._resume = None
        self.epoch = start.epoch
        self._consumed = start
        for step in range(start.batch, len(self)):
            batch = self._next(Position(start.epoch, step))
            self._consumed = Position(start.epoch, step + 1)
            if step == len(self) - 1:  # now, since who counts batches never asks for one more
                self.epoch = start.epoch + 1
                self._bad_samples.write()
            yield batch

    def windows(self) -> Iterator[list[B]]:
        """The epoch as lists of ``grad_accum`` batches, one list per optimizer step.

        After a resume inside a window the first list is what is left of that window.
        """
        window: list[B] = []
        for batch in self:
            window.append(batch)
            if self._consumed.batch % self.windows_of_epoch.grad_accum == 0:
                yield window
                window = []

    def set_epoch(self, epoch: int) -> None:
        """Begin the next ``iter()`` at ``epoch``, or where a restored state stands in it."""
        if self._resume is None or self._resume.epoch != epoch:
            self._resume = None
            self.epoch = epoch
            self._consumed = Position(epoch)

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
            StateError: if it belongs to another stream, in a way that ``stream.allow_mismatch`` does not name.
        """
        self._resume = self.place_of(state)
        self.epoch = self._resume.epoch

    def place_of(self, state: Mapping[str, Any]) -> Position:
        """Where ``state`` stands, in batches of this rank. Raises as :meth:`load_state_dict` does."""
        allowed = self._pipeline.config.stream.allow_mismatch
        return position_of(state, self.windows_of_epoch, self.fingerprint, allowed)

    @property
    def fingerprint(self) -> Fingerprint:
        """What must be equal for a saved place to mean the same samples and pixels."""
        plan, decode = self._pipeline.plan, self._pipeline.decode
        return {
            **self.index.fingerprint(),
            "seed": plan.seed,
            "shuffle": plan.shuffle,
            "block_bytes": plan.block_bytes,
            "window_samples": plan.windows.window_samples,
            "tail": plan.windows.tail,
            **decode.fingerprint(),
        }

    def close(self, error: BaseException | None = None) -> None:
        """End the execution and its thread, and bring the report on bad samples up to date.

        The loader can be iterated again; that starts a new execution. ``error`` is why this rank stops: the others
        then stop too, and say so, where they wait for a batch or for this rank.
        """
        if isinstance(error, Exception):
            self._hand_over.peers.failed(error)
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        self._bad_samples.write()

    def __enter__(self) -> RankLoader[B]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _next(self, at: Position) -> B:
        number = self.windows_of_epoch.batch_of(self.rank, at.batch)
        waiting_for = f"rank {self.rank}: batch {number} of epoch {at.epoch} (its step {at.batch})"
        try:
            wire = self._feed.next(waiting_for) if self._feed is not None and self._feed_at == at else None
            if wire is None:  # nothing runs, it runs elsewhere, or its epochs are over
                wire = self._open(at).next(waiting_for)
            if wire is None:
                raise StreamError(f"{waiting_for}: the stream ended before it")
            if (wire.epoch, wire.batch) != (at.epoch, number):
                raise StreamError(
                    f"{waiting_for}: the stream delivered batch {wire.batch} of epoch {wire.epoch} instead"
                )
            self._bad_samples.add(wire)
        except BaseException as error:
            self.close(error)  # a feed that failed has no more to give: the next iteration starts afresh
            raise
        self._hand_over.peers.reached(f"step {at.batch} of epoch {at.epoch}")
        self._feed_at = Position(at.epoch, at.batch + 1).normalised(len(self))
        window_end = (at.batch + 1) % self.windows_of_epoch.grad_accum == 0
        return self._to_batch(wire, step=at.batch, window_end=window_end)

    def _open(self, at: Position) -> Feed:
        self._bad_samples.open()
        # The hand-over waits for all ranks: before that, another may still read what closing rank 0's feed would end.
        feed = self._hand_over.feed(at)
        self.close()
        self._feed = feed
        return feed


class EvaluationLoader(Generic[B]):
    """Evaluation batches of one rank: over all ranks every sample exactly once, in the index's order.

    ``len`` is this rank's number of batches, which may be one less than another's, or none. With ``even``, a rank that
    is one short gets the split's first batch again. ``samples`` counts what it shares in, ``filler`` what comes again.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rank: int,
        world_size: int,
        to_batch: ToBatch[B] = batch_of,  # type: ignore[assignment]  # B's default goes with it
        *,
        even: bool = False,
    ) -> None:
        self.index: StreamIndex = pipeline.index
        self.rank = rank
        self.world_size = world_size
        self._pipeline = pipeline
        self._to_batch = to_batch
        of_rank = partial(
            evaluation_batches, pipeline.index.num_samples, world_size, pipeline.config.stream.batch_size, rank
        )
        self.samples = sum(hi - lo for lo, hi in of_rank())
        self._batches = of_rank(even=even)
        self.filler = sum(hi - lo for lo, hi in self._batches) - self.samples

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[B]:
        peers = peers_of_group() if group_place() == (self.rank, self.world_size) else alone()
        peers.join_cluster(self._pipeline.config)
        if not self._batches:
            return
        dataset = self._pipeline.evaluation(self.rank, self.world_size, self._batches)

        def rows() -> Any:
            return dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)

        feed = Feed(rows, str(dataset.name), lambda: None, self._pipeline.config.stream.timeout_s, peers)
        try:
            for step, (lo, hi) in enumerate(self._batches):
                waiting_for = f"rank {self.rank}: evaluation samples {lo} to {hi - 1} of split {self.index.split}"
                wire = feed.next(waiting_for)
                if wire is None:
                    raise StreamError(f"{waiting_for}: the stream ended before them")
                if wire.batch != step * self.world_size + self.rank:
                    raise StreamError(f"{waiting_for}: the stream delivered batch {wire.batch} instead")
                yield self._to_batch(wire, step=step, window_end=False)
        finally:
            feed.close()

    def close(self) -> None:
        """Nothing outlives an iteration."""


def ray_loader(
    config: Config, split: str = "train", *, rank: int | None = None, world_size: int | None = None
) -> RankLoader[Any] | EvaluationLoader[Any]:
    """The loader of ``split`` for this rank: training batches for ``"train"``, evaluation batches for any other role.

    A batch is a :class:`rfstream.batch.Batch`, or of a LeRobot dataset a :class:`rfstream.episodes.batch.EpisodeBatch`.
    ``rank`` and ``world_size`` come from ``torch.distributed`` when its group is up, else 0 and 1. A local Ray starts
    when the first batch is asked for and no cluster is there.

    Raises:
        ConfigError, DatasetError, PlanError: if configuration, pack and sizes do not fit together.
    """
    group_rank, group_size = group_place()
    world_size = group_size if world_size is None else world_size
    rank = group_rank if rank is None else rank
    if not 0 <= rank < world_size:
        raise PlanError(f"rank {rank} is not one of {world_size}")
    training = split == "train"
    pipeline = build_pipeline(config, split, world_size, training=training)
    if not training:
        return EvaluationLoader(pipeline, rank, world_size, maker_of(pipeline))
    return RankLoader(pipeline, hand_over_of(pipeline), maker_of(pipeline))


def maker_of(pipeline: Pipeline) -> ToBatch[Any]:
    """What makes batches of ``pipeline``'s samples."""
    index = pipeline.index
    return partial(episode_batch_of, index.dataset.tasks) if isinstance(index, EpisodeIndex) else batch_of


def hand_over_of(pipeline: Pipeline) -> HandOver:
    """How the ranks of ``pipeline`` come by their iterators.

    Raises:
        PlanError: if there are several and no ``torch.distributed`` group joins them.
    """
    world_size = pipeline.plan.windows.world_size
    if world_size == 1:
        return HandOver(pipeline, alone())
    if group_place()[1] != world_size:
        raise PlanError(
            f"a training loader for {world_size} ranks needs an initialised torch.distributed group to hand "
            f"the stream over"
        )
    return HandOver(pipeline, peers_of_group())

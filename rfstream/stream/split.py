"""From one running execution to the iterator of each rank: hand-over between processes, and a rank's feed."""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import pyarrow as pa
import ray
import torch.distributed as dist
from ray.data import DataIterator
from ray.data._internal.cluster_autoscaler import get_or_create_autoscaling_coordinator
from ray.data._internal.stats import get_or_create_stats_actor

from rfstream.config import Config
from rfstream.errors import RFStreamError, StreamError
from rfstream.plan.position import Position
from rfstream.session import attach_ray, ensure_ray, leave_last
from rfstream.stream.pipeline import PREFETCHED, Pipeline


def open_splits(pipeline: Pipeline, start: Position) -> list[DataIterator]:
    """Start an execution at ``start``; one iterator a rank, batch m going to iterator m % W."""
    # Ray Data's two helper actors of a cluster, which the split's coordinator would ask for only after its own imports:
    # asked for now, theirs run beside those, and the first batch comes a second sooner.
    get_or_create_stats_actor()
    get_or_create_autoscaling_coordinator()
    splits: list[DataIterator] = pipeline.training(start).streaming_split(pipeline.plan.windows.world_size, equal=False)
    return splits


class HandOver(Protocol):
    """How a rank comes by its iterator."""

    def iterator(self, start: Position) -> DataIterator:
        """This rank's iterator of an execution that begins at ``start``; all ranks ask for the same."""
        ...


@dataclass(frozen=True)
class LocalHandOver:
    """World size 1: the rank opens its own."""

    pipeline: Pipeline

    def iterator(self, start: Position) -> DataIterator:
        """See :class:`HandOver`."""
        ensure_ray(self.pipeline.config.decode.actors[0])
        return open_splits(self.pipeline, start)[0]


class ThreadHandOver:
    """Ranks that are threads of one process, as the ledger runs them: the last to arrive opens for all."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._splits: list[DataIterator] = []
        self._barrier = threading.Barrier(pipeline.plan.windows.world_size, timeout=pipeline.config.stream.timeout_s)

    def of_rank(self, rank: int) -> HandOver:
        """The hand-over as ``rank`` sees it."""
        return _ThreadRank(self, rank)

    def abort(self) -> None:
        """Let no rank wait any longer: one has failed."""
        self._barrier.abort()

    def wait_for_all(self, rank: int) -> None:
        """Return when every rank has called this.

        Raises:
            StreamError: if one does not within ``stream.timeout_s``, or failed.
        """
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise StreamError(
                f"rank {rank} waited in vain for the other ranks: one of them failed or is stuck"
            ) from None

    def take(self, rank: int, start: Position) -> DataIterator:
        """Rank ``rank``'s iterator; waits for all ranks."""
        try:
            if self._barrier.wait() == 0:
                ensure_ray(self._pipeline.config.decode.actors[0])
                self._splits = open_splits(self._pipeline, start)
            self._barrier.wait()
            return self._splits[rank]
        except threading.BrokenBarrierError:
            raise StreamError(f"rank {rank} waited in vain for the other ranks to start at {start}") from None
        except BaseException:
            self._barrier.abort()
            raise


@dataclass(frozen=True)
class _ThreadRank:
    shared: ThreadHandOver
    rank: int

    def iterator(self, start: Position) -> DataIterator:
        return self.shared.take(self.rank, start)


class GroupHandOver:
    """Ranks of a ``torch.distributed`` group: rank 0 opens and sends the others theirs, and the cluster's address."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._kept: list[DataIterator] = []

    def iterator(self, start: Position) -> DataIterator:
        """See :class:`HandOver`. Collective over the default group.

        Raises:
            StreamError: if a rank fails (its reason on all ranks), if ranks ask for different positions, or if one does
                not arrive within ``stream.timeout_s``.
        """
        config = self._pipeline.config
        join_cluster(config, self._pipeline.plan.windows.world_size)
        opened = self._kept
        mine: dict[str, Any] = {"start": start}
        if dist.get_rank() == 0:
            try:
                opened = open_splits(self._pipeline, start)
                mine["splits"] = [ray.cloudpickle.dumps(s) for s in opened]
            except Exception as error:  # whatever it is, the other ranks must not wait in vain
                mine["error"] = str(error)
        everyone = _meet(mine, config, f"to start epoch {start.epoch}")
        self._kept = opened  # Ray ends a coordinator with its last owner's handle: not before all have arrived
        for rank, other in enumerate(everyone):
            if other["start"] != start:
                raise StreamError(
                    f"rank {dist.get_rank()} starts at {start} but rank {rank} at {other['start']}: resume all alike"
                )
        split: DataIterator = pickle.loads(everyone[0]["splits"][dist.get_rank()])
        return split


def join_cluster(config: Config, world_size: int) -> None:
    """Connect this process to Ray; if it is one of several ranks of a group, to the same cluster as rank 0.

    Collective over the default group the first time, when there is one of ``world_size`` ranks.

    Raises:
        ConfigError: if a configured cluster can't be reached.
        StreamError: if a rank fails, is attached to another cluster already, or does not arrive in time.
    """
    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        ensure_ray(config.decode.actors[0])
        return
    if _Joined.group is dist.group.WORLD:
        return
    mine: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            ensure_ray(config.decode.actors[0])
            leave_last()
            mine = {"address": ray.get_runtime_context().gcs_address, "auth_mode": os.environ.get("RAY_AUTH_MODE")}
        except Exception as error:  # as above
            mine = {"error": str(error)}
    first = _meet(mine, config, "to join one Ray cluster")[0]
    attach_ray(first["address"], first["auth_mode"])
    _Joined.group = dist.group.WORLD


class _Joined:
    """The default group whose ranks have joined one cluster, and the group of our own over the same ranks."""

    group: dist.ProcessGroup | None = None
    meeting: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None = None


def _meet(mine: dict[str, Any], config: Config, purpose: str) -> list[dict[str, Any]]:
    """What every rank brought, in the order of ranks. An ``error`` that one brought is raised on all."""
    if _Joined.meeting is None or _Joined.meeting[0] is not dist.group.WORLD:
        # A group of its own: objects travel over the CPU whatever the training backend is, and its waits are bounded.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.stream.timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        _Joined.meeting = (dist.group.WORLD, group)
    everyone: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, mine, group=_Joined.meeting[1])
    except RuntimeError as error:
        raise StreamError(
            f"rank {dist.get_rank()} waited for the other ranks {purpose} "
            f"(stream.timeout_s={config.stream.timeout_s:g}): {error}"
        ) from error
    for rank, other in enumerate(everyone):
        if "error" in other:
            raise StreamError(f"rank {rank} failed {purpose}: {other['error']}")
    return everyone


class Feed:
    """A rank's batches, pulled ahead by a thread, with a bounded wait for each."""

    def __init__(self, rows: Callable[[], Any], end: Callable[[], None], timeout_s: float) -> None:
        self._queue: queue.Queue[pa.Table | BaseException | None] = queue.Queue(maxsize=PREFETCHED)
        self._stop = threading.Event()
        self._timeout = timeout_s
        self._thread = threading.Thread(
            target=_pump, args=(rows, self._queue, self._stop), name="rfstream-feed", daemon=True
        )
        self._thread.start()
        self.close = weakref.finalize(self, _close, self._stop, self._queue, self._thread, end)
        _open_feeds.add(self)

    def next(self, waiting_for: str) -> pa.Table | None:
        """The next row, or ``None`` at the end of the execution.

        Raises:
            StreamError: if the wait runs out, or the pipeline failed: then with the pipeline's own error as the cause.
        """
        try:
            item = self._queue.get(timeout=self._timeout)
        except queue.Empty:
            raise StreamError(
                f"{waiting_for} did not arrive within stream.timeout_s={self._timeout:g} s; "
                f"{_cluster_state()}: raise the "
                "timeout if the data is slow, else look for a starved or dead decode pool"
            ) from None
        if isinstance(item, BaseException):
            raise _translated(item, waiting_for) from item
        return item


_open_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()


@atexit.register
def _close_open_feeds() -> None:
    """Runs before Ray's own exit handler, which was registered before this one; ``weakref``'s may run after it."""
    for feed in list(_open_feeds):
        feed.close()


def _pump(rows: Callable[[], Any], out: queue.Queue[Any], stop: threading.Event) -> None:
    last: BaseException | None = None
    iterator: Iterator[pa.Table] = iter(())
    try:
        iterator = iter(rows())
        for row in iterator:
            if not _put(out, row, stop):
                break
    except BaseException as error:
        last = error
    finally:
        if hasattr(iterator, "close"):
            iterator.close()  # tells Ray that this rank is done
    _put(out, last, stop)


def _put(out: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            out.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _close(stop: threading.Event, out: queue.Queue[Any], thread: threading.Thread, end: Callable[[], None]) -> None:
    stop.set()
    end()
    while not out.empty():
        out.get_nowait()
    if thread is not threading.current_thread():
        thread.join(timeout=10)


def split_feed(split: DataIterator, timeout_s: float, *, owner: bool) -> Feed:
    """The feed of a rank's split. Closing the owner's ends the execution for all ranks."""
    coordinator = split._coord_actor

    def end() -> None:
        if owner and ray.is_initialized():
            # The only way to end an execution at once whose consumers are blocked in it.
            ray.kill(coordinator)

    def rows() -> Any:
        return split.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=PREFETCHED)

    return Feed(rows, end, timeout_s)


def _cluster_state() -> str:
    try:
        total, free = ray.cluster_resources(), ray.available_resources()
        return f"the Ray cluster has {free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs free"
    except Exception:  # the cluster is gone: that is the finding
        return "the Ray cluster does not answer"


def _translated(error: BaseException, waiting_for: str) -> StreamError:
    if isinstance(error, ray.exceptions.ActorDiedError):  # a decode actor's death is not a consumer's error
        return StreamError(
            f"{waiting_for} failed: the actor that deals out batches (SplitCoordinator) died, killed or out of memory; "
            "go on from the last saved state"
        )
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RFStreamError):
            return StreamError(str(cause))
        inner = getattr(cause, "cause", None)
        cause = inner if isinstance(inner, BaseException) else cause.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return StreamError(f"{waiting_for} failed: {type(error).__name__}: {lines[-1].strip() if lines else 'no message'}")

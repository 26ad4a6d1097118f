"""A rank's batches, pulled ahead by a thread, with a bounded wait for each."""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import ray
from ray._private.state import state
from ray.data._internal.stats import get_or_create_stats_actor

from rfstream.errors import StreamError
from rfstream.session import own_sentence
from rfstream.stream.pipeline import PREFETCHED
from rfstream.stream.ranks import Peers
from rfstream.stream.wire import WireBatch, from_row

LOOK_S = 1.0
"""Who waits for a batch looks this often whether another rank has failed."""
_DIAGNOSIS_S = 10.0
_ACTOR = "MapWorker("
"""Ray Data's actors are called ``MapWorker(step)``."""


class Feed:
    """Pulls the batches in ``rows()`` ahead, which the dataset named ``execution`` makes; ``end`` is called when it is
    closed."""

    def __init__(
        self, rows: Callable[[], Any], execution: str, end: Callable[[], None], timeout_s: float, peers: Peers
    ) -> None:
        self._queue: queue.Queue[WireBatch | BaseException | None] = queue.Queue(maxsize=PREFETCHED)
        self._stop = threading.Event()
        self._execution = execution
        self._timeout = timeout_s
        self._peers = peers
        self._thread = threading.Thread(
            target=_pump, args=(rows, self._queue, self._stop), name="rfstream-feed", daemon=True
        )
        self._thread.start()
        self.close = weakref.finalize(self, _close, self._stop, self._queue, self._thread, end)
        _open_feeds.add(self)

    def next(self, waiting_for: str) -> WireBatch | None:
        """The next batch, or ``None`` at the end of the execution.

        Raises:
            StreamError: if the wait runs out, another rank failed meanwhile, or the pipeline failed: then with the
                pipeline's own error as the cause.
        """
        item = self._wait(waiting_for)
        if isinstance(item, BaseException):
            raise _translated(item, waiting_for) from item
        return item

    def _wait(self, waiting_for: str) -> WireBatch | BaseException | None:
        deadline = time.monotonic() + self._timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                return self._queue.get(timeout=min(LOOK_S, left))
            except queue.Empty:
                if failure := self._peers.failure():
                    raise StreamError(f"{waiting_for} was not waited for any longer: {failure}") from None
        runs = "; ".join(filter(None, (what_runs(self._execution), self._peers.places())))
        raise StreamError(
            f"{waiting_for} did not arrive within stream.timeout_s={self._timeout:g} s; {runs}: raise the timeout if "
            "the data is slow, else look for a starved or dead decode pool"
        )


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
        for batch in itertools.chain.from_iterable(map(from_row, iterator)):
            if not _put(out, batch, stop):
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


def what_runs(execution: str) -> str:
    """What Ray and ``execution`` are doing, for who has waited in vain. Takes :data:`_DIAGNOSIS_S` at most."""
    said: list[str] = []
    thread = threading.Thread(target=_ask_ray, args=(execution, said), name="rfstream-diagnosis", daemon=True)
    thread.start()
    thread.join(_DIAGNOSIS_S)
    return "; ".join(said) or "the Ray cluster does not answer"


def _ask_ray(execution: str, said: list[str]) -> None:
    try:
        total, free = ray.cluster_resources(), ray.available_resources()
        said.append(f"the Ray cluster has {free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs free")
        # No public calls tell the rest without a dashboard.
        actors = Counter(
            f"{actor['State'].lower().replace('_', ' ')} of {actor['ActorClassName'][len(_ACTOR) : -1]}"
            for actor in state.actor_table(None).values()
            if actor["ActorClassName"].startswith(_ACTOR) and actor["State"] != "DEAD"
        )
        said.append("actors: " + (", ".join(f"{n} {what}" for what, n in sorted(actors.items())) or "none"))
        datasets = ray.get(get_or_create_stats_actor().get_datasets.remote(), timeout=_DIAGNOSIS_S)
        for name, dataset in datasets.items():
            # Others may be those of other loaders and runs, or were ended with their coordinator.
            for step in dataset["operators"].values() if name.startswith(f"{execution}_") else ():
                if step["name"].startswith(("Input", "split(")):
                    continue  # they hand on and do nothing
                of = f"{step['progress']} of {step['total']} tasks done"
                said.append(f"{step['name']}: {of}, {step['queued_blocks']} blocks queued")
    except Exception:  # the cluster is gone, or going: what it said before is the finding
        return


def _translated(error: BaseException, waiting_for: str) -> StreamError:
    if isinstance(error, ray.exceptions.ActorDiedError):  # a decode actor's death is not a consumer's error
        return StreamError(
            f"{waiting_for} failed: the actor that deals out batches (SplitCoordinator) died, killed or out of memory; "
            "go on from the last saved state"
        )
    if (own := own_sentence(error)) is not None:
        return StreamError(own)
    lines = [line for line in str(error).splitlines() if line.strip()]
    return StreamError(f"{waiting_for} failed: {type(error).__name__}: {lines[-1].strip() if lines else 'no message'}")

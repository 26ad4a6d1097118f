"""Ray itself: attach to the cluster there is, or start a quiet local one."""

from __future__ import annotations

import atexit
import importlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import ray
from ray._private import worker
from ray._private.state import state

from rfstream.errors import ConfigError, RFStreamError, StreamError

T = TypeVar("T")

EXIT_GRACE_S = 10.0
"""Seconds that ranks may take from their last collective call to their exit."""
_UNWATCHED = {"LOG_NAME_UPDATE_INTERVAL_S": "600", "REPORTER_UPDATE_INTERVAL_MS": "600000"}
"""Environment of a Ray of which nobody reads logs and figures. By default it looks for new log files twice a second and
at all of its processes every few seconds, for a tenth of a core."""


def ensure_ray(min_cpus: int = 1) -> None:
    """Connect this process to Ray: as it already is, to a running cluster, or to a local one started for this process.

    The local one has the machine's CPUs, or ``min_cpus`` logical ones if that is more, so that what needs them still
    starts. No more than that: Ray starts a worker process for each, before anything asks for it.

    Raises:
        ConfigError: if ``RAY_ADDRESS`` names a cluster that can't be reached.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address != "local":
        try:
            ray.init(address=address, logging_level=logging.ERROR)
            return
        except ConnectionError as error:
            if "RAY_ADDRESS" in os.environ:
                raise ConfigError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from None
    start_ray(num_cpus=max(os.cpu_count() or 1, min_cpus))
    _quiet()


def start_ray(**options: Any) -> None:
    """A local Ray, without dashboard or workers' output, in a thread that stays: Linux ends Ray's processes with the
    thread that started them. ``options`` are ``ray.init``'s."""
    if threading.current_thread() is threading.main_thread():
        _init(**options)
        return
    started: Future[None] = Future()

    def run() -> None:
        try:
            _init(**options)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        threading.Event().wait()

    threading.Thread(target=run, name="rfstream-ray", daemon=True).start()
    started.result()


def _init(**options: Any) -> None:
    options |= {"address": "local", "include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
    with _unwatched():
        start_again_if_late(partial(ray.init, **options))


def start_again_if_late(start: Callable[[], T]) -> T:
    """What ``start`` gives; asked again where a busy machine did not start Ray's processes in the 30 s that Ray allows.

    Those of the first start end with the thread.
    """
    try:
        return start()
    except Exception as error:  # of no class of its own
        if "timed out during startup" not in str(error):
            raise
        return start()


@contextmanager
def _unwatched() -> Iterator[None]:
    """What is started inside inherits :data:`_UNWATCHED`, but for what the environment says already."""
    added = {name: value for name, value in _UNWATCHED.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def leave_last() -> None:
    """At this process's exit, let the other processes that use its Ray leave first: it ends with this one, and them.

    Waits :data:`EXIT_GRACE_S` at most, since it may be this one's failure that they wait for. Nothing to do where Ray
    is not this process's.
    """
    node = worker._global_node
    if node is not None and node.is_head():
        atexit.unregister(_wait_for_others)  # once is enough
        atexit.register(_wait_for_others)  # Ray's own handler, registered before, runs after it


def _wait_for_others() -> None:
    deadline = time.monotonic() + EXIT_GRACE_S
    while ray.is_initialized() and time.monotonic() < deadline:
        # No public call tells without a dashboard.
        if not any(job["DriverPid"] != os.getpid() and not job["IsDead"] for job in state.job_table()):
            return
        time.sleep(0.1)


def most_of(resource: str) -> float:
    """The most of ``resource`` that the cluster can ever have; infinite where an autoscaler may add some.

    Ray's own autoscalers tell nobody their limits. A cluster of which this process is the head has none.
    """
    # No public calls tell either.
    now: float = ray.cluster_resources().get(resource, 0)
    limits = state.get_max_resources_from_cluster_config()
    if limits is not None:
        return max(now, float(limits.get(resource, 0)))
    node = worker._global_node
    if node is not None and node.is_head():
        return now
    return math.inf


def own_sentence(error: BaseException) -> str | None:
    """What rfstream's own error says that ``error`` comes from; None if there is none.

    Ray raises a task's error as one that is of the task's class too, whose text is a traceback with colours, and adds
    lines of its own to the text of the task's.
    """
    seen: list[BaseException] = []
    waiting: list[Any] = [error]
    while waiting:
        current = waiting.pop(0)
        if isinstance(current, RFStreamError) and not isinstance(current, ray.exceptions.RayError):
            return str(current).partition("\n")[0]
        if isinstance(current, BaseException) and current not in seen:
            seen.append(current)
            of_workers = getattr(current, "worker_failures", {}).values()  # of Ray Train
            waiting += [getattr(current, "cause", None), current.__cause__, *of_workers]
    return None


def _quiet() -> None:
    """Ray Data reports each execution at INFO; in a session of our own that is noise beside a progress bar."""
    importlib.import_module("ray.data")  # sets the level itself when it is imported: not after this
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def attach_ray(address: str, auth_mode: str | None) -> None:
    """Connect this process, unless it is, to the cluster at ``address`` that another process of the run uses.

    ``auth_mode`` is ``RAY_AUTH_MODE`` in that process: a cluster that ``ray.init`` started there asks for a token, and
    only the process that started it knows so.

    Raises:
        StreamError: if this process is attached to another cluster, or has no node of that one.
    """
    if ray.is_initialized():
        mine = ray.get_runtime_context().gcs_address
        if mine != address:
            raise StreamError(
                f"this rank uses the Ray cluster at {mine} and rank 0 that at {address}: start all ranks on one"
            )
        return
    if auth_mode is not None:
        os.environ["RAY_AUTH_MODE"] = auth_mode
        ray._raylet.Config.initialize("")  # Ray reads its environment on import; no public call makes it look again
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:
        raise StreamError(
            f"no Ray node of the cluster at {address} is on this machine ({error}): run "
            f"`ray start --address={address}` first"
        ) from error
    _quiet()

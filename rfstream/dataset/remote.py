"""Calls of a remote filesystem: each within its time, and several at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import fsspec

from rfstream.dataset.retry import patiently

T = TypeVar("T")

IN_FLIGHT = 8
"""Requests under way at once."""


def at_once(work: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """``work`` of each entry of the lists, :data:`IN_FLIGHT` at once; the first error ends all."""
    if len(arguments[0]) < 2:
        return list(map(work, *arguments))
    pool = ThreadPoolExecutor(min(IN_FLIGHT, len(arguments[0])))
    try:
        return list(pool.map(work, *arguments))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def ask(url: str, what: str, deadline_s: float, method: str, **arguments: Any) -> Any:
    """What the filesystem's ``method`` says of a remote ``url``, tried again as long as that may help.

    The arguments are those of :func:`rfstream.dataset.retry.patiently` and of :func:`call`; so are the errors.
    """
    return patiently(url, what, deadline_s, lambda timeout: call(url, timeout, method, **arguments))


def call(url: str, timeout: float, method: str, before: tuple[str, ...] = (), **arguments: Any) -> Any:
    """One call of a method of the remote filesystem of ``url``, which is given up after ``timeout`` seconds.

    The path follows the arguments ``before``.

    Raises:
        TimeoutError: if it takes longer.
        Exception: whatever the filesystem raises; each has exceptions of its own.
    """
    began = time.monotonic()
    # To make a filesystem is to look for credentials, over the network too.
    fs, path = _within(timeout, partial(fsspec.core.url_to_fs, url))
    fs.invalidate_cache(path)  # what it remembers of listings may be old
    left = timeout - (time.monotonic() - began)
    if fs.async_impl:
        return getattr(fs, method)(*before, path, **arguments, timeout=max(left, 0.001))
    return _within(left, partial(getattr(fs, method), *before, path, **arguments))


def _within(timeout: float, work: Callable[[], T]) -> T:
    """What ``work`` returns, within ``timeout`` seconds; a thread that takes longer is left to itself."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout)

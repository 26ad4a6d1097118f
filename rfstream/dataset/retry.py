"""Trying again what may go well the next time, for a bounded time.

Transient is what storage says of itself (408, 425, 429, 5xx), a connection that breaks or does not answer, and a body
shorter than asked for. All else, refused credentials and absent files above all, is final at once. What a filesystem's
own client does on top (gcsfs tries a request up to six times, botocore five) happens inside one try here, and so within
its time.
"""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import TypeVar

import requests
from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from rfstream.errors import DatasetError

T = TypeVar("T")

logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # or it prints a traceback beside our sentence

DEADLINE_S = 150.0
"""How long one answer of a storage may take by default, all tries together, seconds."""
_TRIES_AT_LEAST = 3
"""A try that gets no answer is given up after this part of the deadline, so that others follow it."""
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 20.0
_TRANSIENT = frozenset({408, 425, 429})
_REFUSED = frozenset({401, 403})
_ADVICE = {
    "gs": "log in with `gcloud auth application-default login`, or give the machine's service account a role on the "
    "bucket",
    "s3": "set AWS credentials, or give the machine a role that may use the bucket",
}


class ShortBodyError(Exception):
    """An answer had fewer bytes than asked for."""


_BROKEN = (
    TimeoutError,
    ConnectionError,
    EOFError,
    http.client.HTTPException,
    requests.RequestException,
    ShortBodyError,
)
_BROKEN_NAMES = frozenset(
    {"aiohttp.ClientError", "botocore.HTTPClientError", "botocore.ConnectionError", "botocore.IncompleteReadError"}
)
_NO_CREDENTIALS = frozenset({"DefaultCredentialsError", "RefreshError", "NoCredentialsError"})
"""Classes by name, of packages that may not be installed (google-auth, botocore) or that who reads from a disk need not
import (aiohttp)."""


def patiently(url: str, what: str, deadline_s: float, attempt: Callable[[float], T]) -> T:
    """What ``attempt(seconds it may take)`` returns, tried again with growing, random waits until ``deadline_s``.

    Args:
        url: what is read or written, for messages; ``what`` is said to have been impossible: "read", "written".
        deadline_s: bound of all tries and the waits between them, seconds.
        attempt: one try; it keeps to its time itself.

    Raises:
        FileNotFoundError: if the storage says that there is nothing.
        DatasetError: one sentence, if the try fails for good, or none went well in time.
    """
    began, tries = time.monotonic(), 0

    def once() -> T:
        nonlocal tries
        tries += 1
        left = deadline_s - (time.monotonic() - began)
        return attempt(min(deadline_s / _TRIES_AT_LEAST, max(left, 0.01)))

    retrying = Retrying(
        retry=retry_if_exception(_is_transient),
        wait=wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        stop=stop_before_delay(deadline_s),
        reraise=True,
    )
    try:
        return retrying(once)
    except DatasetError:
        raise
    except Exception as error:  # each remote has exceptions of its own
        if _is_transient(error):
            tried = f"{tries} {'try' if tries == 1 else 'tries'} in {time.monotonic() - began:.1f} s"
            raise DatasetError(
                f"{url}: can't be {what}: {tried}, the last: {_reason(error)}; look at network and storage "
                "(stream.timeout_s sets how long to try)"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise
        raise DatasetError(_final(url, what, error)) from error


def _final(url: str, what: str, error: BaseException) -> str:
    """One sentence for an error that no other try would mend."""
    if _is_refused(error):
        advice = _ADVICE.get(url.partition("://")[0], "give this machine credentials for it")
        return f"{url}: can't be {what}: access was refused ({_reason(error)}); {advice}"
    return f"{url}: can't be {what} ({_reason(error)})"


def describe(error: BaseException) -> str:
    """One line for an exception: what the system says, else its text, else its class."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _status(error: BaseException) -> int | None:
    """The HTTP status behind ``error``: fsspec's filesystems wrap it in exceptions of their own."""
    for cause in _causes(error):
        answer = getattr(cause, "response", None)  # botocore's
        metadata = answer.get("ResponseMetadata", {}) if isinstance(answer, Mapping) else {}
        stated = (getattr(cause, "status", None), getattr(cause, "code", None), metadata.get("HTTPStatusCode"))
        for value in stated:
            if str(value).isdecimal():
                return int(str(value))
        if isinstance(cause, PermissionError) or (isinstance(cause, OSError) and str(cause).startswith("Forbidden")):
            return 403
        if _is_broken(cause):
            return None  # what lies below is the broken connection's, and aiohttp gives it a code too
    return None


def _is_transient(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT or status >= 500
    return not _is_refused(error) and any(map(_is_broken, _causes(error)))


def _is_broken(cause: BaseException) -> bool:
    names = (f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(cause).__mro__)
    return isinstance(cause, _BROKEN) or not _BROKEN_NAMES.isdisjoint(names)


def _is_refused(error: BaseException) -> bool:
    return _status(error) in _REFUSED or any(type(cause).__name__ in _NO_CREDENTIALS for cause in _causes(error))


def _reason(error: BaseException) -> str:
    status = _status(error)
    if status in {entry.value for entry in HTTPStatus}:
        return f"{status} {HTTPStatus(status).phrase}"
    if any(isinstance(cause, TimeoutError) for cause in _causes(error)):
        return "no answer"
    broken = next(filter(_is_broken, _causes(error)), error)
    return describe(broken)

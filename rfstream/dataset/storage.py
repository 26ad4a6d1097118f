"""Bytes from a local folder or an fsspec URL.

A pack lives at a local path or at any URL that fsspec knows (``gs://``, ``s3://``, ``https://``). ``file://`` is local.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec

from rfstream.errors import DatasetError

_LOCAL_SCHEMES = ("file", "local")


def local_path(url: str) -> Path | None:
    """The local path that ``url`` names, or None if it names something remote."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    return Path(rest) if scheme in _LOCAL_SCHEMES else None


def join(folder: str, name: str) -> str:
    """``folder/name``, for a path or a URL."""
    return f"{folder.rstrip('/')}/{name}" if folder.rstrip("/") else f"/{name}"


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a remote ``url`` and the path inside it.

    Raises:
        DatasetError: if no installed filesystem knows the URL's scheme.
    """
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DatasetError(f"{url}: no filesystem for this URL ({error}); install the package that serves it") from None
    return fs, path


def exists(url: str) -> bool:
    """Whether there is a file or folder at ``url``."""
    local = local_path(url)
    if local is not None:
        return local.exists()
    fs, path = filesystem(url)
    return bool(fs.exists(path))


def read_bytes(url: str) -> bytes:
    """The whole file at ``url``.

    Raises:
        DatasetError: if it can't be read.
    """
    local = local_path(url)
    try:
        if local is not None:
            return local.read_bytes()
        fs, path = filesystem(url)
        data: bytes = fs.cat_file(path)
        return data
    except OSError as error:
        raise DatasetError(f"{url}: can't be read ({describe(error)})") from error


def read_json(url: str) -> Any:
    """The JSON document at ``url``.

    Raises:
        DatasetError: if it can't be read or is no JSON.
    """
    data = read_bytes(url)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{url}: not a readable JSON file ({describe(error)})") from None


def read_ranges(urls: Sequence[str], starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
    """Bytes ``starts[i] <= b < ends[i]`` of each remote ``urls[i]``, requested together; shorter at a file's end.

    Raises:
        OSError: what the filesystem raises for a file that is absent or can't be reached.
    """
    fs, _ = filesystem(urls[0])
    paths = [filesystem(url)[1] for url in urls]
    data: list[bytes] = fs.cat_ranges(paths, list(starts), list(ends), on_error="raise")
    return data


def open_remote(url: str) -> IO[bytes]:
    """A seekable binary file at a remote ``url``, which the caller closes."""
    fs, path = filesystem(url)
    file: IO[bytes] = fs.open(path, "rb")
    return file


@contextmanager
def open_binary(url: str) -> Iterator[IO[bytes]]:
    """A seekable binary file at ``url``, for reading."""
    local = local_path(url)
    if local is not None:
        with local.open("rb") as file:
            yield file
        return
    with open_remote(url) as file:
        yield file


@contextmanager
def replacing(url: str) -> Iterator[IO[bytes]]:
    """A binary file to write that appears at ``url`` as a whole when the block ends, and not at all if it raises."""
    local = local_path(url)
    if local is None:
        fs, path = filesystem(url)
        with fs.transaction, fs.open(path, "wb") as file:
            yield file
        return
    descriptor, name = tempfile.mkstemp(prefix=f".{local.name}.", dir=local.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(local)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def describe(error: BaseException) -> str:
    """One line for an exception: what the system says, else its text, else its class."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__

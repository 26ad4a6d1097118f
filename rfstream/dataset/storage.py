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
_MAX_GAP = 64 * 1024


def local_path(url: str) -> Path | None:
    """The local path that ``url`` names, or None if it names something remote."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    return Path(rest) if scheme in _LOCAL_SCHEMES else None


def join(folder: str, name: str) -> str:
    """``folder/name``, for a path or a URL."""
    return f"{folder.rstrip('/')}/{name}"


def exists(url: str) -> bool:
    """Whether there is a file or folder at ``url``.

    Raises:
        DatasetError: if a remote can't be asked.
    """
    local = local_path(url)
    if local is not None:
        return local.exists()
    with _explained(url, "read"):
        fs, path = _filesystem(url)
        return bool(fs.exists(path))


def list_files(url: str) -> list[str]:
    """Names of the files in the folder ``url``, sorted.

    Raises:
        DatasetError: if it can't be listed.
    """
    with _explained(url, "listed"):
        fs, path = _filesystem(url)
        entries = fs.ls(path, detail=True)
        return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file")


def make_folder(url: str) -> None:
    """Make the folder ``url`` and those above it, where there are none yet.

    Raises:
        DatasetError: if it can't be made.
    """
    with _explained(url, "made"):
        fs, path = _filesystem(url)
        fs.makedirs(path, exist_ok=True)


def read_bytes(url: str) -> bytes:
    """The whole file at ``url``.

    Raises:
        DatasetError: if it can't be read.
    """
    with _explained(url, "read"):
        local = local_path(url)
        if local is not None:
            return local.read_bytes()
        fs, path = _filesystem(url)
        return bytes(fs.cat_file(path))


def read_json(url: str) -> Any:
    """The JSON document at ``url``.

    Raises:
        DatasetError: if it can't be read or is no JSON.
    """
    data = read_bytes(url)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{url}: not a readable JSON file ({describe(error)}); correct or replace it") from None


def read_text(url: str) -> str:
    """The text in UTF-8 at ``url``, without the byte order mark that some editors write.

    Raises:
        DatasetError: if it can't be read or is no such text.
    """
    try:
        return read_bytes(url).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{url}: not a text file in UTF-8 ({describe(error)}); correct or replace it") from None


def read_ranges(urls: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """Bytes ``begin <= b < end`` of each URL, requested together; shorter at a file's end.

    All URLs are of one filesystem.

    Raises:
        DatasetError: if one can't be read.
    """
    if not urls:
        return []
    with _explained(", ".join(sorted(set(urls))), "read"):
        fs, _ = _filesystem(urls[0])
        paths = [_filesystem(url)[1] for url in urls]
        begin, end = ([span[i] for span in spans] for i in (0, 1))
        data: list[bytes] = fs.cat_ranges(paths, begin, end, on_error="raise")
        return data


def read_near(url: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, memoryview]]:
    """What lies in ``spans`` of one file, local or remote, as offsets and bytes; near ones together.

    Raises:
        DatasetError: if it can't be read.
    """
    starts, ends = ([span[i] for span in spans] for i in (0, 1))
    _, starts, ends = fsspec.utils.merge_offset_ranges([url] * len(spans), starts, ends, max_gap=_MAX_GAP)
    data = read_ranges([url] * len(starts), list(zip(starts, ends, strict=True)))
    return [(start, memoryview(part)) for start, part in zip(starts, data, strict=True)]


def file_sizes(urls: Sequence[str]) -> list[int]:
    """Bytes of each remote URL, asked for together; all are of one filesystem.

    Raises:
        DatasetError: if one is not there.
    """
    if not urls:
        return []
    with _explained(", ".join(sorted(set(urls))), "read"):
        fs, _ = _filesystem(urls[0])
        return [int(size) for size in fs.sizes([_filesystem(url)[1] for url in urls])]


def open_binary(url: str) -> IO[bytes]:
    """A seekable binary file at ``url``, for reading; the caller closes it.

    Raises:
        DatasetError: if it can't be opened.
    """
    with _explained(url, "read"):
        local = local_path(url)
        if local is not None:
            return local.open("rb")
        fs, path = _filesystem(url)
        file: IO[bytes] = fs.open(path, "rb")
        return file


@contextmanager
def replacing(url: str) -> Iterator[IO[bytes]]:
    """A binary file to write that appears at ``url`` as a whole when the block ends, and not at all if it raises.

    Raises:
        DatasetError: if it can't be written.
    """
    local = local_path(url)
    with _explained(url, "written"):
        if local is not None:
            with _replacing_local(local) as file:
                yield file
        else:
            fs, path = _filesystem(url)
            with fs.transaction, fs.open(path, "wb") as file:
                yield file


@contextmanager
def _replacing_local(local: Path) -> Iterator[IO[bytes]]:
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


def _filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a remote ``url`` and the path inside it."""
    fs, path = fsspec.core.url_to_fs(url)
    return fs, path


@contextmanager
def _explained(url: str, what: str) -> Iterator[None]:
    """Turn what a filesystem raises into one sentence. Each remote has exceptions of its own, so all are taken."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(f"{url}: can't be {what} ({describe(error)})") from error

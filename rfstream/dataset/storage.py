"""Bytes from a local folder or an fsspec URL.

A pack lives at a local path or at any URL that fsspec knows (``gs://``, ``s3://``, ``https://``). ``file://`` is local.
What is remote is tried again where that may help (:mod:`rfstream.dataset.retry`), for ``deadline_s`` at most.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from typing_extensions import Buffer

from rfstream.dataset.remote import ask, at_once, call
from rfstream.dataset.retry import DEADLINE_S, ShortBodyError, patiently
from rfstream.dataset.retry import describe as describe
from rfstream.errors import DatasetError

_LOCAL_SCHEMES = ("file", "local")
_SHORT_TRIES = 3
"""An answer that is short as often as this is taken for all that there is."""
MAX_GAP = 64 * 1024
"""Ranges of a file this near are one read, bytes: on a remote store a request costs more than what lies between."""
_BUFFER = 1024 * 1024
"""What a file opened at a URL reads at once, bytes."""
_SLOWEST = 1_000_000
"""Bytes per second that an upload is given time for beyond its deadline."""


def local_path(url: str) -> Path | None:
    """The local path that ``url`` names, or None if it names something remote."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    return Path(rest) if scheme in _LOCAL_SCHEMES else None


def join(folder: str, name: str) -> str:
    """``folder/name``, for a path or a URL."""
    return f"{folder.rstrip('/')}/{name}"


def exists(url: str, deadline_s: float = DEADLINE_S) -> bool:
    """Whether there is a file or folder at ``url``.

    Raises:
        DatasetError: if a remote can't be asked.
    """
    local = local_path(url)
    if local is not None:
        return local.exists()
    try:
        ask(url, "read", deadline_s, "info")
    except FileNotFoundError:
        return False
    return True


def make_folder(url: str) -> None:
    """Make the folder ``url`` and those above it, where there are none yet.

    Raises:
        DatasetError: if it can't be made.
    """
    local = local_path(url)
    if local is None:
        ask(url, "made", DEADLINE_S, "makedirs", exist_ok=True)
        return
    with explained(url, "made"):
        local.mkdir(parents=True, exist_ok=True)


def read_bytes(url: str, deadline_s: float = DEADLINE_S) -> bytes:
    """The whole file at ``url``.

    Raises:
        DatasetError: if it can't be read.
    """
    data = find_bytes(url, deadline_s)
    if data is None:
        raise DatasetError(f"{url}: can't be read (No such file or directory)")
    return data


def find_bytes(url: str, deadline_s: float = DEADLINE_S) -> bytes | None:
    """The whole file at ``url``, or None if there is none.

    Raises:
        DatasetError: if it can't be read, or is shorter than its storage says.
    """
    local = local_path(url)
    if local is not None:
        with explained(url, "read"):
            return local.read_bytes() if local.exists() else None

    def attempt(timeout: float) -> bytes:
        began = time.monotonic()
        size = call(url, timeout, "info").get("size")
        data = bytes(call(url, timeout - (time.monotonic() - began), "cat_file"))
        if size is not None and len(data) < size:
            raise ShortBodyError(f"{len(data)} bytes of {size}")
        return data

    try:
        return patiently(url, "read", deadline_s, attempt)
    except FileNotFoundError:
        return None


def read_json(url: str) -> Any:
    """The JSON document at ``url``.

    Raises:
        DatasetError: if it can't be read or is no JSON.
    """
    data = read_bytes(url)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise not_json(url, error) from None


def not_json(url: str, error: Exception) -> DatasetError:
    """What to say of a file at ``url`` that ``error`` says is no JSON."""
    return DatasetError(f"{url}: not a readable JSON file ({describe(error)}); correct or replace it")


def read_text(url: str) -> str:
    """The text in UTF-8 at ``url``, without the byte order mark that some editors write.

    Raises:
        DatasetError: if it can't be read or is no such text.
    """
    try:
        return read_bytes(url).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{url}: not a text file in UTF-8 ({describe(error)}); correct or replace it") from None


def read_range(url: str, begin: int, end: int, deadline_s: float = DEADLINE_S) -> bytes:
    """Bytes ``begin <= b < end`` of the file at ``url``; shorter at its end.

    Raises:
        DatasetError: if they can't be read.
    """
    local = local_path(url)
    if local is not None:
        with explained(url, "read"), local.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)
    shorts = 0

    def attempt(timeout: float) -> bytes:
        nonlocal shorts
        data = bytes(call(url, timeout, "cat_file", start=begin, end=end))
        if len(data) > end - begin:
            raise DatasetError(f"{url}: the storage ignores ranges: it sent {len(data)} bytes for {end - begin}")
        if len(data) < end - begin:
            shorts += 1
            if shorts < _SHORT_TRIES:
                raise ShortBodyError(f"{len(data)} bytes of {end - begin}")
        return data

    try:
        return patiently(url, f"read from byte {begin} to {end}", deadline_s, attempt)
    except FileNotFoundError:
        raise DatasetError(f"{url}: can't be read (No such file or directory)") from None


def read_ranges(urls: Sequence[str], spans: Sequence[tuple[int, int]], deadline_s: float = DEADLINE_S) -> list[bytes]:
    """Bytes ``begin <= b < end`` of each URL, several requests at once if it is remote; shorter at a file's end.

    ``deadline_s`` is each one's own.

    Raises:
        DatasetError: if one can't be read.
    """

    def read(url: str, span: tuple[int, int]) -> bytes:
        return read_range(url, span[0], span[1], deadline_s)

    if all(local_path(url) is not None for url in set(urls)):  # threads would take longer than the reads
        return list(map(read, urls, spans))
    return at_once(read, urls, spans)


def read_near(
    url: str, spans: Sequence[tuple[int, int]], deadline_s: float = DEADLINE_S
) -> list[tuple[int, memoryview]]:
    """What lies in ``spans`` of one file, as offsets and bytes; near ones together.

    ``deadline_s`` is each range's own.

    Raises:
        DatasetError: if it can't be read.
    """
    wanted = merged(spans)
    data = read_ranges([url] * len(wanted), wanted, deadline_s)
    return [(begin, memoryview(part)) for (begin, _), part in zip(wanted, data, strict=True)]


def merged(spans: Iterable[tuple[int, int]], max_gap: int = MAX_GAP) -> list[tuple[int, int]]:
    """Spans ``begin <= b < end`` that hold all of ``spans``, ascending, where those at most ``max_gap`` bytes apart are
    one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin - found[-1][1] <= max_gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def open_binary(url: str, deadline_s: float = DEADLINE_S, buffer: int = _BUFFER) -> IO[bytes]:
    """A seekable binary file at ``url``, for reading; the caller closes it.

    Of a remote one ``buffer`` bytes are read at once.

    Raises:
        DatasetError: if it can't be opened; of a remote one, from its reads too.
    """
    local = local_path(url)
    if local is not None:
        with explained(url, "read"):
            return local.open("rb")
    return io.BufferedReader(_RemoteFile(url, size_of(url, deadline_s), deadline_s), buffer)


def size_of(url: str, deadline_s: float = DEADLINE_S) -> int:
    """Size of the remote file at ``url``, bytes.

    Raises:
        DatasetError: if there is none, or its size can't be told.
    """
    try:
        size: int | None = ask(url, "read", deadline_s, "info").get("size")
    except FileNotFoundError:
        raise DatasetError(f"{url}: can't be read (No such file or directory)") from None
    if size is None:
        raise DatasetError(f"{url}: can't be read (the storage does not say how long the file is)")
    return size


def sizes_of(urls: Sequence[str], deadline_s: float = DEADLINE_S) -> list[int]:
    """:func:`size_of` each URL, several requests at once; ``deadline_s`` is each one's own."""
    return at_once(lambda url: size_of(url, deadline_s), urls)


def sizes_in(folder: str) -> dict[str, int | None]:
    """Name -> size in bytes of the files that lie directly in ``folder``; empty if there is no such folder.

    A size is ``None`` where a listing has none, as those over HTTP.

    Raises:
        DatasetError: if it can't be listed.
    """
    local = local_path(folder)
    if local is not None:
        with explained(folder, "listed"):
            return {path.name: path.stat().st_size for path in local.iterdir() if path.is_file()}
    try:
        entries = ask(folder, "listed", DEADLINE_S, "ls", detail=True)
    except FileNotFoundError:
        return {}
    return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries if entry["type"] == "file"}


def remove(url: str) -> None:
    """Remove the file at ``url``, if it is there.

    Raises:
        DatasetError: if it can't be removed.
    """
    local = local_path(url)
    if local is not None:
        with explained(url, "removed"):
            local.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        ask(url, "removed", DEADLINE_S, "rm_file")


class Positioned(io.RawIOBase):
    """A file of a known size that is read from a position; what reads is up to the class derived from it."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        """See :class:`io.IOBase`."""
        return True

    def seekable(self) -> bool:
        """See :class:`io.IOBase`."""
        return True

    def tell(self) -> int:
        """See :class:`io.IOBase`."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See :class:`io.IOBase`."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at


class _RemoteFile(Positioned):
    """A remote file whose reads are range requests."""

    def __init__(self, url: str, size: int, deadline_s: float) -> None:
        super().__init__(size)
        self._url, self._deadline_s = url, deadline_s

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._size)
        if end <= self._at:
            return 0
        data = read_range(self._url, self._at, end, self._deadline_s)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


@contextmanager
def replacing(url: str) -> Iterator[IO[bytes]]:
    """A binary file to write that appears at ``url`` as a whole when the block ends, and not at all if it raises.

    Raises:
        DatasetError: if it can't be written.
    """
    local = local_path(url)
    with explained(url, "written"):
        if local is not None:
            with _replacing_local(local) as file:
                yield file
            return
        with tempfile.NamedTemporaryFile(prefix="rfstream-") as temporary:
            yield temporary
            temporary.flush()
            upload(Path(temporary.name), url)


def upload(file: Path, url: str) -> None:
    """Copy a local file to a remote ``url``, where it appears as a whole; a large one in parts.

    Raises:
        DatasetError: if it can't be written, or the storage has another size of it afterwards.
    """
    size = file.stat().st_size
    deadline_s = DEADLINE_S + size / _SLOWEST

    try:
        ask(url, "written", deadline_s, "put_file", before=(str(file),))
    except FileNotFoundError:
        raise DatasetError(f"{url}: can't be written (there is no such bucket or server)") from None
    stored = size_of(url)
    if stored != size:
        raise DatasetError(f"{url}: can't be written: {size} bytes were sent and {stored} are there; pack again")


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


@contextmanager
def explained(url: str, what: str) -> Iterator[None]:
    """Turn what goes wrong with a file into one sentence. Who fills it has exceptions of its own, so all are taken."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(f"{url}: can't be {what} ({describe(error)})") from error

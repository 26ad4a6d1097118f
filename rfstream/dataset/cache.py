"""Whole shards of a remote pack on this node's disk, shared by all its processes.

A folder holds ``{key}-{size}.shard`` files; the key is a digest of the shard's URL and of its pack's index. A process
that dies leaves no harm, for what it holds are locks (``flock``) that the kernel drops with it:

- A file appears under its name whole: it is filled as ``.part``, synced and renamed.
- Who reads a shard holds a shared ``flock`` on it, who fills one an exclusive one. Only what can be locked is removed:
  a shard that nobody reads, the least recently used first, or a part whose filler is dead.
- A part takes its whole size when it is made, and parts are made, and shards removed, under the lock of the folder: all
  of them together never exceed the bound.
- ``{key}.lock`` makes others wait for who fills a shard, in place of filling it as well.

Where there is no room, or the disk is full, a shard is read from where it is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rfstream.dataset import storage
from rfstream.dataset.remote import IN_FLIGHT
from rfstream.errors import DatasetError

_PIECE = 8 * 1024 * 1024
_POLL_S = 0.05


@dataclass(frozen=True)
class ShardCache:
    """Where shards are kept on this node, and how many bytes they may take."""

    folder: str
    nbytes: int

    def open(self, url: str, digest: str, deadline_s: float) -> int | None:
        """A descriptor of the local copy of the shard at ``url``, which is fetched first where there is none.

        As long as it is open the copy stays. The caller closes it.

        Args:
            url: a remote shard.
            digest: ``SplitIndex.digest`` of its pack: a pack that was made again has other copies.
            deadline_s: how long to wait for another process that fetches the shard, and for each range of one's own.

        Returns:
            None if there is no room for it beside what is in use.

        Raises:
            DatasetError: if the shard can't be read, or the folder not be made or written.
        """
        key = hashlib.sha256(f"{digest}\0{url}".encode()).hexdigest()[:32]
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            found = self._found(key)
            if found is not None:
                return found
            with _locked(Path(self.folder) / f"{key}.lock", time.monotonic() + deadline_s) as mine:
                found = self._found(key)
                return self._filled(key, url, deadline_s) if found is None and mine else found
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return None
            raise DatasetError(f"{self.folder}: can't be used as a cache ({storage.describe(error)})") from error

    def _found(self, key: str) -> int | None:
        """The copy, if there is one, under a shared lock and marked as used now."""
        for path in Path(self.folder).glob(f"{key}-*.shard"):
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                whole = os.fstat(descriptor).st_size == _size_in(path)
                if whole and os.fstat(descriptor).st_nlink:
                    _mark_used(descriptor)
                    return descriptor
                os.close(descriptor)  # it was removed in between, or the disk lost some of it
        return None

    def _filled(self, key: str, url: str, deadline_s: float) -> int | None:
        """Fetch the shard; a descriptor of the copy under a shared lock, or None without room."""
        size = storage.size_of(url, deadline_s)
        part = Path(self.folder) / f"{key}-{size}.part"
        descriptor = self._reserved(part, size) if size <= self.nbytes else None
        if descriptor is None:
            return None
        try:
            _fill(descriptor, url, size, deadline_s)
            _mark_used(descriptor)
            with self._alone():
                part.rename(part.with_suffix(".shard"))
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            return descriptor
        except BaseException:
            with self._alone():
                part.unlink()
            os.close(descriptor)
            raise

    def _alone(self) -> AbstractContextManager[bool]:
        """The lock of the folder: under it alone files come, are renamed and go."""
        return _locked(Path(self.folder) / "folder.lock")

    def _reserved(self, part: Path, size: int) -> int | None:
        """A new, exclusively locked file of ``size`` bytes; None where removing what nobody uses does not make room."""
        with self._alone():
            files = [*Path(self.folder).glob("*.shard"), *Path(self.folder).glob("*.part")]
            # A dead part is of no use to anybody, so it goes first.
            oldest = sorted(files, key=lambda path: (path.suffix == ".shard", path.stat().st_mtime))
            taken = sum(path.stat().st_size for path in files)
            for path in oldest:
                if taken + size <= self.nbytes and path.suffix == ".shard":
                    break
                taken -= _removed(path)
            if taken + size > self.nbytes:
                return None
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError:
                part.unlink()
                os.close(descriptor)
                raise
            return descriptor


def _fill(descriptor: int, url: str, size: int, deadline_s: float) -> None:
    spans = [(begin, min(begin + _PIECE, size)) for begin in range(0, size, _PIECE)]
    for first in range(0, len(spans), IN_FLIGHT):
        some = spans[first : first + IN_FLIGHT]
        for (begin, end), data in zip(some, storage.read_ranges([url] * len(some), some, deadline_s), strict=True):
            if os.pwrite(descriptor, data, begin) != end - begin:
                raise DatasetError(f"{url}: ends before its {size} bytes: it is truncated; copy or pack it again")
    os.fsync(descriptor)


def _mark_used(descriptor: int) -> None:
    """Set the time of a shard's last use to now; the time that the system would set moves in steps of milliseconds."""
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))


def _size_in(path: Path) -> int:
    """The size that the name of a shard states."""
    return int(path.stem.rpartition("-")[2])


def _removed(path: Path) -> int:
    """Remove ``path`` if no process holds it; returns the bytes that this gave back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(descriptor).st_size
        path.unlink()
        return size
    except BlockingIOError:
        return 0
    finally:
        os.close(descriptor)


def _taken(descriptor: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)


@contextmanager
def _locked(path: Path, until: float | None = None) -> Iterator[bool]:
    """Hold the lock on ``path``, or, past ``until`` on the monotonic clock, go on without: the value says which."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if until is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield until is None or _taken(descriptor, until)
    finally:
        os.close(descriptor)

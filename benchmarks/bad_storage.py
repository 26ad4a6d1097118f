"""Object storage on a bad day: a folder or another server over HTTP, from a server that can be told to misbehave."""

from __future__ import annotations

import http.client
import random
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

Mode = Literal["well", "error", "refuse", "stall", "cut", "break off"]
"""``error``: status 503. ``refuse``: status 403. ``stall``: no answer. ``cut``: half of the bytes, under headers that
say so. ``break off``: half of the bytes that the headers promise."""
_PIECE = 64 * 1024
_SHARD = re.compile(rb"-\d{6}\.(tar|parquet)")
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Line:
    """How any request goes where no mode says otherwise: shares of requests that fail with 503 and of bodies that break
    off, drawn from ``seed``; seconds before each answer; bytes per second of all answers together."""

    errors: float = 0.0
    broken: float = 0.0
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    seed: int = 0


class BadStorage:
    """Serves ``source``, a folder or the URL of a server, at ``url`` until it is closed.

    ``mode`` says how requests for shards go, ``line`` how all do. ``requests`` counts all by what became of them, a
    :data:`Mode`; ``shard_paths`` are those of requests for shards.
    """

    def __init__(self, source: Path | str, line: Line = Line()) -> None:
        self.mode: Mode = "well"
        self.line = line
        self.requests: Counter[Mode] = Counter()
        self.shard_paths: list[str] = []
        self.closed = threading.Event()
        self._draw = random.Random(line.seed)
        self._lock = threading.Lock()
        self._free_at = 0.0
        storage = self

        class Handler(_Handler):
            def __init__(self, *request: Any) -> None:
                self.storage, self.source = storage, source
                super().__init__(*request)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> BadStorage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()

    def fate(self, of_shard: bool) -> Mode:
        """How a request goes; ``of_shard``: it reads or writes a shard."""
        with self._lock:
            drawn = self._draw.random()
            fate: Mode = "well"
            if self.mode != "well":
                fate = self.mode if of_shard else "well"
            elif drawn < self.line.errors + self.line.broken:
                fate = "error" if drawn < self.line.errors else "break off"
            self.requests[fate] += 1
        return fate

    def wait_for(self, nbytes: int) -> None:
        """Wait until the line has carried ``nbytes`` more."""
        if self.line.bytes_per_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.line.bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    """Of a folder, whole files and single ranges; of a server, whatever it answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    storage: BadStorage
    source: Path | str

    def handle(self) -> None:
        with suppress(ConnectionError):  # who asked is gone
            super().handle()

    def do_HEAD(self) -> None:
        self._answer()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD  # noqa: N815 - the base class looks for them

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        of_shard = bool(_SHARD.search(unquote(self.path).encode()) or _SHARD.search(sent[:_PIECE]))
        if of_shard:
            self.storage.shard_paths.append(self.path)
        fate = self.storage.fate(of_shard)
        time.sleep(self.storage.line.latency_s)
        if fate == "stall":
            self.storage.closed.wait()
        status, headers, data = self._answer_of_source(fate, sent)
        promised = int(headers.pop("Content-Length", len(data)))
        if fate in ("cut", "break off"):
            data = data[: promised // 2]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(promised // 2 if fate == "cut" else promised))
        self.end_headers()
        for first in range(0, 0 if self.command == "HEAD" else len(data), _PIECE):
            piece = data[first : first + _PIECE]
            self.storage.wait_for(len(piece))
            self.wfile.write(piece)
        self.close_connection = fate == "break off"

    def _answer_of_source(self, fate: Mode, sent: bytes) -> tuple[int, dict[str, str], bytes]:
        if fate in ("error", "refuse"):
            return 503 if fate == "error" else 403, {}, b""
        return self._of_folder(self.source) if isinstance(self.source, Path) else self._of_server(self.source, sent)

    def _of_folder(self, folder: Path) -> tuple[int, dict[str, str], bytes]:
        path = folder / self.path.lstrip("/")
        if not path.is_file():
            return 404, {}, b""
        span = self.headers.get("Range")
        size = path.stat().st_size
        first, last = (span.removeprefix("bytes=").split("-")) if span else ("0", "")
        end = int(last) + 1 if last else size
        with path.open("rb") as file:
            file.seek(int(first))
            data = file.read(end - int(first))
        headers = {"Accept-Ranges": "bytes"}
        if span:
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{size}"
        return 206 if span else 200, headers, data

    def _of_server(self, url: str, sent: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        kept = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        connection.request(self.command, self.path, sent, kept)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
        if self.command == "HEAD":  # which has the length of what a GET would send, and nothing to count
            headers["Content-Length"] = answer.headers.get("Content-Length", "0")
        return answer.status, headers, data

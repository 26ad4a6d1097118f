"""Object storage on a bad day: a folder over HTTP, from a server that can be told to misbehave."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

Mode = Literal["well", "error", "stall", "cut", "break off"]
"""``error``: status 503. ``stall``: no answer. ``cut``: half of the bytes, under headers that say so. ``break off``:
half of the bytes that the headers promise."""


class BadStorage:
    """Serves ``folder`` at ``url`` until it is closed. ``mode`` says how requests for shards go; all others go well."""

    def __init__(self, folder: Path) -> None:
        self.mode: Mode = "well"
        self.closed = threading.Event()
        storage = self

        class Handler(_Handler):
            def __init__(self, *request: Any) -> None:
                self.storage, self.folder = storage, folder
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


class _Handler(BaseHTTPRequestHandler):
    """Whole files and single ranges."""

    protocol_version = "HTTP/1.1"
    storage: BadStorage
    folder: Path

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _answer(self, *, body: bool) -> None:
        path = self.folder / self.path.lstrip("/")
        mode = self.storage.mode if path.suffix == ".tar" else "well"
        if mode == "stall":
            self.storage.closed.wait()
        if mode == "error" or not path.is_file():
            self.send_response(503 if mode == "error" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = path.read_bytes()
        size, span = len(data), self.headers.get("Range")
        if span:
            first, last = span.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1 if last else None]
        promised = len(data)
        if mode in ("cut", "break off"):
            data = data[: promised // 2]
        self.send_response(206 if span else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(promised if mode == "break off" else len(data)))
        if span:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{size}")
        self.end_headers()
        if body:
            self.wfile.write(data)
        self.close_connection = mode == "break off"

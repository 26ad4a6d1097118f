"""An S3 server for tests, on this machine and in memory, and the bad line to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

from benchmarks.bad_storage import BadStorage

BUCKET = "rfstream-test"


@contextmanager
def bucket() -> Iterator[BadStorage]:
    """An empty bucket with versions at ``s3://{BUCKET}`` for this process and those that it starts, and the line to it.

    The server knows neither users nor rights: it takes any credentials.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # or it prints every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with BadStorage(f"http://{host}:{port}") as storage, pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", storage.url)
            patch.setenv("AWS_ACCESS_KEY_ID", "a test's")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "own")
            patch.setenv("AWS_MAX_ATTEMPTS", "1")  # what is tried again is tried by us
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            client = fsspec.filesystem("s3")
            client.mkdir(BUCKET)
            client.call_s3("put_bucket_versioning", Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
            yield storage
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()

"""A Google Cloud Storage server for tests, on this machine and in memory, and the bad line to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

from benchmarks.bad_storage import BadStorage

BUCKET = "rfstream-test"


@contextmanager
def bucket() -> Iterator[BadStorage]:
    """An empty bucket at ``gs://{BUCKET}`` for this process and those that it starts, and the line to it."""
    from gcp_storage_emulator.server import create_server

    with create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET) as server:
        port = server._api._httpd.server_port
        with BadStorage(f"http://127.0.0.1:{port}") as storage, pytest.MonkeyPatch.context() as patch:
            patch.setenv("STORAGE_EMULATOR_HOST", storage.url)
            patch.setenv("FSSPEC_GS_TOKEN", "anon")
            patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            fsspec.config.set_conf_env(fsspec.config.conf)
            fsspec.get_filesystem_class("gs").clear_instance_cache()
            yield storage
    del fsspec.config.conf["gs"]
    fsspec.get_filesystem_class("gs").clear_instance_cache()

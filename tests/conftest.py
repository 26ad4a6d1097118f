"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import gcs
import pytest
import s3
from hypothesis import settings

from benchmarks.bad_storage import BadStorage

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # gRPC, which no emulator speaks
os.environ["RAY_ADDRESS"] = "local"  # never a cluster that happens to run on this machine

settings.register_profile("untimed", deadline=None)  # a busy machine is no reason to fail
settings.load_profile("untimed")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real datasets beside the checkout; skips (or fails, where it is required) if it is absent."""
    if not DATA.is_dir():
        if os.environ.get("RFSTREAM_REQUIRE_DATA") == "1":
            pytest.fail(f"RFSTREAM_REQUIRE_DATA=1 but {DATA} does not exist")
        pytest.skip(f"needs the real datasets in {DATA}")
    return DATA


@pytest.fixture(scope="session")
def bucket() -> Iterator[BadStorage]:
    """A Google Cloud Storage bucket on this machine at ``gs://rfstream-test``, and the line to it, for all tests."""
    with gcs.bucket() as storage:
        yield storage


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[BadStorage]:
    """An S3 bucket on this machine at ``s3://rfstream-test``, and the line to it, for all tests."""
    with s3.bucket() as storage:
        yield storage


@pytest.fixture(scope="session")
def ray_session(bucket: BadStorage, s3_bucket: BadStorage) -> Iterator[None]:
    """One local Ray for all tests that stream: four logical CPUs, whatever the machine has; its workers see the buckets
    too."""
    import ray

    from rfstream.session import start_ray

    if not ray.is_initialized():
        start_ray(num_cpus=4, object_store_memory=400_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def packs(shared_data: Path, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packs of the real datasets: ``bccd`` (train, val) and ``coco_cc`` (train, val)."""
    import rfstream

    folder = tmp_path_factory.mktemp("packs")
    for name in ("bccd", "coco_cc"):
        rfstream.pack(str(shared_data / name), str(folder / name), splits="train,valid:val", progress=False)
    return folder

"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real datasets beside the checkout; skips (or fails, where it is required) if it is absent."""
    if not DATA.is_dir():
        if os.environ.get("RFSTREAM_REQUIRE_DATA") == "1":
            pytest.fail(f"RFSTREAM_REQUIRE_DATA=1 but {DATA} does not exist")
        pytest.skip(f"needs the real datasets in {DATA}")
    return DATA

"""Planning at 1e9 samples in 2e7 fragments: seconds and peak memory of ``rfstream plan`` on a synthetic index."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SHARDS, FRAGMENTS, PER_FRAGMENT = 200_000, 20_000_000, 50


def write_index(folder: Path) -> None:
    """A pack's index and fragment table without its shards."""
    per_shard = FRAGMENTS // SHARDS
    shards = [f"train-00000000-{i:06d}.tar" for i in range(SHARDS)]
    index = {
        "version": 1,
        "split": "train",
        "shards": shards,
        "num_samples": FRAGMENTS * PER_FRAGMENT,
        "categories": [{"id": 1, "name": "thing"}],
        "annotated_category_ids": [1],
        "category_ids": "remap",
        "samples_per_shard": [per_shard * PER_FRAGMENT] * SHARDS,
    }
    (folder / "train-index.json").write_text(json.dumps(index))
    first = np.arange(FRAGMENTS, dtype=np.int64) * PER_FRAGMENT
    nbytes = 8 * 1024**2 + np.arange(FRAGMENTS, dtype=np.int64) % 4096
    table = pa.table(
        {
            "shard": pa.array(np.repeat(np.arange(SHARDS, dtype=np.int32), per_shard)),
            "first": first,
            "samples": np.full(FRAGMENTS, PER_FRAGMENT, dtype=np.int64),
            "offset": np.zeros(FRAGMENTS, dtype=np.int64),
            "nbytes": nbytes,
        }
    )
    pq.write_table(table, folder / "train-00000000.fragments.parquet")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_index(folder)
        config = folder / "plan.yaml"
        config.write_text(json.dumps({"data": {"path": str(folder)}}))
        before = time.perf_counter()
        subprocess.run([sys.executable, "-m", "rfstream.cli", "plan", str(config), "--world-size", "64"], check=True)
        seconds = time.perf_counter() - before
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6
    print(
        f"{FRAGMENTS * PER_FRAGMENT:,} samples in {FRAGMENTS:,} fragments: {seconds:.1f} s ({cpu:.1f} CPU-s), "
        f"peak {peak:.2f} GB"
    )


if __name__ == "__main__":
    main()

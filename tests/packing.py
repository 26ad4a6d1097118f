"""What the tests of packs share: packing into many shards, without Ray, and as a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from rfstream.dataset import storage
from rfstream.dataset.convention import Convention
from rfstream.dataset.document import SplitSource
from rfstream.dataset.index import CategoryIds, PackFormat, SplitIndex
from rfstream.dataset.layouts import find_splits, read_split
from rfstream.dataset.pack import pack
from rfstream.dataset.parquet_shards import write_parquet_shard
from rfstream.dataset.publish import describe_pack, publish, staging
from rfstream.dataset.shards import write_shard

ROOT = Path(__file__).resolve().parents[1]
SMALL = 300_000  # bytes: a few images a shard


def files_in(folder: Path) -> dict[str, bytes]:
    """The files directly in ``folder`` by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def in_bucket(url: str) -> dict[str, bytes]:
    """The same of a folder in a bucket."""
    return {name: storage.read_bytes(storage.join(url, name)) for name in storage.sizes_in(url)}


def pack_small(source: Path, output: Path, **options: Any) -> dict[str, bytes]:
    """Pack train and val into many shards, with Ray; returns all that is in ``output`` then."""
    pack(str(source), str(output), splits="train,valid:val", max_shard_bytes=SMALL, progress=False, **options)
    assert all(path.is_file() for path in output.iterdir())
    return files_in(output)


def pack_here(
    source: Path, output: Path, per_shard: int, split: str = "train", format: PackFormat = "tar"
) -> SplitIndex:
    """Pack a split in this process, ``per_shard`` samples a shard."""
    return pack_checked(read_split(find_splits(source)[split], "remap"), output, per_shard, split, format=format)


def pack_checked(
    checked: SplitSource,
    output: Path,
    per_shard: int,
    split: str,
    category_ids: CategoryIds = "remap",
    format: PackFormat = "tar",
) -> SplitIndex:
    """The same from what was read, under the name ``split``."""
    convention = Convention.of(checked.categories, (item.sidecar for item in checked.items))
    with staging(output) as folder:
        written = []
        for number, first in enumerate(range(0, len(checked.items), per_shard)):
            at = (folder / str(number), number, first, checked.items[first : first + per_shard])
            written.append(write_shard(*at) if format == "tar" else write_parquet_shard(*at, convention))
        about = describe_pack(split, checked.categories, checked.annotated_category_ids, category_ids, written, format)
        return publish(output, folder, *about, written)


def start_job(*arguments: str, cpus: int = 2) -> subprocess.Popen[str]:
    """``pipelines/pack.py`` in a process with a Ray of its own."""
    code = (
        f"import ray; ray.init(address='local', num_cpus={cpus}, object_store_memory=100_000_000, "
        "include_dashboard=False, log_to_driver=False); import runpy; "
        "runpy.run_path('pipelines/pack.py', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

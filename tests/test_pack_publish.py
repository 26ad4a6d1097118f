"""Publishing is atomic: a pack that is killed or fails leaves the former one, and the next run tidies up."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from packing import ROOT, SMALL, files_in, pack_small, start_job

from benchmarks.killing import pack_killed
from rfstream.dataset.index import read_index
from rfstream.dataset.pack import pack
from rfstream.dataset.publish import staging
from rfstream.errors import DatasetError

pytestmark = pytest.mark.usefixtures("ray_session")


def test_packing_again_leaves_no_trace_of_the_former_pack(shared_data: Path, tmp_path: Path) -> None:
    pack_small(shared_data / "bccd", tmp_path / "a")
    (tmp_path / "a" / "train-notes.txt").write_text("mine")
    second = pack_small(shared_data / "coco_cc", tmp_path / "a")
    assert second.pop("train-notes.txt") == b"mine"
    assert second == pack_small(shared_data / "coco_cc", tmp_path / "b")
    assert pack_small(shared_data / "coco_cc", tmp_path / "b") == second


def test_packing_one_split_leaves_the_others_alone(shared_data: Path, tmp_path: Path) -> None:
    first = pack_small(shared_data / "bccd", tmp_path)
    pack(str(shared_data / "coco_cc"), str(tmp_path), splits="train", progress=False)
    after = files_in(tmp_path)
    assert {k: v for k, v in after.items() if k.startswith("val-")} == {
        k: v for k, v in first.items() if k.startswith("val-")
    }
    assert read_index(str(tmp_path), "train").num_samples == 55


def test_a_pack_killed_twice_is_the_former_one_until_it_is_whole(shared_data: Path, tmp_path: Path) -> None:
    source, killed = str(shared_data / "bccd"), tmp_path / "killed"
    before = pack_small(shared_data / "coco_cc", killed)

    def start() -> subprocess.Popen[str]:
        assert files_in(killed) == before
        return start_job(source, str(killed), "--splits", "train,valid:val", "--max-shard-bytes", "30000")

    pack_killed(start, killed, [("driver", 3), ("worker", 40)], within_s=120)
    pack(source, str(tmp_path / "undisturbed"), splits="train,valid:val", max_shard_bytes=30_000, progress=False)
    assert files_in(killed) == files_in(tmp_path / "undisturbed")
    assert not list(killed.glob(".rfstream-pack-*"))


KILLED_IN_PUBLISH = """
import os, pathlib, signal, sys
from rfstream.dataset import coco, pack, publish, shards
source, destination, survive = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
rename = pathlib.Path.replace
def dying(self, target):
    global survive
    if pathlib.Path(target).parent == destination:
        if survive == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        survive -= 1
    return rename(self, target)
pathlib.Path.replace = dying
split = coco.read_split(coco.find_splits(pathlib.Path(source))["train"], "remap")
with publish.staging(destination) as folder:
    parts = (split.items[:100], split.items[100:])
    written = [shards.write_shard(folder / f"{i}.tar", i, 100 * i, part) for i, part in enumerate(parts)]
    index = publish.describe_pack("train", split.categories, split.annotated_category_ids, "remap", written)
    publish.publish(destination, folder, *index, written)
"""


@pytest.mark.parametrize("survive", [0, 1, 2, 3, 4, 5])
def test_a_pack_killed_at_any_rename_is_the_former_or_the_new_one(
    shared_data: Path, tmp_path: Path, survive: int
) -> None:
    pack(str(shared_data / "coco_cc"), str(tmp_path), splits="train", progress=False)
    before = files_in(tmp_path)
    arguments = [sys.executable, "-c", KILLED_IN_PUBLISH, str(shared_data / "bccd"), str(tmp_path), str(survive)]
    died = subprocess.run(arguments, cwd=ROOT, timeout=120).returncode == -signal.SIGKILL
    # Two shards, two tables, then the index: whoever survives five renames has published.
    assert died == (survive < 5)
    after = files_in(tmp_path)
    if died:
        assert {key: after[key] for key in before} == before
    else:
        assert read_index(str(tmp_path), "train").num_samples == 205
        assert len(after) == 5
    pack(str(shared_data / "coco_cc"), str(tmp_path), splits="train", progress=False)
    assert files_in(tmp_path) == before


def test_a_living_pack_keeps_its_staging_folder(shared_data: Path, tmp_path: Path) -> None:
    with staging(tmp_path) as folder:
        (folder / "shard.tar").write_bytes(b"half")
        pack(str(shared_data / "coco_cc"), str(tmp_path), splits="train", progress=False)
        assert (folder / "shard.tar").read_bytes() == b"half"
    assert not folder.exists()
    assert read_index(str(tmp_path), "train").num_samples == 55


def test_a_failing_task_fails_the_pack_with_its_sentence(shared_data: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(shared_data / "coco_cc" / "train", source / "train")
    before = pack_small(shared_data / "coco_cc", tmp_path / "out")
    # A kernel file says it has 4096 bytes and gives fewer: an image that shrank since it was checked.
    shrinking = next(file for file in Path("/sys/kernel").iterdir() if file.is_file() and file.stat().st_size == 4096)
    image = sorted((source / "train").glob("*.jpg"))[20]
    image.unlink()
    image.symlink_to(shrinking)
    with pytest.raises(DatasetError, match=rf"{image}: 4096 bytes when the pack began, \d+ now; pack again") as caught:
        pack(str(source), str(tmp_path / "out"), max_shard_bytes=SMALL, progress=False)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").glob(".rfstream*"))
    assert files_in(tmp_path / "out") == before

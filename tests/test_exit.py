"""However a process that streams ends, nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import ray

from rfstream.session import start_ray

MARK = "RFSTREAM_TEST_MARK"
SCRIPT = """
import os, signal, sys, time
import rfstream
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
loader = rfstream.ray_loader(rfstream.Config(data={"path": sys.argv[1]}, stream={"batch_size": 4}))
for batch in loader:
    print("streaming", flush=True)
    time.sleep(60)
"""


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("how", "code"), [("ctrl-c", None), ("kill -9", -signal.SIGKILL)])
def test_nothing_is_left_when_the_process_ends(packs: Path, how: str, code: int | None) -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(packs / "bccd")],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "streaming\n"
    if how == "ctrl-c":
        process.send_signal(signal.SIGINT)
    if how == "kill -9":
        process.kill()
    process.communicate(timeout=120)
    if code is not None:
        assert process.returncode == code
    assert not left_of(mark)


def left_of(mark: str) -> list[str]:
    """The processes that are still there 30 s later."""
    deadline = time.monotonic() + 30
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [" ".join(process.cmdline())[:80] for process in left]


def test_a_ray_that_a_thread_started_outlives_the_thread_and_not_the_process(packs: Path, tmp_path: Path) -> None:
    """Linux ends the processes of a thread that asked for it with the thread, and this one with its object store."""
    (tmp_path / "config.yaml").write_text(f"data: {{path: {packs / 'bccd'}}}")
    command = [Path(sys.executable).parent / "rfstream", "ledger", "config.yaml", "--out", "ledger.parquet"]
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark}
    done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not left_of(mark)


RANKS = """
import sys, time
import torch.distributed as dist
import rfstream
dist.init_process_group("gloo")
loader = rfstream.ray_loader(rfstream.Config(data={"path": sys.argv[1]}, stream={"batch_size": 8}), "val")
for batch in loader:
    pass
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(3)
    print("rank 1 has ended", flush=True)
"""


def test_rank_0_s_ray_outlives_the_other_ranks(packs: Path, tmp_path: Path) -> None:
    """Ray ends the processes that use it when it ends, and it ends with the process that started it."""
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "ranks.py"), str(packs / "coco_cc")],
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "rank 1 has ended" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(("said", "starts"), [("The current node timed out during startup.", 2), ("no space", 1)])
def test_a_ray_that_a_busy_machine_did_not_start_in_time_is_started_again(
    monkeypatch: pytest.MonkeyPatch, said: str, starts: int
) -> None:
    """Ray gives its processes 30 s, which no setting changes."""
    asked: list[str] = []

    def fail(**options: str) -> None:
        asked.append(options["address"])
        raise Exception(said)

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(Exception, match=said):
        start_ray()
    assert asked == ["local"] * starts

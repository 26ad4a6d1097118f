"""The same run under Ray Train, torchrun and as a Ray job: each for real, on CPU workers."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import recording
import yaml
from packing import pack_here
from ray.exceptions import RayTaskError
from ray.train.v2.api.exceptions import WorkerGroupError

from rfstream.config import Config
from rfstream.errors import ConfigError, DatasetError
from rfstream.tools.scenes import make_scenes
from rfstream.train.run import _reason, located, train

# Processes that import torch and Lightning come and go here: 20 s a test on two idle cores, far more on busy ones.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
TRAIN = 22
"""Batches of 3 on 2 ranks: 4 steps an epoch, the last wrapped."""


def pack(folder: Path, val: int) -> Path:
    make_scenes(folder / "scenes", train=TRAIN, val=val, seed=2)
    for split in ("train", "val"):
        pack_here(folder / "scenes", folder / "pack", per_shard=10, split=split)
    return folder / "pack"


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack whose 7 validation images make two batches for rank 0 and one for rank 1."""
    return pack(tmp_path_factory.mktemp("seven"), val=7)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack whose 2 validation images leave rank 1 without any."""
    return pack(tmp_path_factory.mktemp("two"), val=2)


def values(pack: Path, output: Path, **run: Any) -> dict[str, Any]:
    transform = "rfstream.tools.scenes:{}_transform"
    return {
        "data": {"path": str(pack)},
        "stream": {"batch_size": 3, "seed": 5, "timeout_s": 400},
        "decode": {"actors": [1, 1]},
        "augment": {
            "cpu": {"transform": transform.format("train"), "args": {"size": 48}},
            "eval": {"transform": transform.format("eval"), "args": {"size": 48}},
        },
        "train": {"output": str(output), "accelerator": "cpu", **run},
    }


def recorded(folder: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir()
    return {"model": "tests.recording:build", "model_args": {"folder": str(folder), **more}}


def trained(notes: list[dict[str, Any]]) -> dict[tuple[int, int, int], tuple[list[str], float]]:
    """Keys and pixels by (epoch, step, rank)."""
    return {(n["epoch"], n["step"], n["rank"]): (n["keys"], n["pixels"]) for n in notes if n["kind"] == "train"}


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path, **more}


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def config_file(folder: Path, **content: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """A cluster head of its own with a dashboard on loopback; yields the environment that reaches it."""
    with tempfile.TemporaryDirectory(prefix="rf", ignore_cleanup_errors=True) as folder:
        env = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=uuid.uuid4().hex)
        dashboard = free_port()
        command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=4", "--object-store-memory=200000000"]
        command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        ports = ("port", "ray-client-server-port", "dashboard-agent-listen-port")  # whose defaults another Ray may hold
        command += [f"--temp-dir={folder}", *(f"--{name}={free_port()}" for name in ports)]
        with (Path(folder) / "head.log").open("w") as log:
            head = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield {**env, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        finally:
            stop_tree(psutil.Process(head.pid))


def stop_tree(root: psutil.Process) -> None:
    """End ``root`` and all that descends from it: asked first, and made to where asking does not help."""
    tree = [root, *root.children(recursive=True)]
    root.terminate()
    _, left = psutil.wait_procs(tree, timeout=20)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=20)


@pytest.fixture(scope="module")
def job(seven: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two Ray Train workers of a submitted job were given in two epochs."""
    folder = tmp_path_factory.mktemp("job")
    run = {"launcher": "ray", "workers": 2, "epochs": 2, **recorded(folder / "notes")}
    config = config_file(folder, **values(seven, folder / "out", **run))
    submit = [str(BIN / "ray"), "job", "submit", "--", sys.executable, str(ROOT / "pipelines" / "train.py")]
    with cluster() as env:
        for _ in range(30):
            done = subprocess.run(
                [*submit, "--config", str(config)], env=env, capture_output=True, text=True, timeout=800
            )
            if not any(early in done.stderr for early in ("Failed to connect", "No available agent")):
                break
            time.sleep(2)  # the head is not up yet
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "succeeded" in output and "epoch=1" in output and "time/images=24" in output
    return recording.notes(folder / "notes")


def test_workers_of_a_ray_job_share_an_epoch(job: list[dict[str, Any]]) -> None:
    batches = trained(job)
    assert sorted(batches) == [(e, s, r) for e in range(2) for s in range(4) for r in range(2)]
    for epoch in range(2):
        keys = [k for (e, _, _), (keys, _) in batches.items() if e == epoch for k in keys]
        assert len(keys) == 24 and len(set(keys)) == TRAIN


def test_workers_of_a_ray_job_validate_each_image_once_with_equal_buffers(job: list[dict[str, Any]]) -> None:
    for epoch in range(2):
        of_rank = [
            [i for n in job if (n["kind"], n["epoch"], n["rank"]) == ("val", epoch, rank) for i in n["images"]]
            for rank in range(2)
        ]
        assert sorted(of_rank[0] + of_rank[1]) == [*range(1, 8)]
        assert [len(images) for images in of_rank] == [4, 3]
        means = [n["mean"] for n in job if n["kind"] == "buffers" and n["epoch"] == epoch]
        assert len(means) == 2 and means[0] == means[1]


def test_a_worker_that_dies_is_replaced_and_the_run_goes_on(
    seven: Path, job: list[dict[str, Any]], ray_session: None, tmp_path: Path
) -> None:
    """Rank 1 dies inside the second epoch: what is trained from the reported checkpoint on equals the whole job, which
    the same file ran in a cluster of its own."""
    run = {"launcher": "ray", "workers": 2, "epochs": 2, "max_failures": 1}
    metrics = train(Config(**values(seven, tmp_path / "out", **run, **recorded(tmp_path / "notes", die_at=[1, 2]))))
    assert metrics["epoch"] == 1 and (tmp_path / "notes" / "died").exists()
    assert list((tmp_path / "out").glob("ray-*/checkpoint_*/checkpoint.ckpt"))
    notes = recording.notes(tmp_path / "notes")
    assert trained(notes) == trained(job)
    first_of_second = [n for n in notes if n["kind"] == "train" and (n["epoch"], n["step"]) == (1, 0)]
    assert len(first_of_second) == 4, "the second epoch was begun twice, by both ranks"
    assert len([n for n in notes if n["kind"] == "train" and n["epoch"] == 0]) == 8, "the first epoch was not repeated"


def test_what_starts_ray_workers_imports_no_lightning() -> None:
    program = "import sys, rfstream.train.run; sys.exit('pytorch_lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(("raised", "said"), [(DatasetError("no split"), "no split"), (KeyError("x"), "KeyError: 'x'")])
def test_what_a_ray_worker_raises_is_one_sentence(raised: Exception, said: str) -> None:
    """As Ray Train hands it over; a run whose worker raises is in test_policy.py."""
    traceback = f"ray::fit()\n  File somewhere\n{type(raised).__name__}: {raised}"
    of_worker = RayTaskError("fit", traceback, raised).as_instanceof_cause()
    assert _reason(WorkerGroupError(f"[Rank 0 Error Snippet]:\n{traceback}\n", {0: of_worker})) == said


def test_a_full_disk_is_one_sentence(seven: Path, ray_session: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / "metrics.csv").symlink_to("/dev/full")
    bad = values(seven, out, epochs=1, **recorded(tmp_path / "notes"))
    with pytest.raises(ConfigError, match=r"out: No space left on device, .* go on with train.resume=.*last.ckpt$"):
        train(Config(**bad))


def test_refuses_what_does_not_fit(seven: Path, ray_session: None, tmp_path: Path) -> None:
    named = recorded(tmp_path / "notes")
    for run, message in (
        ({}, "train.model is required"),
        ({"resume": str(tmp_path / "no.ckpt"), **named}, "train.resume=.*no.ckpt does not exist"),
        ({"workers": 2, **named}, "train.workers=2 needs train.launcher=ray or torchrun"),
        ({"launcher": "torchrun", **named}, "not started by torchrun"),
        (
            {"launcher": "ray", "workers": 9, **named},
            "train.workers=9 .* need 10 CPUs and the Ray cluster has or may grow to 4",
        ),
        (
            {"model": "tests.packing:pack_small"},
            "train.model='tests.packing:pack_small' can't be built with model_args {}",
        ),
        (
            {"model": "builtins:list"},
            "train.model='builtins:list' returned list, not a pytorch_lightning.LightningModule",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            train(Config(**values(seven, tmp_path / "out", **run)))


def test_local_paths_hold_in_other_working_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = {"output": "out", "resume": "last.ckpt"}
    cache = {"folder": "cache", "bytes": "1MB"}
    stream = {"on_bad_sample": "quarantine", "quarantine": "bad"}
    one = Config(data={"path": "pack", "shards": "gs://b/shards", "cache": cache}, stream=stream, train=run)
    several = Config(data={"path": [{"path": "a", "shards": "b"}, {"path": "gs://b/pack"}]})
    data, train = located(one).data, located(one).train
    assert (data.path, data.shards) == (f"{tmp_path}/pack", "gs://b/shards")
    assert data.cache is not None and data.cache.folder == f"{tmp_path}/cache"
    assert located(one).stream.quarantine == f"{tmp_path}/bad"
    assert (train.output, train.resume) == (f"{tmp_path}/out", f"{tmp_path}/last.ckpt")
    assert [(pack.path, pack.shards) for pack in located(several).data.packs] == [
        (f"{tmp_path}/a", f"{tmp_path}/b"),
        ("gs://b/pack", None),
    ]


def test_torchrun_with_a_rank_that_has_nothing_to_validate_and_then_raises(two: Path, tmp_path: Path) -> None:
    """Rank 1 raises in its second epoch. Rank 0 stands in a collective operation meanwhile, and would only say that a
    connection was closed; it takes longer to end than torchrun takes to see that rank 1 has failed, so torchrun
    terminates it.
    """
    run = {"launcher": "torchrun", "epochs": 2, **recorded(tmp_path / "notes", fail_at=[1, 1], linger_s=2)}
    config = config_file(tmp_path, **values(two, tmp_path / "out", **run))
    command = [str(BIN / "torchrun"), "--master-port", str(free_port()), "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "pipelines" / "train.py"), "--config", str(config)],
        env=environment(RAY_ADDRESS="local"),
        capture_output=True,
        text=True,
        timeout=800,
    )
    notes = recording.notes(tmp_path / "notes")
    (failed,) = [n["at"] for n in notes if n["kind"] == "failed"]
    assert time.time() - failed < 200, "the other rank, or a process of the launcher, went on"
    assert done.returncode != 0
    assert "RuntimeError: no luck in this step" in done.stderr
    # Or it still waited for the batch of that step, on a busy machine, and says that it waits no longer.
    assert re.search(r"^error: rank 0.*: rank 1 failed: RuntimeError: no luck in this step$", done.stderr, re.M)
    assert [(n["rank"], n["images"]) for n in notes if n["kind"] == "val"] == [(0, [1, 2])]
    assert (tmp_path / "out" / "checkpoints" / "last.ckpt").exists()

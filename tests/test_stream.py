"""The stream on real photos through real Ray: order, pixels, length, resume, faults, and what it leaves behind."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from ray._private.internal_api import node_stats

import rfstream
from rfstream.config import Config
from rfstream.errors import ConfigError, PlanError, StateError, StreamError
from rfstream.loader import EvaluationLoader, RankLoader
from rfstream.plan.keys import sample_key
from rfstream.stream.pipeline import build_pipeline
from rfstream.tools.ledger import first_difference, ledger_rows, make_ledger
from rfstream.tools.report import batches_held, try_batches

CROP = {"transform": "tests.pipelines:crop_flip_jitter"}
SMALL = {"transform": "tests.augmentations:resize", "args": {"size": 96}}


def config(path: Path, cpu: dict[str, Any] | None = None, actors: tuple[int, int] = (1, 1), **stream: Any) -> Config:
    cpu = cpu or SMALL
    return Config(
        data={"path": str(path)},
        stream={"batch_size": 4, "timeout_s": 300, **stream},
        decode={"actors": actors},
        augment={"cpu": cpu, "eval": SMALL},
    )


def train_loader(cfg: Config) -> RankLoader:
    loader = rfstream.ray_loader(cfg)
    assert isinstance(loader, RankLoader)
    return loader


@pytest.fixture(scope="module")
def reference(packs: Path) -> Any:
    """Two epochs of bccd with random crop, flip and colour jitter: one actor, one rank, windows of 16."""
    return make_ledger(config(packs / "bccd", CROP, (1, 1), grad_accum=4), epochs=2, world_size=1)


def test_same_pixels_the_ledger_is_complete(reference: Any) -> None:
    assert len(reference) == 2 * 208  # 205 samples fill 13 windows of 16
    for epoch in (0, 1):
        rows = [r for r in reference.to_pylist() if r["epoch"] == epoch]
        assert [r["position"] for r in rows] == list(range(208))
        assert len({r["key"] for r in rows[:205]}) == 205
        wrapped = {r["key"]: r["pixels"] for r in rows[:3]}
        assert [r["key"] for r in rows[205:]] == list(wrapped)
        assert all(wrapped[r["key"]] != r["pixels"] for r in rows[205:])  # the same samples, augmented afresh


def test_same_pixels_with_three_actors(packs: Path, reference: Any) -> None:
    table = make_ledger(config(packs / "bccd", CROP, (3, 3), grad_accum=4), epochs=2, world_size=1)
    assert first_difference(reference, table) is None


def test_same_pixels_on_four_ranks(packs: Path, reference: Any) -> None:
    table = make_ledger(config(packs / "bccd", CROP, (2, 2), global_batch=16), epochs=2, world_size=4)
    assert first_difference(reference, table) is None
    assert {r["rank"] for r in table.to_pylist()} == set(range(4))


def test_same_pixels_fused_and_staged(packs: Path, reference: Any) -> None:
    cfg = config(packs / "bccd", CROP, (2, 2), grad_accum=4, assembly="staged")
    assert first_difference(reference, make_ledger(cfg, epochs=2, world_size=1)) is None


def test_same_order_with_many_blocks_fused_and_staged(packs: Path) -> None:
    tables = [
        make_ledger(config(packs / "coco_cc", SMALL, block_bytes="9MB", assembly=a), epochs=2, world_size=2)
        for a in ("fused", "staged")
    ]
    assert first_difference(*tables) is None
    orders = [[r["key"] for r in tables[0].to_pylist() if r["epoch"] == e] for e in (0, 1)]
    assert orders[0] != orders[1]
    assert set(orders[0]) == set(orders[1])


def test_a_ledger_that_differs_is_told_where(reference: Any, packs: Path) -> None:
    other = make_ledger(config(packs / "bccd", CROP, (2, 2), grad_accum=4, seed=1), epochs=1, world_size=1)
    assert "epoch 0 position 0: key" in str(first_difference(reference, other))


@pytest.mark.parametrize(("tail", "batch_size", "grad_accum", "expected"), [("wrap", 7, 3, 30), ("drop", 7, 3, 27)])
def test_exact_length(packs: Path, tail: str, batch_size: int, grad_accum: int, expected: int) -> None:
    cfg = config(packs / "bccd", batch_size=batch_size, grad_accum=grad_accum, tail=tail)
    with train_loader(cfg) as loader:
        assert len(loader) == expected
        windows = list(loader.windows())
        assert [len(w) for w in windows] == [grad_accum] * (expected // grad_accum)
        assert [b.step for w in windows for b in w] == list(range(expected))
        assert [b.window_end for b in windows[0]] == [False, False, True]
        assert all(len(b) == batch_size for w in windows for b in w)


def test_exact_length_needs_one_window(packs: Path) -> None:
    with pytest.raises(PlanError, match="205 samples do not fill one window of 206"):
        rfstream.ray_loader(config(packs / "bccd", batch_size=103, grad_accum=2, tail="drop"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_sees_each_image_exactly_once(packs: Path, world_size: int) -> None:
    keys: list[str] = []
    for rank in range(world_size):
        loader = rfstream.ray_loader(config(packs / "coco_cc"), "val", rank=rank, world_size=world_size)
        assert isinstance(loader, EvaluationLoader)
        batches = list(loader)
        assert len(loader) == len(batches)
        keys += [k for b in batches for k in b.keys]
    assert len(keys) == 49
    assert sorted(keys) == [f"{i:08d}" for i in range(49)]


def test_evaluation_of_fewer_samples_than_ranks(packs: Path) -> None:
    loaders = [
        rfstream.ray_loader(config(packs / "coco_cc", batch_size=25), "val", rank=r, world_size=4) for r in range(4)
    ]
    assert [len(x) for x in loaders] == [1, 1, 0, 0]
    assert [sum(len(b) for b in x) for x in loaders] == [25, 24, 0, 0]


def test_resume_at_any_step_equals_the_uninterrupted_run(packs: Path) -> None:
    cfg = config(packs / "bccd", grad_accum=2, batch_size=20)
    full, states = [], []
    with train_loader(cfg) as loader:
        for batch in itertools.chain.from_iterable(itertools.repeat(loader, 3)):
            full.append(ledger_rows(batch, 0, 1))
            states.append(loader.state_dict())
    of_epoch = len(loader)
    for done in (1, of_epoch - 1, of_epoch + 3):  # inside a window, before an epoch's last step, in the second
        with train_loader(cfg) as resumed:
            resumed.load_state_dict(states[done - 1])
            after = [ledger_rows(batch, 0, 1) for batch in resumed]
        assert after == full[done : (done // of_epoch + 1) * of_epoch]


def test_resume_at_step_10000_decodes_nothing_that_came_before(packs: Path, tmp_path: Path) -> None:
    cfg = config(packs / "bccd", {"transform": "tests.augmentations:noted", "args": {"file": str(tmp_path / "seen")}})
    with train_loader(cfg) as loader:
        epoch, step = divmod(10_000, len(loader))
        loader.load_state_dict(loader.state_at(epoch, step))
        first = next(iter(loader))
    assert (first.epoch, first.step) == (epoch, step)

    def draw(epoch: int, position: int) -> int:
        return int(np.random.default_rng(sample_key(0, epoch, position)).integers(2**62))

    came_before = {draw(epoch, position) for position in range(4 * step)}
    to_come = {draw(epoch + i // 208, i % 208) for i in range(4 * step, 5 * 208)}
    decoded = {int(line) for line in (tmp_path / "seen").read_text().split()}
    assert {draw(epoch, 4 * step + i) for i in range(4)} <= decoded
    assert came_before and not decoded & came_before and decoded <= to_come


def test_windows_after_a_resume_inside_one_keep_to_the_plan(packs: Path) -> None:
    with train_loader(config(packs / "bccd", batch_size=20, grad_accum=3)) as loader:
        loader.load_state_dict(loader.state_at(0, 4))
        assert [[b.step for b in w] for w in loader.windows()] == [[4, 5], [6, 7, 8], [9, 10, 11]]
        loader.set_epoch(7)
        assert loader.state_dict()["epoch"] == 7


def test_a_failed_loader_can_be_used_again(packs: Path) -> None:
    cfg = config(packs / "bccd", {"transform": "tests.pipelines:large_crop"})
    with train_loader(cfg) as loader:
        for _ in range(2):
            with pytest.raises(StreamError, match=r"^[^\n]*fails on shard[^\n]*$"):
                next(iter(loader))


def test_resume_of_another_stream_is_refused(packs: Path) -> None:
    state = train_loader(config(packs / "bccd")).state_dict()
    with pytest.raises(StateError, match="seed was 0, is 1"):
        train_loader(config(packs / "bccd", seed=1)).load_state_dict(state)
    with pytest.raises(StateError, match="transform was"):
        train_loader(config(packs / "bccd", CROP)).load_state_dict(state)


def test_set_epoch_and_break_start_where_they_say(packs: Path) -> None:
    with train_loader(config(packs / "bccd", batch_size=41)) as loader:
        first = [b.keys for b in loader]
        second = [b.keys for b in loader]
        for _ in loader:
            break
        loader.set_epoch(1)
        assert [b.keys for b in loader] == second
        loader.set_epoch(0)
        assert [b.keys for b in loader] == first


def decode_workers() -> list[psutil.Process]:
    """Ray's processes that hold a decode actor of ours."""
    tree = psutil.Process().children(recursive=True)
    found = []
    for process in tree:
        try:
            if "MapWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_faults_a_killed_decode_actor_changes_nothing(packs: Path, reference: Any) -> None:
    cfg = config(packs / "bccd", CROP, (2, 2), grad_accum=4)
    rows = []
    with train_loader(cfg) as loader:
        for epoch in range(2):
            for batch in loader:
                rows += ledger_rows(batch, 0, 1)
                if (epoch, batch.step) == (0, 5):
                    victims = decode_workers()
                    assert victims, "no decode actor was found to kill"
                    os.kill(victims[0].pid, signal.SIGKILL)
    table = type(reference).from_pylist(rows, schema=reference.schema)
    assert first_difference(reference, table) is None


def wait_until(condition: Any, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return bool(condition())


@pytest.mark.parametrize("how", ["close", "break", "exception", "forgotten"])
def test_nothing_is_left_behind(packs: Path, how: str) -> None:
    import threading

    cfg = config(packs / "bccd")
    loader = train_loader(cfg)
    if how == "exception":
        with pytest.raises(ZeroDivisionError), loader:
            for _ in loader:
                raise ZeroDivisionError
    else:
        for _ in loader:
            break
        if how in ("close", "break"):
            loader.close()
    del loader
    assert wait_until(lambda: not decode_workers()), "decode actors are still alive"
    assert wait_until(lambda: not [t for t in threading.enumerate() if t.name == "rfstream-feed"])


def test_a_loader_can_be_used_again_after_close(packs: Path) -> None:
    with train_loader(config(packs / "bccd", batch_size=41)) as loader:
        first = next(iter(loader)).keys
        loader.close()
        loader.set_epoch(0)
        assert next(iter(loader)).keys == first


def test_memory_of_a_batch_is_its_own(packs: Path) -> None:
    with train_loader(config(packs / "bccd")) as loader:
        batch = next(iter(loader))
        batch.images.add_(1)  # a view of shared memory would end the process here
        batch.targets.flat["boxes"].mul_(2)
        assert batch.images.dtype == torch.uint8
        assert batch.images.shape == (4, 3, 96, 96)


def test_bounded_memory_of_a_consumer_that_stands_still(packs: Path) -> None:
    """The stream stops where ``rfstream plan`` said, not where the object store is full."""
    cfg = Config(data={"path": str(packs / "bccd")}, stream={"batch_size": 4}, decode={"actors": (1, 1)})
    pipeline = build_pipeline(cfg, "train", 1, training=True)
    most = batches_held(pipeline) * try_batches(pipeline, pipeline.plan.order(0)).batch_bytes
    node = ray.nodes()[0]

    def used() -> int:
        stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])
        return int(stats.store_stats.object_store_bytes_used)

    before = used()
    with train_loader(cfg) as loader:
        next(iter(loader))
        held = [0]
        while len(held) < 5 or held[-1] > held[-5]:
            time.sleep(1)
            held.append(used() - before)
    assert most / 4 < held[-1] < most


def test_a_wait_that_runs_out_says_what_for(packs: Path) -> None:
    cfg = config(packs / "bccd", timeout_s=0.05)
    with train_loader(cfg) as loader, pytest.raises(StreamError, match=r"rank 0: batch 0 of epoch 0.*timeout_s=0.05"):
        next(iter(loader))


def test_a_pool_that_can_never_start_is_refused(packs: Path) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    cfg = config(packs / "bccd", actors=(cpus + 1, cpus + 1))
    with train_loader(cfg) as loader, pytest.raises(ConfigError, match=f"at least {cpus + 1} CPUs"):
        next(iter(loader))


def test_a_failing_transform_reaches_the_loop_as_one_sentence(packs: Path) -> None:
    cfg = config(packs / "bccd", {"transform": "tests.augmentations:not_a_transform"})
    with train_loader(cfg) as loader, pytest.raises(StreamError, match=r"^[^\n]*returned int, not an[^\n]*$"):
        next(iter(loader))

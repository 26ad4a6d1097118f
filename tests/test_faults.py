"""Faults in the middle of a stream: it goes on with the same ledger, or ends with a sentence and can be resumed."""

from __future__ import annotations

import json
import random
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from packing import pack_here

import rfstream
from benchmarks.bad_storage import BadStorage, Mode
from benchmarks.killing import kill_worker
from rfstream.config import Config
from rfstream.errors import StreamError
from rfstream.loader import RankLoader
from rfstream.stream.feed import what_runs
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.ranks import Peers, threads
from rfstream.stream.split import HandOver
from rfstream.tools.ledger import SCHEMA, first_difference, ledger_rows, make_ledger

CROP = {"transform": "tests.pipelines:crop_flip_jitter", "args": {"size": 128}}
EPOCHS = 3
TIMEOUT_S = 300.0
FIND_S = 30.0
"""A process that must be there is found by then, on the busiest machine."""


@pytest.fixture(scope="module")
def pack(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """205 photos in shards of 20: many fragments, so many blocks where they are small."""
    folder = tmp_path_factory.mktemp("faults") / "pack"
    pack_here(shared_data / "bccd", folder, per_shard=20)
    return folder


def config(path: Path | str, actors: int = 2, **stream: Any) -> Config:
    return Config(
        data={"path": str(path)},
        stream={"batch_size": 5, "global_batch": 20, "timeout_s": TIMEOUT_S, "block_bytes": "1MB", **stream},
        decode={"actors": (actors, actors)},
        augment={"cpu": CROP},
    )


@pytest.fixture(scope="module")
def reference(pack: Path, ray_session: None) -> pa.Table:
    return make_ledger(config(pack), epochs=EPOCHS, world_size=1)


def differs(reference: pa.Table, rows: list[dict[str, Any]]) -> str | None:
    """Where ``rows`` leave the undisturbed run, as far as they go."""
    return first_difference(reference.slice(0, len(rows)), pa.Table.from_pylist(rows, schema=SCHEMA))


def loader_of(cfg: Config) -> RankLoader:
    loader = rfstream.ray_loader(cfg)
    assert isinstance(loader, RankLoader)
    return loader


def test_a_killed_read_worker_changes_nothing(pack: Path, reference: pa.Table) -> None:
    rows = []
    with ThreadPoolExecutor(1) as beside, loader_of(config(pack, assembly="staged")) as loader:
        killed = beside.submit(
            kill_worker, "MapWorker(Read", FIND_S
        )  # beside, since nothing is read while a consumer stands still
        for batch in loader:
            rows += ledger_rows(batch, 0, 1)
    assert killed.result(), "no read actor was found to kill"
    assert len(rows) == 220
    assert differs(reference, rows) is None


def test_a_killed_coordinator_is_one_sentence_and_the_loader_goes_on(pack: Path, reference: pa.Table) -> None:
    rows, said = [], ""
    with loader_of(config(pack)) as loader:
        with pytest.raises(
            StreamError, match=r"^rank 0: batch \d+ of epoch \d \(its step \d+\) failed: the actor that deals"
        ):
            while loader.epoch < EPOCHS:
                for batch in loader:
                    rows += ledger_rows(batch, 0, 1)
                    if (batch.epoch, batch.step) == (0, 3):
                        assert kill_worker("SplitCoordinator", FIND_S)
        loader.load_state_dict(loader.state_dict())
        for batch in loader:
            rows += ledger_rows(batch, 0, 1)
            said = said or what_runs(loader._feed._execution)
    assert said.count("ReadBatchSource: ") == 1, "the killed execution is told as well"
    assert len(rows) % 220 == 0
    assert differs(reference, rows) is None


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("stall", r"http://.*\.tar: can't be read from byte \d+ to \d+: \d tries in \d+\.\d s, the last: no answer"),
        ("cut", r"http://.*\.tar: sample \w+ ends at byte \d+ but the shard before that: it is truncated"),
    ],
)
def test_bad_storage_is_one_sentence_and_the_run_resumes(
    pack: Path, reference: pa.Table, mode: Mode, message: str
) -> None:
    rows: list[dict[str, Any]] = []
    with BadStorage(pack) as storage:
        # Storage is given up after half of it.
        with loader_of(config(storage.url, timeout_s=60)) as loader:
            with pytest.raises(StreamError, match=f"^{message}[^\\n]*$"):
                while True:  # epochs may have been read already
                    for batch in loader:
                        rows += ledger_rows(batch, 0, 1)
                        storage.mode = mode
            state = json.loads(json.dumps(loader.state_dict()))
        storage.mode = "well"
        with loader_of(config(storage.url)) as loader:
            loader.load_state_dict(state)
            resumed = [row for batch in loader for row in ledger_rows(batch, 0, 1)]
    assert resumed and differs(reference, rows + resumed) is None


# Chaos

CHAOS_S = 25


@dataclass(frozen=True)
class Leg:
    """A stretch of the run with a loader of its own, on any number of ranks."""

    world_size: int
    assembly: str
    actors: int
    windows: int
    fault: str
    fault_step: int


def drawn(draw: random.Random) -> Leg:
    world_size, windows = draw.choice([1, 2, 4]), draw.randint(2, 6)  # two: room for a fault before the last step
    assembly = draw.choice(["fused", "staged"])
    kills = {"fused": ["MapWorker(Read"], "staged": ["MapWorker(Read", "MapWorker(Map"]}[assembly]
    faults = [*kills, "break", "close", "none"]
    steps = windows * 4 // world_size
    return Leg(world_size, assembly, draw.randint(1, 2), windows, draw.choice(faults), draw.randint(1, steps - 1))


def run(leg: Leg, pack: Path, state: dict[str, Any] | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The ledger's rows of ``leg``, which begins at ``state``, and the state after it."""
    pipeline = build_pipeline(config(pack, leg.actors, assembly=leg.assembly), "train", leg.world_size, training=True)

    def of_rank(peers: Peers) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        done = 0
        with RankLoader(pipeline, HandOver(pipeline, peers)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            while done < leg.windows * loader.windows_of_epoch.grad_accum:
                for batch in loader:
                    rows += ledger_rows(batch, peers.rank, leg.world_size)
                    done += 1
                    if done == leg.windows * loader.windows_of_epoch.grad_accum:
                        break
                    if done != leg.fault_step:
                        continue
                    if leg.fault in ("break", "close"):
                        if leg.fault == "close":
                            peers.meet({}, TIMEOUT_S, "to close")  # the execution ends with rank 0's loader
                            loader.close()
                        loader.load_state_dict(loader.state_dict())
                        break
                    if leg.fault != "none" and peers.rank == 0:
                        # All may be read already; a decode actor lives as long as the execution.
                        read = leg.assembly == "staged" and leg.fault == "MapWorker(Read"
                        hit = kill_worker(leg.fault, 2.0 if read else FIND_S)
                        assert hit or read, f"no {leg.fault} was found to kill"
            peers.meet({}, TIMEOUT_S, "to end")
            return rows, loader.state_dict()

    with ThreadPoolExecutor(leg.world_size) as pool:
        ranks = list(pool.map(of_rank, threads(leg.world_size)))
    rows = sorted((row for rows, _ in ranks for row in rows), key=lambda row: (row["epoch"], row["position"]))
    assert all(after == ranks[0][1] for _, after in ranks)
    return rows, json.loads(json.dumps(ranks[0][1]))


def test_chaos_changes_nothing(pack: Path, reference: pa.Table) -> None:
    """Faults, world sizes, assemblies and actor counts at random, then on to the epoch's end."""
    seed = secrets.randbits(32)
    print("seed", seed)
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    state: dict[str, Any] | None = None
    legs: list[Leg] = []
    deadline = time.monotonic() + CHAOS_S
    while len(rows) < len(reference):
        over = time.monotonic() > deadline or len(rows) + 6 * 20 > len(reference)
        rest = (220 - len(rows) % 220) // 20
        if over and rows and rest == 11:
            break
        leg = Leg(1, "fused", 2, rest, "none", 0) if over else drawn(draw)
        print(leg)
        legs.append(leg)
        more, state = run(leg, pack, state)
        assert len(more) == 20 * leg.windows, (seed, legs)
        rows += more
        assert differs(reference, rows) is None, (seed, legs)

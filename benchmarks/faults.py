"""What a fault in the middle of a stream does: what the user sees, how long it takes, and the ledger.

    python benchmarks/faults.py ../shared/data/bccd

Each fault has a process and a Ray of its own, which streams two epochs and does to itself what the table says, in the
middle of the first. Where that ends it, a fresh process goes on from the last state.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import albumentations as A
import numpy as np
import pyarrow as pa
import ray
import typer
from bad_storage import BadStorage, Mode
from common import RESULTS
from killing import kill_worker
from ray._private.internal_api import memory_summary
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

import rfstream
from rfstream import Config, RankLoader
from rfstream.tools.ledger import SCHEMA, first_difference, ledger_rows

EPOCHS = 2
FAULT_AT, STORAGE_FAULT_AT = 10, 1
"""Step of the first epoch after which the fault happens; soon where it is the storage's, before all was read."""
STEP_S = 0.05
"""How long a training step takes."""
TIMEOUT_S = 30.0
BOUND_S = 240.0
"""A process that takes longer than this hangs."""
STORE = 400_000_000
SMALL_STORE = 80_000_000
AUGMENT = A.to_dict(A.Compose([A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=1.0)]))


@dataclass
class Stream:
    """What a fault can reach of the process that streams."""

    loader: RankLoader
    storage: BadStorage
    cluster: Cluster | None
    beside: ThreadPoolExecutor
    kills: list[Future[None]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)


def kill(title: str) -> Callable[[Stream], None]:
    """SIGKILL for one of Ray's processes that runs ``title``, as soon as there is one.

    Beside the consumer: nothing may be read while that stands still.
    """

    def hit() -> None:
        if not kill_worker(title, TIMEOUT_S):
            raise RuntimeError(f"no process of {title} to kill")

    def inject(stream: Stream) -> None:
        stream.kills.append(stream.beside.submit(hit))

    return inject


def kill_node(stream: Stream) -> None:
    """SIGKILL for all processes of the node that is not this process's."""
    assert stream.cluster is not None
    mine = ray.get_runtime_context().get_node_id()
    other = next(node for node in stream.cluster.worker_nodes if node.node_id != mine)
    stream.cluster.remove_node(other, allow_graceful=False)


def kill_self(_: Stream) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_store(stream: Stream) -> None:
    """Hold most of the object store in objects in use, which can't be spilled; less where it takes no more."""
    for _ in range(5):
        try:
            stream.held.append(ray.get(ray.put(np.ones(10_000_000, dtype=np.uint8))))
        except ray.exceptions.RayError:
            return


def storage(mode: Mode) -> Callable[[Stream], None]:
    def misbehave(stream: Stream) -> None:
        stream.storage.mode = mode

    return misbehave


@dataclass(frozen=True)
class Fault:
    """One row of the table. ``url``: read over HTTP, so staged; ``nodes``: one for this process, one beside it."""

    inject: Callable[[Stream], None]
    url: bool = False
    nodes: int = 1
    cpus: int = 2
    store: int = STORE
    full_disk: bool = False


FAULTS = {
    "nothing": Fault(lambda _: None),
    "kill -9 of a decode actor": Fault(kill("MapWorker")),
    "kill -9 of a read actor": Fault(kill("MapWorker(Read"), url=True),
    "loss of a node, CPUs to spare": Fault(kill_node, nodes=2, cpus=4),
    "loss of a node, no CPUs to spare": Fault(kill_node, nodes=2),
    "kill -9 of the split's coordinator": Fault(kill("SplitCoordinator")),
    "kill -9 of the training process": Fault(kill_self),
    "object store 5/8 taken by others": Fault(fill_store, store=SMALL_STORE),
    "the same, and no disk to spill to": Fault(fill_store, store=SMALL_STORE, full_disk=True),
    "storage answers 503": Fault(storage("error"), url=True),
    "storage does not answer": Fault(storage("stall"), url=True),
    "storage cuts bodies short": Fault(storage("cut"), url=True),
    "storage breaks off in a body": Fault(storage("break off"), url=True),
}


def stream(name: str, pack: str, journal: Path, *, resume: bool) -> None:
    """Stream to the end, with the fault and a line of ``journal`` for each batch.

    With ``resume`` go on from the last of these, without the fault and on a machine that has what it lacked.
    """
    fault = FAULTS[name]
    state = None
    if resume:
        fault = replace(fault, inject=FAULTS["nothing"].inject, nodes=1, cpus=2, store=STORE, full_disk=False)
        state = next((line["state"] for line in reversed(read(journal)) if "state" in line), None)
    with ExitStack() as stack, journal.open("a") as lines:

        def note(**said: Any) -> None:
            lines.write(json.dumps({**said, "at": time.monotonic()}) + "\n")
            lines.flush()

        http = stack.enter_context(BadStorage(Path(pack)))
        cluster = start_ray(fault)
        config = Config(
            data={"path": http.url if fault.url else pack},
            stream={"batch_size": 4, "timeout_s": TIMEOUT_S, "block_bytes": "250kB"},
            decode={"actors": [2 * fault.nodes, 2 * fault.nodes]},
            augment={"cpu": {"albumentations": AUGMENT}},
        )
        loader = rfstream.ray_loader(config)
        assert isinstance(loader, RankLoader)
        if state is not None:
            loader.load_state_dict(state)
        reach = Stream(loader, http, cluster, stack.enter_context(ThreadPoolExecutor(1)))
        try:
            with loader:
                while loader.epoch < EPOCHS:
                    for batch in loader:
                        note(rows=ledger_rows(batch, 0, 1), state=loader.state_dict())
                        time.sleep(STEP_S)
                        if not resume and (batch.epoch, batch.step) == (0, STORAGE_FAULT_AT if fault.url else FAULT_AT):
                            note(fault=name)
                            fault.inject(reach)
        except Exception as error:  # the finding, whatever it is
            note(error=f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}")
        for done in reach.kills:
            done.result()
        note(end=True)
        summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
        spilled = [line for line in summary.splitlines() if line.startswith("Spilled")]
        note(spilled=spilled[0].split(",")[0] if spilled else "")
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


def start_ray(fault: Fault) -> Cluster | None:
    """A Ray of as many nodes and logical CPUs as ``fault`` asks for."""
    if fault.nodes == 1:
        # Above its threshold Ray takes a disk for full: a full one without filling one.
        settings = {"local_fs_capacity_threshold": 0.01} if fault.full_disk else None
        ray.init(
            address="local",
            num_cpus=fault.cpus,
            object_store_memory=fault.store,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            _system_config=settings,
        )
        return None
    cluster = Cluster()
    for _ in range(fault.nodes):
        cluster.add_node(num_cpus=fault.cpus, object_store_memory=fault.store)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    cluster.wait_for_nodes()
    return cluster


def in_child(name: str, pack: str, journal: Path, *, resume: bool) -> bool:
    """Run :func:`stream` in a process of its own; whether it ended within the bound."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=stream, args=(name, pack, journal), kwargs={"resume": resume})
    process.start()
    process.join(BOUND_S)
    if process.is_alive():
        process.kill()
        process.join()
        return False
    return True


def measure(name: str, pack: str, journal: Path) -> tuple[dict[str, Any], pa.Table]:
    """One row of the table, and the ledger."""
    ended = in_child(name, pack, journal, resume=False)
    first = read(journal)
    at = next((line["at"] for line in first if "fault" in line), first[0]["at"])
    after = [line for line in first if line["at"] > at]
    error = next((line for line in first if "error" in line), None)
    over = any("end" in line for line in first)
    if error is not None or not over:
        ended = in_child(name, pack, journal, resume=True) and ended
    arrivals = [line["at"] for line in read(journal) if "rows" in line and line["at"] > at]
    if error is not None:
        seen, seconds = error["error"], error["at"] - at
    elif over:
        seen, seconds = "nothing", max(b - a for a, b in pairwise([at, *arrivals])) - STEP_S
    else:
        seen, seconds = "the process is gone", arrivals[0] - at
    row = {
        "fault": name,
        "seen": seen if ended else "it hung",
        "seconds": round(seconds, 1),
        "batches after it": sum("rows" in line for line in after),
        "spilled": next((line["spilled"] for line in after if "spilled" in line), ""),
    }
    rows = [row for line in read(journal) if "rows" in line for row in line["rows"]]
    return row, pa.Table.from_pylist(rows, schema=SCHEMA)


def read(journal: Path) -> list[dict[str, Any]]:
    """Its lines; a last one that was never finished is left out."""
    return [json.loads(line) for line in journal.read_text().splitlines(keepends=True) if line.endswith("\n")]


def main(source: str, faults: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Pack SOURCE's train split into small shards and measure FAULTS (all by default)."""
    chosen = ["nothing", *(name for name in FAULTS if name != "nothing" and (not faults or name in faults))]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        pack = f"{folder}/pack"
        rfstream.pack(source, pack, splits="train", max_shard_bytes=300_000, progress=False)
        ray.shutdown()
        reference: pa.Table | None = None
        for number, name in enumerate(chosen):
            row, ledger = measure(name, pack, Path(folder) / f"{number}.jsonl")
            reference = ledger if reference is None else reference
            row["ledger"] = first_difference(reference, ledger) or "equal"
            Console().print(row)
            results.append(row)
    table = Table(*results[0], title="faults")
    for row in results:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "faults.json").write_text(json.dumps({"source": source, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""Interrupt a run at every step, resume it, on the same and on another number of ranks, and compare the ledgers.

    python benchmarks/interrupts.py ../shared/data/bccd

Each resumed run has a loader, an execution and a decode pool of its own, begins at the state that the interrupted one
saved, as JSON, and goes on to the end. Ranks are threads of this process.
"""

from __future__ import annotations

import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import albumentations as A
import pyarrow as pa
import typer
from common import RESULTS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import rfstream
from rfstream import Config, RankLoader
from rfstream.errors import StateError
from rfstream.session import ensure_ray
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.ranks import Peers, threads
from rfstream.stream.split import HandOver
from rfstream.tools.ledger import SCHEMA, first_difference, ledger_rows

EPOCHS = 3
WORLD_SIZES = (1, 2, 4)
AUGMENT = A.to_dict(A.Compose([A.RandomCrop(96, 96), A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=1.0)]))


def run(
    config: Config, world_size: int, state: dict[str, Any] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The ledger's rows from ``state`` to the end of the last epoch, and rank 0's state after each of its steps.

    Raises:
        StateError: if ``state`` lies inside a step of that many ranks.
    """
    pipeline = build_pipeline(config, "train", world_size, training=True)

    def of_rank(peers: Peers) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        rows, states = [], []
        with RankLoader(pipeline, HandOver(pipeline, peers)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            while loader.epoch < EPOCHS:
                for batch in loader:
                    rows += ledger_rows(batch, peers.rank, world_size)
                    states.append(json.loads(json.dumps(loader.state_dict())))
            peers.meet({}, config.stream.timeout_s, "to end")
        return rows, states

    with ThreadPoolExecutor(world_size) as pool:
        ranks = list(pool.map(of_rank, threads(world_size)))
    rows = [row for rows, _ in ranks for row in rows]
    return sorted(rows, key=lambda row: (row["epoch"], row["position"])), ranks[0][1]


def main(source: str, batch_size: int = 32, window: int = 128) -> None:
    """Pack SOURCE's train split; interrupt runs of 3 epochs on 1, 2 and 4 ranks at every step."""
    with tempfile.TemporaryDirectory() as folder:
        ensure_ray(2)
        rfstream.pack(source, folder, splits="train", progress=False)
        config = Config(
            data={"path": folder},
            stream={"batch_size": batch_size, "global_batch": window},
            decode={"actors": [1, 1]},
            augment={"cpu": {"albumentations": AUGMENT}},
        )
        whole, _ = run(config, 1, None)
        reference = pa.Table.from_pylist(whole, schema=SCHEMA)
        table = Table("ranks before", "ranks after", "interrupted at", "inside a step", "ledgers equal", "seconds each")
        results = []
        with Progress() as bar:
            for before in WORLD_SIZES:
                rows, states = run(config, before, None)
                assert first_difference(reference, pa.Table.from_pylist(rows, schema=SCHEMA)) is None
                for after in WORLD_SIZES:
                    began, refused, wrong = time.monotonic(), 0, []
                    for state in bar.track(states[:-1], description=f"{before} -> {after} ranks"):
                        done = state["epoch"] * (len(reference) // EPOCHS) + state["samples"]
                        try:
                            rest, _ = run(config, after, state)
                        except StateError:
                            refused += 1
                            continue
                        ledger = pa.Table.from_pylist(rest, schema=SCHEMA)
                        if (difference := first_difference(reference.slice(done), ledger)) is not None:
                            wrong.append(f"after {done} samples: {difference}")
                    resumed = len(states) - 1 - refused
                    seconds = round((time.monotonic() - began) / max(resumed, 1), 1)
                    row = (before, after, resumed, refused, f"{resumed - len(wrong)} of {resumed}", seconds)
                    table.add_row(*map(str, row))
                    results.append({"row": row, "wrong": wrong})
        Console().print(table, *(text for result in results for text in result["wrong"]))
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "interrupts.json").write_text(json.dumps({"source": source, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

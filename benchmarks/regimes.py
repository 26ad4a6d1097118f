"""How a loader bears its consumer: one that takes all it can get, one that trains, one that is slow.

    python benchmarks/regimes.py ../shared/data/cards

The trainer takes a fixed time a step, so that it asks for 80 % of what the loader gave the fast consumer before; the
slow one asks for 20 %. What counts is the share of time spent waiting for batches, and memory. The clock starts after
a fifth of the images, when what had been made before the first was taken has gone. Cold and warm starts are
``first_batch.py``'s, the pause between epochs is ``epoch_gap.py``'s.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from common import RESULTS, in_turn, reading, report, tree_memory
from loaders import batches_of, prepare, with_store
from peers.work import Job

CONSUMERS = {"fast": None, "training": 0.8, "slow": 0.2}
"""Share of the loader's own rate that is asked for; None: all of it."""
ROWS = ["rfstream-fused", "rfstream-staged", "dataloader-uint8"]


def consume(name: str, job: Job, images: int, step_s: float) -> dict[str, float]:
    """``images`` images, in steps that take ``step_s`` each: a sleep, as for a GPU that works meanwhile."""
    waited = began = 0.0
    seen = measured = store = 0
    asked = time.perf_counter()
    for batch, in_store in with_store(batches_of(name, job)):
        came = time.perf_counter()
        if began:
            waited += came - asked
        elif seen >= images // 5:
            began = came
        seen += len(batch.images)
        measured += len(batch.images) if began else 0
        store = max(store, in_store)
        time.sleep(step_s)
        asked = time.perf_counter()
        if seen >= images:
            break
    seconds = asked - began
    figures = {"images/s": measured / seconds, "waiting, %": 100 * waited / seconds}
    figures["memory, MB"] = tree_memory()[1] / 1e6
    return figures | ({"object store, MB": store / 1e6} if store else {})


def main(
    source: Path,
    images: Annotated[int, typer.Option(help="repeat SOURCE to so many; a multiple of the batch size")] = 2000,
    size: Annotated[int, typer.Option(help="pixels a side")] = 576,
    batch_size: int = 16,
    workers: int = 2,
    repetitions: int = 3,
    out: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Prepare SOURCE and give every loader each consumer in turn."""
    if child:
        name, data, *sizes, count, step_s = json.loads(child)
        typer.echo(json.dumps(consume(name, Job(Path(data), *sizes), count, step_s)))
        return
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as made:
        job = Job(Path(made), size, batch_size, workers)
        prepare(source, job, images, ROWS)

        def variant(name: str, consumer: str) -> dict[str, Any]:
            share = CONSUMERS[consumer]
            step_s = batch_size / (share * rates[name]) if share else 0.0
            # Not to the epoch's end, where workers have nothing left to do and hold nothing ready.
            spec = json.dumps([name, str(job.data), size, batch_size, workers, images * 9 // 10, step_s])
            figures = reading(__file__, str(job.data), f"--child={spec}")
            if share is None:
                rates[name] = figures["images/s"]
            return figures

        variants = {f"{name}, {consumer}": partial(variant, name, consumer) for name in ROWS for consumer in CONSUMERS}
        title = f"regimes {source.name} {size}: a fast, a training and a slow consumer"
        setting = {"source": source.name, "images": images, "batch_size": batch_size, "workers": workers}
        report(title, in_turn(variants, repetitions), {**setting, "consumers": CONSUMERS}, out)


if __name__ == "__main__":
    typer.run(main)

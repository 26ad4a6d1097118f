"""Seconds between the last batch of an epoch and the first of the next.

One execution over many epochs, against the same job executed anew for each epoch.

    python benchmarks/epoch_gap.py ../shared/data/bccd
"""

from __future__ import annotations

import statistics
import tempfile
import time

import typer
from common import cpu_seconds, in_turn, report

import rfstream
from rfstream import Config, RankLoader

EPOCHS = 6


def gaps(config: Config, *, anew: bool) -> dict[str, float]:
    """Median gap over ``EPOCHS`` epochs; with ``anew`` each epoch has an execution of its own."""
    loader = rfstream.ray_loader(config)
    assert isinstance(loader, RankLoader)
    seconds: list[float] = []
    before, began, last = cpu_seconds(), time.perf_counter(), 0.0
    with loader:
        for _ in range(EPOCHS):
            for step, _batch in enumerate(loader):
                if step == 0 and last:
                    seconds.append(time.perf_counter() - last)
                last = time.perf_counter()
            if anew:
                loader.close()
        total = time.perf_counter() - began
    return {"gap, s": statistics.median(seconds), "all epochs, s": total, "CPU-s": cpu_seconds() - before}


def main(source: str, repetitions: int = 3) -> None:
    """Pack SOURCE's train split and measure."""
    with tempfile.TemporaryDirectory() as folder:
        rfstream.pack(source, folder, splits="train", progress=False)
        config = Config(data={"path": folder}, stream={"batch_size": 16})
        variants = {
            "one execution": lambda: gaps(config, anew=False),
            "executed per epoch": lambda: gaps(config, anew=True),
        }
        title = "epoch gap: last batch of an epoch to the first of the next"
        report(title, in_turn(variants, repetitions), {"source": source, "epochs": EPOCHS, "batch_size": 16})


if __name__ == "__main__":
    typer.run(main)

"""What ``rfstream plan`` predicts beside what the stream then gives.

    python benchmarks/plan_prediction.py ../shared/data/cards

A reading decodes one batch in a process of its own and predicts, with all processes on the cores that this one may use;
then another runs the stream, as ``loaders.py`` does. CPU-seconds are of all processes: they tell an error of the model
from a machine that has other work, which takes images a second away and leaves CPU-seconds almost alone.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from common import RESULTS, in_turn, reading, report
from loaders import Bench, prepare
from peers.work import Job, config_of

from rfstream.plan.throughput import MEASURED, forecast
from rfstream.stream.pipeline import build_pipeline
from rfstream.tools.report import try_batches, work_of

ROW = "rfstream-fused"


def predict(job: Job) -> dict[str, float]:
    """Images a second, and CPU-seconds of all processes."""
    pipeline = build_pipeline(config_of(job, "fused"), "train", 1, training=True)
    work = work_of(try_batches(pipeline, pipeline.plan.order(0)), job.batch_size)
    spent = work.seconds_per_image + MEASURED.of_all(work.batch_bytes) / work.batch_size
    cores = len(os.sched_getaffinity(0))
    return {"images/s": forecast(work, job.workers, cores).images_per_s, "CPU-s per 1000 images": spent * 1000}


def beside(job: Job, images: int) -> dict[str, float]:
    """Prediction, measurement, and how many times the one is the other."""
    spec = json.dumps({**asdict(job), "data": str(job.data)})
    foretold, seen = reading(__file__, str(job.data), f"--child={spec}"), Bench(job, images).read(ROW, job.workers)
    figures: dict[str, float] = {}
    for name, value in foretold.items():
        figures |= {f"{name}, predicted": value, name: seen[name], f"{name}, ratio": value / seen[name]}
    return figures


def main(
    source: Path,
    images: Annotated[int, typer.Option(help="repeat SOURCE to so many; a multiple of the batch size")] = 1008,
    size: Annotated[int, typer.Option(help="pixels a side")] = 576,
    batch_size: int = 16,
    actors: Annotated[str, typer.Option(help="numbers of decode actors, by comma")] = "1,2",
    repetitions: int = 3,
    out: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Predict and measure on SOURCE with each number of actors, in turn."""
    if child:
        spec = json.loads(child)
        typer.echo(json.dumps(predict(Job(**{**spec, "data": Path(spec["data"])}))))
        return
    with tempfile.TemporaryDirectory() as made:
        job = Job(Path(made), size, batch_size, 1)
        prepare(source, job, images, [ROW])
        jobs = {f"actors {number}": replace(job, workers=int(number)) for number in actors.split(",")}
        readings = in_turn({name: partial(beside, each, images) for name, each in jobs.items()}, repetitions)
    title = f"plan prediction: {source.name} at {size} px, {images} images, batch {batch_size}"
    cores = len(os.sched_getaffinity(0))
    setting = {"source": source.name, "images": images, "size": size, "batch_size": batch_size, "cores": cores}
    report(title, readings, setting, out)


if __name__ == "__main__":
    typer.run(main)

"""What training waits for: RF-DETR Nano on the stream and on RF-DETR's own loader, in turn.

    python benchmarks/gpu_step.py ../shared/data/cards

With an NVIDIA GPU: images a second, milliseconds a step, and out of a torch.profiler trace of the same steps
(``gpu_trace.py``) the share of time in which no kernel ran, and the share of the batches' copies, from page-locked
memory to the GPU, that ran while the steps computed: the proof that a copy costs the steps nothing. Kernels and copies
alone are traced, since tracing every operator would slow down what launches them.

Without one, reduced: a tiny RF-DETR at 64 px on the CPU, and the share of time in which the training loop waits for its
next batch. The loaders then share the cores with the model, so that the share says that all of this works, not what a
GPU would wait. Its title says that there was no GPU, and its file has another name.

The reduced form runs in the tests. Of what needs a GPU only the arithmetic on a trace is tested: nothing here has been
run on one yet.

SOURCE is in Roboflow's layout. Each reading is an epoch in a process of its own, measured from a quarter of its steps
on: the model is warm by then, and the batches that were made while it started are used up, if there are enough of
them. The stream may hold 24 batches an actor, so with 16 workers a quarter is 400 steps, ``--images 25600`` in all.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import RESULTS, in_turn, reading, report
from loaders import prepare
from peers.work import Job

KINDS = {"rfstream": "stream", "RF-DETR, loose files": "loose"}
LEAST = 5
"""RF-DETR's loader repeats a dataset of fewer batches."""


def main(
    source: Path,
    images: Annotated[int, typer.Option(help="repeat SOURCE to so many; 5 whole batches or more")] = 1008,
    size: Annotated[int | None, typer.Option(help="pixels a side; without, 576, and 64 where there is no GPU")] = None,
    batch_size: int = 16,
    workers: Annotated[int | None, typer.Option(help="of each loader; without, one a core")] = None,
    repetitions: int = 3,
    out: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Prepare SOURCE and train on each loader in turn."""
    if child:
        from rfdetr_fit import measure  # takes seconds to import

        kind, data, *sizes = json.loads(child)
        typer.echo(json.dumps(measure(kind, Job(Path(data), *sizes))))
        return
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if images % batch_size or images < LEAST * batch_size:
        raise typer.BadParameter(f"{images} images are not {LEAST} or more whole batches of {batch_size}")
    size, workers = size or (576 if gpu else 64), workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as made:
        job = Job(Path(made), size, batch_size, workers)
        prepare(source, job, images, [])
        specs = {name: json.dumps([kind, made, size, batch_size, workers]) for name, kind in KINDS.items()}
        variants = {name: partial(reading, __file__, made, f"--child={spec}") for name, spec in specs.items()}
        readings = in_turn(variants, repetitions)
    what = f"RF-DETR Nano on one {gpu}" if gpu else "no GPU, so a tiny RF-DETR on the CPU and no GPU idle share"
    title = f"{'gpu' if gpu else 'cpu'} step {source.name} {size}: {what}; batch {batch_size}, {workers} workers"
    setting = {"source": source.name, "images": images, "batch_size": batch_size, "workers": workers, "gpu": gpu}
    report(title, readings, setting, out)


if __name__ == "__main__":
    typer.run(main)

"""RF-DETR Nano trained for an epoch on one of its loaders: what ``gpu_step.py`` runs in a process of its own."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from gpu_trace import busy_s, overlapped_share
from peers.rfdetr import module_of
from peers.work import Job
from rfdetr.training import RFDETRModelModule, build_trainer
from torch.profiler import ProfilerActivity, profile

from rfstream.train.timing import Timing

PATCH = 16
"""RF-DETR Nano's, in pixels."""
TINY = {"num_queries": 50, "num_select": 50, "group_detr": 2}
"""What makes a step on a CPU a matter of a second."""


class Window(pl.Callback):
    """The figures of a fit's steps, but for the first quarter of them; on a GPU with a trace, which is ``None`` else.

    On a GPU the window begins and ends with nothing left to do there.
    """

    def __init__(self, timing: Timing, trace: profile | None) -> None:
        self.figures: dict[str, float] = {}
        self._timing = timing
        self._trace = trace
        self._began = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done, steps = batch_idx + 1, int(trainer.num_training_batches)
        if done == steps // 4:
            self._open(trainer, pl_module)
        elif done == steps:
            self._close(steps - steps // 4)

    def _open(self, trainer: Any, pl_module: Any) -> None:
        if self._trace is not None:
            torch.cuda.synchronize()
            self._trace.start()
        self._timing.images, self._timing.waiting_s, self._timing.stepping_s = 0, 0.0, 0.0
        self._timing.on_train_start(trainer, pl_module)  # starting the trace took a while
        self._began = time.perf_counter()

    def _close(self, steps: int) -> None:
        if self._trace is not None:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        images = self._timing.images
        self.figures = {
            "images": images,
            "images/s": images / seconds,
            "step, ms": seconds / steps * 1000,
            "waiting for a batch, %": 100 * self._timing.waiting_share,
        }
        if self._trace is not None:
            self._trace.stop()
            self.figures |= traced(self._trace, seconds)


def traced(trace: profile, seconds: float) -> dict[str, float]:
    """What the GPU did in the ``seconds`` of ``trace``."""
    with tempfile.TemporaryDirectory() as folder:
        trace.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    share = overlapped_share(events)
    figures = {"GPU idle, %": 100 * (1 - busy_s(events) / seconds)}
    return figures if share is None else figures | {"copies while computing, %": 100 * share}


def measure(kind: str, job: Job) -> dict[str, float]:
    """The figures of an epoch, in this process: on the GPU, or of a tiny model on the CPU. Nothing is validated or
    saved; all else is as RF-DETR has it."""
    gpu = torch.cuda.is_available()
    model = {"device": "cuda" if gpu else "cpu", "positional_encoding_size": job.size // PATCH, **({} if gpu else TINY)}
    with tempfile.TemporaryDirectory() as output:
        data = module_of(job, kind, model, epochs=1, grad_accum_steps=1, output_dir=output, tensorboard=False)
        timing = Timing()
        window = Window(timing, profile(activities=[ProfilerActivity.CUDA]) if gpu else None)
        trainer = build_trainer(
            data.train_config,
            data.model_config,
            accelerator="gpu" if gpu else "cpu",
            devices=1,
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        kept = [each for each in trainer.callbacks if not isinstance(each, pl.callbacks.Checkpoint)]
        trainer.callbacks = [*kept, timing, window]
        trainer.fit(RFDETRModelModule(data.model_config, data.train_config), data)
    return window.figures

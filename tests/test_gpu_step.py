"""What training waits for: the bench's reduced form, and its arithmetic on a GPU's trace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_trace import busy_s, overlapped_share
from rfstream.batch import copied_pixels
from rfstream.episodes.batch import EpisodeBatch
from rfstream.train import transfer

ROOT = Path(__file__).resolve().parents[1]
COMPUTE, SIDE, OTHER = 7, 20, 24


def kernel(start: float, end: float, stream: int = COMPUTE) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "gemm", "ts": start, "dur": end - start, "args": {"stream": stream}}


def copy(start: float, end: float, stream: int = SIDE, way: str = "HtoD (Pinned -> Device)") -> dict[str, Any]:
    name, args = f"Memcpy {way}", {"stream": stream, "bytes": 1}
    return {"ph": "X", "cat": "gpu_memcpy", "name": name, "ts": start, "dur": end - start, "args": args}


STEPS = [kernel(0, 100), kernel(100, 150), kernel(300, 400)]
NOISE = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1000, "args": {}},
    {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 150, "dur": 150, "args": {"stream": COMPUTE}},
]


@pytest.mark.parametrize(
    ("copies", "share"),
    [
        ([copy(50, 90)], 1.0),
        ([copy(140, 180)], 0.25),
        ([copy(160, 200)], 0.0),
        ([copy(50, 90), copy(150, 190)], 0.5),
        ([copy(50, 90), copy(60, 90), copy(200, 240)], 0.5),  # at once: counted once
        ([copy(50, 90, stream=COMPUTE)], 0.0),  # by the clocks at once, and yet in line
        ([copy(50, 90), copy(150, 190, stream=COMPUTE)], 0.5),
        ([copy(200, 240), kernel(200, 240, stream=OTHER)], 0.0),  # beside kernels that are not the steps'
        ([copy(50, 90), copy(160, 200, way="HtoD (Pageable -> Device)")], 1.0),
        ([copy(50, 90, way="DtoH (Device -> Pinned)")], None),
        ([], None),
    ],
)
def test_overlapped_share_of_the_copies(copies: list[dict[str, Any]], share: float | None) -> None:
    events = [*copies, *STEPS[::-1], *NOISE]  # a trace's events come in no order
    assert overlapped_share(events) == share


def test_busy_is_when_any_kernel_runs() -> None:
    events = [*STEPS, kernel(120, 200, stream=OTHER), copy(200, 300), *NOISE]
    assert busy_s(events) == pytest.approx(300e-6)
    assert busy_s(NOISE) == 0


def test_a_trace_of_torch_profiler_is_read(tmp_path: Path) -> None:
    with torch.profiler.profile() as trace:
        torch.ones(8).sum()
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events and (busy_s(events), overlapped_share(events)) == (0, None)  # of a CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="the reduced form is for machines without a GPU")
def test_reduced_form_trains_on_both_loaders(shared_data: Path, tmp_path: Path) -> None:
    sizes = ["--images=12", "--batch-size=2", "--repetitions=1", "--workers=1"]
    command = [sys.executable, "-m", "rfstream.cli", "bench", "gpu_step", str(shared_data / "bccd"), *sizes]
    done = subprocess.run([*command, f"--out={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "cpu_step_bccd_64.json").read_text())
    assert "no GPU" in document["title"] and document["setting"]["gpu"] is None
    assert set(document["readings"]) == {"rfstream", "RF-DETR, loose files"}
    for name, figures in document["readings"].items():
        (images,), (rate,), (step_ms,) = (figures[key] for key in ("images", "images/s", "step, ms"))
        assert images == 10, name  # of six steps the first is not measured
        assert rate > 0 and rate * step_ms / 1000 == pytest.approx(2)
        assert 0 <= figures["waiting for a batch, %"][0] <= 100
        assert not any("idle" in figure or "copies" in figure for figure in figures)


def episodes(pixels: torch.Tensor) -> EpisodeBatch:
    return EpisodeBatch({"camera": pixels}, ("camera",), [], [], 0, 0, False)


def test_steps_wait_for_a_copy_that_other_streams_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of CUDA, and in which order, by a CPU that plays the GPU."""
    asked: list[str] = []

    def move(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        asked.append(f"copy on {current[-1]}, {device}, {non_blocking=}")
        return tensor.clone()

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Steps(str):
        def wait_stream(self, stream: str) -> None:
            asked.append(f"{self} wait for {stream}")

    current, steps = ["steps"], Steps("steps")
    monkeypatch.setattr(transfer, "_copy_stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "to", move)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: asked.append(f"keep for {stream}"))
    batch = transfer.transferred(episodes(torch.ones(2)), torch.device("cuda", 0))
    assert asked == ["pin", "copy on side, cuda:0, non_blocking=True", "keep for steps", "steps wait for side"]
    assert batch["camera"].tolist() == [1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_copies_beside_the_steps(tmp_path: Path) -> None:
    """Not run in CI: 16 batches, each copied while the GPU still works on what was launched before."""
    gpu, matrix = torch.device("cuda"), torch.rand(8192, 8192, device="cuda")
    wires = [np.full((16, 3, 576, 576), number, np.uint8) for number in range(16)]
    copied_pixels(wires[0])
    torch.cuda.synchronize()
    sums = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for wire in wires:
            for _ in range(4):
                matrix = matrix @ matrix
            pixels = copied_pixels(wire)
            assert pixels.is_pinned()
            batch = transfer.transferred(episodes(pixels), gpu)
            sums.append(batch["camera"].amin() + batch["camera"].amax())
        torch.cuda.synchronize()
    assert [int(value) for value in sums] == [2 * number for number in range(16)], "read before it had come, or after"
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    share = overlapped_share(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert share is not None and share > 0.5

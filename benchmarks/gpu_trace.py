"""What a GPU did, out of a trace of torch.profiler: the events that ``export_chrome_trace`` writes.

Kernels have the category ``kernel``, copies ``gpu_memcpy``; both have their stream in ``args``, and their start and
duration in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]


def busy_s(events: Iterable[Event]) -> float:
    """Seconds in which at least one kernel ran, on whatever stream; copies alone leave a GPU idle."""
    return _length(_union(_interval(event) for event in events if event.get("cat") == "kernel")) / 1e6


def overlapped_share(events: Sequence[Event]) -> float | None:
    """The part, 0..1, of the time of copies from page-locked memory to the GPU in which the steps computed too.

    The steps' stream is the one on which kernels took longest. A copy on that stream overlaps nothing, whatever the
    clocks say: it waits for the kernels before it, and those after it wait for it. None: there was no such copy.
    """
    kernels: dict[Any, list[Interval]] = {}
    copies: dict[Any, list[Interval]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            kernels.setdefault(event["args"]["stream"], []).append(_interval(event))
        elif event.get("cat") == "gpu_memcpy" and "HtoD (Pinned" in event["name"]:
            copies.setdefault(event["args"]["stream"], []).append(_interval(event))
    if not copies:
        return None
    steps = max(kernels, key=lambda stream: _length(_union(kernels[stream])), default=None)
    computing = _union(kernels.get(steps, ()))
    beside = _union(interval for stream, of in copies.items() if stream != steps for interval in of)
    both = _length(beside) + _length(computing) - _length(_union(beside + computing))
    return both / _length(_union(interval for of in copies.values() for interval in of))


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in intervals that are apart, in order."""
    apart: list[Interval] = []
    for start, end in sorted(intervals):
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        else:
            apart.append((start, end))
    return apart


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)

"""What ``benchmarks/episodes.py`` runs in processes of their own: the stream, what ``rfstream plan`` announces of it,
and pure decoding of the packets that it decodes.

    python benchmarks/episode_readers.py stream ARGUMENTS

ARGUMENTS is a JSON object: the keyword arguments of the function of that name. The last line is its result, as JSON.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import av
import memory

import rfstream
from rfstream import Config, RankLoader
from rfstream.episodes.sample import EncodedStep, Run, Shot
from rfstream.episodes.video import VideoDecoder
from rfstream.plan.position import Position
from rfstream.session import ensure_ray
from rfstream.stream.pipeline import BATCHES_PER_TASK, build_pipeline
from rfstream.stream.source import reader_of


def stream(config: dict[str, Any], seconds: float | None, warm_up: int) -> dict[str, Any]:
    """When each batch came, seconds after the loader was asked for: until ``seconds`` after ``warm_up`` batches, or for
    two epochs, the end of each told in a line of its own. Beside it, what was held in memory at most."""
    began = time.perf_counter()
    parsed = Config(**config)
    ensure_ray(parsed.decode.actors[1])
    stop, taken = threading.Event(), []
    watch = threading.Thread(target=lambda: taken.extend(memory.readings(stop)))
    watch.start()
    try:
        loader = rfstream.ray_loader(parsed)
        assert isinstance(loader, RankLoader)
        with loader:
            batches = two_epochs(loader) if seconds is None else chain.from_iterable(repeat(loader))
            arrivals = times(batches, began, seconds or math.inf, warm_up)
    finally:
        stop.set()
        watch.join()
    held = {f"{what} bytes": max((reading[what] for reading in taken), default=0) for what in ("store", "actor")}
    plan = build_pipeline(parsed, "train", 1, training=True).plan
    return {"arrivals": arrivals, "first_pool": int(plan.order(0).starts[1]) // parsed.stream.batch_size + 1, **held}


def two_epochs(loader: RankLoader[Any]) -> Iterator[Any]:
    for epoch in range(2):
        yield from loader
        print(json.dumps({"epoch": epoch}), flush=True)


def times(batches: Iterable[Any], began: float, seconds: float, warm_up: int) -> list[float]:
    arrivals: list[float] = []
    for _ in batches:
        arrivals.append(time.perf_counter() - began)
        if len(arrivals) > warm_up and arrivals[-1] - arrivals[warm_up] >= seconds:
            break
    return arrivals


def announce(config: dict[str, Any]) -> dict[str, Any]:
    """What ``rfstream plan`` says of memory."""
    return memory.announced(Config(**config))


def decode(config: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Decode the stream's first tasks for ``seconds``, in as many processes as it has actors."""
    actors = Config(**config).decode.actors[1]
    with ProcessPoolExecutor(actors, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(partial(decode_share, config, seconds, actors), range(actors)))
    rate = sum(part["samples"] / part["seconds"] for part in parts)
    totals = {name: sum(part[name] for part in parts) for name in ("samples", "packets", "decoders")}
    return {"samples/s": rate, **totals}


def decode_share(config: dict[str, Any], seconds: float, actors: int, first: int) -> dict[str, float]:
    """Every ``actors``-th of the stream's tasks from ``first`` on: of each the packets that its samples need, once,
    whatever they share. The clock runs while packets are decoded and frames turned into RGB, as the stream does both,
    and not while their bytes are read."""
    found = {"samples": 0, "seconds": 0.0, "packets": 0, "decoders": 0}
    video, to_rgb = VideoDecoder(), av.video.reformatter.VideoReformatter()
    for steps in islice(encoded(Config(**config)), first, None, actors):
        runs = {id(run): run for run in map(run_of, (s for step in steps for shots in step.shots for s in shots))}
        began = time.perf_counter()
        for run in runs.values():
            for frame in video.frames(run).values():
                to_rgb.reformat(frame, format="rgb24")
        found["seconds"] += time.perf_counter() - began
        found["samples"] += len(steps)
        found["packets"] += sum(len(run.pts) for run in runs.values())
        found["decoders"] += len(runs)
        if found["seconds"] >= seconds:
            break
    return found


def encoded(config: Config) -> Iterator[list[EncodedStep]]:
    """Samples of each of the stream's tasks before they are decoded."""
    pipeline = build_pipeline(config, "train", 1, training=True)
    for task in pipeline.plan.tasks(Position(0, 0), 1, BATCHES_PER_TASK):
        yield reader_of(pipeline.reader).read(task.rows(task.lo, task.hi))


def run_of(shot: Shot) -> Run:
    assert isinstance(shot.source, Run)
    return shot.source


if __name__ == "__main__":
    function: Any = {"stream": stream, "announce": announce, "decode": decode}[sys.argv[1]]
    print(json.dumps(function(**json.loads(sys.argv[2]))))

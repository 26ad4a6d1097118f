"""``rfstream plan``: what a run will do, before it is paid for."""

from __future__ import annotations

import math
import os
import resource
import statistics
import time
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from rfstream.config import Config
from rfstream.dataset.mixture import MixedSplit, Split
from rfstream.episodes.index import EpisodeIndex
from rfstream.errors import DatasetError
from rfstream.plan.keys import IntArray
from rfstream.plan.mixture import Mixture
from rfstream.plan.order import EpochOrder
from rfstream.plan.throughput import Forecast, Work, forecast
from rfstream.plan.windows import Windows
from rfstream.stream.decode import decoder_of
from rfstream.stream.pipeline import (
    BATCHES_PER_TASK,
    PREFETCHED,
    READS_PER_NODE,
    TASKS_IN_FLIGHT,
    TASKS_WAITING,
    Pipeline,
    build_pipeline,
)
from rfstream.stream.source import reader_of

_BATCHES_IN_HAND = 4
_TRIED = 3
"""Tasks that are measured: one may take half as long again as another."""
_TRIAL_S = 3.0
"""No further one is begun after so many seconds, once one is measured."""


@dataclass(frozen=True)
class Trial:
    """Batches, read and decoded here: the size of the largest in bytes, decoded and encoded, CPU-seconds per
    image, and the most memory that this process has had, in bytes."""

    batch_bytes: int
    encoded_bytes: int
    seconds_per_image: float
    process_bytes: int

    @property
    def actor_bytes(self) -> int:
        """The most private memory of a decode actor: it loads what this process did, or less, and holds the batch that
        it makes, the one that it hands over and what it keeps for the next."""
        return self.process_bytes + _BATCHES_IN_HAND * self.batch_bytes


def try_batches(pipeline: Pipeline, order: EpochOrder) -> Trial:
    """Read and decode the first tasks' batches in this process: one to warm up, and up to :data:`_TRIED` to measure.

    Raises:
        DatasetError: if the shards can't be read.
    """
    windows, size = pipeline.plan.windows, pipeline.plan.windows.batch_size
    of_task = min(BATCHES_PER_TASK, windows.batches)
    starts = range(0, windows.batches - of_task + 1, of_task)
    reader, decoder = reader_of(pipeline.reader), decoder_of(pipeline.decode, pipeline.substitutes)
    spent: list[float] = []
    decoded = encoded = 0
    began = time.monotonic()
    while len(spent) < 2 or (len(spent) <= _TRIED and time.monotonic() - began < _TRIAL_S):
        first = starts[len(spent) % len(starts)]
        before = time.process_time()  # other work on the machine, and waits for storage, are no part of it
        samples = reader.read(pipeline.plan.task(order, first, first + of_task).rows(first, first + of_task))
        for m in range(first, first + of_task):
            of_batch = samples[(m - first) * size : (m - first + 1) * size]
            wire = decoder.batch(of_batch, 0, m, m * size)
            decoded = max(decoded, sum(a.nbytes for a in wire.arrays.values()))
        spent.append(time.process_time() - before)
        encoded = max(encoded, sum(column.nbytes for column in reader.to_columns(samples).values()) // of_task)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Trial(decoded, encoded, statistics.median(spent[1:]) / (of_task * size), most)


def batches_held(pipeline: Pipeline) -> int:
    """How many decoded batches lie in the object store at most: those that wait, tasks that had begun when there were
    too many of these, and what ranks hold.

    A rank holds what Ray and the feed each prefetch, a row in the feed's hand and a batch in use.
    """
    of_actor = (TASKS_WAITING + TASKS_IN_FLIGHT) * BATCHES_PER_TASK
    by_ray = max(PREFETCHED, pipeline.batches_per_row)
    of_ranks = pipeline.plan.windows.world_size * (by_ray + PREFETCHED + pipeline.batches_per_row + 1)
    return pipeline.config.decode.actors[1] * of_actor + of_ranks


def work_of(trial: Trial, batch_size: int) -> Work:
    """What a batch like that of ``trial`` takes."""
    return Work(trial.seconds_per_image, batch_size, trial.batch_bytes, trial.encoded_bytes)


def plan_report(config: Config, world_size: int, read_bytes_per_s: float = math.inf) -> Table:
    """A two-column table of what training with ``config`` on ``world_size`` ranks will do, where storage gives all
    readers together ``read_bytes_per_s``.

    Raises:
        ConfigError, DatasetError, PlanError: if it can't run at all.
    """
    pipeline = build_pipeline(config, "train", world_size, training=True)
    table = Table(title=f"{config.data.name}, split {pipeline.index.split}", show_header=False)
    order = pipeline.plan.order(0)
    costs = _cost_rows(pipeline, order, read_bytes_per_s)
    for name, value in [*_pack_rows(pipeline), *_plan_rows(pipeline, order), *costs]:
        table.add_row(name, value)
    return table


def _pack_rows(pipeline: Pipeline) -> list[tuple[str, str]]:
    """What each pack of a mixture gives to an epoch."""
    split, mixture = pipeline.index, pipeline.plan.fragments
    if not isinstance(split, MixedSplit) or not isinstance(mixture, Mixture):
        return []
    rows = [
        (
            f"pack {pack.number}",
            f"{pack.index.path}: {pack.index.num_samples:,} samples x {pack.weight:g} = {share.per_epoch:,} an epoch, "
            f"{share.per_epoch / mixture.total:.1%}",
        )
        for pack, share in zip(split.packs, mixture.shares, strict=True)
    ]
    return [*rows, ("classes", ", ".join(split.class_names()))]


def _plan_rows(pipeline: Pipeline, order: EpochOrder) -> list[tuple[str, str]]:
    windows = pipeline.plan.windows
    parts, nbytes = _contents(pipeline, order)
    block = order.block_bytes(nbytes)
    per_read = (
        f"{_size(np.median(nbytes))} a fragment" if not pipeline.fused else f"{_size(nbytes.sum() / order.samples)}"
    )
    return [
        ("samples", f"{order.samples:,} in {parts}, {_size(nbytes.sum())}"),
        ("fragments", f"{len(nbytes):,}"),
        ("shuffle blocks", f"{order.blocks:,} of up to {_size(block.max())}"),
        (
            "window",
            f"{windows.window_samples:,} samples = {windows.world_size} ranks x {windows.grad_accum} accumulated x "
            f"{windows.batch_size}",
        ),
        ("windows per epoch", f"{windows.windows:,} (optimizer steps)"),
        ("batches per epoch", f"{windows.batches_per_rank:,} a rank, {windows.batches:,} in all"),
        ("tail", _tail(windows)),
        ("assembly", "fused: decode actors read" if pipeline.fused else "staged: read actors, then decode actors"),
        ("bytes per read", per_read + (" (one sample)" if pipeline.fused else "")),
        ("epochs per execution", f"{pipeline.epochs_per_execution():,}"),
    ]


def _contents(pipeline: Pipeline, order: EpochOrder) -> tuple[str, IntArray]:
    """Of how many parts the split is, in words, and the bytes of each fragment."""
    index = pipeline.index
    if isinstance(index, EpisodeIndex):
        return f"{len(index.chosen):,} episodes", index.nbytes
    assert isinstance(index, Split)
    return f"{len(index.shards):,} shards", order.fragments.nbytes


def _tail(windows: Windows) -> str:
    surplus = windows.positions - windows.samples
    if surplus > 0:
        return f"wrap: {surplus:,} samples seen twice to complete the last window"
    if surplus < 0:
        return f"drop: {-surplus:,} samples left out each epoch"
    return "none: the samples fill whole windows"


def _cost_rows(pipeline: Pipeline, order: EpochOrder, read_bytes_per_s: float) -> list[tuple[str, str]]:
    held = batches_held(pipeline)
    try:
        trial = try_batches(pipeline, order)
    except DatasetError as error:
        return [("object store", f"up to about {held:,} batches; their size is unknown: {error}")]
    blocks = 1 + READS_PER_NODE
    # Batches carry what comes before their frames in a video, some of it more than once.
    carried = pipeline.rows_per_block() * BATCHES_PER_TASK * trial.encoded_bytes
    block = max(order.block_bytes(_contents(pipeline, order)[1]).max(), carried)
    encoded = "" if pipeline.fused else f", and {_size(blocks * block)} of {blocks} encoded blocks (on one node)"
    return [
        ("batch", f"{_size(trial.batch_bytes)} of pixels and targets"),
        ("object store", f"up to about {_size(held * trial.batch_bytes)} ({held:,} batches){encoded}"),
        ("a decode actor", f"up to about {_size(trial.actor_bytes)} of its own"),
        ("decode", f"{1 / trial.seconds_per_image:,.0f} images/s a core"),
        *_rate_rows(pipeline, work_of(trial, pipeline.plan.windows.batch_size), read_bytes_per_s),
    ]


def _rate_rows(pipeline: Pipeline, work: Work, read_bytes_per_s: float) -> list[tuple[str, str]]:
    """What the stream gives with the fewest and the most actors, a core each, and where all share this machine's."""
    low, high = pipeline.config.decode.actors
    cores = os.cpu_count() or 1
    pools = [(n, forecast(work, n, read_bytes_per_s=read_bytes_per_s)) for n in sorted({low, high})]
    here = forecast(work, high, cores, read_bytes_per_s)
    apart = ", ".join(f"{_rate(each)} with {n} {'actor' if n == 1 else 'actors'}" for n, each in pools)
    most = pools[-1][1]
    return [
        ("predicted", f"{apart}, a core each; {_rate(here)} if all share the {cores} cores here"),
        (
            "what limits",
            f"{most.bottleneck}, if the ranks together take more than {most.images_per_s:,.0f} images/s; else the "
            "training step",
        ),
    ]


def _rate(of: Forecast) -> str:
    return f"{of.images_per_s:,.0f} images/s ({of.bottleneck})"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1000
    return ""

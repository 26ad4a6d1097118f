"""The Ray Data job: plan -> read -> decode, in order. A row that a rank takes is one block, of one batch or several."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ray
from ray.data import ActorPoolStrategy, DataContext, Dataset, TaskPoolStrategy

from rfstream.config import Config
from rfstream.dataset.cache import ShardCache
from rfstream.dataset.mixture import Split
from rfstream.dataset.roles import label_space, split_of
from rfstream.dataset.storage import local_path
from rfstream.episodes.decode import EpisodeSpec
from rfstream.episodes.index import index_of, pool_weights
from rfstream.episodes.layout import layout_of
from rfstream.episodes.metadata import read_dataset
from rfstream.episodes.reader import EpisodeReaderSpec
from rfstream.episodes.transform import described
from rfstream.errors import ConfigError
from rfstream.plan.mixture import Mixture
from rfstream.plan.order import Fragments
from rfstream.plan.position import Fingerprint, Position
from rfstream.plan.tasks import StreamPlan
from rfstream.plan.windows import Windows
from rfstream.session import most_of
from rfstream.stream.backpressure import bound_waiting_rows
from rfstream.stream.decode import DecodeSpec, DetectionSpec
from rfstream.stream.source import (
    BatchSource,
    PackSubstitutes,
    ReaderSpec,
    StagedDecode,
    batches_per_row,
    evaluation_functions,
    reader_spec_of,
    training_functions,
)

BATCHES_PER_TASK = 4
"""Consecutive batches of a task that decodes: few enough to balance, enough to pay for the task."""
TASKS_PER_EXECUTION = 500
"""Ray ends the actor pool with each execution, so one spans as many epochs as this many tasks allow (at least one)."""
BUFFERED_BLOCKS = 8
"""Finished batches that a task may hold back. Ray's executor looks at each actor ten times a second at worst, so fewer
leave actors idle."""
TASKS_IN_FLIGHT = 4
TASKS_WAITING = 2
"""For each actor, what so many tasks make may wait to be taken before no more begin."""
READS_PER_NODE = 2
PREFETCHED = 2
"""Batches that a rank holds ready, and that Ray holds ready for it, in whole rows: a row may be one large batch."""


class StreamIndex(Protocol):
    """What a stream knows of its split, whatever the samples are."""

    @property
    def split(self) -> str:
        """Name of the split."""
        ...

    @property
    def digest(self) -> str:
        """Text that stands for its content."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples in the split."""
        ...

    def fingerprint(self) -> Fingerprint:
        """What must be equal for equal rows to mean equal samples."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """A split as a Ray Data job, ready to be built from any position.

    ``at_hand``: single samples are read at little cost, so that decode actors may read them.
    """

    config: Config
    index: StreamIndex
    plan: StreamPlan
    reader: ReaderSpec
    decode: DecodeSpec
    at_hand: bool

    @property
    def fused(self) -> bool:
        """Whether reading happens inside the decode actors."""
        assembly = self.config.stream.assembly
        return self.at_hand if assembly == "auto" else assembly == "fused"

    @property
    def substitutes(self) -> PackSubstitutes | None:
        """What training takes in the place of bad samples; None if they stop it."""
        if self.config.stream.on_bad_sample == "raise":
            return None
        return PackSubstitutes(self.reader, self.index.num_samples, self.plan.seed)

    def epochs_per_execution(self) -> int:
        """Epochs that one execution spans."""
        batches = self.plan.windows.batches
        per_epoch = -(-batches // BATCHES_PER_TASK) if self.fused else self.plan.order(0).blocks
        return max(1, TASKS_PER_EXECUTION // per_epoch)

    def training(self, start: Position) -> Dataset:
        """Batches of all ranks in order, from ``start`` to the end of :meth:`epochs_per_execution` epochs."""
        decode = self.config.decode
        smallest, largest = pool_size(decode.actors)
        pool = ActorPoolStrategy(min_size=smallest, max_size=largest, max_tasks_in_flight_per_actor=TASKS_IN_FLIGHT)
        epochs = self.epochs_per_execution()
        decoding = (self.decode, self.substitutes)
        fixed = (self.plan, start, epochs, BATCHES_PER_TASK, self.reader)
        if self.fused:
            reading = partial(training_functions, *fixed, *decoding)
            return self._read(reading, largest, compute=pool, num_cpus=1)
        nodes = sum(node["Alive"] for node in ray.nodes())
        # Actors, since Ray ends an idle task's worker after a second, and the next would import and connect anew.
        readers = ActorPoolStrategy(size=READS_PER_NODE * nodes, max_tasks_in_flight_per_actor=1)
        reading = partial(training_functions, *fixed, None, None)
        encoded = self._read(reading, largest, compute=readers, num_cpus=0)
        return encoded.map_batches(
            StagedDecode,
            fn_constructor_args=(self.reader, *decoding, self.batches_per_row),
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=pool,
            num_cpus=1,
        )

    def evaluation(self, rank: int, world_size: int, batches: Sequence[tuple[int, int]]) -> Dataset:
        """One rank's evaluation batches, rows ``(lo, hi)`` each, decoded in tasks that no training actor can starve."""
        functions = partial(evaluation_functions, batches, rank, world_size, BATCHES_PER_TASK, self.reader, self.decode)
        share = -(-self.config.decode.actors[1] // world_size)
        at_once = min(share, -(-len(batches) // BATCHES_PER_TASK))
        return self._read(functions, at_once, compute=TaskPoolStrategy(size=at_once), num_cpus=0)

    @property
    def batches_per_row(self) -> int:
        """Batches that a row holds at most: see :func:`rfstream.stream.source.batches_per_row`."""
        return batches_per_row(self.plan, BATCHES_PER_TASK)

    def rows_per_block(self) -> int:
        """Rows of encoded batches that a shuffle block has, or one more."""
        return -(-self.plan.windows.batches // (self.plan.order(0).blocks * BATCHES_PER_TASK))

    def _read(self, functions: Any, decoders: int, **options: Any) -> Dataset:
        """A dataset of ``functions``' rows, with the settings of :func:`_configure` on its own context, and as many
        batches waiting as ``decoders`` at work call for."""
        count = sum(1 for _ in functions())
        # As many blocks as tasks, or Ray inserts a step that splits them.
        dataset = ray.data.read_datasource(BatchSource(functions), override_num_blocks=count, **options)
        dataset.set_name(f"rfstream-{uuid.uuid4().hex}")  # by which Ray's statistics tell it from all others
        _configure(dataset.context, self.config.decode.label_selector)
        # Of encoded rows, the next block is read while one waits.
        bound_waiting_rows(dataset.context, decoders * TASKS_WAITING, encoded=self.rows_per_block())
        return dataset


def build_pipeline(
    config: Config, split: str, world_size: int, *, training: bool, decode: DecodeSpec | None = None
) -> Pipeline:
    """The job for role ``split`` of ``config.data.splits``; ``decode`` in place of what ``config`` says of decoding.

    Raises:
        ConfigError, DatasetError, PlanError: if configuration, pack and sizes do not fit together.
    """
    if config.data.format == "lerobot":
        if decode is not None:
            raise ConfigError(
                f"data.format: lerobot has no samples for {type(decode).__name__}: name a pack in data.path"
            )
        return _of_episodes(config, split, world_size, training=training)
    index, cache = split_of(config, split), config.data.cache
    plan = _plan(config, index.fragments(), int(config.stream.block_bytes), world_size, training=training)
    reader = reader_spec_of(index, None if cache is None else ShardCache(cache.folder, int(cache.bytes)))
    return Pipeline(config, index, plan, reader, decode or _detection(config, index, training=training), index.at_hand)


def _of_episodes(config: Config, role: str, world_size: int, *, training: bool) -> Pipeline:
    """The job for a split of a LeRobot dataset: an episode is a fragment, and a pool of them a shuffle block."""
    asked, root, deadline_s = config.episodes, config.data.name, config.stream.deadline_s
    select = None if asked.select is None else tuple(asked.select)
    split = config.data.splits.get(role, role)
    dataset = read_dataset(root, deadline_s)
    layout = layout_of(dataset.info, asked.delta_timestamps, asked.cameras)
    sections = {"episodes.transforms": asked.transforms, "episodes.eval_transforms": asked.eval_transforms}
    stated = {section: described(layout, transforms, section) for section, transforms in sections.items()}
    section = "episodes.transforms" if training else "episodes.eval_transforms"
    decode = EpisodeSpec(config.stream.seed, layout, config.decode.max_pixels, stated[section], section)
    index = index_of(dataset, split, select, decode.batch_layout(), asked.pool_size, deadline_s)
    weights, pool = pool_weights(index.nbytes, asked.pool_size, int(config.stream.block_bytes))
    plan = _plan(config, Fragments(index.starts, weights), pool, world_size, training=training)
    reader = EpisodeReaderSpec(root, split, select, dataset.digest, layout, asked.pool_size, deadline_s)
    # Images in Parquet are read by whole row groups.
    at_hand = local_path(root) is not None and all(camera.dtype == "video" for camera in layout.cameras)
    return Pipeline(config, index, plan, reader, decode, at_hand)


def _plan(
    config: Config, fragments: Fragments | Mixture, block_bytes: int, world_size: int, *, training: bool
) -> StreamPlan:
    stream = config.stream
    tail = stream.tail if training else "wrap"
    windows = Windows(fragments.total, world_size, stream.accumulation(world_size), stream.batch_size, tail)
    return StreamPlan(fragments, windows, stream.seed, stream.shuffle, block_bytes)


def _detection(config: Config, index: Split, *, training: bool) -> DetectionSpec:
    transform = config.augment.cpu if training else config.augment.eval
    return DetectionSpec(
        seed=config.stream.seed,
        labels=tuple(sorted(label_space(config, index).label_of().items())),
        transform=transform.model_dump_json() if transform else "",
        transform_key="augment.cpu" if training else "augment.eval",
        masks=config.decode.masks,
        pad_multiple=config.decode.pad_multiple,
        exif=config.decode.exif,
        max_pixels=config.decode.max_pixels,
        shrink_to=config.decode.shrink_to,
        pack_ids=index.pack_ids,
    )


def pool_size(actors: tuple[int, int]) -> tuple[int, int]:
    """Fewest and most decode actors, within what the cluster has or may grow to and placement groups leave.

    Ray Data counts the training workers' CPUs as its own, and would wait for actors that can't start.

    Raises:
        ConfigError: with the numbers, if not even the fewest can ever start.
    """
    smallest, largest = actors
    left = most_of("CPU") - _reserved_cpus()
    if smallest > left:
        raise ConfigError(
            f"decode.actors asks for at least {smallest} CPUs and the Ray cluster can never have more than {left:g} "
            "beside what training workers reserve: lower the minimum, or add nodes"
        )
    return smallest, largest if math.isinf(left) else min(largest, int(left))


def _reserved_cpus() -> int:
    """CPUs that placement groups hold."""
    groups = ray.util.placement_group_table().values()
    held = [g["bundles"] for g in groups if g["state"] in ("CREATED", "RESCHEDULING")]
    return int(sum(bundle.get("CPU", 0) for bundles in held for bundle in bundles.values()))


def _configure(context: DataContext, label_selector: dict[str, str] | None) -> None:
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = 1  # so that every row becomes a block of its own
    context.execution_options.preserve_order = True
    # Here it reaches every task and actor, and what Ray Data asks of the autoscaler. By the key `ray-subcluster` Ray
    # Data also finds the CPUs that it may count on.
    context.execution_options.label_selector = label_selector
    context._max_num_blocks_in_streaming_gen_buffer = BUFFERED_BLOCKS

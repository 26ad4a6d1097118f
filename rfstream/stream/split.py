"""From one running execution to the iterator of each rank: the hand-over between processes."""

from __future__ import annotations

import pickle
from typing import Any

import ray
from ray.data import DataIterator
from ray.data._internal.cluster_autoscaler import get_or_create_autoscaling_coordinator
from ray.data._internal.stats import get_or_create_stats_actor

from rfstream.errors import StreamError
from rfstream.plan.position import Position
from rfstream.stream.feed import Feed
from rfstream.stream.pipeline import PREFETCHED, Pipeline
from rfstream.stream.ranks import Peers


def open_splits(pipeline: Pipeline, start: Position) -> tuple[list[DataIterator], str]:
    """Start an execution at ``start``; one iterator a rank, batch m going to iterator m % W; and its dataset's name."""
    # Ray Data's two helper actors of a cluster, which the split's coordinator would ask for only after its own imports:
    # asked for now, theirs run beside those, and the first batch comes a second sooner.
    get_or_create_stats_actor()
    get_or_create_autoscaling_coordinator()
    dataset = pipeline.training(start)
    return dataset.streaming_split(pipeline.plan.windows.world_size, equal=False), str(dataset.name)


class HandOver:
    """How a rank comes by its iterator: rank 0 opens them all and gives the others theirs."""

    def __init__(self, pipeline: Pipeline, peers: Peers) -> None:
        self.peers = peers
        self._pipeline = pipeline
        self._kept: list[DataIterator] = []

    def iterator(self, start: Position) -> tuple[DataIterator, str]:
        """This rank's iterator of an execution that begins at ``start``, and its name. Collective over the ranks.

        Raises:
            ConfigError: if a configured cluster can't be reached, or has no room for the decode actors.
            StreamError: if a rank fails (its reason on all ranks), if ranks ask for different positions, or if one does
                not arrive within ``stream.timeout_s``.
        """
        peers, config = self.peers, self._pipeline.config
        peers.join_cluster(config)
        if peers.world_size == 1:
            (only,), execution = open_splits(self._pipeline, start)
            return only, execution
        opened = self._kept
        mine: dict[str, Any] = {"start": start}
        if peers.rank == 0:
            try:
                opened, mine["execution"] = open_splits(self._pipeline, start)
                mine["splits"] = [ray.cloudpickle.dumps(s) for s in opened]
            except Exception as error:  # whatever it is, the other ranks must not wait in vain
                mine["error"] = str(error)
        everyone = peers.meet(mine, config.stream.timeout_s, f"to start epoch {start.epoch}")
        self._kept = opened  # Ray ends a coordinator with its last owner's handle: not before all have arrived
        for rank, other in enumerate(everyone):
            if other["start"] != start:
                raise StreamError(
                    f"rank {peers.rank} starts at {start} but rank {rank} at {other['start']}: resume all alike"
                )
        return pickle.loads(everyone[0]["splits"][peers.rank]), everyone[0]["execution"]

    def feed(self, start: Position) -> Feed:
        """Batches from :meth:`iterator`. Closing rank 0's ends the execution for all ranks."""
        split, execution = self.iterator(start)
        coordinator = split._coord_actor

        def end() -> None:
            if self.peers.rank == 0 and ray.is_initialized():
                # The only way to end an execution at once whose consumers are blocked in it.
                ray.kill(coordinator)

        ready = -(-PREFETCHED // self._pipeline.batches_per_row)

        def rows() -> Any:
            return split.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=ready)

        return Feed(rows, execution, end, self._pipeline.config.stream.timeout_s, self.peers)

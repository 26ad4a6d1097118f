"""The ranks of a run: one Ray cluster for all, meetings, and what each lets the others know."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from typing import Any

import ray
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from rfstream.config import Config
from rfstream.errors import RFStreamError, StreamError
from rfstream.session import attach_ray, ensure_ray, leave_last

POLL_S = 0.02
RECOVERY_S = 10.0
"""Seconds that a rank which failed may take until it starts anew with the others."""
_NEWS_S = 1.0
"""A rank tells at most this often where it stands."""


class Peers:
    """One rank's view of the ranks that share its stream.

    All that they know of each other goes through a key-value store that each can reach, so nobody waits for a rank that
    is stuck in a collective operation, and a wait for one that has failed ends with the reason.

    Args:
        store: the same one for all ranks.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._meetings = 0
        self._joined = False
        self._failed: int | None = None  # the number of its failure, over all ranks
        self._told = 0.0

    def meet(self, mine: Mapping[str, Any], timeout_s: float, purpose: str) -> list[dict[str, Any]]:
        """What every rank brings, in the order of ranks. Collective; an ``error`` that one brings is raised on all.

        Raises:
            StreamError: if a rank brings an error, failed, or does not come within ``timeout_s``.
        """
        everyone = [dict(mine)] if self.world_size == 1 else self._gather(pickle.dumps(mine), timeout_s, purpose)
        for rank, other in enumerate(everyone):
            if "error" in other:
                raise StreamError(f"rank {rank} failed {purpose}: {other['error']}")
        return everyone

    def _gather(self, mine: bytes, timeout_s: float, purpose: str) -> list[dict[str, Any]]:
        number, began = self._meetings, time.monotonic()
        waits = f"rank {self.rank} waited for the other ranks {purpose}"
        keys = [f"meeting/{number}/{rank}" for rank in range(self.world_size)]
        try:
            self._withdraw(f"failed/{self.rank}")
            self._failed = None
            self._store.set(keys[self.rank], mine)  # type: ignore[arg-type]  # the stub leaves bytes out
            everyone = []
            for rank, key in enumerate(keys):
                while (brought := self._read(key)) is None:
                    waited = time.monotonic() - began
                    failure = self.failure() if waited > min(RECOVERY_S, timeout_s) else None
                    if failure or waited > timeout_s:
                        self._withdraw(keys[self.rank])
                        absent = f"rank {rank} did not come within stream.timeout_s={timeout_s:g} s"
                        raise StreamError(f"{waits}: {failure or absent}")
                    time.sleep(POLL_S)
                everyone.append(pickle.loads(brought))
            # All have read what was brought to the one before, since all have come to this one.
            self._store.delete_key(f"meeting/{number - 1}/{self.rank}")
        except dist.DistError as error:
            raise StreamError(f"{waits}: the process that keeps their store is gone ({_line(error)})") from error
        self._meetings += 1
        return everyone

    def _read(self, key: str) -> bytes | None:
        """What stands under ``key``, if anything does; a store's own ``get`` would wait for it."""
        return (self._store.get(key) or None) if self._store.check([key]) else None

    def _withdraw(self, key: str) -> None:
        """Let nothing stand under ``key``. Not deleted: another rank may have seen it and be about to read it."""
        self._store.set(key, "")

    def failed(self, error: BaseException) -> None:
        """Let the others know that this rank can't go on, until it comes to the next meeting."""
        if self.world_size == 1:
            return
        reason = str(error) if isinstance(error, RFStreamError) else f"{type(error).__name__}: {_line(error)}"
        try:
            if self._failed is None:
                self._failed = self._store.add("failures", 1)
                self._store.set(f"failed/{self.rank}", f"{self._failed} {reason}")
        except dist.DistError:  # the others have lost the store too
            return

    def failure(self) -> str | None:
        """Which other rank was the first to fail, before this one if it did too, and why."""
        failures: list[tuple[int, str]] = []
        try:
            for rank in range(self.world_size):
                if rank != self.rank and (said := self._read(f"failed/{rank}")) is not None:
                    number, _, reason = said.decode().partition(" ")
                    failures.append((int(number), f"rank {rank} failed: {reason}"))
        except dist.DistError:
            return None
        earlier = [text for number, text in sorted(failures) if self._failed is None or number < self._failed]
        return earlier[0] if earlier else None

    def reached(self, place: str) -> None:
        """Let the others know where this rank stands: what they say of it when they wait in vain."""
        now = time.monotonic()
        if self.world_size == 1 or now - self._told < _NEWS_S:
            return
        self._told = now
        try:
            self._store.set(f"reached/{self.rank}", f"{time.time()} {place}")
        except dist.DistError:
            return

    def places(self) -> str:
        """Where the other ranks stood when they last said so."""
        said = []
        try:
            for rank in range(self.world_size):
                if rank != self.rank and (last := self._read(f"reached/{rank}")) is not None:
                    when, _, place = last.decode().partition(" ")
                    said.append(f"rank {rank} was given {place} {time.time() - float(when):.0f} s ago")
        except dist.DistError:
            said.append("the other ranks can't be asked")
        return ", ".join(said)

    def join_cluster(self, config: Config) -> None:
        """Connect this process to Ray, and to the same cluster as rank 0. Collective the first time.

        Raises:
            ConfigError: if a configured cluster can't be reached.
            StreamError: if a rank fails, is attached to another cluster already, or does not arrive in time.
        """
        if self.world_size == 1:
            ensure_ray(config.decode.actors[0])
        if self.world_size == 1 or self._joined:
            return
        mine: dict[str, Any] = {}
        if self.rank == 0:
            try:
                ensure_ray(config.decode.actors[0])
                leave_last()
                mine = {"address": ray.get_runtime_context().gcs_address, "auth_mode": os.environ.get("RAY_AUTH_MODE")}
            except Exception as error:  # whatever it is, the other ranks must not wait in vain
                mine = {"error": str(error)}
        first = self.meet(mine, config.stream.timeout_s, "to join one Ray cluster")[0]
        attach_ray(first["address"], first["auth_mode"])
        self._joined = True


def group_place() -> tuple[int, int]:
    """Rank and world size of the ``torch.distributed`` group, or 0 and 1 where there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def peers_of_group() -> Peers:
    """The ranks of the ``torch.distributed`` group; this process alone where there is none."""
    rank, world_size = group_place()
    if world_size == 1:
        return alone()
    group = dist.group.WORLD
    if _Group.peers is None or _Group.of is not group:
        assert group is not None
        _Group.of, _Group.peers = group, Peers(PrefixStore("rfstream", group.get_group_store()), rank, world_size)
    return _Group.peers


def alone() -> Peers:
    """A single rank."""
    return Peers(HashStore(), 0, 1)


def threads(world_size: int) -> list[Peers]:
    """Ranks that are threads of this process, as the ledger runs them."""
    store = HashStore()
    return [Peers(store, rank, world_size) for rank in range(world_size)]


class _Group:
    """The ranks of the group that this process was last seen in."""

    of: dist.ProcessGroup | None = None
    peers: Peers | None = None


def _line(error: BaseException) -> str:
    """The first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"

"""Where a run stands, and whether a saved place belongs to this run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rfstream.errors import StateError
from rfstream.plan.windows import Windows

STATE_VERSION = 1
Fingerprint = dict[str, str | int | bool]


@dataclass(frozen=True, order=True)
class Position:
    """``batch`` batches of ``epoch`` consumed by each rank. All that a checkpoint needs."""

    epoch: int = 0
    batch: int = 0

    def normalised(self, batches_per_rank: int) -> Position:
        """The same place with ``batch < batches_per_rank``: the end of an epoch is the start of the next."""
        return Position(self.epoch + self.batch // batches_per_rank, self.batch % batches_per_rank)


def state_of(position: Position, windows: Windows, fingerprint: Fingerprint) -> dict[str, Any]:
    """JSON-able state. The place is kept in samples of the whole world, so that another (W, A) of the same G can use
    it."""
    samples = position.batch * windows.world_size * windows.batch_size
    return {"version": STATE_VERSION, "epoch": position.epoch, "samples": samples, "fingerprint": dict(fingerprint)}


def position_of(
    state: Mapping[str, Any], windows: Windows, fingerprint: Fingerprint, allowed: Collection[str] = ()
) -> Position:
    """The place that ``state`` names, in batches of this run.

    Differences that ``allowed`` names are let pass: the run goes on after as many samples of its own epoch. With
    another number of samples in a window, at the next place where a window of both begins.

    Raises:
        StateError: if the state is damaged, of another version, of another stream (the message names each difference),
            or stands inside what is one step here; or if no such place is left in the epoch.
    """
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"the saved data position has version {state.get('version')!r}, this release reads {STATE_VERSION}: "
            "resume with the release that wrote it, or start the epoch anew"
        )
    epoch, samples, saved = state.get("epoch"), state.get("samples"), state.get("fingerprint")
    if type(epoch) is not int or type(samples) is not int or epoch < 0 or samples < 0 or not isinstance(saved, Mapping):
        raise StateError("the saved data position is damaged (epoch, samples or fingerprint): use another checkpoint")
    differing = {key for key in {*saved, *fingerprint} if saved.get(key) != fingerprint.get(key)}
    refused = sorted(differing.difference(allowed))
    if refused:
        named = "; ".join(f"{key} was {saved.get(key)!r}, is {fingerprint.get(key)!r}" for key in refused)
        raise StateError(
            f"the saved data position belongs to another stream: {named}. Restore these, or start anew; or, to go on "
            f"at the same count of samples in this stream, set stream.allow_mismatch=[{', '.join(refused)}]"
        )
    if "window_samples" in differing:
        samples = _next_shared(samples, saved.get("window_samples"), windows)
    step = windows.world_size * windows.batch_size
    if samples > windows.positions:
        raise StateError(f"the saved data position ({samples} samples) lies past the epoch's {windows.positions}")
    if samples % step:
        raise StateError(
            f"the saved data position ({samples} samples into epoch {epoch}) is not a step of world size "
            f"{windows.world_size} x batch_size {windows.batch_size} = {step}: resume with the world size "
            f"it was saved under"
        )
    return Position(epoch, samples // step).normalised(windows.batches_per_rank)


def _next_shared(samples: int, window_samples: Any, windows: Windows) -> int:
    """The first place from ``samples`` on where a window of ``window_samples`` and one of ``windows`` begin."""
    if type(window_samples) is not int or window_samples < 1:
        raise StateError("the saved data position is damaged (fingerprint.window_samples): use another checkpoint")
    every = math.lcm(window_samples, windows.window_samples)
    shared = -(-samples // every) * every
    if shared > windows.positions:
        raise StateError(
            f"from the saved data position ({samples} samples) on, no window of {window_samples} samples begins where "
            f"one of {windows.window_samples} does: resume with the former, or from a checkpoint of an epoch's end"
        )
    return shared

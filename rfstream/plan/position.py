"""Where a run stands, and whether a saved place belongs to this run."""

from __future__ import annotations

from collections.abc import Mapping
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


def position_of(state: Mapping[str, Any], windows: Windows, fingerprint: Fingerprint) -> Position:
    """The place that ``state`` names, in batches of this run.

    Raises:
        StateError: if the state is damaged, of another version, of another stream (the message names each difference),
            or stands inside what is one step here.
    """
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"the saved data position has version {state.get('version')!r}, this release reads {STATE_VERSION}: "
            "resume with the release that wrote it, or start the epoch anew"
        )
    epoch, samples, saved = state.get("epoch"), state.get("samples"), state.get("fingerprint")
    if type(epoch) is not int or type(samples) is not int or epoch < 0 or samples < 0 or not isinstance(saved, Mapping):
        raise StateError("the saved data position is damaged (epoch, samples or fingerprint): use another checkpoint")
    differing = [key for key in sorted({*saved, *fingerprint}) if saved.get(key) != fingerprint.get(key)]
    if differing:
        named = "; ".join(f"{key} was {saved.get(key)!r}, is {fingerprint.get(key)!r}" for key in differing)
        raise StateError(f"the saved data position belongs to another stream: {named}. Restore these, or start anew")
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

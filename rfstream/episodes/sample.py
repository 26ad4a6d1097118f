"""A sample of an episode before its pixels are decoded: its windows of numbers, and the bytes that its frames need."""

from __future__ import annotations

from dataclasses import dataclass

from rfstream.plan.keys import IntArray


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Run:
    """Packets of a video file, from a key frame to the last of the frames that samples want of them.

    ``data`` holds them end to end, ``size``, ``pts`` and ``dts`` int64 (P,) describe each; ``wanted`` are the times at
    which the wanted frames are shown. ``offset`` is where the key frame lies in ``file``.
    """

    file: str
    offset: int
    codec: str
    extradata: bytes
    data: bytes
    size: IntArray
    pts: IntArray
    dts: IntArray
    wanted: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Picture:
    """An encoded image out of a Parquet ``file``, which does not tell at which byte (``offset`` is 0)."""

    file: str
    data: bytes
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Shot:
    """One frame of one camera: a picture, or what is shown at ``pts`` of a run. ``frame`` counts in the episode."""

    source: Run | Picture
    pts: int
    frame: int


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """One frame of an episode with its windows.

    ``row`` is its row in the index; ``record`` the bytes of :meth:`rfstream.episodes.layout.Layout.record_type`'s
    value; ``shots`` the window of each camera. Steps that are read together share their runs and pictures.
    """

    key: str
    row: int
    dataset: str
    episode: int
    timestamp: float
    record: bytes
    shots: tuple[tuple[Shot, ...], ...]

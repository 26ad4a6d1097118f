"""What a sample of an episode holds: each feature's window in time, its shape and type.

A window is a list of steps in frames. It ends at the episode's edges: where it would go further it repeats the frame at
the edge, and says so in ``{feature}_is_pad``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rfstream.episodes.metadata import INFO, Feature, Info
from rfstream.errors import ConfigError, DatasetError
from rfstream.plan.keys import IntArray
from rfstream.stream.wire import HEADER

TOLERANCE_S = 1e-4
"""How far a delta may lie from a multiple of 1/fps, seconds; LeRobot's own default."""
TASK = "task"
"""Field of a record: the position of the sample's task among the dataset's tasks."""
PAD = "_is_pad"
RECORDS = "records"
"""Array of a wire batch: one structured value a sample (see :meth:`Layout.record_type`)."""


@dataclass(frozen=True)
class Field:
    """One feature of a sample. ``steps`` is its window in frames; ``None`` for the frame alone, without an axis of
    time."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    steps: tuple[int, ...] | None

    def clamped(self, frame: int, length: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Frames of the window around ``frame`` in an episode of ``length``, int64 (T,), and where they repeat an edge,
        bool (T,)."""
        wanted = frame + np.array(self.steps or (0,), dtype=np.int64)
        inside = np.minimum(np.maximum(wanted, 0), length - 1)  # a quarter of the time of np.clip
        return inside, wanted != inside


@dataclass(frozen=True)
class Layout:
    """The fields of a sample: ``tabular`` lie in the data files, ``cameras`` are pictures of ``shape`` (H, W)."""

    fps: float
    tabular: tuple[Field, ...]
    cameras: tuple[Field, ...]

    def record_type(self) -> np.dtype[np.void]:
        """All but pixels of one sample as one structured value: each tabular field with its window, ``_is_pad`` of each
        field with one, and :data:`TASK`."""
        kinds: list[tuple[str, npt.DTypeLike, tuple[int, ...]]] = []
        for field in self.tabular:
            kinds.append((field.name, np.dtype(field.dtype), (*_window_shape(field), *field.shape)))
        for field in (*self.tabular, *self.cameras):
            if field.steps is not None:
                kinds.append((field.name + PAD, np.dtype(bool), _window_shape(field)))
        return np.dtype([*kinds, (TASK, np.dtype(np.int64), ())])

    def deltas(self) -> str:
        """The windows in a line, as a state's fingerprint keeps them."""
        fields = (*self.tabular, *self.cameras)
        return json.dumps({field.name: field.steps for field in fields if field.steps is not None}, sort_keys=True)


def layout_of(info: Info, deltas: Mapping[str, Sequence[float]], cameras: Sequence[str] | None) -> Layout:
    """What a sample holds of a dataset's features: all that are numbers, and ``cameras`` (``None`` for all).

    ``deltas`` are windows in seconds, as LeRobot's ``delta_timestamps``.

    Raises:
        ConfigError: for a camera or feature that is not there, or a delta that is no multiple of 1/fps.
        DatasetError: for a type that is not known, a camera without three channels, or a name that means another thing.
    """
    found = [name for name, feature in info.features.items() if feature.is_camera]
    chosen = found if cameras is None else list(cameras)
    for camera in chosen:
        if camera not in found:
            raise ConfigError(f"episodes.cameras: no camera {camera!r} (known here: {', '.join(found) or 'none'})")
    tabular = {n: f for n, f in info.features.items() if not f.is_camera and f.dtype != "string"}
    for name in deltas:
        if name not in tabular and name not in chosen:
            known = ", ".join([*tabular, *chosen])
            raise ConfigError(f"episodes.delta_timestamps: no feature {name!r} is streamed (known here: {known})")

    def field(name: str, dtype: str, shape: tuple[int, ...]) -> Field:
        return Field(name, dtype, shape, _steps(name, deltas[name], info.fps) if name in deltas else None)

    pictures = {name: info.features[name] for name in found if name in chosen}
    layout = Layout(
        info.fps,
        tuple(field(name, _numpy_name(name, feature), _shape(feature)) for name, feature in tabular.items()),
        tuple(field(name, feature.dtype, _frame(name, feature)) for name, feature in pictures.items()),
    )
    _check_names(layout)
    return layout


def _check_names(layout: Layout) -> None:
    """Raise DatasetError where two parts of a sample would have one name."""
    fields = (*layout.tabular, *layout.cameras)
    taken = {TASK, *(field.name + PAD for field in fields if field.steps is not None)}
    of_wire = {RECORDS, HEADER}
    for field in fields:
        if field.name in taken or (field in layout.cameras and field.name in of_wire):
            raise DatasetError(
                f"{INFO}: feature {field.name!r} has the name of something else in a sample; give it another name in "
                "the dataset"
            )


def _steps(name: str, deltas: Sequence[float], fps: float) -> tuple[int, ...]:
    if not deltas:
        raise ConfigError(f"episodes.delta_timestamps.{name}: no delta is given; write [0.0] for the frame alone")
    steps = [round(delta * fps) for delta in deltas]
    for delta, step in zip(deltas, steps, strict=True):
        if abs(delta - step / fps) > TOLERANCE_S:
            raise ConfigError(
                f"episodes.delta_timestamps.{name}: {delta:g} s is no multiple of 1/{fps:g} s (within "
                f"{TOLERANCE_S:g}): the nearest is {step / fps:.6g}"
            )
    return tuple(steps)


def _frame(name: str, feature: Feature) -> tuple[int, ...]:
    """Height and width of a camera's pictures."""
    if len(feature.picture) != 3 or feature.picture[2] != 3:
        raise DatasetError(
            f"{INFO}: camera {name} has shape {list(feature.shape)}, and three axes with 3 channels are streamed; "
            "name the other cameras in episodes.cameras"
        )
    return feature.picture[:2]


def _shape(feature: Feature) -> tuple[int, ...]:
    return () if feature.shape == (1,) else feature.shape


def _window_shape(field: Field) -> tuple[int, ...]:
    return () if field.steps is None else (len(field.steps),)


def _numpy_name(name: str, feature: Feature) -> str:
    try:
        kind = np.dtype(feature.dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "biuf":
        raise DatasetError(f"{INFO}: feature {name} has dtype {feature.dtype!r}, which is no type of numbers")
    return kind.name

"""Encoded samples of episodes to arrays: packets and images to pixels, records to one structured array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from rfstream import recycle
from rfstream.config import MAX_PIXELS
from rfstream.dataset.retry import describe
from rfstream.episodes.container import import_av
from rfstream.episodes.layout import RECORDS, Layout
from rfstream.episodes.metadata import INFO
from rfstream.episodes.sample import EncodedStep, Picture, Run, Shot
from rfstream.plan.position import Fingerprint
from rfstream.stream.bad import BadSample, BadSampleError
from rfstream.stream.image import decode_rgb, raise_pillow_limit, to_planes

Frame = Any
"""A decoded frame: PyAV's ``VideoFrame``, or of an image uint8 (H, W, 3)."""


@dataclass(frozen=True)
class EpisodeSpec:
    """How samples of episodes are decoded: a :class:`rfstream.stream.decode.DecodeSpec`."""

    seed: int
    layout: Layout
    max_pixels: int = MAX_PIXELS

    def build(self) -> EpisodeDecoder:
        """A decoder for this process."""
        return EpisodeDecoder(self)

    def fingerprint(self) -> Fingerprint:
        """See :class:`rfstream.stream.decode.DecodeSpec`."""
        cameras = ",".join(camera.name for camera in self.layout.cameras)
        return {"delta_timestamps": self.layout.deltas(), "cameras": cameras}


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """``frames`` are those of each camera's window: as decoders leave them, which is half of the bytes of pixels."""

    record: bytes
    frames: tuple[tuple[Frame, ...], ...]


class EpisodeDecoder:
    """See :class:`rfstream.stream.decode.SampleDecoder`. What steps share is decoded once, and forgotten with
    the last of them."""

    def __init__(self, spec: EpisodeSpec) -> None:
        self._layout = spec.layout
        self._record = spec.layout.record_type()
        self._max_pixels = spec.max_pixels
        self._shown: WeakKeyDictionary[Run, dict[int, Frame | str]] = WeakKeyDictionary()
        self._images: WeakKeyDictionary[Picture, Frame] = WeakKeyDictionary()
        raise_pillow_limit(spec.max_pixels)

    def sample(self, sample: EncodedStep, key: int) -> DecodedStep:
        """See :class:`rfstream.stream.decode.SampleDecoder`."""
        frames = []
        for camera, window in zip(self._layout.cameras, sample.shots, strict=True):
            decoded = []
            for shot in window:
                try:
                    frame = self._frame(shot)
                    _check_size(frame, camera.shape)
                except Exception as error:  # FFmpeg and Pillow raise many kinds for what they can't read
                    raise _bad(sample, camera.name, shot, error) from error
                decoded.append(frame)
            frames.append(tuple(decoded))
        return DecodedStep(sample.record, tuple(frames))

    def collate(self, decoded: Sequence[DecodedStep]) -> dict[str, npt.NDArray[Any]]:
        """The records as one structured array (B,); of each camera uint8 (B, T, 3, H, W)."""
        arrays: dict[str, npt.NDArray[Any]] = {
            RECORDS: np.frombuffer(b"".join(step.record for step in decoded), dtype=self._record)
        }
        for at, camera in enumerate(self._layout.cameras):
            out = recycle.empty((len(decoded), len(camera.steps or (0,)), 3, *camera.shape), np.uint8)
            for window, step in zip(out, decoded, strict=True):
                for planes, frame in zip(window, step.frames[at], strict=True):
                    to_planes(self._pixels(frame), planes)
            arrays[camera.name] = out
        return arrays

    def _pixels(self, frame: Frame) -> npt.NDArray[np.uint8]:
        """Pixels of a frame, uint8 (H, W, 3)."""
        if isinstance(frame, np.ndarray):
            return frame
        (plane,) = self._to_rgb.reformat(frame, format="rgb24").planes
        rows = np.frombuffer(plane, dtype=np.uint8).reshape(plane.height, plane.line_size)
        return rows[:, : 3 * plane.width].reshape(plane.height, plane.width, 3)

    @cached_property
    def _to_rgb(self) -> Any:
        """Converts frames: one for all, since it is made anew for another size alone."""
        return import_av().video.reformatter.VideoReformatter()

    def _frame(self, shot: Shot) -> Frame:
        source = shot.source
        if isinstance(source, Picture):
            if source not in self._images:
                self._images[source] = decode_rgb(source.data, self._max_pixels)
            return self._images[source]
        if source not in self._shown:
            self._shown[source] = decode_run(source)
        found = self._shown[source][shot.pts]
        if isinstance(found, str):
            raise ValueError(found)
        return found


def decode_run(run: Run) -> dict[int, Frame | str]:
    """Each wanted frame of ``run`` by the time at which it is shown, or in words why there is none.

    Words, since an exception's traceback would keep the run alive as long as the result.

    All in one pass; if that fails, each in a pass of its own that ends with it, so that what is wrong with one frame
    does not depend on which others are wanted.
    """
    last = {int(pts): at for at, pts in enumerate(run.pts)}
    try:
        return dict(_decoded(run, run.wanted, len(run.pts)))
    except Exception:
        found: dict[int, Frame | str] = {}
        for pts in run.wanted:
            try:
                found |= _decoded(run, frozenset([pts]), last[pts] + 1)
            except Exception as error:
                found[pts] = describe(error)
        return found


def _decoded(run: Run, wanted: frozenset[int], packets: int) -> dict[int, Frame]:
    """Frames of the first ``packets`` packets.

    Raises:
        ValueError: if a wanted frame does not come.
        Exception: what FFmpeg raises for packets that it can't decode.
    """
    av = import_av()
    context = av.CodecContext.create(run.codec, "r")
    context.extradata = run.extradata
    context.thread_count = 1  # an actor has one CPU
    context.options = {"err_detect": "explode"}  # or a damaged frame would be made up from others
    ends = np.cumsum(run.size[:packets])
    found: dict[int, Frame] = {}
    for at in range(packets + 1):
        packet = None  # what the decoder still holds
        if at < packets:
            packet = av.Packet(run.data[ends[at] - run.size[at] : ends[at]])
            packet.pts, packet.dts = int(run.pts[at]), int(run.dts[at])
        for frame in context.decode(packet):
            if frame.pts in wanted and not frame.is_corrupt:
                found[frame.pts] = frame
    if found.keys() != wanted:
        raise ValueError("the decoder gives no frame for that time")
    return found


def _check_size(frame: Frame, shape: tuple[int, ...]) -> None:
    height, width = frame.shape[:2] if isinstance(frame, np.ndarray) else (frame.height, frame.width)
    if (height, width) != shape:
        raise ValueError(f"the frame has {width} x {height} pixels, and {INFO} says {shape[1]} x {shape[0]}")


def _bad(step: EncodedStep, camera: str, shot: Shot, error: BaseException) -> BadSampleError:
    source = shot.source
    said = (
        f"{step.dataset}: episode {step.episode}, frame {shot.frame} of {camera} can't be decoded for the sample at "
        f"{step.timestamp:.3f} s ({describe(error)})"
    )
    bad = BadSample(source.file, step.key, camera, source.offset, said)
    return BadSampleError(bad, "copy the file again, or leave the episode out of episodes.select")

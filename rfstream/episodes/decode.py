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
from rfstream.episodes.transform import CameraTransform, built, transformed
from rfstream.episodes.video import VideoDecoder, VideoFrame
from rfstream.errors import ConfigError
from rfstream.plan.keys import camera_key
from rfstream.plan.position import Fingerprint
from rfstream.stream.bad import BadSample, BadSampleError
from rfstream.stream.image import decode_rgb, raise_pillow_limit, to_planes

Frame = VideoFrame | npt.NDArray[np.uint8]
"""A decoded frame, or an image's pixels (H, W, 3)."""


@dataclass(frozen=True)
class EpisodeSpec:
    """How samples of episodes are decoded: a :class:`rfstream.stream.decode.DecodeSpec`.

    ``layout`` is the dataset's; ``transforms`` are what :func:`rfstream.episodes.transform.described` says of the
    configuration's ``section``.
    """

    seed: int
    layout: Layout
    max_pixels: int = MAX_PIXELS
    transforms: str = ""
    section: str = ""

    def build(self) -> EpisodeDecoder:
        """A decoder for this process."""
        return EpisodeDecoder(self)

    def fingerprint(self) -> Fingerprint:
        """See :class:`rfstream.stream.decode.DecodeSpec`."""
        cameras = ",".join(camera.name for camera in self.layout.cameras)
        transforms: Fingerprint = {"transforms": self.transforms} if self.transforms else {}
        return {"delta_timestamps": self.layout.deltas(), "cameras": cameras, **transforms}

    def batch_layout(self) -> Layout:
        """What a batch holds: the dataset's layout, with cameras of the size that their transforms make."""
        return transformed(self.layout, self.built_transforms())

    def built_transforms(self) -> dict[str, CameraTransform]:
        """The transforms by camera."""
        return built(self.layout, self.transforms, self.section)


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """``frames`` are those of each camera's window: as decoders leave them, which is half of the bytes of pixels, or
    transformed."""

    record: bytes
    frames: tuple[tuple[Frame, ...], ...]


class EpisodeDecoder:
    """See :class:`rfstream.stream.decode.SampleDecoder`. What steps share is decoded once, and forgotten with
    the last of them."""

    def __init__(self, spec: EpisodeSpec) -> None:
        self._layout = spec.layout
        self._transforms = spec.built_transforms()
        self._batch_layout = transformed(spec.layout, self._transforms)
        self._record = spec.layout.record_type()
        self._max_pixels = spec.max_pixels
        self._video = VideoDecoder()
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
            transform = self._transforms.get(camera.name)
            if transform is not None:
                decoded = self._transformed(sample, window, decoded, transform, camera_key(key, camera.name))
            frames.append(tuple(decoded))
        return DecodedStep(sample.record, tuple(frames))

    def collate(self, decoded: Sequence[DecodedStep]) -> dict[str, npt.NDArray[Any]]:
        """The records as one structured array (B,); of each camera uint8 (B, T, 3, H, W)."""
        arrays: dict[str, npt.NDArray[Any]] = {
            RECORDS: np.frombuffer(b"".join(step.record for step in decoded), dtype=self._record)
        }
        for at, camera in enumerate(self._batch_layout.cameras):
            out = recycle.empty((len(decoded), len(camera.steps or (0,)), 3, *camera.shape), np.uint8)
            converted: dict[int, npt.NDArray[np.uint8]] = {}
            for window, step in zip(out, decoded, strict=True):
                for planes, frame in zip(window, step.frames[at], strict=True):
                    if id(frame) in converted:
                        planes[...] = converted[id(frame)]  # a quarter of the time of converting it again
                    else:
                        to_planes(self._pixels(frame), planes)
                        converted[id(frame)] = planes
            arrays[camera.name] = out
        return arrays

    def _transformed(
        self, sample: EncodedStep, window: Sequence[Shot], frames: Sequence[Frame], transform: CameraTransform, key: int
    ) -> list[Frame]:
        """A camera's ``frames`` after its transform, all with the same ``key``."""
        made = []
        for shot, frame in zip(window, frames, strict=True):
            try:
                # A copy: samples share frames, and a transform may write to what it is given.
                made.append(transform(np.array(self._pixels(frame)), key))
            except Exception as error:  # a user's transform raises what it likes
                where = f"{sample.dataset}: episode {sample.episode}, frame {shot.frame}"
                raise ConfigError(
                    f"{transform.key} fails on {where} ({type(error).__name__}: {describe(error)})"
                ) from error
        return made

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
            self._shown[source] = self._video.frames(source)
        found = self._shown[source][shot.pts]
        if isinstance(found, str):
            raise ValueError(found)
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

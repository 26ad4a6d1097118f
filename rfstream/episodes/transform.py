"""Transforms of cameras' frames: uint8 (H, W, 3) to uint8 of one size a camera, with one draw for a sample's window."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rfstream.config import CpuTransform
from rfstream.dataset.retry import describe
from rfstream.episodes.layout import Field, Layout
from rfstream.errors import ConfigError
from rfstream.stream.augment import Image, build_transform, check_image
from rfstream.stream.targets import targets_of


class CameraTransform:
    """What the configuration at ``key`` makes of the frames of ``camera``.

    ``shape`` is the height and width of what it returns. A black frame tells, so that each process knows it before it
    sees any frame, and all know the same.

    Raises:
        ConfigError: if the transform can't be built, or fails on a black frame.
    """

    def __init__(self, camera: Field, config: CpuTransform, key: str) -> None:
        self.key = key
        self._transform = build_transform(config, key)
        try:
            black = self._image(np.zeros((*camera.shape, 3), dtype=np.uint8), 0)
        except Exception as error:  # a user's transform raises what it likes
            height, width = camera.shape
            raise ConfigError(
                f"{key} fails on a black frame of {width} x {height} ({type(error).__name__}: {describe(error)})"
            ) from error
        self.shape = (black.shape[0], black.shape[1])

    def __call__(self, frame: Image, key: int) -> Image:
        """``frame`` after the transform, which may write to it. Frames of a window have one ``key``, and so one draw.

        Raises:
            ValueError: if the transform returns another type or size.
            Exception: what a user's transform raises.
        """
        image = self._image(frame, key)
        (height, width), (tall, wide) = image.shape[:2], self.shape
        if (height, width) != self.shape:
            raise ValueError(
                f"it returned {width} x {height} pixels, and {wide} x {tall} of a black frame: let it end with one size"
            )
        return image

    def _image(self, frame: Image, key: int) -> Image:
        image, _ = self._transform(frame, targets_of([], {}, *frame.shape[:2], masks=False), key)
        check_image(image, "on the device")
        return image


def described(layout: Layout, transforms: Mapping[str, CpuTransform], section: str) -> str:
    """``transforms`` of cameras as one line of JSON; the empty string if there are none.

    Raises:
        ConfigError: for a camera that is not streamed.
    """
    cameras = [camera.name for camera in layout.cameras]
    for name in transforms:
        if name not in cameras:
            known = ", ".join(cameras) or "none"
            raise ConfigError(f"{section}: no camera {name!r} is streamed (known here: {known})")
    chosen = {name: transforms[name].model_dump(mode="json") for name in cameras if name in transforms}
    return json.dumps(chosen) if chosen else ""


def built(layout: Layout, text: str, section: str) -> dict[str, CameraTransform]:
    """The transforms that :func:`described` put into ``text``, by camera."""
    configs = json.loads(text) if text else {}
    return {
        camera.name: CameraTransform(camera, CpuTransform(**configs[camera.name]), f"{section}.{camera.name}")
        for camera in layout.cameras
        if camera.name in configs
    }


def transformed(layout: Layout, transforms: Mapping[str, CameraTransform]) -> Layout:
    """``layout`` with the cameras as ``transforms`` leave them."""
    cameras = (replace(c, shape=transforms[c.name].shape) if c.name in transforms else c for c in layout.cameras)
    return replace(layout, cameras=tuple(cameras))

"""Per-sample transforms in the decode actors: a pure function of (sample, key), whatever ran before.

A transform takes ``(image, target, key)`` and returns the new ``(image, target)``; see :data:`Transform`. Configuration
names either a serialised Albumentations pipeline or ``package.module:name``, a callable that returns an ``A.Compose``
or a function of ``(image, target, rng)``.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rfstream.config import CpuTransform
from rfstream.errors import ConfigError
from rfstream.imports import import_object

if TYPE_CHECKING:
    import albumentations as A

Image = npt.NDArray[np.uint8]
"""uint8 (H, W, 3), RGB."""
Target = dict[str, npt.NDArray[Any]]
"""Arrays whose first axis is the object: boxes float32 (n, 4) xyxy pixels, labels int64 (n,), area float32 (n,),
iscrowd int64 (n,), masks uint8 (n, H, W) where asked for."""
Transform = Callable[[Image, Target, int], tuple[Image, Target]]
"""(image, target, 64-bit key) -> (image, target)."""


def build_transform(config: CpuTransform | None, key: str) -> Transform:
    """The transform that ``config`` describes; ``key`` is where it stands in the configuration, for messages.

    Raises:
        ConfigError: if it can't be imported, built, or is of no usable kind.
    """
    if config is None:
        return _identity
    if config.albumentations is not None:
        return _from_dict(config.albumentations, key)
    assert config.transform is not None
    factory = import_object(config.transform, f"{key}.transform")
    try:
        built = factory(**config.args)
    except TypeError as error:
        raise ConfigError(
            f"{key}.transform={config.transform!r} can't be built with args {config.args}: {error}"
        ) from error
    if type(built).__module__.startswith("albumentations"):
        return _Albumentations(built)
    if callable(built):
        return _Seeded(built)
    raise ConfigError(
        f"{key}.transform={config.transform!r} returned {type(built).__name__}, not an A.Compose or a function"
    )


def check_image(image: object, instead: str) -> None:
    """Raise ValueError unless a transform returned uint8 (H, W, 3): floats would be cut to bytes without a word.

    ``instead`` says where to scale them.
    """
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        kind = f"{image.dtype} of shape {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ValueError(f"it returned an image that is {kind}, not uint8 (H, W, 3): scale and normalise {instead}")


class _AlbumentationsWithoutTorch(importlib.abc.MetaPathFinder):
    """Imports Albumentations, whoever asks for it, without the torch that it would import for its tensor output.

    That saves each decode actor 1.5 s of CPU and 480 MB. Nor does it ask the network for a newer release.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        spec = PathFinder.find_spec(name, path, target) if name == "albumentations" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def without_torch(module: ModuleType) -> None:
            os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
            hidden = "torch" not in sys.modules
            if hidden:
                sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` an ImportError
            try:
                execute(module)
            finally:
                if hidden:
                    del sys.modules["torch"]

        spec.loader.exec_module = without_torch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AlbumentationsWithoutTorch())


def _identity(image: Image, target: Target, key: int) -> tuple[Image, Target]:
    return image, target


class _Seeded:
    """A user's function of ``(image, target, rng)``, given a generator of the sample's own."""

    def __init__(self, function: Callable[[Image, Target, np.random.Generator], tuple[Image, Target]]) -> None:
        self._function = function

    def __call__(self, image: Image, target: Target, key: int) -> tuple[Image, Target]:
        return self._function(image, target, np.random.default_rng(key))


_BOX_SETTINGS = (
    "min_area",
    "min_visibility",
    "min_width",
    "min_height",
    "clip",
    "filter_invalid_bboxes",
    "max_accept_ratio",
)


class _Albumentations:
    """An Albumentations pipeline, re-seeded for each sample, that carries boxes, masks and the fields beside them."""

    def __init__(self, pipeline: A.Compose) -> None:
        import albumentations as A

        if not isinstance(pipeline, A.Compose):
            pipeline = A.Compose([pipeline])
        if pipeline.additional_targets:
            raise ConfigError(
                f"an A.Compose with additional_targets {pipeline.additional_targets} can't be used: there are none"
            )
        bboxes = pipeline.processors.get("bboxes")
        kept = {} if bboxes is None else {name: getattr(bboxes.params, name) for name in _BOX_SETTINGS}
        # Boxes, and an index beside them, whatever the user declared: what else belongs to a box follows through the
        # index.
        params = A.BboxParams(format="pascal_voc", label_fields=["index"], **kept)
        self._pipeline = A.Compose(pipeline.transforms, bbox_params=params, p=pipeline.p)

    def __call__(self, image: Image, target: Target, key: int) -> tuple[Image, Target]:
        self._pipeline.set_random_seed(key & 0xFFFFFFFF)
        count = len(target["boxes"])
        inputs: dict[str, Any] = {"image": image, "bboxes": target["boxes"], "index": np.arange(count)}
        if count and "masks" in target:
            inputs["masks"] = target["masks"]
        out = self._pipeline(**inputs)
        height, width = out["image"].shape[:2]
        index = np.asarray(out["index"], dtype=np.int64)
        result = {name: values[index] for name, values in target.items() if name != "masks"}
        result["boxes"] = np.asarray(out["bboxes"], dtype=np.float32).reshape(-1, 4)
        before = _box_area(target["boxes"][index])
        result["area"] = (result["area"] * _box_area(result["boxes"]) / np.maximum(before, 1e-9)).astype(np.float32)
        if "masks" in target:
            masks = np.asarray(out["masks"])[index] if count else target["masks"]
            result["masks"] = masks.reshape(len(index), height, width)
        return out["image"], result


def _box_area(boxes: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    sides = boxes[:, 2:] - boxes[:, :2]
    return sides[:, 0] * sides[:, 1]


def _from_dict(serialised: dict[str, Any], key: str) -> Transform:
    try:
        import albumentations as A

        return _Albumentations(A.from_dict(serialised))
    except Exception as error:  # Albumentations raises whatever its constructors raise
        raise ConfigError(f"{key}.albumentations is not a pipeline that A.to_dict wrote: {error}") from error

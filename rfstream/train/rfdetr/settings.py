"""What RF-DETR's two configurations say about data, as one value that travels to the decode actors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rfdetr.config import AugmentationBackend, ModelConfig, MultiScale, TrainConfig
from rfdetr.datasets._aug_utils import resolve_keypoint_flip_pairs
from rfdetr.datasets.aug_configs import AUG_CONFIG
from rfdetr.datasets.kornia_transforms import is_gpu_postprocess, resolve_backend_for_build

from rfstream.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """The fields that reach RF-DETR's dataset builders, under its own names, with its defaults resolved.

    ``gpu_postprocess``: the device augments and normalises (``augmentation_backend="kornia"``), so boxes stay
    xyxy in pixels. ``keypoint_flip_pairs`` is None but for keypoint models.
    """

    resolution: int
    patch_size: int
    num_windows: int
    segmentation_head: bool
    use_grouppose_keypoints: bool
    num_keypoints_per_class: list[int]
    keypoint_flip_pairs: list[int] | None
    square_resize_div_64: bool
    multi_scale: str
    expanded_scales: bool
    scale_jitter: bool
    aug_config: dict[str, Any] | list[Any] | None
    gpu_postprocess: bool
    pad_targets_to: int | None

    @classmethod
    def of(cls, model_config: ModelConfig, train_config: TrainConfig) -> Settings:
        """The settings that RF-DETR's data module resolves from its configurations, on this machine's hardware.

        Raises:
            ConfigError: if ``aug_config`` holds something that JSON can't.
            ImportError, RuntimeError, ValueError: RF-DETR's own, for a backend that can't run here.
        """
        backend = resolve_backend_for_build(train_config.augmentation_backend)
        aug_config = train_config.aug_config
        if backend == AugmentationBackend.ALBU and aug_config is None:
            aug_config = AUG_CONFIG
        try:
            aug_config = json.loads(json.dumps(aug_config))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"aug_config can't travel to the decode actors as JSON: {error}") from None
        keypoints = bool(model_config.use_grouppose_keypoints)
        return cls(
            resolution=model_config.resolution,
            patch_size=model_config.patch_size,
            num_windows=model_config.num_windows,
            segmentation_head=bool(model_config.segmentation_head),
            use_grouppose_keypoints=keypoints,
            num_keypoints_per_class=list(model_config.num_keypoints_per_class or []) if keypoints else [],
            keypoint_flip_pairs=resolve_keypoint_flip_pairs(train_config, include_keypoints=keypoints),
            square_resize_div_64=train_config.square_resize_div_64,
            multi_scale=MultiScale.from_value(train_config.multi_scale).value,
            expanded_scales=train_config.expanded_scales,
            scale_jitter=train_config.scale_jitter,
            aug_config=aug_config,
            gpu_postprocess=is_gpu_postprocess(backend),
            pad_targets_to=train_config.pad_targets_to,
        )

    @property
    def block_size(self) -> int:
        """What RF-DETR rounds a batch's height and width up to."""
        return self.patch_size * self.num_windows

    def to_json(self) -> str:
        """One line, equal for equal settings; the order of ``aug_config`` is the order of its transforms."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The inverse of :meth:`to_json`."""
        return cls(**json.loads(text))

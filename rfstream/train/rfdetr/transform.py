"""RF-DETR's own decoding, annotation conversion and transforms on one sample, up to where pixels become floats."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rfdetr.config import ModelConfig, MultiScale, TrainConfig
from rfdetr.datasets.coco import (
    ConvertCoco,
    draft_size_for_transforms,
    make_coco_transforms,
    make_coco_transforms_square_div_64,
    scale_coco_annotation,
)
from rfdetr.datasets.io_utils import decode_pil_image_bytes
from rfdetr.datasets.transforms import AlbumentationsWrapper, Normalize
from torch import Tensor
from torchvision.transforms.v2 import ToImage

from rfstream.config import Exif
from rfstream.dataset.exif import TURNED, stored_orientation, upright
from rfstream.plan.keys import key_of
from rfstream.stream.targets import check_mask
from rfstream.train.rfdetr.settings import Settings

_TO_IMAGE = ToImage()

Target = dict[str, Tensor]
"""RF-DETR's target of one image: boxes float32 (n, 4), labels int64 (n,), area float32 (n,), iscrowd int64 (n,),
image_id int64 (1,), orig_size and size int64 (2,); masks bool (n, H, W) and keypoints float32 (n, K, 3) where the model
has them."""


class RFDETRTransform:
    """What RF-DETR's dataset does to a sample, except for the last step: the image stays uint8.

    ``ToDtype`` and ``Normalize`` run on the device instead, where they give the same bits for a quarter of the bytes
    moved. Boxes and keypoints leave as RF-DETR's ``Normalize`` leaves them.

    Args:
        model_config: RF-DETR's model configuration.
        train_config: RF-DETR's training configuration.
        split: ``"train"`` augments; any other split is resized alone, as RF-DETR does.
        labels: category id -> label; None keeps the ids.
        exif: ``"transpose"`` turns images as their EXIF orientation says, which RF-DETR does not.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        train_config: TrainConfig,
        split: str,
        *,
        labels: Mapping[int, int] | None = None,
        exif: Exif = "ignore",
    ) -> None:
        self._set_up(Settings.of(model_config, train_config), split, labels, exif)

    @classmethod
    def of(
        cls, settings: Settings, split: str, labels: Mapping[int, int] | None, exif: Exif = "ignore"
    ) -> RFDETRTransform:
        """The transform of resolved settings."""
        self = cls.__new__(cls)
        self._set_up(settings, split, labels, exif)
        return self

    def _set_up(self, settings: Settings, split: str, labels: Mapping[int, int] | None, exif: Exif) -> None:
        self._exif = exif
        image_set = "train" if split == "train" else "val"
        steps = _pipeline(settings, image_set)
        stop = next(i for i, step in enumerate(steps) if isinstance(step, ToImage))
        self._steps = steps[:stop]
        self._relative = any(isinstance(step, Normalize) for step in steps[stop:])
        # Without channels: its arithmetic on boxes and keypoints, and none on pixels.
        self._normalize = Normalize(mean=(), std=())
        self._seeded = [s.transform for s in self._steps if isinstance(s, AlbumentationsWrapper)]
        self._draft_size = draft_size_for_transforms(
            image_set,
            settings.resolution,
            multi_scale=_multi_scale(settings) is not MultiScale.OFF,
            expanded_scales=settings.expanded_scales,
            patch_size=settings.patch_size,
            num_windows=settings.num_windows,
            scale_jitter=settings.scale_jitter,
            include_masks=settings.segmentation_head,
        )
        self._convert = ConvertCoco(
            include_masks=settings.segmentation_head,
            include_keypoints=settings.use_grouppose_keypoints,
            cat2label=None if labels is None else dict(labels),
            num_keypoints_per_class=settings.num_keypoints_per_class,
        )

    def decode(self, image: bytes, image_id: int, annotations: Sequence[dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
        """An encoded image and its COCO annotations to a PIL image and a target in pixels of the decoded image.

        Crowd annotations are left out, as RF-DETR does.

        Raises:
            OSError, ValueError, KeyError, TypeError: RF-DETR's and Pillow's own, for a damaged sample.
        """
        decoded, scale = decode_pil_image_bytes(image, self._draft_size)
        if self._exif == "transpose":
            orientation = stored_orientation(image)
            decoded = upright(decoded, orientation)
            scale = scale[::-1] if orientation in TURNED else scale
        if scale != (1.0, 1.0):
            annotations = [scale_coco_annotation(annotation, *scale) for annotation in annotations]
        if self._convert.include_masks:  # RF-DETR hands them to native code as they are
            for annotation in annotations:
                if not annotation.get("iscrowd"):
                    check_mask(annotation, decoded.height, decoded.width)
        pair: tuple[Any, dict[str, Any]] = self._convert(decoded, {"image_id": image_id, "annotations": annotations})
        return pair

    def __call__(self, image: Any, target: dict[str, Any], key: int) -> tuple[Tensor, Target]:
        """Augment, resize: uint8 (3, H, W) and :data:`Target`, a function of the arguments alone."""
        image, target = self.augment(image, target, key)
        return _TO_IMAGE(image).as_subclass(Tensor), target

    def augment(self, image: Any, target: dict[str, Any], key: int) -> tuple[Any, Target]:
        """The same, with the image still Pillow's.

        Every generator that RF-DETR's transforms draw from is seeded with ``key``, 64 bits.
        """
        self._seed(key)
        for step in self._steps:
            image, target = step(image, target)
        if self._relative:
            _, target = self._normalize(torch.empty(0, image.height, image.width), target)
        return image, target

    def _seed(self, key: int) -> None:
        # Not torch.manual_seed: it also asks every accelerator, which takes longer than decoding a small image.
        torch.default_generator.manual_seed(key & (2**63 - 1))
        np.random.seed(key & 0xFFFFFFFF)
        random.seed(key)
        for number, compose in enumerate(self._seeded):  # each its own, or their draws would go together
            compose.set_random_seed(key_of("rfstream.compose", key >> 1, number) & 0xFFFFFFFF)


def _multi_scale(settings: Settings) -> MultiScale:
    return MultiScale(settings.multi_scale)


def _pipeline(settings: Settings, image_set: str) -> list[Any]:
    """The steps of RF-DETR's own pipeline for ``image_set``."""
    make = make_coco_transforms_square_div_64 if settings.square_resize_div_64 else make_coco_transforms
    multi_scale = _multi_scale(settings)
    steps: list[Any] = list(
        make(
            image_set,
            settings.resolution,
            multi_scale=multi_scale is not MultiScale.OFF,
            expanded_scales=settings.expanded_scales,
            skip_random_resize=multi_scale is not MultiScale.PER_SAMPLE,
            patch_size=settings.patch_size,
            num_windows=settings.num_windows,
            aug_config=settings.aug_config,
            scale_jitter=settings.scale_jitter,
            gpu_postprocess=settings.gpu_postprocess,
            keypoint_flip_pairs=settings.keypoint_flip_pairs,
        ).transforms
    )
    return steps

"""Encoded samples to RF-DETR batches in NumPy arrays: the decode actors' part of the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rfdetr.utilities.tensors import PackedTargets, make_collate_fn

from rfstream import recycle
from rfstream.dataset.reader import EncodedSample
from rfstream.stream.bad import bad_sample
from rfstream.stream.image import check_header, pixels_of, raise_pillow_limit, to_planes
from rfstream.stream.targets import SplitIds, parse_sidecar
from rfstream.train.rfdetr.settings import Settings
from rfstream.train.rfdetr.spec import RFDETRSpec
from rfstream.train.rfdetr.transform import RFDETRTransform, Target

FIELD, SHAPE = "target:", "shape:"
"""Prefixes of a target field's flat array and of its shapes, int64 (B, dimensions), among a wire batch's arrays."""


class RFDETRDecoder:
    """Decodes, augments and collates RF-DETR's samples. See :class:`rfstream.stream.decode.SampleDecoder`."""

    def __init__(self, spec: RFDETRSpec) -> None:
        settings = Settings.from_json(spec.settings)
        self._max_pixels = spec.max_pixels
        raise_pillow_limit(spec.max_pixels)
        self._ids = SplitIds(spec.pack_ids)
        labels = None if spec.labels is None else dict(spec.labels)
        self._transform = RFDETRTransform.of(settings, spec.split, labels, spec.exif)
        self._collate = make_collate_fn(
            block_size=settings.block_size,
            pack=True,
            pad_targets_to=settings.pad_targets_to if spec.split == "train" else None,
        )

    def sample(self, sample: EncodedSample, key: int) -> tuple[Any, Target]:
        """See :class:`rfstream.stream.decode.SampleDecoder`."""
        name = ""
        try:
            image_id, name, annotations = parse_sidecar(sample.sidecar)
            image_id = self._ids.image(image_id, sample.row)
            annotations = self._ids.annotations(annotations, sample.row, sample.pack)
            check_header(sample.image, self._max_pixels)
            image, target = self._transform.decode(sample.image, image_id, annotations)
        except Exception as error:  # Pillow and RF-DETR raise many kinds for what they can't read
            raise bad_sample(sample, name, error) from error
        return self._transform.augment(image, target, key)

    def collate(self, decoded: Sequence[tuple[Any, Target]]) -> dict[str, npt.NDArray[Any]]:
        """What RF-DETR's own collation makes of them, with targets packed."""
        # RF-DETR says how large the batch is and how targets are packed; pixels are written once, by us.
        sizes = [(image.height, image.width) for image, _ in decoded]
        empty = [torch.empty(0, *size) for size in sizes]
        nested, targets = self._collate([(pixels, target) for pixels, (_, target) in zip(empty, decoded, strict=True)])
        images = recycle.empty((len(decoded), 3, *nested.tensors.shape[2:]), np.uint8)
        for frame, (image, _) in zip(images, decoded, strict=True):
            to_planes(pixels_of(image), frame)
        arrays: dict[str, npt.NDArray[Any]] = {"images": images, "sizes": np.array(sizes, dtype=np.int64)}
        assert isinstance(targets, PackedTargets)  # RF-DETR leaves unpacked what differs in fields or dtypes
        unpacked = list(targets)
        for name, flat in targets.fields.items():
            shapes = [tuple(target[name].shape) for target in unpacked]
            arrays[SHAPE + name] = np.array(shapes, dtype=np.int64)
            arrays[FIELD + name] = np.packbits(flat.numpy()) if name == "masks" else flat.numpy()
        return arrays

"""``decode``: encoded samples -> one batch in NumPy arrays. Runs in the actor pool, and in evaluation's tasks.

What travels with a task is a :class:`DecodeSpec`; each process builds its decoder once. :class:`BatchDecoder` is the
same for all; the spec's :class:`SampleDecoder` knows the samples. The one here decodes COCO-style detection samples;
an adapter to a framework brings a spec of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import PIL.Image

from rfstream import recycle
from rfstream.config import MAX_PIXELS, CpuTransform, Exif
from rfstream.dataset.exif import TURNED, stored_orientation, upright
from rfstream.dataset.index import PackIds
from rfstream.dataset.reader import EncodedSample
from rfstream.errors import ConfigError, SampleError
from rfstream.plan.keys import sample_key
from rfstream.plan.position import Fingerprint
from rfstream.stream.augment import Image, Target, build_transform, check_image
from rfstream.stream.bad import BadSample, BadSampleError, bad_sample
from rfstream.stream.image import decode_scaled, raise_pillow_limit, to_planes
from rfstream.stream.scaling import Scaling
from rfstream.stream.targets import SplitIds, parse_sidecar, targets_of
from rfstream.stream.wire import WireBatch

S = TypeVar("S")
E_contra = TypeVar("E_contra", bound="Encoded", contravariant=True)


class Encoded(Protocol):
    """What is said of a sample whatever it holds."""

    @property
    def key(self) -> str:
        """Its name in the dataset."""
        ...

    @property
    def row(self) -> int:
        """Its row in the index."""
        ...


class SampleDecoder(Protocol[E_contra, S]):
    """Turns encoded samples into decoded ones, and these into a batch. Holds no state that one sample could leave
    behind for another."""

    def sample(self, sample: E_contra, key: int) -> S:
        """``sample`` decoded, and augmented with the 64-bit ``key``.

        Raises:
            BadSampleError: if it can't be decoded.
            ConfigError: if a user's transform fails on it.
        """
        ...

    def collate(self, decoded: Sequence[S]) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a :class:`WireBatch`."""
        ...


class DecodeSpec(Protocol):
    """What a decoder does, in a few hashable values."""

    def __hash__(self) -> int: ...

    @property
    def seed(self) -> int:
        """Seed of augmentation."""
        ...

    def build(self) -> SampleDecoder[Any, Any]:
        """A decoder for this process."""
        ...

    def fingerprint(self) -> Fingerprint:
        """What must be equal for equal samples to give equal pixels and targets."""
        ...


class Substitutes(Protocol):
    """Where training finds a sample in the place of one that can't be decoded; in a few hashable values."""

    def __hash__(self) -> int: ...

    def of(self, bad: Encoded, epoch: int, position: int) -> Iterable[Any]:
        """Samples to try in the place of ``bad`` at ``position`` of an epoch's order: the same ones for the same
        arguments, a bounded number, and never ``bad``."""
        ...


class BatchDecoder(Generic[S]):
    """Turns encoded samples into batches.

    A sample that can't be decoded is replaced from ``substitutes`` if there are any: what stands in its place is
    decoded and augmented as if it were the position's own.
    """

    def __init__(self, decoder: SampleDecoder[Any, S], seed: int, substitutes: Substitutes | None) -> None:
        self._decoder = decoder
        self._seed = seed
        self._substitutes = substitutes

    @staticmethod
    def of(spec: DecodeSpec, substitutes: Substitutes | None = None) -> BatchDecoder[Any]:
        """A decoder of batches for this process."""
        recycle.keep_freed_memory()
        return BatchDecoder(spec.build(), spec.seed, substitutes)

    def batch(self, samples: Sequence[Encoded], epoch: int, batch: int, first_position: int) -> WireBatch:
        """Decode ``samples``, which stand at ``first_position`` and after in the epoch's order, as batch ``batch``.

        Raises:
            SampleError: naming shard, key, file, byte and reason, if a sample can't be decoded or replaced.
            ConfigError: if a user's transform fails.
        """
        keys: list[str] = []
        decoded: list[S] = []
        found: list[tuple[int, BadSample]] = []
        for position, own in enumerate(samples, start=first_position):
            key, sample, bad = self._sample(own, epoch, position)
            keys.append(key)
            decoded.append(sample)
            found += [(position, each) for each in bad]
        return WireBatch(epoch, batch, keys, self._decoder.collate(decoded), found)

    def _sample(self, own: Encoded, epoch: int, position: int) -> tuple[str, S, list[BadSample]]:
        """Key and content of what stands at ``position``, and what could not."""
        augmentation = sample_key(self._seed, epoch, position)
        bad: list[BadSample] = []
        others = () if self._substitutes is None else self._substitutes.of(own, epoch, position)
        for sample in itertools.chain([own], others):
            try:
                return sample.key, self._decoder.sample(sample, augmentation), bad
            except BadSampleError as error:
                if self._substitutes is None:
                    raise
                bad.append(error.bad)
        raise SampleError(
            f"{bad[0]}; nothing else could be decoded in its place ({len(bad) - 1} others were tried): repair the "
            "dataset and pack again"
        )


@lru_cache(maxsize=8)
def decoder_of(spec: DecodeSpec, substitutes: Substitutes | None = None) -> BatchDecoder[Any]:
    """This process's decoder for ``spec``: built once, whichever task comes first."""
    return BatchDecoder.of(spec, substitutes)


def exif_fingerprint(exif: Exif) -> Fingerprint:
    """What a fingerprint says of EXIF orientation: nothing where it is ignored."""
    return {} if exif == "ignore" else {"exif": exif}


@dataclass(frozen=True)
class DetectionSpec:
    """Detection samples with a per-sample transform. See :class:`DecodeSpec`."""

    seed: int
    labels: tuple[tuple[int, int], ...]
    transform: str
    """The :class:`CpuTransform` as JSON, or the empty string."""
    transform_key: str
    masks: bool
    pad_multiple: int
    exif: Exif = "ignore"
    max_pixels: int = MAX_PIXELS
    shrink_to: int | None = None
    pack_ids: PackIds = ()

    def build(self) -> DetectionDecoder:
        """A decoder for this process."""
        return DetectionDecoder(self)

    def fingerprint(self) -> Fingerprint:
        """What must be equal for equal samples to give equal pixels and targets."""
        shrunk: Fingerprint = {} if self.shrink_to is None else {"shrink_to": self.shrink_to}
        return {"transform": self.transform, "masks": self.masks, **exif_fingerprint(self.exif), **shrunk}


@dataclass(frozen=True)
class _Decoded:
    image: Image
    target: Target
    image_id: int
    orig_size: tuple[int, int]


class DetectionDecoder:
    """Decodes, augments and collates detection samples. See :class:`SampleDecoder`."""

    def __init__(self, spec: DetectionSpec) -> None:
        config = CpuTransform.model_validate_json(spec.transform) if spec.transform else None
        self._transform = build_transform(config, spec.transform_key)
        self._labels = dict(spec.labels)
        self._ids = SplitIds(spec.pack_ids)
        self._spec = spec
        raise_pillow_limit(spec.max_pixels)

    def sample(self, sample: EncodedSample, key: int) -> _Decoded:
        """See :class:`SampleDecoder`."""
        name = ""
        try:
            image_id, name, annotations = parse_sidecar(sample.sidecar)
            image_id = self._ids.image(image_id, sample.row)
            annotations = self._ids.annotations(annotations, sample.row, sample.pack)
            image, size, factor = decode_scaled(sample.image, self._spec.max_pixels, self._spec.shrink_to)
            orientation = stored_orientation(sample.image) if self._spec.exif == "transpose" else 1
            image = _turned(image, orientation)
            orig_size = size[::-1] if orientation in TURNED else size
            _check_stated(sample, *orig_size)
            scaling = Scaling.of(factor, *orig_size, orientation)
            target = targets_of(annotations, self._labels, *orig_size, masks=self._spec.masks, scaling=scaling)
        except Exception as error:  # Pillow raises many kinds for a file it can't read
            raise bad_sample(sample, name, error) from error
        try:
            image, target = self._transform(image, target, key)
            _check_transformed(image, target)
        except Exception as error:  # a user's transform raises what it likes
            where = f"{self._spec.transform_key} fails on shard {sample.shard}, key {sample.key} (file {name})"
            raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
        return _Decoded(image, target, image_id, orig_size)

    def collate(self, decoded: Sequence[_Decoded]) -> dict[str, npt.NDArray[Any]]:
        """Pad images at the bottom and right with zeros to a common size; lay target fields end to end."""
        multiple = self._spec.pad_multiple
        height, width = (-(-max(d.image.shape[axis] for d in decoded) // multiple) * multiple for axis in (0, 1))
        images = recycle.empty((len(decoded), 3, height, width), np.uint8)
        for frame, d in zip(images, decoded, strict=True):
            to_planes(d.image, frame)
        arrays: dict[str, npt.NDArray[Any]] = {
            "images": images,
            "sizes": np.array([d.image.shape[:2] for d in decoded], dtype=np.int64),
            "orig_sizes": np.array([d.orig_size for d in decoded], dtype=np.int64),
            "image_ids": np.array([d.image_id for d in decoded], dtype=np.int64),
            "offsets": np.cumsum([0, *(len(d.target["boxes"]) for d in decoded)], dtype=np.int64),
        }
        fields = [name for name in decoded[0].target if name != "masks"]
        arrays |= {name: np.concatenate([d.target[name] for d in decoded]) for name in fields}
        if "masks" in decoded[0].target:
            arrays["masks"] = np.concatenate([_pack_masks(d.target["masks"], height, width) for d in decoded])
        return arrays


def _turned(image: Image, orientation: int) -> Image:
    """``image`` upright; writable, as a transform may expect."""
    return image if orientation == 1 else np.array(upright(PIL.Image.fromarray(image), orientation))


def _check_stated(sample: EncodedSample, height: int, width: int) -> None:
    """Raise ValueError if the annotations are of an image of another size: their boxes would lie elsewhere."""
    if (sample.width or width, sample.height or height) != (width, height):
        raise ValueError(
            f"the file has {width} x {height} pixels, and its annotations are for {sample.width} x {sample.height}"
        )


def _check_transformed(image: Image, target: Target) -> None:
    """Raise ValueError unless a transform returned what it may."""
    check_image(image, "in augment.device")
    lengths = {name: len(values) for name, values in target.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"it returned target fields of different lengths {lengths}")


def _pack_masks(masks: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Masks (n, h, w) in a frame of (height, width), eight pixels a byte: uint8 (n, ceil(height * width / 8))."""
    n, h, w = masks.shape
    framed = np.zeros((n, height, width), dtype=bool)
    framed[:, :h, :w] = masks
    return np.packbits(framed.reshape(n, height * width), axis=1)

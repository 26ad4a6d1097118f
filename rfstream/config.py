"""Every knob: typed, validated, documented. A file, ``key=value`` overrides and keyword arguments build the same
models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from rfstream.config_faults import brief, known, sentence
from rfstream.config_file import apply_override, read_mapping
from rfstream.errors import ConfigError
from rfstream.plan.windows import accumulation

Positive = Annotated[int, Field(ge=1)]
MAX_PIXELS = 178_956_970
"""Where Pillow refuses an image as a decompression bomb by default; not read from Pillow, since RF-DETR raises its
limit."""
Exif = Literal["ignore", "transpose"]
Mismatch = Literal[
    "pack",
    "weights",
    "classes",
    "seed",
    "shuffle",
    "block_bytes",
    "window_samples",
    "tail",
    "transform",
    "masks",
    "exif",
    "shrink_to",
    "rfdetr",
    "pool_size",
    "delta_timestamps",
    "cameras",
    "transforms",
]
"""What a state's fingerprint holds (see ``RankLoader.fingerprint``)."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CacheConfig(_Section):
    """Whole shards of a remote pack on each node's own disk."""

    folder: Annotated[str, Field(min_length=1)]
    """A folder on a disk of the node, shared by its processes."""
    bytes: Annotated[ByteSize, Field(ge=1)]
    """What all shards in it may take."""


class PackConfig(_Section):
    """One pack of a mixture."""

    path: Annotated[str, Field(min_length=1)]
    """Folder of the pack: a local path or any fsspec URL."""
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    """How often each of its samples comes in an epoch of training."""
    categories: dict[str, str] = {}
    """Names of its categories -> their names in the mixture, where these differ."""
    shards: Annotated[str, Field(min_length=1)] | None = None
    """As in ``data``."""
    splits: dict[str, str | None] = {}
    """As in ``data``, for this pack; null where it has no part in a role."""


class DataConfig(_Section):
    """Where the dataset is."""

    path: Annotated[
        Annotated[str, Field(min_length=1), Tag("<pack>")]
        | Annotated[list[PackConfig], Field(min_length=1), Tag("<mixture>")],
        Discriminator(lambda value: "<mixture>" if isinstance(value, list) else "<pack>"),
    ]
    """Folder of the pack, or of a LeRobot dataset: a local path or any fsspec URL. A list of packs with weights is a
    mixture."""
    format: Literal["pack", "lerobot"] = "pack"
    """What is there: packs of images, or a LeRobot v3 dataset of episodes."""
    shards: Annotated[str, Field(min_length=1)] | None = None
    """Folder or URL of the shards, if they are not in ``path``: of files that others wrote, indexed where they lie."""
    splits: dict[str, str] = {"train": "train", "val": "val"}
    """Role (what code asks for) -> split name in the pack."""
    cache: CacheConfig | None = None
    """Keep shards of a remote pack on each node's disk."""

    @model_validator(mode="after")
    def _one_or_several(self) -> DataConfig:
        if self.shards is not None and not isinstance(self.path, str):
            raise ValueError("shards are those of one pack; in a mixture set them beside the pack's own path")
        if self.format != "pack" and not isinstance(self.path, str):
            raise ValueError(f"format {self.format} takes one dataset; only packs of images make a mixture")
        return self

    @property
    def packs(self) -> list[PackConfig]:
        """The packs of the mixture, or the only one."""
        return [PackConfig(path=self.path, shards=self.shards)] if isinstance(self.path, str) else self.path

    @property
    def name(self) -> str:
        """What messages call the data."""
        return " + ".join(pack.path for pack in self.packs)

    def names_role(self, role: str) -> bool:
        """Whether a split is named for ``role``, of all packs or of one."""
        return role in self.splits or any(pack.splits.get(role) is not None for pack in self.packs)

    def split_name(self, pack: PackConfig, role: str) -> str | None:
        """The name of ``pack``'s split in ``role``; None where it has no part in it."""
        return pack.splits.get(role, self.splits.get(role, role))


class StreamConfig(_Section):
    """Order, batches and waits."""

    batch_size: Positive = 16
    """B: samples of one forward pass on one rank."""
    grad_accum: Positive = 1
    """A: batches of one rank per optimizer step."""
    global_batch: Positive | None = None
    """G: samples per optimizer step over all ranks; sets ``grad_accum`` to G / (world size x batch_size)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of order and augmentation."""
    shuffle: bool = True
    """Permute fragments and samples anew each epoch."""
    tail: Literal["wrap", "drop"] = "wrap"
    """Complete the last window with further samples of the epoch, or leave it out."""
    block_bytes: ByteSize = ByteSize(256 * 1024**2)
    """Encoded bytes whose samples are permuted together."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0
    """The longest any wait may last, seconds."""
    assembly: Literal["auto", "fused", "staged"] = "auto"
    """Read inside the decode actors (``fused``, for local bytes) or in actors before them (``staged``, for remote
    bytes); ``auto`` looks at the path."""
    on_bad_sample: Literal["raise", "replace", "quarantine"] = "raise"
    """What training does with a sample that can't be decoded: stop, take another in its place, or do that and report it
    in ``quarantine``. Evaluation always stops."""
    quarantine: Annotated[str, Field(min_length=1)] | None = None
    """Folder or fsspec URL of the reports on bad samples, one Parquet file a rank."""
    max_bad_rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.01
    """Share of replaced samples past which training stops, once a rank has had a hundred samples."""
    allow_mismatch: list[Mismatch] = []
    """Ways in which a state may be of another stream, and a run go on from it all the same: at its count of samples."""

    @model_validator(mode="after")
    def _one_accumulation(self) -> StreamConfig:
        if self.global_batch is not None:
            if "grad_accum" in self.model_fields_set:
                raise ValueError("set either grad_accum or global_batch, not both")
            if self.global_batch % self.batch_size:
                raise ValueError(f"global_batch {self.global_batch} is not a multiple of batch_size {self.batch_size}")
        return self

    @model_validator(mode="after")
    def _quarantine_has_a_place(self) -> StreamConfig:
        if self.on_bad_sample == "quarantine" and self.quarantine is None:
            raise ValueError("on_bad_sample: quarantine needs a folder or URL for its reports in quarantine")
        if self.on_bad_sample != "quarantine" and self.quarantine is not None:
            raise ValueError(f"quarantine is not written under on_bad_sample: {self.on_bad_sample}; leave it out")
        return self

    @property
    def deadline_s(self) -> float:
        """How long one read from storage may take, all tries together, seconds: half of ``timeout_s``, so that what
        storage did wrong is said before the stream says that nothing came."""
        return self.timeout_s / 2

    def accumulation(self, world_size: int) -> int:
        """A for ``world_size`` ranks: ``grad_accum``, or what makes a window of ``global_batch``.

        Raises:
            PlanError: if ``global_batch`` does not divide.
        """
        if self.global_batch is None:
            return self.grad_accum
        return accumulation(self.global_batch, world_size, self.batch_size)

    @field_validator("block_bytes")
    @classmethod
    def _block_not_empty(cls, value: ByteSize) -> ByteSize:
        if value < 1:
            raise ValueError("must be at least 1 byte")
        return value


class DecodeConfig(_Section):
    """The pool that turns bytes into pixels."""

    actors: tuple[Positive, Positive] = (1, 8)
    """Fewest and most decode actors, one CPU each."""
    masks: bool = False
    """Rasterise instance masks from the annotations' segmentation."""
    pad_multiple: Positive = 1
    """Pad each batch's height and width to a multiple of this."""
    exif: Exif = "ignore"
    """Take images as they are stored, as RF-DETR does, or turn them as their EXIF orientation says (``transpose``)."""
    max_pixels: Positive = MAX_PIXELS
    """An image whose header claims more is a bad sample, and is not decoded."""
    shrink_to: Positive | None = None
    """Decode plain JPEGs at 1/2, 1/4 or 1/8 of their size, the smallest in which the shorter side keeps this many
    pixels or more; ``null`` for the file's own. Boxes, areas and masks follow. All other formats are decoded whole."""
    label_selector: dict[str, str] | None = None
    """Ray node labels that reads and decode need: ``{ray-subcluster: decode}`` keeps them off GPU nodes without it."""

    @field_validator("actors")
    @classmethod
    def _min_below_max(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError(f"the minimum {value[0]} exceeds the maximum {value[1]}: write [min, max]")
        return value


class CpuTransform(_Section):
    """An augmentation of single samples in the decode actors: a Python callable or a serialised Albumentations
    pipeline."""

    transform: str | None = None
    """``package.module:name`` of a callable that returns the transform (see ``rfstream.stream.augment``)."""
    args: dict[str, Any] = {}
    """Keyword arguments of that callable."""
    albumentations: dict[str, Any] | None = None
    """What ``A.to_dict(compose)`` returned."""

    @model_validator(mode="after")
    def _exactly_one(self) -> CpuTransform:
        if (self.transform is None) == (self.albumentations is None):
            raise ValueError(
                "set exactly one of transform (package.module:name) and albumentations (a serialised pipeline)"
            )
        if self.albumentations is not None and self.args:
            raise ValueError("args belong to transform; a serialised pipeline takes none")
        return self


class EpisodesConfig(_Section):
    """What a sample of a LeRobot dataset holds, and which episodes are streamed."""

    select: list[Annotated[int, Field(ge=0)]] | None = None
    """Numbers of the episodes to stream, of those in the split; ``null`` for all. Their order is the dataset's."""
    delta_timestamps: dict[str, list[Annotated[float, Field(allow_inf_nan=False)]]] = {}
    """Feature -> window around a frame in seconds, each a multiple of 1/fps."""
    cameras: list[str] | None = None
    """Cameras to stream; ``null`` for all."""
    pool_size: Positive = 16
    """Whole episodes whose frames are permuted together, as far as ``stream.block_bytes`` allows."""
    transforms: dict[str, CpuTransform] = {}
    """Camera -> what changes its frames in training: one draw for a sample's whole window."""
    eval_transforms: dict[str, CpuTransform] = {}
    """The same for evaluation: usually a resize, nothing random."""


class Normalize(_Section):
    """Per-channel statistics of images scaled to 0..1."""

    mean: tuple[float, float, float]
    std: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]]


class DeviceConfig(_Section):
    """The stage on the training device."""

    normalize: Literal["imagenet", "none"] | Normalize = "imagenet"
    """Subtract the mean and divide by the standard deviation after scaling to 0..1."""
    kornia: list[dict[str, Any]] = []
    """Kornia augmentations in order, ``{name: RandomHorizontalFlip, p: 0.5, ...}``; training only."""


class AugmentConfig(_Section):
    """What happens to a sample between its bytes and the model."""

    cpu: CpuTransform | None = None
    """For training splits."""
    eval: CpuTransform | None = None
    """For evaluation splits: usually a resize, nothing random."""
    device: DeviceConfig = DeviceConfig()


class TrainConfig(_Section):
    """A training run of ``pipelines/train.py``."""

    launcher: Literal["local", "ray", "torchrun"] = "local"
    """One process; Ray Train workers; or ranks that ``torchrun`` started."""
    workers: Positive = 1
    """Ranks under ``launcher: ray``."""
    epochs: Positive = 1
    model: str | None = None
    """``package.module:name`` of a callable ``(class_names, **model_args) -> LightningModule``; for a LeRobot dataset
    its first argument is the training split's ``rfstream.episodes.index.EpisodeIndex``."""
    model_args: dict[str, Any] = {}
    entry: str | None = None
    """``package.module:name`` of what trains on each rank in place of a plain fit of ``model``, such as
    ``rfstream.train.rfdetr:fit``: ``(config, world_size=, resume=, checkpoints=, **trainer options) -> metrics``."""
    output: str = "runs/train"
    """Folder for checkpoints and logs."""
    checkpoint_steps: Positive | None = None
    """Optimizer steps between two checkpoints inside an epoch; ``null`` for its end alone."""
    accelerator: str = "auto"
    max_failures: Annotated[int, Field(ge=-1)] = 0
    """Worker failures that Ray Train recovers from; -1 for any number."""
    resume: str | None = None
    """Checkpoint to continue from."""


class Config(_Section):
    """The whole configuration."""

    data: DataConfig
    stream: StreamConfig = StreamConfig()
    decode: DecodeConfig = DecodeConfig()
    augment: AugmentConfig = AugmentConfig()
    episodes: EpisodesConfig = EpisodesConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _of_one_format(self) -> Config:
        if self.data.format == "pack":
            if self.episodes != EpisodesConfig():
                raise ValueError("episodes is for data.format: lerobot; leave it out")
            return self
        of_images = {
            "data.shards": self.data.shards,
            "data.cache": self.data.cache,
            "augment.cpu": self.augment.cpu,
            "augment.eval": self.augment.eval,
            "augment.device": self.augment.device != DeviceConfig(),
            "decode.masks": self.decode.masks,
            "decode.pad_multiple": self.decode.pad_multiple > 1,
            "decode.exif": self.decode.exif != "ignore",
            "decode.shrink_to": self.decode.shrink_to,
        }
        for key, value in of_images.items():
            if value:
                raise ValueError(f"{key} has no part in data.format: lerobot; leave it out")
        return self

    def __init__(self, **values: Any) -> None:
        """Validate keyword arguments, nested ones as mappings or models.

        Raises:
            ConfigError: one sentence per fault that names the key, what was given and what is allowed.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(sentence(fault, Config) for fault in error.errors())) from None


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file and apply ``dotted.key=value`` overrides, whose values are read as YAML too.

    Raises:
        ConfigError: for a missing or malformed file, a malformed override, or anything :class:`Config` refuses.
    """
    values = read_mapping(path)
    wrong = [key for key in values if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"configuration file {path}: unknown key {brief(wrong[0])}{known(Config, ())}")
    for override in overrides:
        apply_override(values, override)
    try:
        return Config(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None

"""What travels to the decode actors. Imports no RF-DETR: Ray's coordinator unpickles it, and decodes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rfstream.config import MAX_PIXELS, Exif
from rfstream.dataset.index import PackIds
from rfstream.plan.position import Fingerprint
from rfstream.stream.decode import SampleDecoder, exif_fingerprint


@dataclass(frozen=True)
class RFDETRSpec:
    """RF-DETR samples: a :class:`rfstream.stream.decode.DecodeSpec`."""

    settings: str
    """A :class:`rfstream.train.rfdetr.settings.Settings` as JSON."""
    split: str
    seed: int
    labels: tuple[tuple[int, int], ...] | None
    exif: Exif = "ignore"
    max_pixels: int = MAX_PIXELS
    pack_ids: PackIds = ()

    def build(self) -> SampleDecoder[Any, Any]:
        """A decoder for this process, which computes on one thread from then on: an actor has one CPU."""
        import torch

        from rfstream.train.rfdetr.decode import RFDETRDecoder

        torch.set_num_threads(1)
        return RFDETRDecoder(self)

    def fingerprint(self) -> Fingerprint:
        """What must be equal for equal samples to give equal pixels and targets."""
        return {"rfdetr": self.settings, **exif_fingerprint(self.exif)}

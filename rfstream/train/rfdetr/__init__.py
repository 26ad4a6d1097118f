"""RF-DETR on rfstream: its own transforms in the decode actors, its own batches on the device.

``train`` is ``model.train`` with the data streamed; :class:`RFStreamDataModule` takes the place of RF-DETR's data
module under ``build_trainer``; :class:`RFDETRTransform` is what the decode actors run. Needs ``rfstream[rfdetr]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rfstream.train.rfdetr.data import RFStreamDataModule
    from rfstream.train.rfdetr.run import fit, train
    from rfstream.train.rfdetr.transform import RFDETRTransform

# Imported on first use: a decode actor needs the transform alone, and no Lightning.
_LAZY = {"RFDETRTransform": "transform", "RFStreamDataModule": "data", "fit": "run", "train": "run"}

__all__ = ["RFDETRTransform", "RFStreamDataModule", "fit", "train"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

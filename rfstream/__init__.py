"""rfstream: packed detection datasets to ready-to-train batches for every rank, through Ray Data.

>>> import rfstream
>>> config = rfstream.load_config("configs/train/demo.yaml")  # doctest: +SKIP
>>> for batch in rfstream.ray_loader(config): ...  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rfstream.config import Config, load_config
from rfstream.errors import RFStreamError

if TYPE_CHECKING:
    from rfstream.batch import Batch
    from rfstream.dataset.pack import pack
    from rfstream.episodes.batch import EpisodeBatch
    from rfstream.loader import EvaluationLoader, RankLoader, ray_loader

__version__ = "0.1.0"

# Imported on first use: a decode actor imports this package, and needs neither torch nor the packer.
_LAZY = {
    "Batch": "rfstream.batch",
    "EpisodeBatch": "rfstream.episodes.batch",
    "EvaluationLoader": "rfstream.loader",
    "RankLoader": "rfstream.loader",
    "pack": "rfstream.dataset.pack",
    "ray_loader": "rfstream.loader",
}

__all__ = [
    "Batch",
    "Config",
    "EpisodeBatch",
    "EvaluationLoader",
    "RFStreamError",
    "RankLoader",
    "load_config",
    "pack",
    "ray_loader",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rfstream' has no attribute {name!r}")

"""The one place that decides which Lightning is used, for us and for Ray's Lightning classes alike.

Lightning is published twice: ``pytorch_lightning`` and ``lightning.pytorch`` hold the same classes under two names, and
a module of one is refused by a trainer of the other. RF-DETR is written against ``pytorch_lightning``, and so are we.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import pytorch_lightning as pl

__all__ = ["pl", "ray_lightning"]


@cache
def ray_lightning() -> ModuleType:
    """The module ``ray.train.lightning`` with every class bound to ``pl``.

    Ray takes ``lightning.pytorch`` wherever that can be imported, so it is hidden while Ray's module is loaded. A copy
    that the process imported earlier, bound to the other Lightning, stays what it was for whoever holds it.
    """
    with _hidden("lightning", "ray.train.lightning"):
        sys.modules["lightning"] = None  # type: ignore[assignment]  # "import lightning" now says that it is not there
        return importlib.import_module("ray.train.lightning")


@contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    """Take ``packages`` and their submodules out of ``sys.modules``; put back afterwards what was there before."""

    def belongs(name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in packages)

    held = {name: sys.modules.pop(name) for name in list(sys.modules) if belongs(name)}
    try:
        yield
    finally:
        sys.modules.pop("lightning", None)
        sys.modules.update(held)

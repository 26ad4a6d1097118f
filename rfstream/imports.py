"""What a configuration names by its import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rfstream.errors import ConfigError


def import_object(path: str, key: str) -> Callable[..., Any]:
    """The callable named ``package.module:name`` by configuration key ``key``.

    Raises:
        ConfigError: if the form, the module, the name or its kind is wrong.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{key}={path!r} is not of the form package.module:name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way while it loads
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}={path!r}: module {module_name} can't be imported ({reason})") from error
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{key}={path!r}: module {module_name} has no {name}")
    if not callable(found):
        raise ConfigError(f"{key}={path!r} is not callable")
    return found  # type: ignore[no-any-return]

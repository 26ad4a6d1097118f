"""A configuration out of a YAML file and overrides of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from rfstream.config import Config
from rfstream.config_faults import brief, known
from rfstream.errors import ConfigError


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2's floats: PyYAML follows 1.1, where ``1e-4`` is a string."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file and apply ``dotted.key=value`` overrides, whose values are read as YAML too.

    Raises:
        ConfigError: for a missing or malformed file, a malformed override, or anything :class:`Config` refuses.
    """
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _YamlLoader)
    except OSError as error:
        raise ConfigError(f"configuration file {path} can't be read: {error.strerror}") from None
    except Exception as error:  # PyYAML lets out whatever a date, a number or deep nesting raises
        raise ConfigError(f"configuration file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"configuration file {path} must hold a mapping with the key `data`, not {type(values).__name__}"
        )
    wrong = [key for key in values if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"configuration file {path}: unknown key {brief(wrong[0])}{known(Config, ())}")
    for override in overrides:
        _apply(values, override)
    try:
        return Config(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _apply(values: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, e.g. stream.batch_size=4")
    try:
        value = yaml.load(text, _YamlLoader)
    except Exception:  # as above
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from None
    node = values
    for key in keys[:-1]:
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {key} holds a value, not a section")
    node[keys[-1]] = value

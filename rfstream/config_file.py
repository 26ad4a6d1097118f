"""A configuration as it is written: a YAML file, and ``key=value`` overrides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rfstream.errors import ConfigError


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2's floats: PyYAML follows 1.1, where ``1e-4`` is a string."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: if the file is missing, malformed, or holds something else.
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
    return values


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set what ``dotted.key=value`` says in nested mappings; the value is read as YAML.

    Raises:
        ConfigError: if the override is malformed, or leads through a value.
    """
    dotted, equals, text = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, e.g. stream.batch_size=4")
    try:
        value = yaml.load(text, _YamlLoader)
    except Exception:  # as in a file
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from None
    node = values
    for key in keys[:-1]:
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {key} holds a value, not a section")
    node[keys[-1]] = value

"""What pydantic finds wrong with a configuration, as sentences."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

_TAG = re.compile(r"<.*>")  # of a union's member, which stands in a fault's place and in no file


def sentence(fault: Any, root: type[BaseModel]) -> str:
    """One sentence for one of ``ValidationError.errors()`` of a ``root``."""
    loc = [part for part in fault["loc"] if isinstance(part, int) or not _TAG.fullmatch(part)]
    key = ".".join(map(str, loc)) or "configuration"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return f"unknown key {key}{known(root, loc[:-1])}"
    if fault["type"] == "missing":
        return f"{key} is required"
    given = "" if isinstance(fault["input"], dict) else f" (got {brief(fault['input'])})"
    return f"{key}: {message[:1].lower()}{message[1:]}{given}"


def brief(value: object) -> str:
    """``repr(value)`` in bounded length: a few lines of YAML aliases can stand for gigabytes."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    return short.repr(value)


def known(root: type[BaseModel], section: Sequence[int | str]) -> str:
    """The keys of a section of ``root``, in brackets; nothing if they are the user's own."""
    model = root
    for part in section:
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # one of a list or of the user's names: what these hold is found already
        inner = next(_models(field.annotation), None)
        if inner is None:
            return ""
        model = inner
    return f" (known here: {', '.join(model.model_fields)})"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models(argument)

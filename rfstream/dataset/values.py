"""JSON values, as training can use them and as messages show them."""

from __future__ import annotations

from typing import TypeGuard

INT64 = range(1 - 2**63, 2**63)


def is_int64(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a JSON integer that an int64 tensor can hold, as can its negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value in INT64


def is_number(value: object) -> bool:
    """Whether ``value`` is a JSON number that a float32 tensor can hold as finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38 and value == value


def pixels(value: object) -> int | None:
    """A plausible image side, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def short(value: object) -> str:
    """``value`` for a message, in at most 60 characters."""
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

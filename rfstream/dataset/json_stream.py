"""A JSON object read member by member, and its lists entry by entry: the text is never in memory as a whole.

Each entry is decoded by the standard library, so it is what ``json.loads`` makes of it. Streaming parsers on YAJL are
not used because they refuse NaN, Infinity and integers past 64 bits, which annotation files have.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import IO, Any, TextIO

_PIECE = 1024 * 1024  # characters
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_TAIL = 2  # of "1e+5" the decoder takes the 1 where the text ends before the 5, and leaves as many characters


class NoObjectError(ValueError):
    """The text does not begin as a JSON object does."""


def open_text(file: IO[bytes]) -> TextIO:
    """``file`` as text in the encoding that ``json.loads`` would find in its bytes."""
    encoding = json.detect_encoding(file.read(4))
    file.seek(0)
    return io.TextIOWrapper(file, encoding, errors="surrogatepass", newline="")


def members(file: TextIO) -> Iterator[tuple[str, Any]]:
    """Key and value of each member of the object in ``file``, in order, also of those whose key comes again.

    A list is an iterator over its entries; it ends when the next member is asked for.

    Raises:
        NoObjectError: if the text holds something else, or nothing.
        ValueError, RecursionError: if it is no JSON; says where, as ``json.loads`` does.
    """
    text = _Text(file)
    if text.peek() != "{":
        raise NoObjectError
    for _ in text.listed("{", "}"):
        if text.peek() != '"':
            raise text.error("Expecting property name enclosed in double quotes")
        key = text.value()
        text.take(":")
        if text.peek() != "[":
            yield key, text.value()
            continue
        entries = (text.value() for _ in text.listed("[", "]"))
        yield key, entries
        for _ in entries:  # those that were not asked for
            pass
    if text.peek():
        raise text.error("Extra data")


class _Text:
    """A text from a place on, of which a window is in memory."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._window, self._at, self._ended = "", 0, False
        self._line, self._column, self._char = 1, 1, 0  # of the first character in the window

    def peek(self) -> str:
        """The next character that is no space, which is then the next one; empty at the end."""
        while True:
            self._at = _end_of_space(self._window, self._at)
            if self._at < len(self._window) or self._ended:
                return self._window[self._at : self._at + 1]
            self._fill()

    def take(self, wanted: str) -> str:
        """Step over the next character, which has to be one of ``wanted``."""
        found = self.peek()
        if not found or found not in wanted:
            raise self.error(f"Expecting {wanted[0]!r} delimiter")
        self._at += 1
        return found

    def listed(self, opening: str, closing: str) -> Iterator[None]:
        """One step for each thing between brackets, which the caller then reads."""
        self.take(opening)
        if self.peek() == closing:
            self.take(closing)
            return
        yield
        while self.take(f",{closing}") == ",":
            yield

    def value(self) -> Any:
        """Step over the next value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._window, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self.error(error.msg, error.pos) from None
            else:
                if self._ended or end + _TAIL < len(self._window):
                    self._at = end
                    return value
            self._fill()

    def error(self, what: str, at: int | None = None) -> ValueError:
        """What is wrong at the next character, or at another in the window."""
        line, column, char = self._place(self._at if at is None else at)
        return ValueError(f"{what}: line {line} column {column} (char {char})")

    def _place(self, at: int) -> tuple[int, int, int]:
        """Line and column, both from 1, and number of a character in the window."""
        lines = self._window.count("\n", 0, at)
        column = at - self._window.rfind("\n", 0, at) if lines else self._column + at
        return self._line + lines, column, self._char + at

    def _fill(self) -> None:
        """Drop what was stepped over, and read as much again as is left, so that a long value takes few attempts."""
        self._line, self._column, self._char = self._place(self._at)
        self._window, self._at = self._window[self._at :], 0
        try:
            piece = self._file.read(max(_PIECE, len(self._window)))
        except UnicodeDecodeError as error:
            raise ValueError(f"no {error.encoding} text past line {self._line}: {error.reason}") from None
        self._window += piece
        self._ended = not piece


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at

"""A JSON object read entry by entry is what ``json.loads`` makes of it, and takes little memory."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pack_source import write_source
from rfstream.dataset import json_stream
from rfstream.dataset.json_stream import NoObjectError, members, open_text
from rfstream.dataset.layouts import find_splits, read_split
from rfstream.dataset.shard_plan import plan_shards

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5)
VALUES = st.recursive(
    LEAVES | st.sampled_from(["\ud800", 2**70, -0.0, 1e300]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
PIECES = st.integers(1, 40)


def read(data: bytes, piece: int = 7) -> dict[str, Any]:
    """The whole object, with the text read in pieces of so many characters."""
    with patch.object(json_stream, "_PIECE", piece):
        text = open_text(io.BytesIO(data))
        return {key: list(value) if isinstance(value, Iterator) else value for key, value in members(text)}


@given(
    st.dictionaries(st.text(max_size=3), VALUES, max_size=5),
    st.sampled_from([None, 0, 2, "\t"]),
    st.booleans(),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]),
    PIECES,
)
def test_it_is_what_json_makes_of_it(document: Any, indent: Any, ascii_only: bool, encoding: str, piece: int) -> None:
    data = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode(encoding, "surrogatepass")
    assert repr(read(data, piece)) == repr(json.loads(data))


@given(st.dictionaries(st.text("ab", max_size=2), VALUES, max_size=4), st.data(), PIECES)
def test_it_takes_no_more_and_no_less_than_json(document: Any, data: st.DataObject, piece: int) -> None:
    text = json.dumps(document)
    at = data.draw(st.integers(1, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from(["", ",", "]", "}", ":", '"', "1", "-", ".", "e", " ", "[{"]))
    damaged += text[at + data.draw(st.integers(0, 1)) :] if data.draw(st.booleans()) else ""
    try:
        expected = repr(json.loads(damaged))
    except ValueError:
        with pytest.raises(ValueError):
            read(damaged.encode(), piece)
    else:
        assert repr(read(damaged.encode(), piece)) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"images": [{"id": 1},\n {"id": 2}\n {"id": 3}]}',
        '{"images": [{"id": 1},\n {"id": tru}]}',
        '{"a": 1,\n\n "images" 2}',
        '{"a": [1, 2, 3]} {}',
        '{"a": [1, 2',
        '{"a": [1, 2]',
        '{"a": "\n"}',
    ],
)
def test_it_says_where_a_text_is_no_json(text: str) -> None:
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    with pytest.raises(ValueError) as found:
        read(text.encode())
    assert str(found.value).partition(": line")[2] == str(expected.value).partition(": line")[2]


def test_what_is_no_object_or_no_text_is_told_apart() -> None:
    for text in (b"", b"[1]", b"3", b" null"):
        with pytest.raises(NoObjectError):
            read(text)
    with pytest.raises(ValueError, match="no utf-8 text past line 1: invalid start byte"):
        read(b'{"a": 1,\n"b": "' + 20 * b"x" + b'\xff"}')


def test_a_list_that_is_not_asked_for_is_stepped_over() -> None:
    text = open_text(io.BytesIO(b'{"a": [1, [2], 3], "b": [4, 5], "c": 6}'))
    assert [(key, next(value) if key == "b" else None) for key, value in members(text)] == [
        ("a", None),
        ("b", 4),
        ("c", None),
    ]


def test_planning_a_pack_takes_less_memory_than_its_file(tmp_path: Path) -> None:
    file = write_source(tmp_path, 2000, 15_000, photos=False)
    read_split(find_splits(tmp_path)["train"], "remap")  # what is imported and cached counts for nothing
    tracemalloc.start()
    plans = plan_shards(read_split(find_splits(tmp_path)["train"], "remap"), 1_000_000, "tar", None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plans) > 5
    # A window of the text and what decoding it takes are a few MB however large the file is.
    assert peak < 6e6 + 0.5 * file.stat().st_size

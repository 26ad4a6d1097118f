"""Which categories there are in tars that others wrote: as their annotations call them, or as the user names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rfstream.dataset import storage
from rfstream.dataset.foreign_json import Category
from rfstream.dataset.index import check_categories
from rfstream.dataset.values import short
from rfstream.errors import DatasetError

_MAX_NUMBER = 2**20
"""Categories without names are numbers from 0 on; as many as could be meant."""


def read_categories(url: str) -> list[dict[str, Any]]:
    """The categories in the JSON file at ``url``: a list of names, whose ids are 0, 1, 2, ...; an object of ids and
    names; or one with COCO's ``categories``, such as an annotation file or the index of a pack.

    Raises:
        DatasetError: if it is none of these.
    """
    document = storage.read_json(url)
    categories: list[Any] = []
    if isinstance(document, dict) and isinstance(document.get("categories"), list):
        categories = document["categories"]
    elif isinstance(document, dict):
        categories = [{"id": int(key) if key.isdecimal() else key, "name": name} for key, name in document.items()]
    elif isinstance(document, list):
        categories = [{"id": number, "name": name} for number, name in enumerate(document)]
    if not categories or not all(isinstance(category, dict) for category in categories):
        raise DatasetError(
            f"{url}: holds no names of categories; make it a list of names, an object of ids and names, or one with "
            "COCO's list 'categories'"
        )
    check_categories(url, categories, "remap")
    return categories


def categories_of(used: Mapping[Category, str], given: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The categories of a split whose annotations use those in ``used``, each with a sample that does, for messages.

    They are those ``given``; without any, texts are names, in alphabetical order, and a number is the id of a category
    that bears it as its name.

    Raises:
        DatasetError: if there are numbers as well as texts, or one that is not among those given.
    """
    texts = sorted(category for category in used if isinstance(category, str))
    numbers = sorted(category for category in used if isinstance(category, int))
    if texts and numbers:
        raise DatasetError(
            f"{used[texts[0]]} calls a category {texts[0]!r}, and {used[numbers[0]]} calls one {numbers[0]}; write all "
            "of them as names, or all as ids"
        )
    if given is not None:
        return _checked(used, texts, given)
    if texts:
        return [{"id": number, "name": name} for number, name in enumerate(texts)]
    odd = [number for number in numbers if not 0 <= number < _MAX_NUMBER]
    if odd:
        raise DatasetError(f"{used[odd[0]]} uses category {odd[0]}; name the categories with --names")
    return [{"id": number, "name": str(number)} for number in range(max(numbers, default=-1) + 1)]


def _checked(
    used: Mapping[Category, str], texts: Sequence[str], given: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """``given``, if they say which category each in ``used`` is."""
    names = [category["name"] for category in given]
    for name in texts:
        if names.count(name) > 1:
            raise DatasetError(
                f"{used[name]} uses category {name!r}, and --names has two of that name; tell them apart"
            )
    known = set(names) if texts else {category["id"] for category in given}
    for category, where in used.items():
        if category not in known:
            raise DatasetError(f"{where} uses category {short(category)}, which --names does not have; add it there")
    return list(given)


def ids_of(categories: Sequence[Mapping[str, Any]]) -> dict[Category, int]:
    """The id of each category by what annotations may call it, its name or its id."""
    ids: dict[Category, int] = {category["name"]: category["id"] for category in categories}
    return ids | {category["id"]: category["id"] for category in categories}

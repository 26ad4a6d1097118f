"""The samples of a split before they are packed: in memory is what shards are cut by, not the annotations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from rfstream.dataset.annotations import Annotations
from rfstream.dataset.shards import Item, tar_bytes
from rfstream.plan.keys import IntArray

_OPEN, _BETWEEN, _CLOSE = b', "annotations": [', b", ", b"]}"


@dataclass(frozen=True, slots=True)
class Planned:
    """One sample whose JSON member is still to be put together.

    Attributes:
        image, ext, size, width, height: as of :class:`Item`.
        about: what the JSON member says of the image, as JSON without the closing bracket.
        annotations: among which its own have the numbers ``rows``, int64 (n,).
        sidecar_size: what the JSON member will have, bytes.
    """

    image: str
    ext: str
    size: int
    width: int | None
    height: int | None
    about: bytes
    annotations: Annotations
    rows: IntArray
    sidecar_size: int

    def item(self) -> Item:
        """The sample with its JSON member, as ``json.dumps`` writes that."""
        texts = (self.annotations.text(row) for row in self.rows.tolist())
        sidecar = self.about + _OPEN + _BETWEEN.join(texts) + _CLOSE
        return Item(self.image, self.ext, self.size, sidecar, self.width, self.height, len(self.rows))


def sidecar_sizes(about: IntArray, annotations: IntArray, counts: IntArray) -> IntArray:
    """Bytes of JSON members, int64 (n,), from those of their parts, summed over an image's annotations, and counts."""
    sizes: IntArray = about + len(_OPEN) + annotations + len(_BETWEEN) * np.maximum(counts - 1, 0) + len(_CLOSE)
    return sizes


class Items(Sequence[Item]):
    """Samples in order, each put together when it is asked for."""

    def __init__(self, planned: Iterable[Planned]) -> None:
        self._planned = list(planned)

    def __len__(self) -> int:
        return len(self._planned)

    @overload
    def __getitem__(self, at: int) -> Item: ...

    @overload
    def __getitem__(self, at: slice) -> Items: ...

    def __getitem__(self, at: int | slice) -> Item | Items:
        return Items(self._planned[at]) if isinstance(at, slice) else self._planned[at].item()

    def taken(self, order: Iterable[int]) -> Items:
        """Those with the numbers ``order``, in that order."""
        return Items(self._planned[row] for row in order)

    @property
    def nbytes(self) -> int:
        """Bytes of their images."""
        return sum(planned.size for planned in self._planned)

    def tar_bytes(self) -> Iterator[int]:
        """What each takes up in a tar."""
        return (tar_bytes(planned.size, planned.sidecar_size) for planned in self._planned)

"""Memory for batches in the training process, used again when its batch is gone.

An allocation of tens of megabytes comes from the kernel as zeroed pages, which takes about as long as filling it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_KEPT = 4
"""Buffers that are kept for later at most: a batch in use and the next, as bytes and as floats."""
_kept: list[npt.NDArray[np.uint8]] = []
_lock = threading.Lock()


def empty(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array like ``np.empty``'s, in memory that no array and no tensor holds any more if there is."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    with _lock:
        for i in range(len(_kept)):
            buffer = _kept[i]
            # Views and tensors hold their base: three are the list, this name and the call itself.
            if nbytes <= buffer.nbytes <= 2 * nbytes and sys.getrefcount(buffer) == 3:
                _kept.append(_kept.pop(i))
                break
        else:
            buffer = np.empty(nbytes, dtype=np.uint8)
            _kept.append(buffer)
            del _kept[:-_KEPT]
    return buffer[:nbytes].view(dtype).reshape(shape)


def copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy of ``array`` in memory that :func:`empty` gives."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy

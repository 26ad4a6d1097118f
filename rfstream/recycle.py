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

_SPARE = 4
"""Free buffers that are left when another has to be made. Those in use are known too, since what is in use together
will be wanted together again: one for each camera of a batch, say."""
_kept: list[npt.NDArray[np.uint8]] = []
_lock = threading.Lock()


def empty(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array like ``np.empty``'s, in memory that no array and no tensor holds any more if there is."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    with _lock:
        for i in range(len(_kept)):
            if nbytes <= _kept[i].nbytes <= 2 * nbytes and _is_free(i):
                buffer = _kept.pop(i)
                break
        else:
            buffer = np.empty(nbytes, dtype=np.uint8)
            free = [i for i in range(len(_kept)) if _is_free(i)]
            for i in reversed(free[:-_SPARE]):
                del _kept[i]
        _kept.append(buffer)
    return buffer[:nbytes].view(dtype).reshape(shape)


def _is_free(i: int) -> bool:
    """Whether no view and no tensor holds buffer ``i``: each holds its base."""
    return sys.getrefcount(_kept[i]) == 2  # the list, and the call itself


def copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy of ``array`` in memory that :func:`empty` gives."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy

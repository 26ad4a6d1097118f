"""Memory for batches and images, used again when what it held is gone.

An allocation of tens of megabytes comes from the kernel as zeroed pages, which takes about as long as filling it.
"""

from __future__ import annotations

import ctypes
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
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
LARGEST_HEAP_BLOCK = 32 << 20
"""The largest that glibc lets one choose: a larger image has pages of its own, and gives them back."""
KEPT_BYTES = 128 << 20
"""Free memory that glibc keeps at most; and the largest image whose memory is worth keeping apart from it."""
_kept: list[npt.NDArray[np.uint8]] = []
_lock = threading.Lock()


def keep_freed_memory() -> None:
    """Let this process keep the memory of images that it is done with, where glibc would hand it back to the kernel.

    A decoder frees and asks for the same few megabytes again and again: 7 % of its CPU goes into zeroed pages else.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's: see mallopt(3)
        mallopt(_M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


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

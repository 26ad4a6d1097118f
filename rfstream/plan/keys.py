"""Counter-based random numbers: every draw is a pure function of the integers that name it.

Philox-4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is keyed with a BLAKE2b digest of
those integers. Only raw 64-bit words are used, since NumPy promises those to stay the same between its releases
(NEP 19) and does not promise that of ``Generator.permutation``.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def key_of(purpose: str, *words: int) -> int:
    """128-bit key of ``words`` (each a signed 64-bit integer) for one named ``purpose``."""
    digest = hashlib.blake2b(struct.pack(f"<{len(words)}q", *words), digest_size=16, person=purpose.encode()[:16])
    return int.from_bytes(digest.digest(), "little")


def sample_key(seed: int, epoch: int, position: int) -> int:
    """64-bit augmentation key of the sample at ``position`` of an epoch's order.

    No worker, rank, node or retry enters it, so neither do they enter the pixels.
    """
    return key_of("rfstream.sample", seed, epoch, position) & (2**64 - 1)


def camera_key(key: int, camera: str) -> int:
    """64-bit augmentation key of ``camera`` in the sample that has ``key``: by its name, so that which others are
    streamed does not enter."""
    digest = hashlib.blake2b(struct.pack("<Q", key) + camera.encode(), digest_size=8, person=b"rfstream.camera")
    return int.from_bytes(digest.digest(), "little")


def permutation(n: int, purpose: str, *words: int) -> IntArray:
    """A permutation of ``range(n)``, int64 (n,): that which sorts n random numbers.

    Each number carries its index in its lowest bits, so one plain in-place sort gives the permutation, ties included:
    it cannot depend on which sorting algorithm NumPy picks for a machine. At least 39 bits stay random up to 2**25.
    """
    index_bits = np.uint64(max(n - 1, 1).bit_length())
    numbers = np.random.Philox(key=key_of(purpose, *words)).random_raw(n)
    numbers >>= index_bits
    numbers <<= index_bits
    numbers |= np.arange(n, dtype=np.uint64)
    numbers.sort()
    numbers &= np.uint64((1 << int(index_bits)) - 1)
    return numbers.view(np.int64)

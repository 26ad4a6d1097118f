"""How many images a second a stream gives, and what limits it: the lowest of a few rates."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class HandOff:
    """What handing a batch to a rank costs beside decoding it, and how many batches one execution hands out at most.

    CPU-seconds a batch and a byte, of the decode actor, and of coordinator, raylets and rank together. Bytes have no
    limit but these costs: the coordinator sees no pixels.
    """

    actor_s: float
    actor_byte_s: float
    others_s: float
    others_byte_s: float
    batches_per_s: float

    def of_actor(self, batch_bytes: int) -> float:
        """CPU-seconds that a batch costs the actor that made it."""
        return self.actor_s + self.actor_byte_s * batch_bytes

    def of_all(self, batch_bytes: int) -> float:
        """CPU-seconds that a batch costs all processes together."""
        return self.of_actor(batch_bytes) + self.others_s + self.others_byte_s * batch_bytes


MEASURED = HandOff(
    actor_s=0.005,
    actor_byte_s=0.4e-9,
    others_s=0.010,
    others_byte_s=0.5e-9,
    batches_per_s=200,
)
"""Of who has spent what by ``benchmarks/split_scale.py``, for cores as quiet as those on which
``benchmarks/hand_off.py`` hands out 70 batches of 16 MB a second with two of them: good to a factor of two."""


@dataclass(frozen=True)
class Work:
    """What a batch takes."""

    seconds_per_image: float
    """CPU-seconds to read and decode an image."""
    batch_size: int
    """Images."""
    batch_bytes: int
    """Decoded."""
    encoded_bytes: int
    """Of its images and their annotations in the pack."""


@dataclass(frozen=True)
class Forecast:
    """``by_part``: images a second of all ranks together that each part would give if the others gave any number."""

    by_part: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """The slowest part: who consumes is taken to wait for nothing else."""
        return min(self.by_part, key=self.by_part.__getitem__)

    @property
    def images_per_s(self) -> float:
        """What the slowest part leaves."""
        return self.by_part[self.bottleneck]


def forecast(work: Work, actors: int, cores: int | None = None, read_bytes_per_s: float = math.inf) -> Forecast:
    """What a stream gives, with the hand-off's costs as :data:`MEASURED`.

    Args:
        work: what a batch takes.
        actors: decode actors, one core each.
        cores: all that actors, Ray and ranks share; ``None`` if each has its own.
        read_bytes_per_s: what storage gives all readers together.
    """
    decoding = work.seconds_per_image * work.batch_size
    handing = MEASURED.of_actor(work.batch_bytes)
    batches = {
        "decoding" if decoding >= handing else "hand-off in the actors": actors / (decoding + handing),
        "cores": math.inf if cores is None else cores / (decoding + MEASURED.of_all(work.batch_bytes)),
        "hand-off": MEASURED.batches_per_s,
        "storage": read_bytes_per_s / work.encoded_bytes,
    }
    return Forecast({part: rate * work.batch_size for part, rate in batches.items()})

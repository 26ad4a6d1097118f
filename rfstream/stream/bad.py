"""A sample that can't be decoded: what is known of it, and the error that says so."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import UnidentifiedImageError

from rfstream.dataset.reader import EncodedSample
from rfstream.errors import SampleError


@dataclass(frozen=True)
class BadSample:
    """``offset`` is the byte of ``shard`` where the image begins; ``file_name`` is empty if the annotations can't be
    read."""

    shard: str
    key: str
    file_name: str
    offset: int
    reason: str

    def __str__(self) -> str:
        name = f" (file {self.file_name})" if self.file_name else ""
        return (
            f"shard {self.shard}, key {self.key}{name}: {self.reason} (its image is at byte {self.offset} of the shard)"
        )


class BadSampleError(SampleError):
    """One :class:`BadSample`, and what to do about it."""

    def __init__(self, bad: BadSample, advice: str = "repair or remove the file and pack again") -> None:
        super().__init__(bad, advice)
        self.bad = bad
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.bad}; {self.advice}"


def bad_sample(sample: EncodedSample, name: str, error: BaseException) -> BadSampleError:
    """The error for a sample that can't be decoded; ``name`` is its file name, as far as it is known."""
    if isinstance(error, UnidentifiedImageError):  # its text names the address of a buffer
        reason = "the image is of no known format, or its header is damaged"
    else:
        reason = " ".join(str(error).split()) or type(error).__name__
    return BadSampleError(BadSample(sample.shard, sample.key, name, sample.offset, reason))

"""Every error that rfstream raises on purpose.

A message is one sentence a user can act on: it names the file, the shard and key, the field, and what to do.
Command-line entry points print it and exit with status 1; anything else that escapes is a defect of ours.
"""

import re


class RFStreamError(Exception):
    """Base of all errors with a message meant for the user, of whose URLs it keeps no secrets."""

    def __init__(self, *said: object) -> None:
        super().__init__(*(redacted(each) if isinstance(each, str) else each for each in said))


def redacted(text: str) -> str:
    """``text`` without what URLs in it may hold of secrets: passwords, and signatures in queries."""
    text = re.sub(r"://[^/@\s]+@", "://", text)
    return re.sub(r"(://[^\s?'\")]+)\?[^\s'\")]+?(?=[:;,.]?(?:[\s'\")]|$))", r"\1", text)


class ConfigError(RFStreamError):
    """A configuration key, type or value that can't work."""


class DatasetError(RFStreamError):
    """A dataset, pack, index or annotation file that can't be read or packed as it is."""


class SampleError(DatasetError):
    """One sample that can't be decoded; names shard, key, file and reason."""


class PlanError(RFStreamError):
    """Sizes that admit no plan: too few samples for one window, a world size that does not divide, ..."""


class StateError(RFStreamError):
    """A saved position that does not belong to this stream."""


class StreamError(RFStreamError):
    """The running pipeline failed, stalled past its deadline, or delivered something the plan did not say."""

"""Runs of packets to frames, in decoders that stay open from one run to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rfstream.dataset.retry import describe
from rfstream.episodes.container import import_av
from rfstream.episodes.sample import Run

_KEPT = 4
"""Decoders that stay open: each holds some frames, and most datasets have one kind of video."""

VideoFrame = Any
"""PyAV's."""


class VideoDecoder:
    """Decodes runs. Opening a decoder takes a quarter of the time that a run of AV1 with two packets does, so it is
    flushed and used again, unless it has failed. Not to be used by several threads."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, bytes], Any] = {}  # in the order of their last use

    def frames(self, run: Run) -> dict[int, VideoFrame | str]:
        """Each wanted frame of ``run`` by the time at which it is shown, or in words why there is none.

        Words, since an exception's traceback would keep the run alive as long as the result.

        All in one pass; if that fails, each in a pass of its own that ends with it, so that what is wrong with one
        frame does not depend on which others are wanted.
        """
        last = {int(pts): at for at, pts in enumerate(run.pts)}
        try:
            return dict(self._decoded(run, run.wanted, len(run.pts)))
        except Exception:
            found: dict[int, VideoFrame | str] = {}
            for pts in run.wanted:
                try:
                    found |= self._decoded(run, frozenset([pts]), last[pts] + 1)
                except Exception as error:
                    found[pts] = describe(error)
            return found

    def _decoded(self, run: Run, wanted: frozenset[int], packets: int) -> dict[int, VideoFrame]:
        """Frames of the first ``packets`` packets.

        Raises:
            ValueError: if a wanted frame does not come.
            Exception: what FFmpeg raises for packets that it can't decode.
        """
        av = import_av()
        ends = np.cumsum(run.size[:packets])
        found: dict[int, VideoFrame] = {}
        with self._context(run) as context:
            for at in range(packets + 1):
                packet = None  # what the decoder still holds
                if at < packets:
                    packet = av.Packet(run.data[ends[at] - run.size[at] : ends[at]])
                    packet.pts, packet.dts = int(run.pts[at]), int(run.dts[at])
                    if run.codec == "h264":  # elsewhere FFmpeg also leaves out frames that others need
                        context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
                for frame in context.decode(packet):
                    if frame.pts in wanted and not frame.is_corrupt:
                        found[frame.pts] = frame
            if found.keys() != wanted:
                raise ValueError("the decoder gives no frame for that time")
        return found

    @contextmanager
    def _context(self, run: Run) -> Iterator[Any]:
        """A decoder for ``run`` that knows of no other."""
        kind = run.codec, run.extradata
        context = self._open.pop(kind, None) or _opened(run)
        yield context  # what raises here is not used again
        context.flush_buffers()
        self._open[kind] = context
        if len(self._open) > _KEPT:
            del self._open[next(iter(self._open))]


def _opened(run: Run) -> Any:
    context = import_av().CodecContext.create(run.codec, "r")
    context.extradata = run.extradata
    context.thread_count = 1  # an actor has one CPU
    context.options = {"err_detect": "explode"}  # or a damaged frame would be made up from others
    return context

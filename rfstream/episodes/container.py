"""The packets of a video file: where each lies, when it is shown, and which can be decoded first.

All of it stands in an MP4's header. PyAV reads it there, and is given zeros in the place of the pixels' bytes, so that
a file in a bucket costs a few small ranges. What is asked of a file later are ranges of packets.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rfstream.dataset import storage
from rfstream.errors import ConfigError, DatasetError
from rfstream.plan.keys import IntArray

_BOX = 16  # bytes of a box's header at most
_PIECE = 4096
"""What is read of a box at first, bytes: all of most."""


@dataclass(frozen=True, eq=False)
class PacketTable:
    """A video file's packets in the order they are decoded in, and its frames in the order they are shown in.

    Attributes:
        url: path or URL of the file.
        codec: name of its decoder.
        extradata: what the decoder needs before any packet.
        offset, size: bytes of each packet, int64 (P,).
        pts, dts: when it is shown and decoded, in units of the file, int64 (P,).
        packet: packet of each frame, int64 (F,).
        key: packet to decode from for each frame, int64 (F,), never after ``packet``.
    """

    url: str
    codec: str
    extradata: bytes
    offset: IntArray
    size: IntArray
    pts: IntArray
    dts: IntArray
    packet: IntArray
    key: IntArray

    def __len__(self) -> int:
        return len(self.packet)


def read_packets(url: str, fps: float, deadline_s: float) -> PacketTable:
    """The packets of the video file at ``url``, whose frames follow each other at ``fps``.

    Raises:
        DatasetError: if the file is absent, cut short, holds no video, or its frames have other times.
        ConfigError: if PyAV is not installed.
    """
    av = import_av()
    with storage.open_binary(url, deadline_s) as opened:
        size = opened.seek(0, io.SEEK_END)
    try:
        # Without parsers, which would look for key frames in the zeros.
        with av.open(_Header(url, size, deadline_s), options={"fflags": "noparse"}) as container:
            stream = container.streams.video[0]
            # Packets themselves are not kept: each holds as many bytes of zeros as the file has of pixels.
            found = [
                (p.pos, p.size, p.pts, p.dts, p.is_keyframe, p.is_discard, p.is_corrupt)
                for p in container.demux(stream)
                if p.size
            ]
            is_cut = len(found) < stream.frames or any(is_corrupt for *_, is_corrupt in found)
            context, unit = stream.codec_context, float(stream.time_base)
            codec, extradata = context.name, bytes(context.extradata or b"")
            # Other containers wrap packets, so that their bytes do not begin where FFmpeg says that they lie.
            is_mp4 = "mp4" in container.format.name.split(",")
    except (av.error.FFmpegError, IndexError, TypeError) as error:
        raise DatasetError(f"{url}: no video can be read from it ({storage.describe(error)}); copy it again") from None
    if is_cut:
        raise DatasetError(f"{url}: its header speaks of more frames than its {size} bytes hold; copy it again")
    if not is_mp4 or not found or any(value is None for packet in found for value in packet):
        raise DatasetError(f"{url}: its header does not say where and when each frame is; write it again as MP4")
    offset, nbytes, pts, dts, is_key, is_hidden, _ = np.array(found, dtype=np.int64).T.copy()
    if (offset[1:] < (offset + nbytes)[:-1]).any():
        raise DatasetError(f"{url}: its frames do not lie in the order that they are decoded in; write it again")
    shown = np.flatnonzero(is_hidden == 0)
    packet = shown[np.argsort(pts[shown], kind="stable")]
    _check_times(url, pts[packet].astype(np.float64) * unit, fps)
    return PacketTable(url, codec, extradata, offset, nbytes, pts, dts, packet, _keys(url, pts, is_key, packet))


def import_av() -> Any:
    """PyAV, which decodes video.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ConfigError(f"video needs PyAV ({error}): pip install 'rfstream[episodes]'") from error
    av.logging.set_level(None)  # what goes wrong is raised
    return av


def _check_times(url: str, seconds: npt.NDArray[np.float64], fps: float) -> None:
    """Raise DatasetError unless frame k of a file is shown at k / fps."""
    if (np.diff(seconds) <= 0).any():
        at = int(np.flatnonzero(np.diff(seconds) <= 0)[0])
        raise DatasetError(f"{url}: frames {at} and {at + 1} are both shown at {seconds[at]:g} s; write it again")
    off = np.flatnonzero(np.rint(seconds * fps) != np.arange(len(seconds)))
    if len(off):
        at = int(off[0])
        raise DatasetError(
            f"{url}: frame {at} is shown at {seconds[at]:g} s, which is not frame {at} at fps={fps:g}; correct fps in "
            "meta/info.json, or write the file again"
        )


def _keys(url: str, pts: IntArray, is_key: IntArray, packet: IntArray) -> IntArray:
    """The last key packet that is neither decoded nor shown after each frame: what leads an open group of pictures
    is shown before its key and needs the group before."""
    keys = np.flatnonzero(is_key)
    if not len(keys) or keys[0] > packet.min():
        raise DatasetError(f"{url}: its first frame is no key frame, so nothing before the next can be decoded")
    if (np.diff(pts[keys]) <= 0).any():
        raise DatasetError(f"{url}: key frames are not shown in the order that they lie in; write it again")
    by_decoding = np.searchsorted(keys, packet, side="right")
    by_showing = np.searchsorted(pts[keys], pts[packet], side="right")
    chosen = np.minimum(by_decoding, by_showing) - 1
    found: IntArray = keys[np.maximum(chosen, 0)]
    return found


class _Header(storage.Positioned):
    """A video file with zeros in the place of its payload.

    The boxes of a file are those of ISO/IEC 14496-12, 4.2: a size in 32 bits, a name, and where the size is 1 another
    in 64.
    """

    def __init__(self, url: str, size: int, deadline_s: float) -> None:
        super().__init__(size)
        self._boxes: list[tuple[int, bytes]] = []
        at = 0
        while at + _BOX <= size:
            head = storage.read_range(url, at, min(at + _PIECE, size), deadline_s)
            nbytes, name, large = struct.unpack(">I4sQ", head[:_BOX])
            nbytes = {0: size - at, 1: large}.get(nbytes, nbytes)
            if nbytes < 8:
                return  # no box: PyAV says what is wrong
            end = min(at + nbytes, size)
            if name != b"mdat":
                rest = storage.read_range(url, at + len(head), end, deadline_s) if end > at + len(head) else b""
                self._boxes.append((at, (head + rest)[: end - at]))
            else:
                self._boxes.append((at, head[:_BOX]))
            at = end

    def read(self, size: int = -1) -> bytes:
        """See :class:`io.RawIOBase`."""
        end = self._size if size < 0 else min(self._at + size, self._size)
        data = bytearray(max(end - self._at, 0))
        for start, box in self._boxes:
            low, high = max(start, self._at), min(start + len(box), end)
            if low < high:
                data[low - self._at : high - self._at] = box[low - start : high - start]
        self._at += len(data)
        return bytes(data)

"""What a host has of a version that it is still fetching: verified chunks, which it passes on to further hosts."""

import mmap
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from protocol.errors import WeightsError
from protocol.weights.files import digest
from protocol.weights.format import DATA, Manifest

PARTIAL = ".partial"
"""Ending of the names of folders with a version that is being fetched, or removed."""
HELD = ".held"
"""Ending of the file that says which chunks of the file beside it are there."""
DELTA = "delta-"
_HEADER = struct.Struct("<ddQ")
"""Times of the first request and of the last chunk (monotonic seconds, 0: not yet), and chunks from before them."""


def transfer_file(manifest: Manifest) -> str:
    """Return the name of the file that a transfer fills: the data file, or a delta, each delta its own.

    Example:
        >>> rest = {"epoch": 0, "version": 1, "nbytes": 0, "tensors": [], "root": "", "chunk_bytes": 1}
        >>> transfer_file(Manifest(run="r", chunks=b"", **rest))
        'model.safetensors'
    """
    return DATA if manifest.encoding == "full" else f"{DELTA}{digest(manifest.delta_chunks).hex()[:16]}"


class HeldChunks:
    """Map with one byte for each chunk of a file, which one process writes and others of its host read.

    Args:
        path: the file that the chunks are of.
        count: its chunks.

    Raises:
        WeightsError: there is no map of so many chunks.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> own = HeldChunks.begin(path, 4, lacking=[1, 2])
        >>> other = HeldChunks(path, 4)
        >>> other.has(0), other.has(1), other.come, own.arrived(1), other.has(1), other.come, other.whole
        (True, False, 0, None, True, 1, False)
    """

    def __init__(self, path: Path, count: int) -> None:
        self._count = count
        try:
            with open(path.with_name(path.name + HELD), "r+b") as file:
                if os.fstat(file.fileno()).st_size != _HEADER.size + count:
                    raise WeightsError(f"{path}: its map is not of {count} chunks")
                # Invariant: a chunk's byte is set after its content is written. The map is never made shorter.
                self._map = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise WeightsError(f"{path}: {error}") from None

    @classmethod
    def begin(cls, path: Path, count: int, lacking: Iterable[int]) -> "HeldChunks":
        """Begin a transfer into a file, or go on with one. Readers of the map before see what comes.

        Args:
            lacking: numbers of the chunks that have to come; the others are there.
        """
        try:
            held = cls(path, count)
        except WeightsError:
            fresh = path.with_name(f"{path.name}{HELD}.new")
            fresh.write_bytes(bytes(_HEADER.size + count))
            fresh.rename(path.with_name(path.name + HELD))
            held = cls(path, count)
        flags = bytearray(b"\1" * count)
        for index in lacking:
            flags[index] = 0
        held._map[_HEADER.size :] = bytes(flags)
        _HEADER.pack_into(held._map, 0, time.monotonic(), 0.0, flags.count(1))
        return held

    def arrived(self, index: int) -> None:
        """Note that a chunk is verified and written."""
        self._map[_HEADER.size + index] = 1

    def end(self, path: Path) -> None:
        """Note that the last chunk has come, and remove the map's file. Who has it open keeps it."""
        began, _, before = _HEADER.unpack_from(self._map)
        _HEADER.pack_into(self._map, 0, began, time.monotonic(), before)
        path.with_name(path.name + HELD).unlink(missing_ok=True)

    def has(self, index: int) -> bool:
        """Return whether a chunk is there."""
        return self._map[_HEADER.size + index] == 1

    @property
    def number(self) -> int:
        """Chunks that are there."""
        return self._map[_HEADER.size :].count(1)

    @property
    def whole(self) -> bool:
        """Whether all chunks are there."""
        return self.number == self._count

    @property
    def come(self) -> int:
        """Chunks that have come since the transfer began."""
        return max(0, self.number - int(_HEADER.unpack_from(self._map)[2]))

    def seconds(self, now: float) -> float:
        """Return the seconds from the first request to the last chunk, or until now."""
        began, ended, _ = _HEADER.unpack_from(self._map)
        return max(0.0, float((ended or now) - began))

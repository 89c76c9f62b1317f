"""Versions that a server holds open: as they lie in a folder, and as deltas from one another.

An open file outlives its name. So a version that the learner has retired stays for as long as somebody is in the
middle of fetching it, and a delta has no name at all: whatever ends the process, nothing is left behind.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from protocol.errors import WeightsError
from protocol.weights.chunks import digests
from protocol.weights.delta import LARGEST_SHARE, make_delta
from protocol.weights.format import DATA, MANIFEST, Base, Manifest, parse_manifest, read_manifest, same_layout

IDLE_S = 60.0
"""Without a request for so long nobody is fetching it."""
MAX_NAMELESS = 2
"""Retired versions kept for those who are fetching them; and as many deltas."""

Locate = Callable[[int, int], Path]
"""Folder in which a version (epoch, number) lies, if it does."""


@dataclass(eq=False)
class OpenVersion:
    """What can be transferred: a file, and the manifest that tells its chunks."""

    manifest: Manifest
    encoded: bytes
    file: IO[bytes]
    used: float = 0.0
    transfers: int = 0
    """Going on now."""

    @property
    def nameless(self) -> bool:
        """Whether the memory is freed as soon as we close the file."""
        return os.fstat(self.file.fileno()).st_nlink == 0


class Shelf:
    """Opens versions and makes deltas; all of it blocks, and may run in any thread, for different keys at a time.

    Args:
        run: versions of another are refused.
        locate: only whole versions lie there, put there by a rename.
        scratch: where deltas lie while somebody fetches them, without a name; on the same memory as the versions.
    """

    def __init__(
        self, run: str, locate: Locate, scratch: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._locate, self._scratch, self._clock = run, locate, scratch, clock

    def open(self, epoch: int, version: int) -> OpenVersion:
        """A version as a whole.

        Raises:
            WeightsError: it is not there (any more), or is something else.
        """
        folder = self._locate(epoch, version)
        manifest = read_manifest(folder / MANIFEST)
        if (manifest.run, manifest.epoch, manifest.version) != (self._run, epoch, version):
            raise WeightsError(
                f"{folder} holds epoch {manifest.epoch} version {manifest.version} of run {manifest.run!r}"
            )
        try:
            file = open(folder / DATA, "rb")  # noqa: SIM115 (held open while it is served)
        except OSError as error:
            raise WeightsError(f"{folder}: {error}") from None
        try:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.nbytes:
                raise WeightsError(f"{folder}: {DATA} has {size} bytes, its manifest says {manifest.nbytes}")
        except BaseException:
            file.close()
            raise
        return self._held(manifest, file)

    def replaced(self, epoch: int, version: int, held: OpenVersion | None) -> bool:
        """Whether another file lies where a version was opened; one that is gone has not been replaced."""
        if held is None:
            return False
        try:
            now = (self._locate(epoch, version) / DATA).stat()
        except OSError:
            return False
        return not os.path.samestat(now, os.fstat(held.file.fileno()))

    def delta(self, new: OpenVersion, base: OpenVersion) -> OpenVersion | None:
        """The delta that makes ``new`` out of ``base``; None where the whole version is the better choice."""
        if not same_layout(base.manifest.tensors, new.manifest.tensors):
            return None
        nbytes = new.manifest.nbytes
        file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115 (held open while it is served)
        try:
            size = make_delta(
                base.file.fileno(),
                new.file.fileno(),
                nbytes,
                file.fileno(),
                largest=int(nbytes * LARGEST_SHARE),
            )
            if size is None:
                file.close()
                return None
            manifest = msgspec.structs.replace(
                new.manifest,
                encoding="xor-zstd",
                base=base.manifest.as_base,
                delta_bytes=size,
                delta_chunks=digests(file.fileno(), size, new.manifest.chunk_bytes),
            )
        except BaseException:
            file.close()
            raise
        return self._held(manifest, file)

    def _held(self, manifest: Manifest, file: IO[bytes]) -> OpenVersion:
        encoded = msgspec.msgpack.encode(manifest)
        parse_manifest(encoded, f"version {manifest.version}")  # nothing leaves that others would refuse
        return OpenVersion(manifest, encoded, file, self._clock())


VersionKey = tuple[int, int, Base | None]
"""Epoch, version, and what it is told by; None: as a whole."""


def superfluous(held: dict[VersionKey, OpenVersion], now: float) -> list[VersionKey]:
    """What to close: idle for long, or more nameless files than may be kept, the longest unused first."""
    free = sorted((key for key in held if not held[key].transfers), key=lambda key: held[key].used)
    gone = [key for key in free if now - held[key].used > IDLE_S]
    for deltas in (False, True):
        nameless = [key for key in held if (key[2] is not None) == deltas and held[key].nameless]
        closable = [key for key in free if key in nameless and key not in gone]
        excess = len([key for key in nameless if key not in gone]) - MAX_NAMELESS
        gone += closable[: max(0, excess)]
    return gone

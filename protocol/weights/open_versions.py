"""Versions that a server holds open: whole versions from a folder, and deltas between them.

An open file outlives its name. So a version that the learner has deleted stays readable while a client
fetches it. A delta has no name at all, so nothing is left on the disk, however the process ends.
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
"""Seconds without a request after which a version is closed."""
MAX_NAMELESS = 2
"""Upper limit of the deleted versions that are kept open, and of the deltas."""

Locate = Callable[[int, int], Path]
"""Function that returns the folder of a version (epoch, number), whether or not it exists."""


@dataclass(eq=False)
class OpenVersion:
    """An open file to transfer, and the manifest that lists its chunks."""

    manifest: Manifest
    encoded: bytes
    file: IO[bytes]
    used: float = 0.0
    transfers: int = 0
    """Number of transfers that are going on now."""

    @property
    def nameless(self) -> bool:
        """Whether the file has no name any more, so that closing it frees its memory."""
        return os.fstat(self.file.fileno()).st_nlink == 0


class VersionOpener:
    """Opener of versions and maker of deltas.

    Its methods block. Several threads may call them at the same time for different keys.

    Args:
        run: name of the run; versions of a different run are refused.
        locate: returns the folder of a version. Only whole versions lie there: a rename puts them there.
        scratch: folder for deltas, which have no names there; on the same memory as the versions.
    """

    def __init__(
        self, run: str, locate: Locate, scratch: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._locate, self._scratch, self._clock = run, locate, scratch, clock

    def open(self, epoch: int, version: int) -> OpenVersion:
        """Open a whole version.

        Raises:
            WeightsError: it is not there (any more), or its folder holds something else.
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
        """Return whether a different file lies now where ``held`` was opened; False if no file lies there."""
        if held is None:
            return False
        try:
            now = (self._locate(epoch, version) / DATA).stat()
        except OSError:
            return False
        return not os.path.samestat(now, os.fstat(held.file.fileno()))

    def delta(self, new: OpenVersion, base: OpenVersion) -> OpenVersion | None:
        """Make the delta from ``base`` to ``new``; return None if the whole version is the better choice."""
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
        # Serve nothing that clients would refuse.
        parse_manifest(encoded, f"version {manifest.version}")
        return OpenVersion(manifest, encoded, file, self._clock())


VersionKey = tuple[int, int, Base | None]
"""Epoch, version, and the base of the delta; None: the whole version."""


def versions_to_close(held: dict[VersionKey, OpenVersion], now: float) -> list[VersionKey]:
    """Return what to close: idle versions, and the longest unused nameless ones beyond `MAX_NAMELESS`."""
    free = sorted((key for key in held if not held[key].transfers), key=lambda key: held[key].used)
    gone = [key for key in free if now - held[key].used > IDLE_S]
    for deltas in (False, True):
        nameless = [key for key in held if (key[2] is not None) == deltas and held[key].nameless]
        closable = [key for key in free if key in nameless and key not in gone]
        excess = len([key for key in nameless if key not in gone]) - MAX_NAMELESS
        gone += closable[: max(0, excess)]
    return gone

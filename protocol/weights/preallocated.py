"""A data file allocated before its content is known: allocating pages takes longer than filling them."""

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from protocol.weights.chunks import HASH_THREADS, digest
from protocol.weights.format import DATA

COPY_BYTES = 4 * 2**20


class PreallocatedFile:
    """A folder with a data file of ``nbytes`` that is allocated and mapped into this process.

    Raises:
        OSError: there is no room for it. Filling the file later never fails for lack of room.
    """

    def __init__(self, root: Path, nbytes: int) -> None:
        self.folder, self.nbytes = Path(tempfile.mkdtemp(prefix="blank-", dir=root)), nbytes
        try:
            with open(self.folder / DATA, "w+b", buffering=0) as file:
                # Lack of room is an exception here; in a write through the map it would be a fatal signal.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self._memory = mmap.mmap(file.fileno(), nbytes)
        except OSError:
            self.discard()
            raise
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)

    def touch(self) -> None:
        """Make the system find and zero the memory now, which takes longer than filling it.

        Call it while other work goes on.
        """
        self._bytes[:: mmap.PAGESIZE] = 0

    def fill(self, pieces: Iterable[memoryview], step: int) -> bytes:
        """Write the pieces, ``nbytes`` bytes in all, and return the joined hashes of every ``step`` bytes.

        A piece need only be valid until the next is taken. Threads hash chunks as soon as they are written.
        """
        # Invariant: only this thread writes the memory; the pool's threads read ranges that are written.
        together = max(step, COPY_BYTES // step * step)

        def hash_chunks(first: int) -> bytes:
            content = memoryview(self._memory)[first : first + together]
            return b"".join(digest(content[i : i + step]) for i in range(0, len(content), step))

        written, hashing = 0, list[Future[bytes]]()
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            for piece in pieces:
                for start in range(0, len(piece), COPY_BYTES):
                    part = np.frombuffer(piece[start : start + COPY_BYTES], dtype=np.uint8)
                    self._bytes[written : written + len(part)] = part
                    written += len(part)
                    whole = self.nbytes if written == self.nbytes else written - together + 1
                    for first in range(len(hashing) * together, whole, together):
                        hashing.append(pool.submit(hash_chunks, first))
            return b"".join(future.result() for future in hashing)

    def discard(self) -> None:
        """Remove the folder; the file will not be used."""
        shutil.rmtree(self.folder, ignore_errors=True)

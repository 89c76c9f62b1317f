"""A data file allocated before its content is known, because allocating pages takes longer than filling them; and
the hashes of a file that is being written.
"""

import mmap
import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from protocol.weights.chunks import HASH_THREADS, digest
from protocol.weights.format import DATA

HASHED_TOGETHER_BYTES = 4 * 2**20
"""Bytes that a thread hashes at a time."""


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

    @property
    def memory(self) -> memoryview:
        """The bytes of the file, which may be written until the version is finished."""
        return memoryview(self._memory)

    def discard(self) -> None:
        """Remove the folder; the file will not be used."""
        shutil.rmtree(self.folder, ignore_errors=True)


class BackgroundHashes:
    """Hashes of every ``step`` bytes of some memory, computed by threads as soon as the bytes are written."""

    def __init__(self, content: memoryview, step: int) -> None:
        self._content, self._step = content, step
        self._together = max(step, HASHED_TOGETHER_BYTES // step * step)
        # Invariant: one thread at a time writes the memory and calls `written`; the pool reads written ranges only.
        self._hashing = list[Future[bytes]]()
        self._pool = ThreadPoolExecutor(HASH_THREADS, "hashing")

    def written(self, nbytes: int) -> None:
        """Hash what is complete now that the first ``nbytes`` bytes are written."""
        whole = nbytes if nbytes == len(self._content) else nbytes - self._together + 1
        for first in range(len(self._hashing) * self._together, whole, self._together):
            self._hashing.append(self._pool.submit(self._hash, first))

    def joined(self) -> bytes:
        """Wait for the hashes of the whole memory, which is written by now, and return them one after the other."""
        self.written(len(self._content))
        try:
            return b"".join(future.result() for future in self._hashing)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _hash(self, first: int) -> bytes:
        content = self._content[first : first + self._together]
        return b"".join(digest(content[i : i + self._step]) for i in range(0, len(content), self._step))

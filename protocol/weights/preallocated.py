"""A data file whose memory is made before its content is known: to allocate pages takes longer than to fill them."""

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


class Blank:
    """A folder with a data file of ``nbytes``, all of it allocated and mapped here.

    Raises:
        OSError: there is no room for it. To fill one in memory never fails for want of room.
    """

    def __init__(self, root: Path, nbytes: int) -> None:
        self.folder, self.nbytes = Path(tempfile.mkdtemp(prefix="blank-", dir=root)), nbytes
        try:
            with open(self.folder / DATA, "w+b", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # no room is an error here, a signal below
                self._memory = mmap.mmap(file.fileno(), nbytes)
        except OSError:
            self.discard()
            raise
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)

    def touch(self) -> None:
        """Have the system find and clear the memory now, which takes longer than to fill it: while others compute."""
        self._bytes[:: mmap.PAGESIZE] = 0

    def fill(self, pieces: Iterable[memoryview], step: int) -> bytes:
        """Write ``nbytes`` bytes, one piece behind the other; returns the hash of every ``step`` of them.

        A piece is valid until the next. Chunks are hashed in threads, some at a time, as soon as they are whole.
        """
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
        """It will not be filled."""
        shutil.rmtree(self.folder, ignore_errors=True)

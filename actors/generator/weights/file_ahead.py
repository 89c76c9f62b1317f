"""Maps the file of a version into memory before it is loaded, so that no load waits for the kernel.

A file in shared memory is mapped page by page, when each is first read. For 8 GB that takes one thread a second and
more, in which the engine would stand. A thread of its own does it while the engine still samples.
"""

import ctypes
import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14. An older kernel refuses it, and pages are mapped when they are read."""
TIMEOUT_S = 300.0
"""Longest time to map a file: one of 140 GB takes some seconds."""
PIECE_BYTES = 256 * 2**20
"""Bytes of a call."""


class FileAhead:
    """Maps one file at a time; a worker of an engine has one."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mapping weights")
        self._path = ""
        self._data: Future[torch.Tensor] | None = None

    def begin(self, path: str) -> None:
        """Begin to map a file, and return at once."""
        self._path, self._data = path, self._pool.submit(mapped, path)

    @property
    def ready(self) -> bool:
        """Whether the file that was begun is mapped, or cannot be; `take` says which."""
        return self._data is not None and self._data.done()

    def take(self, path: str) -> torch.Tensor:
        """Return a file's bytes, uint8. One that was not begun is mapped now.

        Raises:
            RuntimeError: the file cannot be mapped.
        """
        data, self._data = self._data, None
        if data is None or self._path != path:
            return mapped(path)
        try:
            return data.result(TIMEOUT_S)
        except TimeoutError:
            raise RuntimeError(
                f"{path} was not mapped within {TIMEOUT_S:g} s; look at the free memory and the disks of this host"
            ) from None


def file_bytes(path: str) -> torch.Tensor:
    """Return the bytes of a file, uint8. Each page is mapped when it is first read."""
    return torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)


def mapped(path: str) -> torch.Tensor:
    """Return the bytes of a file, uint8, with all pages mapped.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"weights"), file.flush()
        ...     bytes(mapped(file.name).numpy())
        b'weights'
    """
    data = file_bytes(path)
    # A call through ctypes lets other threads of Python run.
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, data.nbytes, PIECE_BYTES):
        if advise(data.data_ptr() + start, min(PIECE_BYTES, data.nbytes - start), POPULATE_READ):
            break
    return data

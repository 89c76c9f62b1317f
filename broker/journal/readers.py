"""Open files of the journal, for reading single records."""

import errno
import os
from pathlib import Path

from broker.errors import JournalError, TryLater
from broker.journal.records import file_name

MAX_OPEN = 16
TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of reading that come from a lack of resources, and say nothing about the file."""


class Readers:
    """At most `MAX_OPEN` open files, those that were read last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, int] = {}
        """Descriptors by number of the file, in the order of their last use."""

    def read(self, number: int, start: int, nbytes: int) -> bytes:
        """Return these bytes of a file; fewer if it ends before.

        Raises:
            JournalError: the file is missing or cannot be read.
            TryLater: the machine lacks the resources to read it now.
        """
        try:
            return os.pread(self._reader(number), nbytes, start)
        except OSError as error:
            kind = TryLater if error.errno in TRANSIENT else JournalError
            raise kind(f"{self._folder / file_name(number)}: {error.strerror}") from None

    def _reader(self, number: int) -> int:
        fd = self._open.pop(number, None)
        if fd is None:
            fd = os.open(self._folder / file_name(number), os.O_RDONLY | os.O_CLOEXEC)
        self._open[number] = fd
        while len(self._open) > MAX_OPEN:
            os.close(self._open.pop(next(iter(self._open))))
        return fd

    def forget(self, number: int) -> None:
        """Close a file, because it is deleted."""
        if number in self._open:
            os.close(self._open.pop(number))

    def close(self) -> None:
        """Close all files."""
        for fd in self._open.values():
            os.close(fd)
        self._open = {}

"""Follows a file of lines that another process writes."""

import os
from pathlib import Path
from typing import BinaryIO


class FileTail:
    """Follows a file of lines. A file that became shorter, or another file of its name, is read from its beginning.

    Example:
        >>> import tempfile
        >>> path, tail = Path(tempfile.mkdtemp()) / "lines", FileTail()
        >>> _ = path.write_bytes(b"one\\ntwo\\nthr")
        >>> tail.new_lines(path)
        (True, [b'one', b'two'])
        >>> with path.open("ab") as file: _ = file.write(b"ee\\n")
        >>> tail.new_lines(path)
        (False, [b'three'])
    """

    def __init__(self) -> None:
        self._inode, self._offset, self._rest = -1, 0, b""

    def new_lines(self, path: Path) -> tuple[bool, list[bytes]]:
        """Return whether the file was read from its beginning or is gone, and the whole lines since the last call."""
        try:
            with open(path, "rb") as file:
                return self.take(file)
        except OSError:
            gone, self._inode = self._inode != -1, -1
            return gone, []

    def take(self, file: BinaryIO) -> tuple[bool, list[bytes]]:
        """Do what `new_lines` does with a file that is open.

        Raises:
            OSError: it cannot be read.
        """
        stat = os.fstat(file.fileno())
        anew = stat.st_ino != self._inode or stat.st_size < self._offset
        if anew:
            self._inode, self._offset, self._rest = stat.st_ino, 0, b""
        file.seek(self._offset)
        *lines, self._rest = (self._rest + file.read()).split(b"\n")
        self._offset = file.tell()
        return anew, lines

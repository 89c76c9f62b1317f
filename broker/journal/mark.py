"""The mark in the journal's `lock` file: up to which byte of which file the disk has the journal.

A journal that holds less than its mark says has lost something, even if nothing else shows it.
"""

from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from broker.errors import JournalError

LOCK = "lock"
MAX_FILE = (1 << 32) - 1
_TEXT = b"%08d %016d"
_CRC = b" %08x\n"


class Mark(NamedTuple):
    """The newest file that the disk has from its beginning, and how many of its bytes.

    ``file`` 0: nothing is known. ``nbytes`` 0: the mark of an earlier version, which named the file alone.
    """

    file: int = 0
    nbytes: int = 0

    def bytes_of(self, file: int) -> int:
        """Return how many bytes of a file the disk is known to have; 0 if the mark names a different file."""
        return self.nbytes if file == self.file else 0

    def covers(self, file: int, offset: int) -> bool:
        """Return whether the disk is known to have had the byte at this offset.

        Example:
            >>> mark = Mark(2, 100)
            >>> mark.covers(1, 5000), mark.covers(2, 99), mark.covers(2, 100), mark.covers(3, 0)
            (True, True, False, False)
        """
        return file < self.file or (file == self.file and offset < max(self.nbytes, 1))


def pack_mark(mark: Mark) -> bytes:
    """Encode a mark. All marks have the same length, so that a new one replaces the old one in place."""
    text = _TEXT % mark
    return text + _CRC % crc32(text)


def unpack_mark(data: bytes) -> Mark:
    """Decode a mark, also one of an earlier version. Return `Mark()` if the bytes are no mark.

    Example:
        >>> unpack_mark(pack_mark(Mark(7, 4096))), unpack_mark(b"00000007\\n"), unpack_mark(b"junk")
        (Mark(file=7, nbytes=4096), Mark(file=7, nbytes=0), Mark(file=0, nbytes=0))
    """
    line = data[: len(pack_mark(Mark()))].partition(b"\n")[0].strip()
    words = line.split(b" ")
    # A longer text is no number of a file, and Python refuses to convert a very long one.
    if not all(word.isdigit() and len(word) <= 16 for word in words[:2]):
        return Mark()
    mark = Mark(*map(int, words[:2]))
    if len(words) > 1 and pack_mark(mark) != line + b"\n":
        return Mark()
    return mark if mark.file <= MAX_FILE else Mark()


def read_mark(folder: Path) -> Mark:
    """Read the mark of a journal's folder. Return `Mark()` if there is none.

    Raises:
        JournalError: the file cannot be read.
    """
    try:
        with open(folder / LOCK, "rb") as file:
            return unpack_mark(file.read(64))
    except (FileNotFoundError, NotADirectoryError):
        return Mark()
    except OSError as error:
        raise JournalError(f"{folder / LOCK}: {error.strerror}") from None

"""The files in a journal's folder on disk, what they hold, and open files to read single records.

This module only reads, and takes no lock, because the journal may be in use. docs/understand/journal.md says
what each file is for.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from broker.errors import JournalError, TryLater
from broker.journal.writer import (
    HEAD_BYTES,
    FoundRecord,
    Header,
    Loss,
    Place,
    Record,
    file_name,
    payload_at,
    scan,
    unpack_header,
)

DAMAGED = ".damaged"
"""Ending of the name of a file that a repair has set aside. No reader of the journal reads it."""
MAX_DIGITS = 12
"""Upper limit of the digits in the number of a file."""


class Contents(NamedTuple):
    """Content of one file: its head (None if cut or damaged), and the records and losses found after it."""

    number: int
    header: Header | None
    data: bytes
    found: list[FoundRecord | Loss]

    @property
    def entries(self) -> list[FoundRecord]:
        """Whole records of the file."""
        return [item for item in self.found if isinstance(item, FoundRecord)]

    @property
    def losses(self) -> list[Loss]:
        """Damage in the file."""
        return [item for item in self.found if isinstance(item, Loss)]

    @property
    def torn(self) -> Loss | None:
        """The end of the file if it is not a whole record, and nothing whole follows; otherwise None."""
        last = self.found[-1] if self.found else None
        return last if isinstance(last, Loss) and last.torn else None

    def record(self, entry: FoundRecord) -> Record:
        """Return a record with its payload."""
        place = entry.place
        return Record(entry.kind, self.data[place.offset : place.offset + place.nbytes], place)


def numbers(folder: Path, suffix: str = ".log") -> list[int]:
    """Return the numbers of the files in a journal's folder, in order; ".released" selects deleted ones."""
    stems = [path.stem for path in folder.glob(f"journal-*{suffix}")]
    digits = [stem[len("journal-") :] for stem in stems]
    found = [int(text) for text in digits if text.isdecimal() and len(text) <= MAX_DIGITS]
    return sorted(number for number in found if f"{Path(file_name(number)).stem}" in stems)


def read_file(folder: Path, number: int, first: int | None = None) -> Contents:
    """Read a whole file; ``first`` is the number of its first record, used if the head is damaged.

    Raises:
        JournalError: the file cannot be read, or another version of the program wrote it.
    """
    path = folder / file_name(number)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}; restore it from a copy") from None
    head = unpack_header(data)
    if head is not None and head[0].file == number:
        return Contents(number, head[0], data, list(scan(data, number, head[1], head[0].first)))
    found = list(scan(data, number, 0, first))
    nbytes = found[0].nbytes if found and isinstance(found[0], Loss) else len(data)
    lost = found[0].records if first is not None and len(found) > 1 and isinstance(found[0], Loss) else 0
    loss = Loss(number, 0, nbytes, lost, "a head that is cut or damaged", torn=len(found) < 2)
    return Contents(number, None, data, [loss, *found[1:]])


def each_file(folder: Path) -> Iterator[Contents]:
    """Yield all files in order, to inspect a journal. Files that are deleted meanwhile are left out.

    Raises:
        JournalError: there is no journal.
    """
    found = numbers(folder)
    if not found:
        raise JournalError(f"{folder}: no journal here; name the folder of a run that has had a broker")
    for number in found:
        contents = read_unless_released(folder, number)
        if contents is not None:
            yield contents


def read_place(folder: Path, place: Place) -> bytes:
    """Read the payload of one record.

    Raises:
        JournalError: the record is missing or damaged.
    """
    try:
        with open(folder / file_name(place.file), "rb") as file:
            file.seek(place.offset - HEAD_BYTES)
            data = file.read(HEAD_BYTES + place.nbytes)
    except OSError as error:
        raise JournalError(f"{folder / file_name(place.file)}: {error.strerror}; try again") from None
    return payload_at(data, place)


def read_unless_released(folder: Path, number: int, first: int | None = None) -> Contents | None:
    """Read a file; return None if it was released meanwhile."""
    try:
        return read_file(folder, number, first)
    except JournalError:
        if number in numbers(folder, ".released"):
            return None
        raise


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

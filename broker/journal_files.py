"""The journal's files on disk: which there are, what they hold, whether it is whole. Read-only; no lock needed."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from broker.journal_records import Entry, Header, JournalError, Kind, Loss, Record, file_name, scan, unpack_header


class Contents(NamedTuple):
    """One file, read: its head (None if that is cut or damaged), and what was found behind it."""

    number: int
    header: Header | None
    data: bytes
    found: list[Entry | Loss]

    @property
    def entries(self) -> list[Entry]:
        """Whole records."""
        return [item for item in self.found if isinstance(item, Entry)]

    @property
    def losses(self) -> list[Loss]:
        """What is not whole."""
        return [item for item in self.found if isinstance(item, Loss)]

    def record(self, entry: Entry) -> Record:
        """A record with its payload."""
        place = entry.place
        return Record(entry.kind, self.data[place.offset : place.offset + place.nbytes], place)


def numbers(folder: Path) -> list[int]:
    """Numbers of the files in a journal's folder, in order."""
    found = []
    for path in folder.glob("journal-*.log"):
        digits = path.name[len("journal-") : -len(".log")]
        if digits.isdecimal() and path.name == file_name(int(digits)):
            found.append(int(digits))
    return sorted(found)


def read_file(folder: Path, number: int) -> Contents:
    """All of a file.

    Raises:
        JournalError: it cannot be read, or another version of the program wrote it.
    """
    path = folder / file_name(number)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}; restore it from a copy") from None
    head = unpack_header(data)
    if head is None or head[0].file != number:
        lost = Loss(number, 0, len(data), 0, "a head that is cut or damaged", torn=not _has_records(data, number))
        return Contents(number, None, data, [lost])
    header, start = head
    return Contents(number, header, data, list(scan(data, number, start, header.first)))


def _has_records(data: bytes, number: int) -> bool:
    return any(isinstance(item, Entry) for item in scan(data, number, 0))


def gaps(folder: Path, files: list[Contents]) -> list[Loss]:
    """Files that are missing between others, or shorter than the one behind them says."""
    lost = []
    for before, after in zip(files, files[1:], strict=False):
        if after.number != before.number + 1:
            lost.append(Loss(before.number + 1, 0, 0, 0, f"missing, though {file_name(after.number)} is here"))
        elif after.header is not None and after.header.previous_nbytes != len(before.data):
            nbytes = after.header.previous_nbytes - len(before.data)
            what = f"{len(before.data)} bytes, {after.header.previous_nbytes} were written"
            lost.append(Loss(before.number, len(before.data), nbytes, 0, what))
    return lost


def since_snapshot(folder: Path) -> list[Contents]:
    """The files from the newest that begins with a whole snapshot on, or all of them."""
    files: list[Contents] = []
    for number in reversed(numbers(folder)):
        contents = read_file(folder, number)
        files.insert(0, contents)
        entries = contents.entries
        if entries and entries[0].kind is Kind.SNAPSHOT and contents.found[0] is entries[0]:
            break
    return files


def records(folder: Path) -> Iterator[Record | Loss]:
    """Everything in the journal, file by file, losses where they are: for whoever looks at it."""
    found = numbers(folder)
    if not found:
        raise JournalError(f"{folder}: no journal here; name the folder of a run that has had a broker")
    for number in found:
        contents = read_file(folder, number)
        for item in contents.found:
            yield contents.record(item) if isinstance(item, Entry) else item

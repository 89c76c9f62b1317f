"""Check what a journal's folder holds, and repair what a killed process left half done.

`survey` and `records` only read, and take no lock, because the journal may be in use.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

import msgspec

from broker.errors import JournalError
from broker.journal.claim import Claim, Mark, read_known
from broker.journal.files import DAMAGED, Contents, each_file, numbers, read_unless_released
from broker.journal.writer import FoundRecord, Kind, Loss, Place, Record, file_name
from protocol.files import sync_folder, write_whole

log = logging.getLogger(__name__)

ACCEPTED = "accepted-losses.json"


@dataclass
class Survey:
    """Summary of what a journal's folder holds."""

    files: dict[int, int] = field(default_factory=dict)
    """Bytes of each file, by number."""
    released: list[int] = field(default_factory=list)
    """Numbers of the files that were deleted because nothing needed them."""
    mark: Mark = field(default_factory=Mark)
    """Up to which byte of which file the journal is known to go."""
    runs: set[str] = field(default_factory=set)
    losses: list[Loss] = field(default_factory=list)
    """Damage that nobody has accepted yet."""
    accepted: list[Loss] = field(default_factory=list)
    torn: Loss | None = None
    """Torn end that a killed writer left; `repair` cuts it."""
    unbegun: list[int] = field(default_factory=list)
    """Numbers of files after a torn end, or not begun in full; `repair` sets them aside."""
    snapshot: Place | None = None
    """Place of the newest snapshot."""
    next_number: int = 0
    """Number of the next record."""

    def add_file(self, losses: list[Loss], contents: Contents, expected: int | None) -> int | None:
        """Add a file and its losses; return the number that the first record of the next file must have."""
        self.files[contents.number] = len(contents.data)
        if contents.header is not None:
            self.runs.add(contents.header.run)
            expected = contents.header.first
        for item in contents.found:
            if isinstance(item, FoundRecord):
                expected = item.number + 1
                self.snapshot = item.place if item.kind is Kind.SNAPSHOT else self.snapshot
            elif not item.torn:
                losses.append(item)
        return expected

    def classify_end(self, contents: Contents) -> None:
        """Classify an incomplete end of the newest file.

        It is torn, or the file was not begun in full. If the disk is known to have had what is missing, it is damage.
        """
        number, size, torn = contents.number, len(contents.data), contents.torn
        least = self.mark.bytes_of(number)
        what = f"{size} bytes, at least {least} were written; how many records is not known"
        if torn is None:
            if size < least:
                contents.found.append(Loss(number, size, least - size, 0, what))
        elif self.mark.covers(number, torn.offset):
            nbytes = max(size, least) - torn.offset
            what = f"{torn.what}; {what}" if size < least else torn.what
            contents.found[-1] = torn._replace(nbytes=nbytes, what=what, torn=False)
        elif contents.header is None:
            self.unbegun = [number]
        else:
            self.torn = torn


def survey(folder: Path) -> Survey:
    """Read and check all files of a journal.

    Raises:
        JournalError: a file cannot be read.
    """
    here = Survey(mark=read_known(folder))
    logs, here.released = numbers(folder), numbers(folder, ".released")
    losses: list[Loss] = []
    expected: int | None = None
    before: Contents | None = None
    for number in logs:
        found = _next_file(folder, here, number, before, expected)
        if found is None:
            here.released.append(number)
            continue
        contents, gap = found
        if before is not None and before.number == number - 1:
            end = _end(before, contents, expected or 0, here.mark.bytes_of(before.number))
            # A power failure took what the disk did not have yet, or the machine started anew since.
            if end is not None and here.mark.file and not here.mark.covers(before.number, end.offset):
                here.torn, here.unbegun = end, [n for n in logs if n >= number]
                break
            losses += [end] if end is not None else []
        elif before is not None and before.torn is not None:
            # The file behind it is gone, but it was begun, and the disk then had all of this one.
            losses.append(before.torn._replace(torn=False))
        losses += [gap] if gap is not None else []
        if number == logs[-1]:
            here.classify_end(contents)
        expected = here.add_file(losses, contents, expected)
        before = contents
    if here.mark.file > max(logs, default=0):
        losses.append(_missing_newest(here.mark))
    accepted = _accepted(folder)
    here.losses = [loss for loss in losses if (loss.file, loss.offset) not in accepted]
    here.accepted = [loss for loss in losses if (loss.file, loss.offset) in accepted]
    here.next_number = expected or 0
    return here


def records(folder: Path) -> Iterator[Record | Loss]:
    """Yield everything in the journal in order, records and losses.

    Raises:
        JournalError: there is no journal.
    """
    here = Survey(mark=read_known(folder))
    newest = max(numbers(folder), default=0)
    for contents in each_file(folder):
        if contents.number == newest:
            here.classify_end(contents)
        for item in contents.found:
            if isinstance(item, FoundRecord):
                yield contents.record(item)
            else:
                yield item._replace(torn=item.torn and contents.number >= newest)
    if newest < here.mark.file:
        yield _missing_newest(here.mark)


def _next_file(
    folder: Path, here: Survey, number: int, before: Contents | None, expected: int | None
) -> tuple[Contents, Loss | None] | None:
    """Read the file of this number; return it with what is missing before it, or None if it was released."""
    # All files below the lowest released number were released, too.
    # Numbers may be far apart, so no loop here runs over a gap.
    first = before.number + 1 if before else max(1, min(here.released, default=0))
    released = {n for n in here.released if first <= n < number}
    gone = number - first - len(released)
    contents = read_unless_released(folder, number, None if gone > 0 else expected)
    if contents is None or gone <= 0:
        return None if contents is None else (contents, None)
    last = next(n for n in range(number - 1, first - 1, -1) if n not in released)
    what = "missing" if gone == 1 else f"missing, and {gone - 1} before it"
    if before is None or contents.header is None or released:
        return contents, Loss(last, 0, 0, 0, f"{what}; how many records is not known")
    nbytes = contents.header.previous_nbytes if gone == 1 else 0
    return contents, Loss(last, 0, nbytes, contents.header.first - (expected or 0), what)


def _missing_newest(mark: Mark) -> Loss:
    return Loss(mark.file, 0, mark.nbytes, 0, "missing, the newest; how many records is not known")


def _end(before: Contents, after: Contents, expected: int, least: int) -> Loss | None:
    """Return what is missing at the end of a file, according to the head of the file after it.

    ``least``: bytes that the disk is known to have had of the file, for an ``after`` without a head.
    """
    torn, size = before.torn, len(before.data)
    written = after.header.previous_nbytes if after.header is not None else max(size, least)
    records = after.header.first - expected if after.header is not None else 0
    if torn is not None:
        return torn._replace(records=max(records, 1), nbytes=max(size, written) - torn.offset, torn=False)
    if records == 0 and written == size:
        return None
    what = f"{size} bytes, {written} were written"
    if records < 0:
        what += f"; it has {-records} more than the file behind it goes on from"
    return Loss(before.number, size, max(0, written - size), max(0, records), what)


def _accepted(folder: Path) -> set[tuple[int, int]]:
    """Return file and offset of the losses that somebody has accepted."""
    try:
        listed = msgspec.json.decode((folder / ACCEPTED).read_bytes(), type=list[Loss])
    except FileNotFoundError:
        return set()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise JournalError(f"{folder / ACCEPTED}: {error}; remove the file to be asked again") from None
    return {(loss.file, loss.offset) for loss in listed}


def check(folder: Path, here: Survey, *, run: str, accept_loss: bool) -> None:
    """Refuse a journal of another run, and a damaged one unless ``accept_loss`` is set.

    Raises:
        JournalError: the text has the number of losses, the place of the first five, and what can be done.
    """
    if others := sorted(here.runs - {run}):
        raise JournalError(
            f"{folder} belongs to run {others[0]!r}, this is {run!r}; use the run folder of this run"
        )
    if not here.losses:
        return
    lost = "; ".join(map(str, here.losses[:5])) + (
        f"; and {len(here.losses) - 5} more" if here.losses[5:] else ""
    )
    records, nbytes = sum(loss.records for loss in here.losses), sum(loss.nbytes for loss in here.losses)
    if not accept_loss:
        raise JournalError(
            f"{folder} is damaged, {records} records and {nbytes} bytes are lost: {lost}. Restore it from a copy, "
            f"or, to go on without them: offbeat journal accept-loss {folder.parent}"
        )
    log.warning("journal: %d records and %d bytes are lost, and that was accepted: %s", records, nbytes, lost)


def accept_losses(folder: Path) -> list[Loss]:
    """Note all damage of a journal as accepted, and return what was not accepted before.

    Raises:
        JournalError: a broker is using the journal.
    """
    claim = Claim(folder)
    try:
        here = survey(folder)
        if here.losses:
            accept(folder, [*here.accepted, *here.losses])
        return here.losses
    finally:
        claim.close()


def repair(folder: Path, here: Survey) -> None:
    """Cut a torn end, set aside files behind it or not begun in full, and finish interrupted deletions.

    Files are renamed, never removed: what looks like a power failure may be damage to records that count.
    """
    # The newest file goes first, and each name is synced, so that no file ever seems to be missing between two others.
    for number in sorted(here.unbegun, reverse=True):
        aside = _unused(folder, number)
        (folder / file_name(number)).rename(aside)
        sync_folder(folder)
        log.warning(
            "journal: %s was not begun in full, or comes after a torn end: it is now %s",
            file_name(number), aside.name,
        )  # fmt: skip
    if here.torn is not None and here.torn.offset < here.files[here.torn.file]:
        _cut(folder, here.torn, keep=bool(here.unbegun))
        here.files[here.torn.file] = here.torn.offset
    here.files = {number: size for number, size in here.files.items() if number not in here.unbegun}
    finish_release(folder, here.released)


def _cut(folder: Path, torn: Loss, *, keep: bool) -> None:
    """Cut a torn end; ``keep``: write its bytes to a file that is set aside."""
    path = folder / file_name(torn.file)
    log.warning("journal: a torn end is cut: %s", torn)
    if keep:
        aside = _unused(folder, torn.file)
        write_whole(aside, path.read_bytes()[torn.offset :])
        log.warning("journal: the torn end is kept as %s", aside.name)
    with open(path, "r+b") as file:
        file.truncate(torn.offset)
        os.fsync(file.fileno())


def _unused(folder: Path, number: int) -> Path:
    """Return a name for a file that is set aside, which no earlier repair has used."""
    plain = (folder / file_name(number)).with_suffix(DAMAGED)
    names = chain([plain], (plain.with_name(f"{plain.stem}-{i}{DAMAGED}") for i in count(2)))
    return next(path for path in names if not path.exists())


def accept(folder: Path, losses: Iterable[Loss]) -> None:
    """Note losses as accepted, so that nobody is asked about them again."""
    write_whole(folder / ACCEPTED, msgspec.json.format(msgspec.json.encode(list(losses)), indent=1))


def released_name(number: int) -> str:
    """Return the name of the empty file that stands for a deleted one, so that the deletion is no damage."""
    return Path(file_name(number)).with_suffix(".released").name


def release(folder: Path, number: int) -> None:
    """Begin to delete a file; `finish_release` ends it. Both need no room on the disk, which may be full."""
    (folder / file_name(number)).rename(folder / released_name(number))


def finish_release(folder: Path, numbers: Iterable[int]) -> None:
    """Free the bytes of released files, after the disk has their new names.

    A file that is empty under its old name, as a power failure might leave it, would be damage.
    """
    sync_folder(folder)
    for number in numbers:
        os.truncate(folder / released_name(number), 0)


def forget_released(folder: Path, number: int) -> None:
    """Remove the file that stands for a deleted one, because one with a higher number stands for both.

    The disk must have the higher one's name already. It has this removal when the call returns, because a gap
    between two such files would be damage.
    """
    (folder / released_name(number)).unlink()
    sync_folder(folder)

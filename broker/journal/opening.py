"""Check a journal's folder, and repair what a killed process left half done."""

import logging
import os
from collections.abc import Iterable
from itertools import chain, count
from pathlib import Path

import msgspec

from broker.errors import JournalError
from broker.journal.claim import Claim
from broker.journal.files import DAMAGED
from broker.journal.records import Loss, file_name
from broker.journal.survey import ACCEPTED, Survey, survey
from protocol.whole_files import sync_folder, write_whole

log = logging.getLogger(__name__)


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

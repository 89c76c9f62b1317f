"""Messages that could not be handled, kept in the journal with the reason, and known again if they broke the broker."""

import hashlib
from collections.abc import Sequence

from broker.journal.journal import Journal
from broker.journal.records import DeadLetter, Kind, Record, pack_dead_letter, unpack_dead_letter
from broker.recovery import poison_of
from protocol.codec import Buffer

MAX_DEAD_LETTERS = 1_000
"""Upper limit of the dead letters that one process keeps."""
MAX_DEAD_TOTAL_BYTES = 16 << 20
"""Upper limit of the bytes of all dead letters that one process keeps."""
MAX_DEAD_BYTES = 64 * 1024
"""Upper limit of the bytes of one dead letter, all frames together."""
MAX_DEAD_FRAMES = 64
MAX_DEAD_REASON = 1_000
"""Upper limit of the characters of a dead letter's reason."""
POISON = "broker_fault"


class DeadLetters:
    """The dead letters of one process, and the poison: messages that broke the broker, now or before."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self.poison: set[bytes] = set()
        """Digests of messages that broke the broker."""
        self.count = self._nbytes = 0

    def go_on_in(self, journal: Journal) -> None:
        """Keep the next letters in a journal that was opened again.

        The count begins again, because without the next dead letter the next process would break, too.
        """
        self._journal = journal
        self.count = self._nbytes = 0

    def is_poison(self, name: str, frames: Sequence[Buffer]) -> bool:
        """Return whether this message of the peer ``name`` broke the broker before."""
        return bool(self.poison) and _digest(name, frames) in self.poison

    def keep(self, name: str, code: str, reason: str, frames: Sequence[Buffer]) -> None:
        """Keep a message that could not be handled, with the reason, as a dead letter.

        A process keeps its first `MAX_DEAD_LETTERS`, up to `MAX_DEAD_TOTAL_BYTES`. While the disk is nearly full
        it keeps only those of messages that broke the broker, which the next process must know.
        """
        digest = _digest(name, frames) if code == POISON else b""
        if digest:
            self.poison.add(digest)
        journal = self._journal
        if journal is None or self.count >= MAX_DEAD_LETTERS or self._nbytes >= MAX_DEAD_TOTAL_BYTES:
            return
        if code != POISON and (journal.low or journal.blocked):
            return
        letter = DeadLetter(
            peer=name,
            code=code,
            reason=reason[:MAX_DEAD_REASON],
            frames=_first_bytes(frames),
            nbytes=sum(map(len, frames)),
            digest=digest,
        )
        packed = pack_dead_letter(letter)
        self.count += 1
        self._nbytes += len(packed)
        journal.append(Kind.DEAD, packed)

    def note(self, record: Record) -> Record:
        """Learn the poison that a record of the journal tells of; return the record."""
        if record.kind is Kind.SNAPSHOT:
            self.poison.update(poison_of(record))
        elif record.kind is Kind.DEAD:
            letter = unpack_dead_letter(record.payload)
            if letter.code == POISON:
                self.poison.add(letter.digest or _digest(letter.peer, letter.frames))
        return record


def _first_bytes(frames: Sequence[Buffer]) -> list[bytes]:
    """Return the first frames of a message, cut to `MAX_DEAD_BYTES` in sum.

    Example:
        >>> [len(frame) for frame in _first_bytes([b"x" * 60_000, b"y" * 60_000, b"z"])]
        [60000, 5536]
    """
    kept, room = list[bytes](), MAX_DEAD_BYTES
    for frame in frames[:MAX_DEAD_FRAMES]:
        if not room and len(frame):
            break
        kept.append(bytes(frame[:room]))
        room -= len(kept[-1])
    return kept


def _digest(name: str, frames: Sequence[Buffer]) -> bytes:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape"))
    for frame in frames:
        # Letters of earlier versions have these bytes of each frame, and no digest.
        digest.update(b"/" + bytes(frame[: 64 * 1024]))
    return digest.digest()

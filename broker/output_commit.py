"""The `Dispatcher` with its journal: answers leave once the journal has the records they rest on.

Messages that could not be handled are kept in the journal as dead letters, with the reason, and are known
again if they broke the broker.
"""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from broker.config import BrokerConfig
from broker.core.dispatch import Dispatcher
from broker.core.peers import Send
from broker.errors import BrokerError, JournalError, StateBroken
from broker.journal.journal import Journal
from broker.journal.records import (
    MAX_PAYLOAD_BYTES,
    DeadLetter,
    Kind,
    Record,
    pack_dead_letter,
    unpack_dead_letter,
)
from broker.recovery import JournalStore, poison_of, recover, snapshot
from protocol.codec import AnyMessage, Buffer
from protocol.messages.peers import ActorKeys, Heartbeat, Hello, QueueStats, Refused

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


log = logging.getLogger(__name__)

NEED_NOT_WAIT = (ActorKeys, Heartbeat, QueueStats, Refused)
"""Messages that promise nothing, so they need not wait for the journal."""
POISONED = "this message broke the broker before"


class Bell:
    """A bell that the journal's thread rings when more records are durable.

    Invariant: ``heard`` runs on the thread of the journal.
    """

    def __init__(self) -> None:
        self.heard: Callable[[], object] = lambda: None

    def ring(self) -> None:
        self.heard()


class OutputCommit:
    """Holds back every message until the journal has the records it rests on.

    ``bell`` rings, from any thread, when `release` may have messages to send.
    """

    def __init__(self, dispatcher: Dispatcher, journal: Journal | None, store: JournalStore | None) -> None:
        self.dispatcher, self.journal = dispatcher, journal
        self.address: Callable[[str], str | None] = lambda peer: peer
        """Returns the address of a peer's connection, by which `Send.peer` names it while a message waits."""
        self._store = store
        self._reopen: Callable[[], Journal]
        self._waiting: deque[tuple[int, Send]] = deque()
        self.dead_letters = DeadLetters(journal)
        self._freed = 0
        """`JournalStore.freed` when needless files were last deleted; -1: look for them at the next flush."""
        self._blocked = ""
        self._broken = False
        self.bell = Bell()

    @classmethod
    def open(
        cls,
        config: BrokerConfig,
        run: str,
        max_policy_lag: int,
        folder: Path | None,
        accept_loss: bool = False,
    ) -> "OutputCommit":
        """Open the journal and recover the state from it. Without a ``folder`` the state is empty.

        Raises:
            JournalError: the journal belongs to another run, is in use, or is damaged.
        """
        now, boot = time.monotonic(), format(time.time_ns(), "x")
        if folder is None:
            return cls(
                Dispatcher(config, run=run, max_policy_lag=max_policy_lag, now=now, boot=boot), None, None
            )
        reopen = partial(Journal.open, folder, run=run, config=config.journal)
        bell = Bell()
        journal = reopen(accept_loss=accept_loss, on_durable=bell.ring)
        store = JournalStore(journal, config.journal.max_bytes)
        dispatcher = Dispatcher(
            config, run=run, max_policy_lag=max_policy_lag, now=now, store=store, boot=boot
        )
        output_commit = cls(dispatcher, journal, store)
        output_commit._reopen = reopen
        output_commit.bell = bell
        try:
            recover(dispatcher.state, store, map(output_commit.dead_letters.note, journal.recovered()), now)
        except BaseException:
            journal.abandon()
            raise
        return output_commit

    # --- messages in --------------------------------------------------------------------------------------

    def objection(self, name: str, hello: Hello, frames: Sequence[Buffer]) -> Refused | None:
        """Return the refusal that the peer ``name`` would get for this Hello, or None. Changes nothing."""
        if self.dead_letters.is_poison(name, frames):
            return Refused(code="poison", message=POISONED)
        return self.dispatcher.objection(name, hello)

    def handle(self, name: str, message: AnyMessage, frames: Sequence[Buffer], now: float) -> list[Send]:
        """Handle one message of a peer; return the messages that may leave at once.

        Raises:
            StateBroken: the process must end and restart from its journal. The journal notes the message as poison
                if it broke the state itself, or if the fault came from what it had changed.
            JournalError: the state is broken, and the journal cannot be opened again.
        """
        # Half of a change is applied, so no message that comes now is to blame.
        if self._broken:
            return []
        if self.dead_letters.is_poison(name, frames):
            return self._may_leave(self.dispatcher.refuse(name, "poison", POISONED))
        before = self.journal.sequence if self.journal is not None else 0
        try:
            self.dispatcher.take(name, message, frames, now)
        except StateBroken as error:
            self._start_over(str(error), name, frames)
            raise
        except Exception as error:
            # One message must not end the run.
            log.exception("%s from %r could not be handled", type(message).__name__, name)
            self.dead_letters.keep(name, POISON, repr(error), frames)
            return self.refuse(name, POISON, "a fault of the broker; its log has the details")
        try:
            return self._may_leave(self.dispatcher.follow(now))
        except Exception as error:
            # A message that changed nothing that lasts, for example a heartbeat, comes again with equal bytes.
            # It only came first after something else had gone wrong.
            is_to_blame = self.journal is not None and self.journal.sequence > before
            raise self._broken_by(error, name, frames if is_to_blame else ()) from error

    def _broken_by(self, error: Exception, name: str = "", frames: Sequence[Buffer] = ()) -> StateBroken:
        """Start over after a fault in what follows from messages; return the error to raise."""
        broken = error if isinstance(error, StateBroken) else StateBroken(f"the state is broken: {error!r}")
        self._start_over(str(broken), name, frames)
        return broken

    def _start_over(self, reason: str, name: str, frames: Sequence[Buffer]) -> None:
        """Abandon unwritten records, on which no sent message rests. Note the message as poison, if one is given."""
        self._broken = True
        if self.journal is not None:
            self.journal.abandon()
        if self.journal is not None and frames:
            self.journal = self._reopen()
            self.dead_letters.go_on_in(self.journal)
            self.dead_letters.keep(name, POISON, reason, frames)
            self.journal.close()

    def tick(self, now: float) -> list[Send]:
        """Do what is due at this time; return the messages that may leave at once.

        Raises:
            StateBroken: the process must end and restart from its journal.
        """
        try:
            return self._may_leave(self.dispatcher.tick(now))
        except Exception as error:
            raise self._broken_by(error) from error

    def refuse(self, name: str, code: str, text: str) -> list[Send]:
        """Refuse a message of a peer; return the messages that may leave at once."""
        return self._may_leave(self.dispatcher.refuse(name, code, text))

    def admit(self, actor_keys: Sequence[str], revoked: Sequence[str], now: float) -> list[Send]:
        """Note which keys are admitted now; return the messages that may leave at once."""
        return self._may_leave(self.dispatcher.admit(actor_keys, revoked, now))

    def drain(self, reason: str, now: float) -> list[Send]:
        return self._may_leave(self.dispatcher.drain(reason, now))

    # --- messages out -------------------------------------------------------------------------------------

    def _may_leave(self, actions: list[Send]) -> list[Send]:
        if self.journal is None:
            return actions
        at_once, sequence = list[Send](), self.journal.sequence
        for action in actions:
            if isinstance(action.message, NEED_NOT_WAIT):
                at_once.append(action)
            elif (address := self.address(action.peer)) is not None:
                # Address the connection, because the name may belong to another process when this leaves.
                self._waiting.append((sequence, Send(address, action.message, action.frames)))
        return at_once

    def flush(self) -> list[Send]:
        """Have the journal write what is buffered; return the messages that may leave now.

        Raises:
            JournalError: the process must end, and restart from its journal.
        """
        if self.journal is None:
            return []
        self.journal.flush()
        if self.journal.blocked != self._blocked:
            self._blocked = self.journal.blocked
            log.error("the journal cannot be written: %s", self._blocked or "it can, again")
        try:
            self._look_after_files(self.journal)
        except BrokerError:
            raise
        except Exception as error:
            # Without snapshots no file would ever be deleted again, and nobody would notice.
            raise JournalError(f"the journal cannot go on in another file: {error!r}") from error
        return self.release()

    def _look_after_files(self, journal: Journal) -> None:
        assert self._store is not None
        if journal.wants_snapshot:
            saved = snapshot(self.dispatcher.state, self._store, self.dead_letters.poison)
            if len(saved) > MAX_PAYLOAD_BYTES:
                journal.postpone(len(saved))
            else:
                journal.rotate(saved)
                # The new snapshot makes files needless that the last `retain` had to keep.
                self._freed = -1
        if (journal.low or self._freed != self._store.freed) and not journal.releasing:
            self._freed = self._store.freed
            journal.retain(self._store.files)

    def release(self) -> list[Send]:
        """Return the messages that waited for the journal and may leave now."""
        out, waiting = list[Send](), self._waiting
        durable = self.journal.durable if self.journal is not None else -1
        while waiting and waiting[0][0] <= durable:
            out.append(waiting.popleft()[1])
        return out

    def status(self) -> dict[str, Any]:
        """Return the state of the journal, for `/status`."""
        if self.journal is None:
            return {"kind": "memory: all is lost with the process"}
        return {
            "kind": "files",
            "bytes": self.journal.nbytes,
            "records": self.journal.sequence,
            "records_not_durable": self.journal.sequence - self.journal.durable,
            "messages_waiting": len(self._waiting),
            "blocked": self.journal.blocked,
            "low": self.journal.low,
            "why_low": self.journal.why_low,
            "dead_letters": self.dead_letters.count,
        }

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

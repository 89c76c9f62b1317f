"""A `Dispatcher` and the journal under it: messages in, and out what may be said by now."""

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
from broker.core.state import Send
from broker.errors import BrokerError, StateBroken
from broker.journal.journal import (
    DeadLetter,
    Journal,
    JournalError,
    Kind,
    Record,
    pack_dead_letter,
    unpack_dead_letter,
)
from broker.journal_store import JournalStore
from broker.recovery import poison_of, recover, snapshot
from protocol.codec import Buffer
from protocol.messages import AnyMessage, Heartbeat, QueueStats, Refused

log = logging.getLogger(__name__)

FREE = (Heartbeat, QueueStats, Refused)
"""Messages that promise nothing: they need not wait for the journal."""
MAX_DEAD_LETTERS = 1_000
MAX_DEAD_BYTES = 64 * 1024
POISON = "broker_fault"


class Bell:
    """Rung by the journal's thread when something has become durable; ``heard`` is who comes."""

    def __init__(self) -> None:
        self.heard: Callable[[], object] = lambda: None

    def ring(self) -> None:
        self.heard()


class OutputCommit:
    """Holds back every message until the journal has what it rests on.

    ``bell`` is rung, from any thread, when `release` may have something.
    """

    def __init__(self, dispatcher: Dispatcher, journal: Journal | None, store: JournalStore | None) -> None:
        self.dispatcher, self.journal = dispatcher, journal
        self._store = store
        self._reopen: Callable[[], Journal]
        self._waiting: deque[tuple[int, Send]] = deque()
        self._poison: set[bytes] = set()
        self._dead = 0
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
        """The state as the journal has it, or an empty one.

        Raises:
            JournalError: the journal is another run's, in use, or damaged.
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
        desk = cls(dispatcher, journal, store)
        desk._reopen = reopen
        desk.bell = bell
        try:
            recover(dispatcher.state, store, map(desk._note_dead, journal.recovered()), now)
        except BaseException:
            journal.abandon()
            raise
        return desk

    # --- messages in --------------------------------------------------------------------------------------

    def handle(self, name: str, message: AnyMessage, frames: Sequence[Buffer], now: float) -> list[Send]:
        """One message of a peer; returns what may be said at once.

        Raises:
            StateBroken: the process has to end, and to start again from its journal, where this message is noted
                as poison.
        """
        if (
            self._broken
        ):  # half of a change is in the books: whoever speaks now is not to blame for what follows
            return []
        if self._poison and _digest(name, frames) in self._poison:
            return self._may_leave(
                self.dispatcher.refuse(name, "poison", "this message broke the broker before")
            )
        try:
            return self._may_leave(self.dispatcher.handle(name, message, frames, now))
        except StateBroken as error:
            self._start_over(name, str(error), frames)
            raise
        except Exception as error:  # one message must not end the run
            log.exception("%s from %r could not be handled", type(message).__name__, name)
            self.bury(name, POISON, repr(error), frames)
            return self.refuse(name, POISON, "a fault of the broker; its log has the details")

    def _start_over(self, name: str, reason: str, frames: Sequence[Buffer]) -> None:
        """Let go of what was not told to anybody yet, which the journal has not, and note who is to blame."""
        self._broken = True
        if self.journal is not None:
            self.journal.abandon()
            self.journal = self._reopen()
            self._dead = 0  # however many others there were: without this one the next process breaks, too
            self.bury(name, POISON, reason, frames)
            self.journal.close()

    def tick(self, now: float) -> list[Send]:
        """What time alone brings about."""
        return self._may_leave(self.dispatcher.tick(now))

    def refuse(self, name: str, code: str, text: str) -> list[Send]:
        """The answer to frames that are no message."""
        return self._may_leave(self.dispatcher.refuse(name, code, text))

    def drain(self, reason: str, now: float) -> list[Send]:
        return self._may_leave(self.dispatcher.drain(reason, now))

    # --- messages out -------------------------------------------------------------------------------------

    def _may_leave(self, actions: list[Send]) -> list[Send]:
        if self.journal is None:
            return actions
        at_once, sequence = list[Send](), self.journal.sequence
        for action in actions:
            if isinstance(action.message, FREE):
                at_once.append(action)
            else:
                self._waiting.append((sequence, action))
        return at_once

    def flush(self) -> list[Send]:
        """Have the journal written as far as it is; returns what may be said by now.

        Raises:
            JournalError: the process has to end, and to start again from its journal.
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
        except (
            Exception
        ) as error:  # with no snapshot nothing would be released any more, and nobody would know
            raise JournalError(f"the journal cannot go on in another file: {error!r}") from error
        return self.release()

    def _look_after_files(self, journal: Journal) -> None:
        assert self._store is not None
        if journal.wants_snapshot:
            journal.rotate(snapshot(self.dispatcher.state, self._store, self._poison))
            journal.retain(self._store.files)
        elif journal.low:
            journal.retain(self._store.files)

    def release(self) -> list[Send]:
        """What waited for the journal, and may be said by now."""
        out, waiting = list[Send](), self._waiting
        durable = self.journal.durable if self.journal is not None else -1
        while waiting and waiting[0][0] <= durable:
            out.append(waiting.popleft()[1])
        return out

    def status(self) -> dict[str, Any]:
        """Of the journal, for `/status`."""
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
            "dead_letters": self._dead,
        }

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    # --- dead letters -------------------------------------------------------------------------------------

    def bury(self, name: str, code: str, reason: str, frames: Sequence[Buffer]) -> None:
        """Keep a message that could not be handled, with the reason; the first `MAX_DEAD_LETTERS` of a process."""
        if code == POISON:
            self._poison.add(_digest(name, frames))
        if self.journal is None or self._dead >= MAX_DEAD_LETTERS:
            return
        self._dead += 1
        kept = [bytes(frame[:MAX_DEAD_BYTES]) for frame in frames]
        letter = DeadLetter(peer=name, code=code, reason=reason, frames=kept)
        self.journal.append(Kind.DEAD, pack_dead_letter(letter))

    def _note_dead(self, record: Record) -> Record:
        if record.kind is Kind.SNAPSHOT:
            self._poison.update(poison_of(record))
        elif record.kind is Kind.DEAD:
            letter = unpack_dead_letter(record.payload)
            if letter.code == POISON:
                self._poison.add(_digest(letter.peer, letter.frames))
        return record


def _digest(name: str, frames: Sequence[Buffer]) -> bytes:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape"))
    for frame in frames:
        digest.update(b"/" + bytes(frame[:MAX_DEAD_BYTES]))
    return digest.digest()

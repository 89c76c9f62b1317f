"""Fuzz the broker: whatever peers send, it must go on, its ledger must close, and it must stay small.

An input is a script for `benchmarks.fuzz.broker_peers.Peers`. After every message the target checks the
broker's state. From time to time it kills the broker and recovers it from its journal, which is kept in
memory here. The broker must then hold what it held before.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from benchmarks.fuzz.broker_peers import ACTORS, Peers
from benchmarks.fuzz.engine import Choices
from broker.config import BrokerConfig
from broker.core.dispatch import Dispatcher
from broker.core.peers import Send
from broker.journal.records import Kind, Place, Record
from broker.recovery import JournalStore, recover, snapshot
from broker.status import prometheus, status
from protocol.codec import Buffer, decode, encode, encode_delivery, open_envelope
from protocol.errors import ProtocolError
from protocol.messages.episodes import Commit, Deliver, PutTasks
from protocol.messages.peers import Hello

MAX_QUEUED_SEGMENTS = 12
WINDOW = 3
MAX_QUEUED_TASKS = 16
MAX_PEERS = 16
OVERDRAFT = (WINDOW + 1) * len(ACTORS)
"""Segments that the broker may hold beyond `MAX_QUEUED_SEGMENTS`, because actors can send without credit."""
STATUS_EVERY = 64
MESSAGE_S = 0.5
"""Upper limit of the processor seconds that one message may take."""


class MemoryJournal:
    """A journal in memory, with the parts of the interface that `broker.recovery.JournalStore` needs."""

    low, blocked = False, ""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.records = list(records)
        self.losses: list[object] = []

    def append(self, kind: Kind, *parts: bytes) -> Place:
        payload = b"".join(parts)
        place = Place(1, len(self.records), len(payload))
        self.records.append(Record(kind, payload, place))
        return place

    def read(self, place: Place) -> bytes:
        return self.records[place.offset].payload


class BrokerTarget:
    """Target for `broker.core.dispatch.Dispatcher`, its `broker.core.state`, and `broker.recovery`."""

    name, unit = "broker", "messages"

    def __init__(self) -> None:
        self.done = 0

    def make(self, rng: random.Random) -> bytes:
        return rng.randbytes(40 + int(rng.random() ** 6 * 1500))

    def run(self, data: bytes) -> None:
        self.done += Trial(Choices(data)).run()


class Trial:
    """One broker under one script."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._config = BrokerConfig(
            max_queued_segments=MAX_QUEUED_SEGMENTS,
            segment_credit=WINDOW,
            max_queued_tasks=MAX_QUEUED_TASKS,
            task_lease_s=8.0,
            delivery_lease_s=15.0,
            group_deadline_s=10.0,
            max_attempts=2 + choices.below(3),
            min_group_members=1 + choices.below(3),
            max_deliveries=1 + choices.below(5),
        )
        self._lag = choices.below(4)
        self._now, self._boots, self._messages = 1000.0, 0, 0
        self._extra = 0
        self._journal = MemoryJournal()
        self._state, self._store = self._boot()
        self.peers = Peers(choices)

    def run(self) -> int:
        """Run the script to its end. Return the number of messages."""
        while self._choices.left:
            match self._choices.below(32):
                case 0 | 1 | 2 | 3:
                    self._pass_time(self._choices.pick((0.0, 0.05, 0.3, 0.3, 1.0, 2.0, 12.0, 40.0)))
                case 4 if self._choices.flag(3):
                    self._restart()
                case 5 if self._choices.flag(16):
                    self._act(lambda: self._state.drain("end", self._now), 64)
                    self._state.drained(self._now)
                case _:
                    for name, frames in self.peers.speak():
                        self._say(name, frames)
        self._restart()
        return self._messages

    # --- the broker -----------------------------------------------------------------------------------------

    def _boot(self) -> tuple[Dispatcher, JournalStore]:
        self._boots += 1
        store = JournalStore(self._journal, 1 << 30)  # type: ignore[arg-type]
        dispatcher = Dispatcher(
            self._config, run="r", max_policy_lag=self._lag, now=self._now, store=store, boot=str(self._boots)
        )
        return dispatcher, store

    def _restart(self) -> None:
        """Kill the broker, recover it from its journal, and check that it holds what it held before."""
        before = _content(self._state, self._store)
        if self._choices.flag():
            self._journal.append(Kind.SNAPSHOT, snapshot(self._state.state, self._store))
        since = max((i for i, r in enumerate(self._journal.records) if r.kind is Kind.SNAPSHOT), default=0)
        self._state, self._store = self._boot()
        recover(self._state.state, self._store, self._journal.records[since:], self._now)
        after = _content(self._state, self._store)
        for part in before:
            assert after[part] == before[part], (
                f"{part} differ after a restart: {before[part]} became {after[part]}"
            )
        self._check()

    def _say(self, name: str, frames: Sequence[Buffer]) -> None:
        """Open a peer's envelope and handle its messages, as `broker.service` does."""
        self._messages += 1
        try:
            messages = open_envelope(frames)
        except ProtocolError as error:
            self._refuse(name, error)
            return
        for one in messages:
            self._take(name, one)

    def _refuse(self, name: str, error: ProtocolError) -> None:
        code, text = error.code, str(error)
        self._act(lambda: self._state.refuse(name, code, text), 1)

    def _take(self, name: str, frames: Sequence[Buffer]) -> None:
        try:
            message, _ = decode(frames)
        except ProtocolError as error:
            self._refuse(name, error)
            return
        asked = 0
        match message:
            case PutTasks():
                asked = 2 * len(message.tasks)
            case Commit():
                asked = len(message.trained) + len(message.dropped)
            case Hello():
                asked = 8
        self._act(lambda: self._state.handle(name, message, frames[1:], self._now), asked)

    def _pass_time(self, seconds: float) -> None:
        """Let time pass: in steps with heartbeats, or in one step, in which connected peers may expire."""
        beating = not self._choices.flag(8)
        step = max(1.0, seconds / 8) if beating else seconds
        end = self._now + seconds
        while True:
            self._now = min(end, self._now + step)
            for name, frames in self.peers.beat(self._now) if beating and self._now < end else ():
                self._say(name, frames)
            self._act(lambda: self._state.tick(self._now), 0)
            if self._now >= end:
                return

    def _act(self, step: Callable[[], list[Send]], asked: int) -> None:
        state = self._state.state
        here, stored = self._things(), state.ledger.stored.segments
        given_back = state.ledger.rolled_back.segments
        trickle = self._state.learners.starving(self._now)
        began = time.process_time()
        actions = step()
        took = time.process_time() - began
        assert took < MESSAGE_S, f"one message took long: {took:.2f} s of processor time"
        limit = 8 + asked + 4 * (len(state.peers) + here + self._things())
        assert len(actions) <= limit, f"{len(actions)} answers to one message, at most {limit} expected"
        for action in actions:
            if isinstance(action.message, Deliver):
                encode_delivery(action.message, action.frames)
            else:
                encode(action.message)
            self.peers.hear(action.peer, action.message)
        # Rolled-back segments do not count against the bound, because a learner that fell behind brings them.
        self._extra += state.ledger.rolled_back.segments - given_back
        if len(self._store) <= MAX_QUEUED_SEGMENTS:
            self._extra = 0
        elif trickle:
            # The learner starves, so actors get single credits over the bound to finish their groups.
            self._extra += state.ledger.stored.segments - stored
        self._check()

    def _things(self) -> int:
        state = self._state.state
        return state.tasks.queued + state.tasks.leased + len(state.store) + len(state.assembly.groups)

    # --- what must hold --------------------------------------------------------------------------------------

    def _check(self) -> None:
        state, store = self._state.state, self._store
        assert state.violation() == "", f"the ledger does not close: {state.violation()}"
        segments = list(state.segments())
        assert len(segments) == len(store), "segments stored are not segments known"
        assert sum(stored.nbytes for stored in segments) == store.nbytes, "bytes stored are not bytes known"
        keys = {stored.key for stored in segments}
        assert len(keys) == len(segments), "a segment is in two places"
        over = len(store) - MAX_QUEUED_SEGMENTS - self._extra
        assert over <= OVERDRAFT, (
            f"more is held than may be: {over} segments over the bound, {OVERDRAFT} allowed"
        )
        assert state.tasks.queued <= MAX_QUEUED_TASKS + self.peers.most_leases, (
            "more tasks are queued than allowed"
        )
        assert len(state.peers) <= MAX_PEERS, "more peers than names"
        outstanding = sum(state.flow.credit(peer.name) for peer in state.peers.of("actor"))
        assert state.flow.outstanding == outstanding, "credit of peers that are gone"
        assert state.flow.outstanding <= WINDOW * len(ACTORS) + MAX_PEERS, "more credit than windows"
        self.peers.most_leases = max(self.peers.most_leases, state.tasks.leased)
        if self._messages % STATUS_EVERY == 0:
            encode_text = status(self._state, self._now), prometheus(self._state, self._now)
            assert all(encode_text), "no status"


def _content(dispatcher: Dispatcher, store: JournalStore) -> dict[str, Any]:
    """Return the part of the broker's state that must outlive its process."""
    state, assembly = dispatcher.state, dispatcher.state.assembly
    units = sorted(state.deliveries.saved(), key=lambda unit: unit.age)
    ledger = msgspec.to_builtins(state.ledger) | {"duplicate_segments": 0, "refused": {}}
    # Only the running process counts lost peers, as it does refused messages.
    ledger["tasks"].pop("peers_lost", None)
    return {
        "ledger": ledger,
        "tasks": sorted(
            (r.task.task_id, r.attempt, r.losses, r.lease and r.lease.lease_id) for r in state.tasks.live()
        ),
        "segments": sorted((key, nbytes, aside) for key, _, nbytes, aside in store.index()),
        "trajectories": sorted(
            (t.trajectory_id, t.next_index, t.tokens) for t in assembly.trajectories.values()
        ),
        "groups": sorted(
            (g.group_id, sorted(g.out), len(g.here), g.taken, g.lost) for g in assembly.groups.values()
        ),
        "units": [(u.unit_id, u.age, u.deliveries, u.outcome, u.step, len(u.segments)) for u in units],
        "lineage": state.lineage,
        "published": state.published,
    }

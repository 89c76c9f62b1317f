"""Fuzz the broker: whatever peers send, it must go on, its ledger must close, and it must stay small.

An input is a script for `tests.campaigns.fuzz.broker.Peers`. After every message the target checks the
broker's state. From time to time it kills the broker and recovers it from its journal, which is kept in
memory here. The broker must then hold what it held before.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from broker.config import BrokerConfig
from broker.core.dispatch import Dispatcher
from broker.core.peers import Send
from broker.journal.writer import Kind, Place, Record
from broker.metrics import prometheus
from broker.output_commit import JournalStore, recover, snapshot
from broker.status import status
from protocol.codec import (
    PRELUDE,
    AnyMessage,
    Buffer,
    decode,
    encode,
    encode_arrays,
    encode_delivery,
    open_envelope,
)
from protocol.errors import LimitExceeded, ProtocolError
from protocol.messages.episodes import (
    CancelTask,
    Checkpointed,
    Commit,
    Deliver,
    DeliveryCredit,
    LeaseTask,
    PutTasks,
    TaskCredit,
    TaskRejected,
)
from protocol.messages.fields import DeliveryUnit
from protocol.messages.peers import Goodbye, Heartbeat, Hello, PublishWeights, Refused
from tests.campaigns.fuzz.engine import HOSTILE_INTS, Choices, hostile_value, mutate_value
from tests.campaigns.fuzz.messages import arrays, evaluation, group, plain, segment

Said = tuple[str, list[bytes]]
"""A peer, and the frames that it sends."""


def mutated(choices: Choices, message: Any, ids: Sequence[str]) -> Any:
    """Return the message with one field changed.

    Args:
        ids: names that mean something to the broker, to put in place of others.
    """
    name = choices.pick(message.__struct_fields__)
    value = getattr(message, name)
    match value:
        case bool():
            other: Any = not value
        case str() if ids and choices.flag():
            other = choices.pick(ids)
        case int():
            near = value + choices.pick((-1, 1, 2))
            other = near if choices.flag() else choices.pick(HOSTILE_INTS)
        case list() if value and isinstance(value[0], msgspec.Struct) and not choices.flag(4):
            place = choices.below(len(value))
            other = [*value[:place], mutated(choices, value[place], ids), *value[place + 1 :]]
        case list() if value:
            other = value * choices.pick((0, 2, 30))
        case msgspec.Struct():
            other = mutated(choices, value, ids)
        case _:
            other = hostile_value(choices.pick, value)
    return msgspec.structs.replace(message, **{name: other})


def mutated_header(choices: Choices, header: bytes) -> bytes:
    """Return a header with one value changed, or the header itself if that cannot be encoded."""
    try:
        return msgspec.msgpack.encode(mutate_value(choices.pick, msgspec.msgpack.decode(header)))
    except (msgspec.MsgspecError, OverflowError, UnicodeDecodeError):
        return header


def damaged(choices: Choices, frames: Sequence[bytes]) -> list[bytes]:
    """Return frames of which one is missing, cut, or has a wrong byte or value."""
    out = list(frames)
    place = choices.below(len(out)) if out else 0
    match choices.below(4):
        case 0:
            out[place : place + 1] = []
        case 1:
            out[place : place + 1] = [out[place][: choices.below(max(1, len(out[place])))]] if out else []
        case 2 if out and out[place]:
            changed = bytearray(out[place])
            changed[choices.below(len(changed))] = choices.byte()
            out[place] = bytes(changed)
        case _ if len(out) > 1:
            out[1] = mutated_header(choices, out[1])
    return out


def send(name: str, message: Any) -> Said:
    """Encode a message, even one that the protocol forbids. If that fails, send the bare prelude."""
    try:
        return name, [PRELUDE, msgspec.msgpack.encode(message)]
    except (OverflowError, TypeError, UnicodeEncodeError, RecursionError, ValueError):
        return name, [PRELUDE]


LEARNERS, ACTORS, GENERATORS = ("L", "M"), ("a", "b", "c"), ("g", "h")
NAMES = (*LEARNERS, *ACTORS, *GENERATORS, "x", "\udcff")
ROLES = (
    dict.fromkeys(LEARNERS, "learner")
    | dict.fromkeys(ACTORS, "actor")
    | dict.fromkeys(GENERATORS, "generator")
)
MAX_SAID = 64
FOREIGN = plain()


class Run:
    """A lease, and how much of its trajectory was sent."""

    def __init__(self, lease: LeaseTask, actor: str) -> None:
        self.lease, self.actor = lease, actor
        self.index = self.offset = 0


class Peers:
    """All peers of one script."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._runs: dict[str, Run] = {}
        self._units: list[str] = []
        self._tasks: list[str] = ["e0"]
        self._said: list[Said] = []
        self._groups = self._epoch = self._lineage = self._step = self._version = 0
        self._incarnations = dict.fromkeys(NAMES, 1)
        self.most_leases = 0
        self._opening: list[Said] = []
        if not choices.flag(4):
            hello = self._learner_hello("L", new=True)
            self._opening = [("L", encode(hello)), ("L", encode(DeliveryCredit(units=3)))]
            for name in ACTORS[: 1 + choices.below(3)]:
                hi = encode(Hello(role="actor", peer=name, incarnation=1))
                self._opening += [(name, hi), (name, encode(TaskCredit(tasks=2)))]
            self._opening.append(("L", encode(PutTasks(tasks=self._new_group(2)))))

    def hear(self, name: str, message: AnyMessage) -> None:
        """Take in a message of the broker to a peer."""
        match message:
            case LeaseTask():
                known = self._runs.get(message.lease_id)
                self._runs[message.lease_id] = known or Run(message, name)
            case CancelTask():
                self._runs.pop(message.lease_id, None)
            case Deliver():
                self._units.append(message.unit_id)
                del self._units[:-50]
            case Refused(code="unknown_peer") if (
                name in ROLES and len(self._opening) < 8 and self._choices.flag(3)
            ):
                self._opening += self._join(name)

    def beat(self, now: float) -> list[Said]:
        """Return heartbeats of the learners and actors."""
        beat = Heartbeat(progress=now, busy=True, policy_version=self._version)
        return [send(name, beat) for name in NAMES[:5]]

    def speak(self) -> Iterator[Said]:
        """Yield the next messages of the script."""
        if self._opening:
            said, self._opening = self._opening, []
        else:
            said = list(self._next())
        self._said = [*self._said, *said][-MAX_SAID:]
        yield from said

    # --- what kind of message ---------------------------------------------------------------------------------

    def _next(self) -> Iterator[Said]:
        choices = self._choices
        kind = choices.below(40)
        if kind < 16:
            yield from self._segment()
        elif kind < 18:
            yield from self._flood()
        elif kind < 29:
            name, message = self._usual()
            yield send(name, message)
        elif kind < 33:
            name, message = self._usual()
            yield send(name, self._mutated(message))
        elif kind < 34:
            yield send(choices.pick(NAMES), choices.pick(FOREIGN))
        elif kind < 37 and self._said:
            name, frames = choices.pick(self._said)
            yield (name if choices.flag() else choices.pick(NAMES)), frames
        elif kind < 38 and self._said:
            name, frames = choices.pick(self._said)
            yield name, damaged(choices, frames)
        else:
            name = choices.pick(NAMES)
            self._incarnations[name] += choices.flag(3)
            yield from self._join(name, new=choices.flag(3))

    def _usual(self) -> tuple[str, AnyMessage]:
        """Return a sender and a message that is mostly right for the moment."""
        choices = self._choices
        learner, actor = "L" if choices.below(8) else "M", choices.pick(ACTORS)
        match choices.below(12):
            case 0 | 1:
                tasks = (
                    [evaluation(self._new_name("e"))]
                    if choices.flag(4)
                    else self._new_group(1 + choices.below(4))
                )
                return learner, PutTasks(tasks=tasks)
            case 2:
                return learner, DeliveryCredit(units=choices.below(4))
            case 3 | 4:
                return learner, self._commit()
            case 5:
                return learner, Checkpointed(epoch=self._epoch, step=max(0, self._step - choices.below(3)))
            case 6:
                self._version += choices.below(3)
                return learner, PublishWeights(
                    epoch=self._epoch, version=self._version, manifest="m", url="http://h:1"
                )
            case 7 | 8:
                return actor, TaskCredit(tasks=choices.below(4))
            case 9 if self._runs:
                run = choices.pick(list(self._runs.values()))
                reason = choices.pick(("draining", "full", "no such environment"))
                return run.actor, TaskRejected(lease_id=run.lease.lease_id, reason=reason)
            case 10 if choices.flag(6):
                return choices.pick(NAMES[:7]), Goodbye()
            case _:
                name = choices.pick(NAMES[:7])
                return name, Heartbeat(
                    gauges={choices.pick(("tokens_total", "x_share", "y")): float(choices.byte())},
                    progress=float(choices.byte()),
                    busy=choices.flag(),
                    policy_version=self._version,
                )

    def _commit(self) -> Commit:
        choices = self._choices
        self._step += choices.below(2)
        units = [choices.pick(self._units) for _ in range(choices.below(3))] if self._units else []
        dropped = [choices.pick(self._units)] if self._units and choices.flag(4) else []
        return Commit(epoch=self._epoch, step=self._step, trained=units, dropped=dropped)

    def _join(self, name: str, *, new: bool = False) -> list[Said]:
        """Return a peer's Hello, and its first credit."""
        choices = self._choices
        match ROLES.get(name):
            case "learner":
                credit: AnyMessage = DeliveryCredit(units=choices.below(5))
                return [send(name, self._learner_hello(name, new=new)), send(name, credit)]
            case "actor":
                hello = Hello(role="actor", peer=name, incarnation=self._incarnations[name])
                return [send(name, hello), send(name, TaskCredit(tasks=3))]
            case "generator":
                return [send(name, self._generator_hello(name))]
            case _:
                return [send(name, self._mutated(Hello(role="actor", peer="x", incarnation=1)))]

    def _generator_hello(self, name: str) -> Hello:
        at, url = f"tcp://{name}:1", f"http://{name}:1"
        incarnation = self._incarnations[name]
        return Hello(role="generator", peer=name, incarnation=incarnation, endpoint=at, weights_url=url)

    def _learner_hello(self, name: str, *, new: bool) -> Hello:
        choices = self._choices
        if new:
            self._epoch += 1
            if choices.flag(3) or not self._lineage:
                self._lineage = self._epoch
        units: tuple[DeliveryUnit, ...] = ("group", "group", "trajectory", "segment")
        deliver = choices.pick(units)
        self._incarnations[name] = max(self._incarnations[name], self._epoch)
        step = max(0, self._step - choices.below(3))
        return Hello(
            role="learner", peer=name, incarnation=self._incarnations[name], deliver=deliver,
            epoch=self._epoch, lineage=self._lineage, step=step,
        )  # fmt: skip

    # --- segments ---------------------------------------------------------------------------------------------

    def _segment(self) -> Iterator[Said]:
        choices = self._choices
        if not self._runs:
            yield send(choices.pick(ACTORS), TaskCredit(tasks=1))
            return
        run = choices.pick(list(self._runs.values())[-8:])
        tokens = choices.below(5)
        status = choices.pick(("unfinished", "finished", "finished", "truncated", "failed"))
        message = segment(
            run.lease, run.index, run.offset, tokens=tokens, status=status, version=self._version
        )
        values = arrays(tokens, min(2, tokens), self._version)
        kind = choices.below(16)
        if kind == 0:
            message = self._mutated(message)
        name = choices.pick(NAMES) if kind == 1 else run.actor
        try:
            frames = encode_arrays(message, values) if kind != 2 else encode(message)
        except (LimitExceeded, OverflowError, TypeError):
            return
        if kind == 3:
            frames = (
                [*frames, frames[-1]] if choices.flag() else [*frames[:-1], frames[-1][: choices.below(9)]]
            )
        if kind == 4:
            frames = [frames[0], mutated_header(choices, frames[1]), *frames[2:]]
        # With kind 5 the same index comes again.
        if kind != 5:
            run.index += 1
            run.offset += tokens
        if status != "unfinished" and kind > 5:
            self._runs.pop(run.lease.lease_id, None)
        yield name, frames

    def _flood(self) -> Iterator[Said]:
        """Yield many segments of one trajectory, whatever the credit, half of the time with reconnects."""
        choices = self._choices
        runs = list(self._runs.values())[-8:]
        if not runs:
            return
        run, again = choices.pick(runs), choices.flag()
        for _ in range(choices.below(16)):
            message = segment(
                run.lease, run.index, run.offset, tokens=1, status="unfinished", version=self._version
            )
            run.index, run.offset = run.index + 1, run.offset + 1
            yield run.actor, encode_arrays(message, arrays(1, 1, self._version))
            if again and choices.flag(4):
                yield from self._join(run.actor)

    # --- wrong in one place -----------------------------------------------------------------------------------

    def _mutated(self, message: Any) -> Any:
        return mutated(self._choices, message, (*self._units, *self._tasks, *self._runs))

    # --- names --------------------------------------------------------------------------------------------------

    def _new_name(self, prefix: str) -> str:
        self._groups += 1
        name = f"{self._lineage}{prefix}{self._groups}"
        self._tasks = [*self._tasks, name][-20:]
        return name

    def _new_group(self, size: int) -> list[Any]:
        return group(self._new_name("g"), size, deadline_s=20.0)


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
    """A journal in memory, with the parts of the interface that `broker.output_commit.JournalStore` needs."""

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
    """Target for `broker.core.dispatch.Dispatcher`, its `broker.core.state`, and `broker.output_commit`."""

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
        store = JournalStore(self._journal, 1 << 30, wall_clock=lambda: 0.0)  # type: ignore[arg-type]
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

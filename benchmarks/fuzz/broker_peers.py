"""Peers that follow the protocol as far as their script says: the grammar of `benchmarks.fuzz.broker`.

A message is right for the moment (a segment of a lease that the peer holds, a commit of a unit that it was
given). Or it has one wrong field, comes from another peer, is a repetition, or is damaged.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.fuzz.damage import Said, damaged, mutated, mutated_header, send
from benchmarks.fuzz.engine import Choices
from benchmarks.fuzz.messages import arrays, evaluation, group, plain, segment
from protocol.codec import AnyMessage, encode, encode_arrays
from protocol.errors import LimitExceeded
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

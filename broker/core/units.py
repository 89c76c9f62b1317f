"""Units: assembled from segments, ready, leased to the learner, expired, committed, released. Pure.

`Assembly` has the open trajectories and rollout groups. `Deliveries` has the units on their way to the learner.
`LearnerSteps` is how far the learner's line of steps has come, and what a step back behind a checkpoint costs;
`take_over` hands the units of one learner process to the next.
"""

import heapq
import sys
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from broker.core.records import (
    GroupRecord,
    Ledger,
    Outcome,
    SegmentStore,
    StoredSegment,
    Tally,
    TrajectoryRecord,
    Unit,
)
from broker.core.tasks import is_stale
from protocol import names
from protocol.codec import Buffer
from protocol.messages.episodes import Dropped, Segment, Task
from protocol.messages.fields import DeliveryUnit
from protocol.messages.peers import Hello, Refused
from protocol.version_line import VersionLine


class Assembly:
    """Stored segments that are not part of a unit yet.

    Results wait until the owner takes them: new units, notices for the learner, and the ids of tasks that
    nobody needs any more.
    """

    def __init__(self, store: SegmentStore, ledger: Ledger, *, min_members: int, deadline_s: float) -> None:
        self._store, self._ledger = store, ledger
        self._min_members, self._deadline_s = min_members, deadline_s
        self.mode: DeliveryUnit = "group"
        self.trajectories: dict[str, TrajectoryRecord] = {}
        self.groups: dict[str, GroupRecord] = {}
        self._ready: list[Unit] = []
        self._dropped: list[Dropped] = []
        self._unwanted: list[str] = []

    @property
    def results(self) -> bool:
        """Whether there are results to take."""
        return bool(self._ready or self._dropped or self._unwanted)

    def take_ready(self) -> list[Unit]:
        """Return the units formed since the last call."""
        taken, self._ready = self._ready, []
        return taken

    def take_dropped(self) -> list[Dropped]:
        """Return the notices for the learner since the last call."""
        taken, self._dropped = self._dropped, []
        return taken

    def take_unwanted(self) -> list[str]:
        """Return the ids of tasks to cancel since the last call."""
        taken, self._unwanted = self._unwanted, []
        return taken

    def expect(self, task: Task) -> str:
        """Make the group of a new task wait for it; return what is wrong with the task, or ""."""
        if task.purpose == "eval":
            return ""
        group = self.groups.get(task.group_id)
        if group is None:
            group = self.groups[task.group_id] = GroupRecord(task.group_id, task.group_size)
        if group.size != task.group_size:
            return (
                f"task {task.task_id!r}: group {task.group_id!r} has size {group.size}, not {task.group_size}"
            )
        if len(group.out) + group.members_done >= group.size:
            return f"task {task.task_id!r}: group {task.group_id!r} has its {group.size} members already"
        group.out.add(task.task_id)
        return ""

    def add(self, segment: Segment, task: Task, nbytes: int, now: float) -> None:
        """Add the next stored segment of a trajectory. The caller has checked that it is the next one."""
        trajectory_id, tokens, action_tokens = segment.trajectory_id, segment.tokens, segment.action_tokens
        trajectory = self.trajectories.get(trajectory_id)
        if trajectory is None:
            trajectory = self.trajectories[trajectory_id] = TrajectoryRecord(
                trajectory_id, _without_data(task)
            )
        stored = StoredSegment(
            (trajectory_id, segment.index), tokens, action_tokens, segment.version_max, nbytes
        )
        self._ledger.stored.add(stored)
        trajectory.segments.append(stored)
        trajectory.next_index += 1
        trajectory.tokens += tokens
        trajectory.action_tokens += action_tokens
        if segment.status != "unfinished":
            trajectory.closed, trajectory.failed = True, segment.status == "failed"
            if task.purpose == "train" and (length := trajectory.length):
                self._ledger.lengths.closed(length)
        if trajectory.closed or trajectory.split or self.mode == "segment":
            self._form(trajectory, now)

    def set_mode(self, mode: DeliveryUnit, now: float) -> None:
        """Set the kind of unit that the learner wants; trajectories that wait form units of the new kind."""
        if mode == self.mode:
            return
        self.mode = mode
        waiting = [t for group in self.groups.values() for t in group.here]
        for group in self.groups.values():
            group.here = []
        for trajectory in (*waiting, *self.trajectories.values()):
            self._form(trajectory, now)

    def restore(
        self,
        trajectories: Iterable[TrajectoryRecord],
        groups: Iterable[GroupRecord],
        mode: DeliveryUnit,
        now: float,
    ) -> None:
        """Restore what another process held. Deadlines begin anew, because the clock is a different one."""
        self.mode = mode
        self.trajectories = {trajectory.trajectory_id: trajectory for trajectory in trajectories}
        self.groups = {group.group_id: group for group in groups}
        # Snapshots of earlier versions have the data.
        for trajectory in (*self.trajectories.values(), *(t for g in self.groups.values() for t in g.here)):
            trajectory.task = _without_data(trajectory.task)
        for group in self.groups.values():
            group.since = now if group.since is not None else None

    def drop_trajectory(self, trajectory_id: str, outcome: Outcome) -> None:
        """Drop the segments of an attempt that ended early, as far as they are in no unit yet."""
        trajectory = self.trajectories.pop(trajectory_id, None)
        if trajectory is not None:
            self._drop(trajectory.segments, outcome)

    def give_up(self, task: Task, now: float) -> None:
        """Note that a task was given up, so that its group does not wait for it."""
        group = self.groups.get(task.group_id)
        if task.purpose == "eval" or self.mode != "group" or group is None:
            notice = Dropped(unit_id=task.task_id, group_id=task.group_id, trajectories=1, reason="given_up")
            self._dropped.append(notice)
        if group is not None and task.purpose == "train":
            group.out.discard(task.task_id)
            group.lost += 1
            self._conclude_if_complete(group, now)

    def segments(self) -> Iterator[StoredSegment]:
        """Yield all stored segments that are in no unit."""
        for trajectory in (*self.trajectories.values(), *(t for g in self.groups.values() for t in g.here)):
            yield from trajectory.segments

    def overdue(self, now: float) -> list[str]:
        """Return the groups whose deadline has passed.

        Where members are delivered singly, no member waits, so a group with members still out is not overdue.
        """
        return [
            group.group_id
            for group in self.groups.values()
            if group.since is not None
            and now - group.since > self._deadline_s
            and (self.mode == "group" or not group.out)
        ]

    def close_group(self, group_id: str) -> None:
        """Close a group that is overdue: it gets no more members."""
        self._conclude(self.groups[group_id], "deadline")

    def drop_all(self) -> None:
        """Drop all trajectories and groups, because nobody needs them any more."""
        for trajectory in (*self.trajectories.values(), *(t for g in self.groups.values() for t in g.here)):
            self._drop(trajectory.segments, "superseded")
        self.trajectories, self.groups = {}, {}

    def postpone(self, seconds: float) -> None:
        """Postpone all deadlines by the time in which the broker itself kept actors waiting."""
        for group in self.groups.values():
            if group.since is not None:
                group.since += seconds

    def _form(self, trajectory: TrajectoryRecord, now: float) -> None:
        """Form units of a trajectory, as far as the mode allows."""
        task = trajectory.task
        if (self.mode == "segment" or trajectory.split) and task.purpose == "train":
            trajectory.split = True
            for stored in trajectory.segments:
                unit_id = names.window_id(*stored.key)
                last = trajectory.closed and stored is trajectory.segments[-1]
                self._emit(
                    Unit(
                        unit_id,
                        task.group_id,
                        task.purpose,
                        [stored],
                        int(last),
                        complete=last,
                        context=not last,
                        lengths=[trajectory.length] if last and trajectory.length else [],
                    )
                )
            trajectory.segments = []
        if not trajectory.closed:
            return
        self.trajectories.pop(trajectory.trajectory_id, None)
        group = self.groups.get(task.group_id)
        if task.purpose == "eval" or group is None or self.mode != "group":
            if trajectory.segments:
                segments, trajectory.segments = trajectory.segments, []
                unit = Unit(trajectory.trajectory_id, task.group_id, task.purpose, segments, 1, complete=True)
                unit.lengths = [trajectory.length] if trajectory.length and task.purpose == "train" else []
                self._emit(unit)
            if group is not None and task.purpose == "train":
                group.taken += 1
        elif trajectory.segments:
            group.here.append(trajectory)
        else:
            # The member was delivered segment by segment.
            group.taken += 1
        if group is not None and task.purpose == "train":
            group.out.discard(task.task_id)
            self._conclude_if_complete(group, now)

    def _conclude_if_complete(self, group: GroupRecord, now: float) -> None:
        if group.since is None:
            group.since = now
        if group.members_done >= group.size:
            self._conclude(group, "given_up")

    def _conclude(self, group: GroupRecord, reason: str) -> None:
        """End a group that gets no more members: form its unit, or drop it and notify the learner."""
        del self.groups[group.group_id]
        self._unwanted += sorted(group.out)
        segments = [stored for trajectory in group.here for stored in trajectory.segments]
        if len(group.here) >= min(self._min_members, group.size):
            whole = len(group.here) == group.size
            unit = Unit(group.group_id, group.group_id, "train", segments, len(group.here), complete=whole)
            unit.lengths = [trajectory.length for trajectory in group.here if trajectory.length]
            self._emit(unit)
        elif group.here or (self.mode == "group" and not group.taken):
            self._drop(segments, "given_up")
            self._dropped.append(
                Dropped(
                    unit_id=group.group_id, group_id=group.group_id, trajectories=group.size, reason=reason
                )
            )

    def _emit(self, unit: Unit) -> None:
        if unit.fits:
            self._ready.append(unit)
            return
        self._drop(unit.segments, "too_large")
        self._dropped.append(
            Dropped(
                unit_id=unit.unit_id,
                group_id=unit.group_id,
                trajectories=unit.trajectories,
                reason="too_large",
            )
        )

    def _drop(self, segments: list[StoredSegment], outcome: Outcome) -> None:
        for stored in segments:
            self._store.drop(stored.key)
            self._ledger.note_outcome(outcome, stored)


def _without_data(task: Task) -> Task:
    """Return a task without what only the actor needs: data for the environment, note and beginning.

    The task queue has them as long as the task may be leased again.
    """
    if not task.data and not task.note and task.start is None:
        return task
    return replace(task, data={}, note="", start=None)


MAX_RELEASED = 4_096
"""Upper limit of the released units whose names the broker keeps."""
MAX_NAMED = 20
"""Upper limit of the units that a text names."""


class ReleasedUnit(Struct, frozen=True, array_like=True):
    """A unit that a checkpoint covers, so that the broker has deleted its segments."""

    unit_id: str
    step: int
    outcome: Outcome
    segments: int
    tokens: int
    action_tokens: int
    lengths: list[int]


class LearnerSteps(Struct):
    """Steps of the live line of checkpoints. The journal keeps them, so that the next process knows them, too."""

    committed: int = 0
    """Newest step that the learner named in a Commit, or had at its Hello."""
    released: int = 0
    """Newest step that a checkpoint covers."""
    units: list[ReleasedUnit] = []
    """Units released last, the newest at the end."""

    def note_commit(self, step: int) -> None:
        """Note that the learner named a step in a Commit."""
        self.committed = max(self.committed, step)

    def note_release(self, units: Iterable[Unit], step: int) -> None:
        """Note that a checkpoint covers a step, and keep the names of the units that are released with it."""
        self.released = max(self.released, step)
        for unit in units:
            assert unit.outcome is not None
            tally = Tally()
            tally.add_all(unit.segments)
            self.units.append(
                ReleasedUnit(
                    unit.unit_id, unit.step, unit.outcome,
                    tally.segments, tally.tokens, tally.action_tokens, unit.lengths,
                )
            )  # fmt: skip
        del self.units[:-MAX_RELEASED]

    def behind(self, step: int) -> list[ReleasedUnit]:
        """Return the units, as far as they are known by name, that were released with steps after this one."""
        return [unit for unit in self.units if unit.step > step]

    def goes_back(self, step: int) -> bool:
        """Return whether a learner at this step would repeat steps whose units are released."""
        return step < self.released

    def begin(self, step: int, *, new_line: bool) -> None:
        """Continue at this step, with the units of a checkpoint of it. ``new_line`` forgets the units before."""
        self.units = [] if new_line else [unit for unit in self.units if unit.step <= step]
        self.committed = self.released = step


def counted_by_name(units: Sequence[ReleasedUnit]) -> str:
    """Return a text that counts units and names them, as many as fit into a line.

    Example:
        >>> counted_by_name([ReleasedUnit("1g7", 3, "trained", 4, 90, 60, [60])])
        '1 units of 90 tokens (1g7)'
    """
    tokens = sum(unit.tokens for unit in units)
    names = ", ".join(unit.unit_id for unit in units[:MAX_NAMED]) + (
        ", ..." if len(units) > MAX_NAMED else ""
    )
    return f"{len(units)} units of {tokens} tokens{f' ({names})' if names else ''}"


def no_step_back(steps: LearnerSteps, step: int) -> Refused:
    """Return the refusal of a learner at this step, which would repeat steps whose units are released."""
    # There is no checkpoint of step 0 to go back to.
    accept = (
        f"accept the loss with `offbeat train RUN_FILE --resume --from {step}`"
        if step
        else "start anew with `offbeat train RUN_FILE`, without --resume"
    )
    text = (
        f"this learner continues at step {step}, but a checkpoint of step {steps.released} was written: "
        f"{counted_by_name(steps.behind(step))} of the steps between are deleted and cannot be trained again; resume "
        f"from the checkpoint of step {steps.released}, or {accept}"
    )
    return Refused(code="step_back", message=text, fatal=True)


class Deliveries:
    """Whole units. Evaluation comes before training, then older units first; a unit keeps its age.

    A unit is leased until it is committed. If the lease expires before, the unit becomes ready again, but a
    late commit still counts, because it prevents a second training. A committed unit is kept until a
    checkpoint of the learner covers its step. If the learner goes back to a step before that, the unit
    becomes ready again.
    """

    def __init__(self, store: SegmentStore, ledger: Ledger, *, lease_s: float, max_policy_lag: int) -> None:
        self._store, self._ledger = store, ledger
        self._lease_s, self.max_policy_lag = lease_s, max_policy_lag
        self._order: list[tuple[bool, int]] = []
        self._ready: dict[int, Unit] = {}
        """Ready units by age."""
        self._units: dict[str, Unit] = {}
        """Units that are not committed, by id."""
        self._since: dict[str, float] = {}
        """Time when each leased unit was leased."""
        self._committed: dict[str, Unit] = {}
        self.count = 0

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def leased(self) -> int:
        return len(self._since)

    @property
    def committed(self) -> int:
        """Number of committed units that wait for a checkpoint."""
        return len(self._committed)

    @property
    def ready_segments(self) -> int:
        return sum(len(unit.segments) for unit in self._ready.values())

    @property
    def leased_segments(self) -> int:
        return sum(len(self._units[unit_id].segments) for unit_id in self._since)

    def units(self) -> list[Unit]:
        """Return all units that are not committed, in the order in which they became ready."""
        return sorted(self._units.values(), key=lambda unit: unit.age)

    def segments(self) -> Iterator[StoredSegment]:
        """Yield the segments of all units that are not committed."""
        for unit in self._units.values():
            yield from unit.segments

    def add(self, unit: Unit) -> None:
        """Add a new unit, which is ready."""
        self.count += 1
        unit.age = self.count
        # A learner may give a group the name of another group or of a trajectory.
        while self.knows(unit.unit_id):
            unit.unit_id += f"#{unit.age}"
        self._units[unit.unit_id] = unit
        self._queue(unit)

    def next(self) -> Unit | None:
        """Return the ready unit that is delivered next; None if no unit is ready."""
        # A unit may be committed or dropped while it is ready.
        while self._order and self._order[0][1] not in self._ready:
            heapq.heappop(self._order)
        return self._ready[self._order[0][1]] if self._order else None

    def is_stale(self, unit: Unit, version: int, line: VersionLine) -> bool:
        """Return whether a ready unit is too old to be delivered under this policy version of this line."""
        # The learner may hold the unit from an earlier delivery, and train it.
        # Later segments need a context unit.
        wanted = unit.held or unit.purpose == "eval" or unit.context
        return not wanted and is_stale(line.freshest(unit.version_max), version, self.max_policy_lag)

    def lease(self, unit_id: str, epoch: int) -> None:
        """Lease a ready unit to the learner of this epoch."""
        unit = self._units[unit_id]
        self._ready.pop(unit.age, None)
        self._ledger.delivered.add_all(unit.segments)
        if unit.deliveries:
            self._ledger.redelivered.add_all(unit.segments)
        if not unit.deliveries or unit.epoch != epoch:
            unit.processes += 1
        unit.deliveries += 1
        unit.epoch, unit.held = epoch, True

    def leased_at(self, unit_id: str, now: float) -> None:
        """Note the time at which the lease begins."""
        self._since[unit_id] = now

    def frames(self, unit: Unit) -> list[tuple[bytes, Buffer]]:
        """Return header and body of each segment, as the actor sent them."""
        return [self._store.get(stored.key) for stored in unit.segments]

    def knows(self, unit_id: str) -> bool:
        """Return whether the broker still has the unit, so that a commit of it has, or had, an effect."""
        return unit_id in self._units or unit_id in self._committed

    def commit(self, unit_id: str, outcome: Outcome, step: int) -> None:
        """Commit a unit, and keep it until a checkpoint covers ``step``. Ignore unknown or committed ones."""
        unit = self._units.get(unit_id)
        if unit is None:
            return
        self._remove(unit)
        self._count_lengths(unit, outcome, 1)
        unit.step, unit.outcome, unit.processes = step, outcome, 0
        self._committed[unit_id] = unit
        for stored in unit.segments:
            self._store.commit(stored.key)
        self._ledger.note_outcome(outcome, *unit.segments)

    def release(self, step: int) -> list[Unit]:
        """Release the units that were committed up to ``step``, for good. Return them."""
        units = [unit for unit in self._committed.values() if unit.step <= step]
        for unit in units:
            del self._committed[unit.unit_id]
            for stored in unit.segments:
                self._store.drop(stored.key)
        return units

    def lose(self, unit: ReleasedUnit) -> None:
        """Count a released unit as lost: the step that trained or dropped it is not part of the line any more."""
        outcomes = self._ledger.outcomes
        outcomes[unit.outcome].move(
            outcomes["lost"], segments=unit.segments, tokens=unit.tokens, action_tokens=unit.action_tokens
        )
        self._ledger.note_undone(unit.outcome, unit.tokens)
        self._count_lengths(unit, unit.outcome, -1)

    def survived(self) -> None:
        """Reset the count of processes: the learner wrote a checkpoint, so no unit is to blame."""
        for unit in self._units.values():
            unit.processes = 0

    def uncommit_all(self) -> None:
        """Make all committed units ready again, at their old age, because no checkpoint covers them."""
        for unit in self._committed.values():
            assert unit.outcome is not None
            for stored in unit.segments:
                self._store.uncommit(stored.key)
                self._ledger.undo_outcome(unit.outcome, stored)
            self._count_lengths(unit, unit.outcome, -1)
            unit.step, unit.outcome, unit.held = 0, None, False
            self._units[unit.unit_id] = unit
            self._queue(unit)
        self._committed = {}

    def _count_lengths(self, unit: Unit | ReleasedUnit, outcome: Outcome, times: int) -> None:
        for tokens in unit.lengths if outcome == "trained" else ():
            self._ledger.lengths.trained(tokens, times)

    def drop(self, unit_id: str, outcome: Outcome) -> Unit:
        """Drop a unit that is not committed."""
        unit = self._units[unit_id]
        self._remove(unit)
        for stored in unit.segments:
            self._store.drop(stored.key)
            self._ledger.note_outcome(outcome, stored)
        return unit

    def expire(self, progress_at: float, now: float) -> None:
        """Expire the leases of units that were not committed while the learner made no progress."""
        for unit_id, since in list(self._since.items()):
            if now - max(since, progress_at) > self._lease_s:
                self._expire(unit_id)

    def expire_all(self, *, void: bool) -> None:
        """Make all leased units ready again, because they may have been lost on the way.

        ``void``: the learner that had them is gone for good, so it does not hold them any more.
        """
        self._since = {}
        for unit in self._units.values():
            unit.held = unit.held and not void
            if unit.age not in self._ready:
                self._queue(unit)

    def saved(self) -> list[Unit]:
        """Return all units, for a snapshot."""
        return [*self._units.values(), *self._committed.values()]

    def restore(self, units: Iterable[Unit], count: int) -> None:
        """Restore the units that `saved` returned; those that are not committed are ready."""
        self.count = count
        for unit in units:
            if unit.outcome is None:
                self._units[unit.unit_id] = unit
                self._queue(unit)
            else:
                self._committed[unit.unit_id] = unit

    def _queue(self, unit: Unit) -> None:
        self._ready[unit.age] = unit
        heapq.heappush(self._order, (unit.purpose != "eval", unit.age))

    def _expire(self, unit_id: str) -> None:
        del self._since[unit_id]
        self._queue(self._units[unit_id])

    def _remove(self, unit: Unit) -> None:
        del self._units[unit.unit_id]
        self._since.pop(unit.unit_id, None)
        self._ready.pop(unit.age, None)


def process_of(hello: Hello) -> tuple[str, int, int]:
    """Return what identifies a learner process: name, incarnation and epoch."""
    return hello.peer, hello.incarnation, hello.epoch


def goes_back(steps: LearnerSteps, before: Hello, hello: Hello) -> bool:
    """Return whether a new learner process has fewer steps than were released for the one before.

    A learner that begins a new line at step 0 starts anew, which is no step back.
    """
    continues = before.lineage == hello.lineage or hello.step > 0
    return process_of(before) != process_of(hello) and continues and steps.goes_back(hello.step)


def take_over(deliveries: Deliveries, steps: LearnerSteps, before: Hello, hello: Hello) -> tuple[str, ...]:
    """Hand the units of one learner process to the next; return the purposes whose tasks are to be cancelled.

    A new process of the same lineage gets every unit again that its checkpoint does not cover, and
    evaluation tasks are cancelled. In a new lineage, all tasks are cancelled and all units are dropped or
    released. Units that were released with steps which the learner does not have are lost.
    """
    deliveries.expire_all(void=True)
    for unit in steps.behind(hello.step) if goes_back(steps, before, hello) else ():
        deliveries.lose(unit)
    if before.lineage == hello.lineage:
        steps.note_release(deliveries.release(hello.step), hello.step)
        deliveries.uncommit_all()
        return ("eval",)
    if hello.step:
        deliveries.release(hello.step)
        # What was trained after the checkpoint is undone, too.
        deliveries.uncommit_all()
    else:
        deliveries.release(sys.maxsize)
    return ("eval", "train")

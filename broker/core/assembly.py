"""Assembly of segments into units: open trajectories, rollout groups, and what is ready. Pure."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from broker.core.ledger import Ledger
from broker.core.records import GroupRecord, Outcome, SegmentStore, StoredSegment, TrajectoryRecord, Unit
from protocol import names
from protocol.messages.episodes import Dropped, Segment, Task
from protocol.messages.fields import DeliveryUnit


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

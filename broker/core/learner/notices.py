"""Notices to the learner of units that it will never get. Pure."""

from collections import deque

from broker.core.learner.holdings import done_task_ids
from broker.core.recent import Recent
from broker.core.state import BrokerState
from protocol.messages.delivery import Dropped
from protocol.messages.tasks import Task

MAX_NOTICES = 65_536


class Notices:
    """The notices that wait for the learner, and what it got notices of."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._waiting: deque[Dropped] = deque(maxlen=MAX_NOTICES)
        self._noticed = Recent(MAX_NOTICES)
        """Ids of groups and tasks that the learner got notices of since its last Hello."""

    def forget(self) -> None:
        """Forget what the learner got notices of, because it may have missed them."""
        self._noticed = Recent(MAX_NOTICES)

    def tell_over(self, tasks: list[Task]) -> None:
        """Repeat the notices of tasks that are over: a learner that puts such tasks again has missed them."""
        over = [task for task in tasks if task.task_id in self._state.tasks.over]
        if not over:
            return
        if self._state.assembly.mode == "group":
            self._tell_groups_over([task for task in over if task.purpose == "train"])
            over = [task for task in over if task.purpose == "eval"]
        done = set(done_task_ids(self._state, "train", "eval"))
        for task in over:
            if task.task_id not in done and task.task_id not in self._noticed:
                self._noticed.add(task.task_id, 0)
                notice = Dropped(unit_id=task.task_id, group_id=task.group_id, trajectories=1, reason="over")
                self._waiting.append(notice)

    def _tell_groups_over(self, tasks: list[Task]) -> None:
        """Repeat the notices of whole groups that are over, where members are delivered together."""
        state = self._state
        over: dict[str, list[Task]] = {}
        for task in tasks:
            if task.group_id not in self._noticed:
                over.setdefault(task.group_id, []).append(task)
        held = state.tasks.groups() | {unit.group_id for unit in state.deliveries.units()}
        for group_id in sorted(over.keys() - held - state.assembly.groups.keys()):
            trajectories = len(over[group_id])
            notice = Dropped(unit_id=group_id, group_id=group_id, trajectories=trajectories, reason="over")
            self._waiting.append(notice)

    def send(self, learner: str | None) -> None:
        """Tell the learner which units it will never get; while it is away (None), the notices wait."""
        if self._state.notices:
            self._waiting.extend(self._state.take_notices())
        while learner is not None and self._waiting:
            notice = self._waiting.popleft()
            self._noticed.add(notice.group_id, 0)
            self._state.outbox.send(learner, notice)

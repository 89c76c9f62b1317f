"""The learner's conversation with the broker: tasks out, groups in, commits and announcements out."""

import logging
import queue
import time
from collections.abc import Callable, Sequence

from learner.config import LearnerConfig
from learner.errors import BrokerRefused, NoData, Stopped
from learner.intake.curriculum import Curriculum
from learner.intake.intake import Intake
from learner.trajectory import Trajectory
from learner.units import Unit
from protocol.link import ThreadLink
from protocol.messages import (
    AnyMessage,
    Checkpointed,
    CheckpointWanted,
    Deliver,
    DeliveryCredit,
    Drain,
    Held,
    PublishWeights,
    PutTasks,
    Refused,
    Task,
)

log = logging.getLogger(__name__)

CREDIT_UNITS = 64
TASKS_PER_MESSAGE = 512
POLL_S = 0.2
HELD_TIMEOUT_S = 180.0
"""Longer than a broker may take to start again, which it may be doing."""
CONFIRM_TIMEOUT_S = 15.0
TIME_LIMIT = "time limit"
FATAL_CODES = ("queue_full", "bad_task", "malformed", "limit", "version")
"""Refusals after which we would wait for ever for what was never taken."""


class Exchange:
    """Blocking calls over a `ThreadLink`; every wait has a deadline and names whom it waits for."""

    def __init__(
        self,
        link: ThreadLink,
        curriculum: Curriculum,
        config: LearnerConfig,
        *,
        lockstep: bool,
        stop_reason: Callable[[], str],
        broker: str = "",
        step: int = 0,
    ) -> None:
        self._link, self._config, self.lockstep, self._stop_reason = link, config, lockstep, stop_reason
        self._broker = f"the broker at {broker}" if broker else "the broker"
        self.curriculum = curriculum
        self.intake = Intake(curriculum, config.drops_uniform_groups, windows=config.train_on == "windows")
        self._drained = ""
        self._patience_s = config.start_timeout_s
        self._evaluating: list[Task] = []
        self._announced: PublishWeights | None = None
        self._checkpointed: Checkpointed | None = None
        self._covered = step
        """Steps that a checkpoint covers, at least."""
        self._joins = 0
        self._owed_held = False
        self._held_tasks: list[str] = []
        self._held_units: list[str] = []
        self._confirming = False
        self.checkpoint_wanted = ""
        """Why the broker wants a checkpoint, if it does."""
        self.between: Callable[[], None] = lambda: None
        """What to do while waiting, whenever something may have come."""
        self.waiting = False
        """Whether `collect` or `evaluate` is waiting for the broker now."""
        self._since, self._wanted = 0.0, 0

    def collect(self, *, step: int, version: int) -> list[Unit]:
        """Wait for a full batch, oldest first; keeps the task queue filled meanwhile.

        In lockstep it waits for all that is under way, the batches of a forced lag included, so that nothing is
        sampled while the weights change; they are taken in the order they were dealt out.

        Raises:
            NoData: nothing arrived for `data_timeout_s`.
            Stopped: the run is to end.
        """
        config = self._config
        wanted = config.units_per_batch
        batches = min(config.forced_lag + 1, config.steps - step) if self.lockstep else 1
        oldest = version - (config.forced_lag if self.lockstep else config.max_policy_lag)

        def enough() -> bool:
            self.between()
            self.intake.drop_stale(oldest)
            self.refill(step=step, version=version)
            return len(self.intake.ready) >= wanted * batches

        def missing() -> str:
            return f"{len(self.intake.ready)} of {wanted * batches} {config.train_on} are here"

        self._wanted = wanted * batches
        self._wait(enough, missing, limited=True)
        return self.intake.take(wanted, in_order=self.lockstep)

    def evaluate(self, tag: str, *, version: int) -> list[Trajectory | None]:
        """Greedy episodes on held-out tasks, sampled by ``version`` or a later one; None where one was given up.

        The run's time limit does not end it.
        """
        self._evaluating = tasks = self.curriculum.evaluation(tag, version)
        self.put(tasks)

        def out() -> int:
            return sum(task.group_id not in self.intake.evaluated for task in tasks)

        def missing() -> str:
            return f"evaluation {tag!r}: {out()} of {len(tasks)} tasks are out"

        def done() -> bool:
            self.between()
            return not out()

        try:
            self._wait(done, missing, limited=False)
        finally:
            self._evaluating = []
        return [self.intake.evaluated.pop(task.group_id) for task in tasks]

    def inherit(self) -> None:
        """Wait for the broker to say what it holds of the lineage that this learner continues, and adopt it.

        Raises:
            NoData: it does not say it within `HELD_TIMEOUT_S`.
            Stopped: the run is to end.
        """
        self._owed_held, deadline = True, time.monotonic() + HELD_TIMEOUT_S
        while self._owed_held:
            if reason := self._drained or self._stop_reason():
                raise Stopped(reason)
            if time.monotonic() > deadline:
                raise NoData(
                    f"{self._broker} has not said within {HELD_TIMEOUT_S:g} s what it holds of lineage "
                    f"{self.curriculum.lineage}; look at its log and its /status, then start the learner again "
                    "with --resume"
                )
            self._pump(POLL_S)

    def refill(self, *, step: int, version: int) -> None:
        """Let go of what was filtered out and put tasks up to the capacity that the lag bound allows."""
        self.flush(step=step)
        left = max(1, self._config.steps - step)
        tasks = self.curriculum.refill(
            version=version,
            lockstep=self.lockstep,
            steps_left=left,
            backlog=0 if self.lockstep else self.intake.backlog,
        )
        self.put(tasks)

    def flush(self, *, step: int) -> None:
        """Commit what was dropped since the last time, and once more what came again although committed.

        Windows that were dropped are context of those that follow. A checkpoint that does not know of them must
        not let go of them: once there is one at ``step``, they belong to the next step.
        """
        self._recommit()
        later = self.intake.windows and self._config.checkpoint_every > 0 and self._covered == step
        self.commit([], step=step + later)

    def _recommit(self) -> None:
        for message in self.intake.recommit(self.curriculum.epoch):
            self._link.send(message)

    def commit(
        self, trained: Sequence[Unit], *, step: int, version: int = -1, replayed_tokens: int = 0
    ) -> None:
        """These groups entered a gradient at ``step``, which updated ``version``, and so did replayed tokens."""
        message = self.intake.commit(self.curriculum.epoch, step, trained, replayed_tokens, version)
        if message is None:
            return
        if message.trained:
            log.debug("step %d trained %s", step, " ".join(message.trained))
        self._link.send(message)
        if not self._config.checkpoint_every:  # nothing will be asked for again
            self.checkpointed(step=step)

    def checkpointed(self, *, step: int) -> None:
        """A checkpoint covers ``step``; told again whenever we join again."""
        self._covered = step
        self._checkpointed = Checkpointed(epoch=self.curriculum.epoch, step=step)
        self._link.send(self._checkpointed)

    def announce(self, message: PublishWeights) -> None:
        """Tell the broker of a new version; told again whenever we join again."""
        self._announced = message
        self._link.send(message)

    def confirm_commits(self, *, step: int) -> None:
        """Before leaving: make sure that the broker knows of all that was committed.

        A commit may be lost with its connection, and nobody would say so: ask what the broker holds, and commit
        again what we are done with, until it holds none of that. If it does not answer within `CONFIRM_TIMEOUT_S`,
        it will hear of it from the learner that continues this lineage.
        """
        self._confirming, deadline = True, time.monotonic() + CONFIRM_TIMEOUT_S
        self.flush(step=step)
        while self._confirming:
            self._owed_held = True
            self._link.rejoin()
            while self._owed_held:
                if time.monotonic() > deadline:
                    log.warning(
                        "%s has not confirmed within %g s what was committed last; a learner that resumes this run "
                        "will tell it again",
                        self._broker,
                        CONFIRM_TIMEOUT_S,
                    )
                    return
                self._pump(POLL_S)

    def close(self) -> None:
        """Leave the broker on purpose."""
        self._link.close("done")

    @property
    def in_step(self) -> bool:
        """Whether trajectories stand still at the end of each window until there is another version."""
        return self.lockstep and self.intake.windows

    @property
    def version_before(self) -> int:
        """Newest policy version the broker knew of when we joined: of an earlier learner, if there was one."""
        return self._link.session.policy_version

    def put(self, tasks: Sequence[Task]) -> None:
        """Queue tasks; the broker ignores those it has seen."""
        for start in range(0, len(tasks), TASKS_PER_MESSAGE):
            self._link.send(PutTasks(tasks=list(tasks[start : start + TASKS_PER_MESSAGE])))

    def _joined(self) -> None:
        """A broker may have lost what we sent last, or all it knew of us: say again what it needs to know.

        It ignores what it has seen. Before it has said what it holds, it is not to deliver: see `_held`.
        """
        self._joins += 1
        self._held_tasks, self._held_units = [], []
        if self._announced is not None:
            self._link.send(self._announced)
        if self._checkpointed is not None:
            self._link.send(self._checkpointed)

    def _ready_for_deliveries(self) -> None:
        self.put([task for task in self._evaluating if task.group_id not in self.intake.evaluated])
        self._credit(CREDIT_UNITS)

    def _credit(self, units: int) -> None:
        """Of the join that we are at in the inbox: for a later one it would come before our word of what is trained."""
        self._link.send(DeliveryCredit(units=units), join=self._joins)

    def _held(self, task_ids: Sequence[str], unit_ids: Sequence[str]) -> None:
        """What the broker holds; it says so each time we join.

        First it hears again of what we are done with, as those commits were lost: it would deliver that anew, or
        drop it as stale although it is trained. Then it may deliver.
        """
        lost = self.intake.commit_again(unit_ids)
        self._recommit()
        owed, self._owed_held = self._owed_held, False
        if self._confirming:
            self._confirming = lost > 0
            return
        again = self.curriculum.adopt(task_ids) if owed else self.intake.awaited()
        self.put(again)
        self._ready_for_deliveries()
        if owed:
            log.info("the broker holds %d tasks of this lineage; told again of %d", len(task_ids), len(again))

    def _wait(self, done: Callable[[], bool], missing: Callable[[], str], *, limited: bool) -> None:
        """Wait until ``done``; the run's time limit ends it only if ``limited``, SIGTERM and Drain always do."""
        self.waiting, self._since = True, time.monotonic()
        try:
            self._pump(0.0)
            heard = time.monotonic()
            while True:
                reason = self._drained or self._stop_reason()
                if reason and (limited or reason != TIME_LIMIT):
                    raise Stopped(reason)
                looked = time.monotonic()
                if done():
                    return
                heard += time.monotonic() - looked  # a checkpoint may have been written
                if self._pump(POLL_S):
                    heard, self._patience_s = time.monotonic(), self._config.data_timeout_s
                elif time.monotonic() - heard > self._patience_s:
                    raise NoData(f"nothing arrived for {self._patience_s:g} s: {missing()}; {self._blame()}")
        finally:
            self.waiting = False
            self._wanted = 0

    def gauges(self) -> tuple[tuple[str, float], ...]:
        """What the learner waits for and for how long, for its heartbeat; may be called from another thread."""
        if not self.waiting:
            return ()
        waits: list[tuple[str, float]] = [("waiting_seconds", time.monotonic() - self._since)]
        if wanted := self._wanted:
            waits += [("units_here", float(len(self.intake.ready))), ("units_wanted", float(wanted))]
        return tuple(waits)

    def _blame(self) -> str:
        """Whom we wait for, and where to look."""
        if not self._link.session.joined:
            return (
                f"{self._broker} is silent: start it again with its run folder, the learner goes on by itself"
            )
        return (
            f"{self._broker} answers, its /status says who waits for whom; its gauges: {self.intake.gauges}"
        )

    def _pump(self, timeout_s: float) -> bool:
        """Take in all that has arrived, waiting for the first message; True if a delivery was among it."""
        before = self.intake.deliveries
        try:
            item = self._link.inbox.get(timeout=timeout_s) if timeout_s else self._link.inbox.get_nowait()
            while True:
                if item is None:
                    self._joined()
                elif isinstance(item, BaseException):
                    raise item
                else:
                    self._take_in(*item)
                item = self._link.inbox.get_nowait()
        except queue.Empty:
            return self.intake.deliveries > before

    def _take_in(self, message: AnyMessage, rest: list[bytes]) -> None:
        match message:
            case Drain(reason=reason):
                self._drained = reason or "drain"
            case CheckpointWanted(reason=reason):
                self.checkpoint_wanted = reason or "the broker asks for it"
            case Held(task_ids=task_ids, unit_ids=unit_ids, more=more):
                self._held_tasks += task_ids
                self._held_units += unit_ids
                if not more:
                    tasks, self._held_tasks = self._held_tasks, []
                    units, self._held_units = self._held_units, []
                    self._held(tasks, units)
            case Refused():
                text = f"the broker refused the learner ({message.code}): {message.message}"
                if message.fatal or message.code in FATAL_CODES:
                    raise BrokerRefused(text)
                log.warning("%s", text)
            case _:
                self.intake.received(message, rest)
                if isinstance(message, Deliver):
                    self._credit(1)

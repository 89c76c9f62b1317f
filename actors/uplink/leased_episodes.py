"""Runs the tasks that the broker leases to an actor, each as an episode, and tells the broker how each one ends."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from actors.episode import Episode
from actors.errors import Infrastructure
from actors.failures import FAILURES
from actors.uplink.lease_book import LeaseBook
from actors.uplink.outbox import Outbox
from protocol.link import AsyncLink
from protocol.messages.tasks import LeaseTask, TaskCredit, TaskRejected

log = logging.getLogger(__name__)

GIVE_UP_S = 10.0


class LeasedEpisodes:
    """The episodes of an actor. All methods are for the actor's event loop.

    Args:
        link: connection to the broker.
        outbox: segments of the episodes that are not acknowledged.
        capacity: episodes that run at the same time.
        env: name of the environment; tasks of others are rejected.
        begin: makes the episode of a lease.
    """

    def __init__(
        self,
        link: AsyncLink,
        outbox: Outbox,
        *,
        capacity: int,
        env: str,
        begin: Callable[[LeaseTask], Awaitable[Episode]],
    ) -> None:
        self.book = LeaseBook(capacity)
        self._link, self._outbox, self._env, self._begin = link, outbox, env, begin
        self._running: dict[str, asyncio.Task[None]] = {}
        """Task of each episode, by lease id."""
        self._finished = self._failed = self._given_back = 0
        self._env_seconds = 0.0

    @property
    def ended(self) -> int:
        """Number of episodes that have ended by themselves."""
        return self._finished + self._failed

    def leased(self, lease: LeaseTask) -> None:
        """Run a task, or reject it with a reason."""
        trajectory_id = lease.trajectory_id
        # Before a Welcome the broker repeats the leases that it believes to run here.
        if self.book.knows(lease.lease_id):
            if self.book.is_over(lease.lease_id) and not self._outbox.holds(trajectory_id):
                # The lease has ended and no segment of it is on its way, so the broker missed its end.
                self._link.send(
                    TaskRejected(lease_id=lease.lease_id, reason="it has ended here", fault=False)
                )
            return
        if lease.task.env != self._env:
            self._reject(lease, f"this actor runs environment {self._env!r}, not {lease.task.env!r}")
        elif (running := self.book.lease_of(trajectory_id)) or self._outbox.holds(trajectory_id):
            # A broker that was restarted leases the attempt again. Segments of the old episode may be on
            # their way under this trajectory id, so no new episode may use it. The next attempt has a new id.
            self.cancel(running or "", "leased again by another broker")
            self._outbox.forget(trajectory_id)
            self._reject(lease, "this attempt is under way already, under another lease")
        elif why := self.book.why_not():
            # Unlike `_reject`, this announces no credit for a replacement.
            self._link.send(TaskRejected(lease_id=lease.lease_id, reason=why))
        else:
            self.book.leased(lease)
            task = asyncio.create_task(self._run(lease), name=f"episode {lease.task.task_id}")
            self._running[lease.lease_id] = task
            # A callback, because a task that is cancelled before its first step never enters the coroutine.
            task.add_done_callback(lambda done: self._ended(lease, done))

    def served(self, *, by_any: bool) -> None:
        """Take tasks as long as a generator serves this actor, and no others."""
        if credit := self.book.served(by_any=by_any):
            log.info(
                "%s generator serves this actor: it takes %s tasks",
                *(("a", "new") if by_any else ("no", "no")),
            )
            self._give_back(credit)

    def cancel(self, lease_id: str, reason: str) -> None:
        """Cancel the episode of a lease, if it runs."""
        episode = self._running.get(lease_id)
        if episode is not None:
            log.info("lease %s cancelled: %s", lease_id, reason)
            episode.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Let episodes end for a time, and give up the rest."""
        running = list(self._running.values())
        log.info("draining: %d episodes run", len(running))
        if running and timeout_s:
            await asyncio.wait(running, timeout=timeout_s)
        left = [task for task in running if not task.done()]
        for task in left:
            task.cancel()
        if left:
            log.warning("%d episodes given up", len(left))
            # The wait has a deadline, because an environment may ignore its cancellation.
            await asyncio.wait(left, timeout=GIVE_UP_S)

    def gauges(self) -> dict[str, float]:
        """Return what the actor reports of its episodes."""
        return {
            "episodes_running": float(len(self.book)),
            "episodes_finished_total": float(self._finished),
            "episodes_failed_total": float(self._failed),
            "episodes_given_back_total": float(self._given_back),
            "env_seconds": self._env_seconds / max(1, self.ended),
        }

    def _reject(self, lease: LeaseTask, reason: str) -> None:
        """Reject one task, and announce credit for one more."""
        self._link.send(TaskRejected(lease_id=lease.lease_id, reason=reason))
        self._give_back(self.book.unused())

    def _give_back(self, credit: TaskCredit | None) -> None:
        # Without a connection nothing is sent, because the next join announces all the credit.
        if credit is not None and self._link.session.joined:
            self._link.send(credit)

    async def _run(self, lease: LeaseTask) -> None:
        episode = await self._begin(lease)
        try:
            await episode.run()
            self._finished += episode.status != "failed"
            self._failed += episode.status == "failed"
            # Send the credit now, so that it leaves together with the last segment.
            self._give_back(self.book.ended(lease.lease_id))
        except asyncio.CancelledError:
            self._outbox.forget(episode.trajectory_id)
            raise
        finally:
            self._env_seconds += episode.env_seconds

    def _ended(self, lease: LeaseTask, task: asyncio.Task[None]) -> None:
        del self._running[lease.lease_id]
        credit = self.book.ended(lease.lease_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            fault = not isinstance(error, Infrastructure)
            self._given_back += not fault
            # If this rejection is lost, the broker repeats the lease, and `leased` rejects it once more. It
            # does so only while the outbox holds no segment of the trajectory.
            self._outbox.forget(lease.trajectory_id)
            reason = f"not recordable: {error!r}" if fault else str(error)
            failure = FAILURES.record(error, lease.trajectory_id)
            rejected = TaskRejected(
                lease_id=lease.lease_id, reason=reason[:500], fault=fault, failure=failure
            )
            self._link.send(rejected)
        self._give_back(credit)

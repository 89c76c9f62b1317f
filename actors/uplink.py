"""An actor's side towards the broker: its leases, the episodes that run for them, and the segments that it sends.

`LeaseBook` and `Outbox` are pure: they have no socket and no clock.
"""

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence

from actors.episode import Episode
from actors.errors import Infrastructure
from actors.failures import FAILURES
from protocol.arrays import SegmentArrays
from protocol.codec import Frames, encode_arrays
from protocol.messages.episodes import LeaseTask, SegmentAck, TaskCredit, TaskRejected
from protocol.names import SegmentKey
from protocol.sockets import AsyncLink

log = logging.getLogger(__name__)

REMEMBERED_LEASES = 1_024


class LeaseBook:
    """Leases that run, and the task credit that the actor announces to the broker.

    ``capacity`` is the number of episodes that the actor runs at the same time. At each (re)join the broker
    counts credit from zero, so the actor announces capacity minus the running leases. Afterwards each lease
    that ends frees one more. While no generator lets the actor in, the actor has no credit.

    Example:
        >>> book = LeaseBook(capacity=2)
        >>> book.joined() is None
        True
        >>> book.served(by_any=True)
        TaskCredit(tasks=2, void=True)
        >>> book.ended("unknown") is None
        True
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._running: dict[str, str] = {}
        self._over: deque[str] = deque(maxlen=REMEMBERED_LEASES)
        self.draining = False
        self._served = False

    def __len__(self) -> int:
        return len(self._running)

    def joined(self) -> TaskCredit | None:
        """Return the credit to announce after a Welcome, if there is any."""
        return TaskCredit(tasks=self._free) if self._free > 0 and self._takes_tasks else None

    def served(self, *, by_any: bool) -> TaskCredit | None:
        """Note whether any generator serves this actor. Return the credit to announce if that has changed."""
        if by_any == self._served:
            return None
        self._served = by_any
        return None if self.draining else TaskCredit(tasks=self._free if by_any else 0, void=True)

    @property
    def _free(self) -> int:
        return max(0, self._capacity - len(self._running))

    @property
    def _takes_tasks(self) -> bool:
        return self._served and not self.draining

    def why_not(self) -> str:
        """Return why any lease is rejected now: "draining", "full" (more leases than credit), or ""."""
        if self.draining:
            return "draining"
        return "" if self._free and self._takes_tasks else "full"

    def leased(self, lease: LeaseTask) -> bool:
        """Record a lease. Return False if it must not start: it is known, or `why_not` gives a reason."""
        if self.why_not() or self.knows(lease.lease_id):
            return False
        self._running[lease.lease_id] = lease.trajectory_id
        return True

    def knows(self, lease_id: str) -> bool:
        """Return whether a lease runs, or has run: the message of its end may be on its way."""
        return lease_id in self._running or lease_id in self._over

    def is_over(self, lease_id: str) -> bool:
        """Return whether a lease has run and ended here."""
        return lease_id in self._over

    def lease_of(self, trajectory_id: str) -> str | None:
        """Return the lease under which a trajectory runs, if it does."""
        return next((lease for lease, running in self._running.items() if running == trajectory_id), None)

    def ended(self, lease_id: str) -> TaskCredit | None:
        """Record the end of a lease. Return the credit that it frees, if any."""
        if self._running.pop(lease_id, None) is None:
            return None
        self._over.append(lease_id)
        return self.unused()

    def unused(self) -> TaskCredit | None:
        """Return credit for one more lease, or None while draining or without a generator."""
        return TaskCredit(tasks=1) if self._takes_tasks else None


class Outbox:
    """Segments on their way to the broker: sent as far as its credit reaches, kept until acknowledged.

    After a (re)join the broker grants segment credit anew, and the outbox sends every unacknowledged segment
    again, in order. The broker drops the copies of segments that it has already.

    Example:
        >>> outbox = Outbox()
        >>> outbox.granted(1)
        >>> outbox.offer_frames(("t.0", 0), [b"a"]); outbox.offer_frames(("t.0", 1), [b"b"])
        >>> outbox.due(), outbox.waiting
        ([[b'a']], 1)
        >>> outbox.rejoined(); outbox.granted(8)
        >>> outbox.due()
        [[b'a'], [b'b']]
    """

    def __init__(self) -> None:
        self._credit = 0
        self._waiting: OrderedDict[SegmentKey, Frames] = OrderedDict()
        self._unacked: OrderedDict[SegmentKey, Frames] = OrderedDict()
        self.acks: Counter[str] = Counter()
        self.resent = 0

    @property
    def waiting(self) -> int:
        """Number of segments that wait to be sent, because there is no credit for them."""
        return len(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether everything that was offered has been acknowledged."""
        return not self._waiting and not self._unacked

    def offer(self, cut: SegmentArrays) -> None:
        """Encode a segment and queue it for sending."""
        segment, arrays = cut
        self.offer_frames((segment.trajectory_id, segment.index), encode_arrays(segment, arrays))

    def offer_frames(self, key: SegmentKey, frames: Frames) -> None:
        self._waiting[key] = frames

    def due(self) -> list[Frames]:
        """Return the frames of the segments that may be sent now, and count them as sent."""
        sent: list[Frames] = []
        while self._credit > 0 and self._waiting:
            key, frames = self._waiting.popitem(last=False)
            self._unacked[key] = frames
            self._credit -= 1
            sent.append(frames)
        return sent

    def granted(self, segments: int) -> None:
        """Add the broker's credit for ``segments`` more segments."""
        self._credit += segments

    def acked(self, ack: SegmentAck) -> None:
        """Drop an acknowledged segment, whatever status the broker gave it."""
        self.acks[ack.status] += 1
        key = (ack.trajectory_id, ack.index)
        self._unacked.pop(key, None)
        # A rejoin moves unacknowledged segments here, and an ack sent before it may arrive after it.
        self._waiting.pop(key, None)

    def rejoined(self) -> None:
        """Start anew on a new connection: no credit, and all unacknowledged segments wait, in order."""
        self._credit = 0
        self.resent += len(self._unacked)
        self._unacked.update(self._waiting)
        self._waiting, self._unacked = self._unacked, OrderedDict()

    def holds(self, trajectory_id: str) -> bool:
        """Return whether a segment of the trajectory is not acknowledged yet."""
        return any(key[0] == trajectory_id for kept in (self._waiting, self._unacked) for key in kept)

    def forget(self, trajectory_id: str) -> None:
        """Drop the remaining segments of a trajectory that is no longer wanted."""
        for kept in (self._waiting, self._unacked):
            for key in [key for key in kept if key[0] == trajectory_id]:
                del kept[key]


WAITING_SEGMENTS = 64
"""Segments that may wait for credit. With more, episodes wait before they go on."""


class SegmentSender:
    """Segments of all episodes on their way to the broker. All methods are for the actor's event loop.

    Args:
        link: connection to the broker.
    """

    def __init__(self, link: AsyncLink) -> None:
        self.outbox = Outbox()
        self.tokens = 0
        """Tokens of all segments so far."""
        self._link = link
        self._room = asyncio.Event()

    async def emit(self, cuts: Sequence[SegmentArrays]) -> None:
        """Put all segments into the outbox before the first wait, then wait until the outbox has room."""
        for cut in cuts:
            self.tokens += cut.segment.tokens
            self.outbox.offer(cut)
        self.flush()
        while self.outbox.waiting > WAITING_SEGMENTS:
            self._room.clear()
            await self._room.wait()

    def flush(self) -> None:
        """Send what the credit allows, and wake the episodes that wait for room."""
        # Between Hello and Welcome nothing is sent, because the broker is about to count the credit anew.
        if self._link.session.joined:
            for frames in self.outbox.due():
                self._link.send_frames(frames)
        self._room.set()

    def granted(self, segments: int) -> None:
        """Add the broker's credit for ``segments`` more segments, and use it."""
        self.outbox.granted(segments)
        self.flush()

    def acked(self, ack: SegmentAck) -> None:
        """Let go of a segment that the broker has answered, and use the room."""
        self.outbox.acked(ack)
        self.flush()

    def rejoined(self) -> None:
        """Count the credit anew: the broker has welcomed this actor, and grants it from the beginning."""
        self.outbox.rejoined()

    @property
    def waits_for_credit(self) -> bool:
        """True while segments wait for the broker's credit."""
        return self.outbox.waiting > 0

    async def emptied(self, timeout_s: float) -> None:
        """Wait until the broker has acknowledged all segments, ``timeout_s`` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.outbox.empty:
                    self._room.clear()
                    await self._room.wait()

    def gauges(self) -> dict[str, float]:
        """Return what the actor reports of its segments."""
        return {
            "tokens_total": float(self.tokens),
            "segments_waiting": float(self.outbox.waiting),
            "segments_refused_total": float(self.outbox.acks["refused"]),
        }


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

    @property
    def running(self) -> int:
        """Number of episodes that run."""
        return len(self.book)

    def joined(self) -> None:
        """Announce all the credit for tasks: the broker has welcomed this actor."""
        if (credit := self.book.joined()) is not None:
            self._link.send(credit)

    def take_no_more(self) -> None:
        """Take no new tasks from now on."""
        self.book.draining = True

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

    def cancel_trajectory(self, trajectory_id: str, reason: str) -> None:
        """Cancel the episode of a trajectory, if it runs."""
        if (lease_id := self.book.lease_of(trajectory_id)) is not None:
            self.cancel(lease_id, reason)

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

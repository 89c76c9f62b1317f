"""The actor process: runs many episodes in one event loop, connected to the broker and to generators."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from actors.config import ActorConfig
from actors.environments.live_suite import LiveSuite
from actors.episode import Bounds, Episode
from actors.errors import ActorError, Infrastructure
from actors.failures import FAILURES
from actors.generator_client.pool import GeneratorPool
from actors.render import Renderer
from actors.uplink import LeaseBook, Outbox
from envs.base import Suite
from envs.config import EnvConfig
from envs.registry import make_suite
from protocol.arrays import SegmentArrays
from protocol.link import AsyncLink
from protocol.messages import (
    AnyMessage,
    CancelTask,
    Drain,
    Generators,
    Hello,
    LeaseTask,
    Refused,
    SegmentAck,
    SegmentCredit,
    TaskCredit,
    TaskRejected,
)
from protocol.session import Progress

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
ACK_TIMEOUT_S = 5.0
GIVE_UP_S = 10.0
SWITCH_S = 0.001
"""Time after which a thread that computes in Python lets another one run. The default of 5 ms would let a few
computing environments delay the heartbeats."""
WATCH_S = 1.0
BROKER_LOST_S = 600.0
"""Longest silence of the broker. Then this process ends, because its supervisor may know a different one."""
WAITING_SEGMENTS = 64
"""Segments that may wait for credit. With more, episodes wait before they go on."""


def run_actor(
    config: ActorConfig,
    *,
    name: str,
    broker: str,
    model: str,
    env: EnvConfig,
    run: str,
    keys: Path | None = None,
    template_args: Mapping[str, Any] | None = None,
    special_in_messages: bool = False,
    in_step: bool = False,
) -> None:
    """Run episodes until SIGTERM or a Drain message, then drain. Blocks until the actor has ended.

    Args:
        config: ``[actor]`` of the run file.
        name: peer name, unique in the run.
        broker: endpoint of the broker.
        model: folder with the model's tokenizer files. The actor reads no weights.
        env: ``[env]`` of the run file.
        run: name of the run. The actor ends if the broker serves a different one.
        keys: folder of the keys. None means that nothing is encrypted.
        template_args: further variables of the chat template, `[model] template_args` of the run file.
        special_in_messages: see `actors.render.Renderer`, `[model] special_tokens_in_messages` of the run file.
        in_step: run windows in lockstep, see `actors.episode.Bounds`.

    Raises:
        EnvError: the environment cannot be used.
        ActorError: the tokenizer cannot be used, or the broker refuses this actor or is lost.
        LinkDown: no broker answers.
    """
    # This handler works until the event loop installs its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.setswitchinterval(SWITCH_S)
    renderer = Renderer(Path(model), template_args, special_in_messages=special_in_messages)

    def make() -> Suite:
        return make_suite(env.name, env.params)

    asyncio.run(_serve(config, name, broker, env.name, run, make, renderer, keys, in_step))
    # The linger time lets the Goodbye leave.
    zmq.Context.instance().destroy(linger=1_000)


async def _serve(
    config: ActorConfig,
    name: str,
    broker: str,
    env_name: str,
    run: str,
    make: Callable[[], Suite],
    renderer: Renderer,
    keys: Path | None,
    in_step: bool,
) -> None:
    actor = Actor(config, name, broker, env_name, run, make, renderer, keys, in_step=in_step)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, actor.stop)
    await actor.run()


class Actor:
    """State of the actor process. All of it is used on one event loop.

    The code of environments runs in threads of its own; see `actors.environments.runner`.

    Args:
        make: makes the suite. It is called at once, and again if code has blocked the environments' thread.
    """

    def __init__(
        self,
        config: ActorConfig,
        name: str,
        broker: str,
        env_name: str,
        run: str,
        make: Callable[[], Suite],
        renderer: Renderer,
        keys: Path | None = None,
        *,
        in_step: bool = False,
    ) -> None:
        self._config, self._env_name, self._run = config, env_name, run
        self._renderer = renderer
        self._suite = LiveSuite(
            make,
            calls=config.concurrent_episodes,
            timeout_s=config.env_timeout_s,
            on_failure=self._give_up,
        )
        self._bounds = Bounds(config.segment_tokens, config.max_turns, config.env_timeout_s, in_step)
        self._outbox, self._book = Outbox(), LeaseBook(config.concurrent_episodes)
        self._pool = GeneratorPool(
            name,
            config.generator_timeout_s,
            keys=keys,
            on_change=self._generators_changed,
            episodes=lambda: len(self._book),
        )
        self._episodes: dict[str, asyncio.Task[None]] = {}
        self._stop = asyncio.Event()
        self._room = asyncio.Event()
        self._fatal = ""
        self._finished = self._failed = self._given_back = self._tokens = 0
        self._env_seconds = 0.0
        # Looks at which environments were at work, or turns waited for a generator. Both have deadlines of their
        # own, so this counts as progress. Else the broker would take the tasks, and count the attempts as lost.
        self._looks_at_work = 0
        hello = Hello(
            role="actor",
            peer=name,
            incarnation=time.time_ns() // 1_000_000,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self._link = AsyncLink(
            broker,
            hello,
            self._received,
            on_join=self._joined,
            progress=self._progress,
            on_failure=self._give_up,
            keys=keys,
        )

    def stop(self) -> None:
        """Take no new tasks, let the running episodes end, then return from `run`."""
        # Set the flag at once, because the next message may be a lease.
        self._book.draining = True
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop` is called or the broker sends a Drain, then drain.

        Raises:
            ActorError: the broker refuses this actor, serves a different run, or has been silent too long.
            LinkDown: no broker answers.
        """
        try:
            await self._wait_for_broker()
            while not self._stop.is_set():
                self._give_up_lost_broker(time.monotonic())
                self._look_at_work()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), WATCH_S)
            await self._drain()
        finally:
            await self._link.close(self._fatal or "drained")
            self._pool.close()
            await self._suite.close()
        if self._fatal:
            raise ActorError(self._fatal)

    def _look_at_work(self) -> None:
        self._suite.look()
        self._looks_at_work += self._suite.environments.running > 0 or self._pool.waiting > 0

    def _give_up_lost_broker(self, now: float) -> None:
        if (silent := self._link.session.silent_for(now)) > BROKER_LOST_S:
            self._give_up(
                f"the broker has not been heard for {silent:.0f} s; is it running, is the way to it open?"
            )

    async def _wait_for_broker(self) -> None:
        joining = asyncio.create_task(self._link.joined(JOIN_TIMEOUT_S))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                joining.result()
        finally:
            for task in (joining, stopping):
                task.cancel()

    # --- messages from the broker -------------------------------------------------------------------------

    def _joined(self) -> None:
        welcome = self._link.session.welcome
        if welcome is not None and welcome.run != self._run:
            return self._give_up(
                f"the broker serves run {welcome.run!r}, this actor belongs to {self._run!r}"
            )
        if welcome is not None:
            self._pool.placed(welcome.place)
        self._outbox.rejoined()
        credit = self._book.joined()
        if credit is not None:
            self._link.send(credit)
        return None

    def _received(self, message: AnyMessage, rest: list[bytes]) -> None:
        match message:
            case LeaseTask():
                self._leased(message)
            case Generators():
                self._pool.update(message.generators)
            case SegmentCredit():
                self._outbox.granted(message.segments)
                self._flush()
            case SegmentAck():
                self._acked(message)
            case CancelTask():
                self._cancel(message.lease_id, message.reason)
            case Drain():
                log.info("drain: %s", message.reason)
                self.stop()
            case Refused():
                log.warning("broker refused (%s): %s", message.code, message.message)
                if message.fatal:
                    self._give_up(f"the broker refused this actor: {message.message}")
            case _:
                log.warning("unexpected message from the broker: %s", type(message).__name__)

    def _leased(self, lease: LeaseTask) -> None:
        trajectory_id = lease.trajectory_id
        # Before a Welcome the broker repeats the leases that it believes to run here.
        if self._book.knows(lease.lease_id):
            if self._book.is_over(lease.lease_id) and not self._outbox.holds(trajectory_id):
                # The lease has ended and no segment of it is on its way, so the broker missed its end.
                self._link.send(
                    TaskRejected(lease_id=lease.lease_id, reason="it has ended here", fault=False)
                )
            return
        if lease.task.env != self._env_name:
            self._reject(lease, f"this actor runs environment {self._env_name!r}, not {lease.task.env!r}")
        elif (running := self._book.lease_of(trajectory_id)) or self._outbox.holds(trajectory_id):
            # A broker that was restarted leases the attempt again. Segments of the old episode may be on
            # their way under this trajectory id, so no new episode may use it. The next attempt has a new id.
            self._cancel(running or "", "leased again by another broker")
            self._outbox.forget(trajectory_id)
            self._reject(lease, "this attempt is under way already, under another lease")
        elif why := self._book.why_not():
            # Unlike `_reject`, this announces no credit for a replacement.
            self._link.send(TaskRejected(lease_id=lease.lease_id, reason=why))
        else:
            self._book.leased(lease)
            task = asyncio.create_task(self._run_episode(lease), name=f"episode {lease.task.task_id}")
            self._episodes[lease.lease_id] = task
            # A callback, because a task that is cancelled before its first step never enters the coroutine.
            task.add_done_callback(lambda done: self._ended(lease, done))

    def _reject(self, lease: LeaseTask, reason: str) -> None:
        """Reject one task, and announce credit for one more."""
        self._link.send(TaskRejected(lease_id=lease.lease_id, reason=reason))
        self._give_back(self._book.unused())

    def _give_back(self, credit: TaskCredit | None) -> None:
        # Without a connection nothing is sent, because the next join announces all the credit.
        if credit is not None and self._link.session.joined:
            self._link.send(credit)

    def _generators_changed(self) -> None:
        """Take tasks as long as a generator serves this actor, and no others."""
        serves = self._pool.serves
        if credit := self._book.served(by_any=serves):
            log.info(
                "%s generator serves this actor: it takes %s tasks",
                *(("a", "new") if serves else ("no", "no")),
            )
            self._give_back(credit)

    def _acked(self, ack: SegmentAck) -> None:
        log.debug("segment %d of %s: %s", ack.index, ack.trajectory_id, ack.status)
        self._outbox.acked(ack)
        if ack.status == "refused":
            log.warning("segment %d of %s refused: %s", ack.index, ack.trajectory_id, ack.reason)
            lease_id = self._book.lease_of(ack.trajectory_id)
            # Without this segment the rest of the trajectory is useless.
            if lease_id is not None:
                self._cancel(lease_id, ack.reason)
        self._flush()

    def _cancel(self, lease_id: str, reason: str) -> None:
        episode = self._episodes.get(lease_id)
        if episode is not None:
            log.info("lease %s cancelled: %s", lease_id, reason)
            episode.cancel()

    def _give_up(self, reason: str) -> None:
        self._fatal = reason
        self.stop()

    # --- episodes -----------------------------------------------------------------------------------------

    async def _run_episode(self, lease: LeaseTask) -> None:
        suite, environments = await self._suite.ready()
        episode = Episode(lease, suite, self._renderer, self._pool, self._bounds, self._emit, environments)
        try:
            await episode.run()
            self._finished += episode.status != "failed"
            self._failed += episode.status == "failed"
            # Send the credit now, so that it leaves together with the last segment.
            self._give_back(self._book.ended(lease.lease_id))
        except asyncio.CancelledError:
            self._outbox.forget(episode.trajectory_id)
            raise
        finally:
            self._env_seconds += episode.env_seconds

    def _ended(self, lease: LeaseTask, task: asyncio.Task[None]) -> None:
        del self._episodes[lease.lease_id]
        credit = self._book.ended(lease.lease_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            fault = not isinstance(error, Infrastructure)
            self._given_back += not fault
            # If this rejection is lost, the broker repeats the lease, and `_leased` rejects it once more. It
            # does so only while the outbox holds no segment of the trajectory.
            self._outbox.forget(lease.trajectory_id)
            reason = f"not recordable: {error!r}" if fault else str(error)
            failure = FAILURES.record(error, lease.trajectory_id)
            rejected = TaskRejected(
                lease_id=lease.lease_id, reason=reason[:500], fault=fault, failure=failure
            )
            self._link.send(rejected)
        self._give_back(credit)

    async def _emit(self, cuts: Sequence[SegmentArrays]) -> None:
        """Put all segments into the outbox before the first wait, then wait until the outbox has room."""
        for cut in cuts:
            self._tokens += cut.segment.tokens
            self._outbox.offer(cut)
        self._flush()
        while self._outbox.waiting > WAITING_SEGMENTS:
            self._room.clear()
            await self._room.wait()

    def _flush(self) -> None:
        # Between Hello and Welcome nothing is sent, because the broker is about to count the credit anew.
        if self._link.session.joined:
            for frames in self._outbox.due():
                self._link.send_frames(frames)
        self._room.set()

    def _progress(self) -> Progress:
        ended = self._finished + self._failed
        gauges = {
            "episodes_running": float(len(self._book)),
            "episodes_finished_total": float(self._finished),
            "episodes_failed_total": float(self._failed),
            "episodes_given_back_total": float(self._given_back),
            "env_seconds": self._env_seconds / max(1, ended),
            "tokens_total": float(self._tokens),
            "segments_waiting": float(self._outbox.waiting),
            "segments_refused_total": float(self._outbox.acks["refused"]),
            "generator_interruptions_total": float(self._pool.interruptions),
        }
        gauges |= self._suite.gauges
        # Episodes that wait for segment credit wait for the broker, so this actor does not count as busy.
        busy = len(self._book) > 0 and self._outbox.waiting == 0
        progress = self._tokens + ended + self._pool.chunks + self._looks_at_work
        return Progress(float(progress), busy, 0, tuple(gauges.items()), note=self._pool.trouble)

    # --- the end ------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Let episodes end, give up the rest, then wait briefly for the broker's acknowledgements."""
        running = list(self._episodes.values())
        log.info("draining: %d episodes run", len(running))
        if running and not self._fatal:
            await asyncio.wait(running, timeout=self._config.drain_timeout_s)
        left = [task for task in running if not task.done()]
        for task in left:
            task.cancel()
        if left:
            log.warning("%d episodes given up", len(left))
            # The wait has a deadline, because an environment may ignore its cancellation.
            await asyncio.wait(left, timeout=GIVE_UP_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self._fatal else ACK_TIMEOUT_S):
                while not self._outbox.empty:
                    self._room.clear()
                    await self._room.wait()

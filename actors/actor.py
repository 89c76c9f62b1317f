"""An actor: runs many episodes in one event loop, connected to the broker and to generators; and its process."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from actors.config import ActorConfig
from actors.environments import EnvironmentRunner, LiveSuite
from actors.episode import Bounds, Episode
from actors.errors import ActorError, Orphaned
from actors.generator_client import GeneratorPool
from actors.play_requests import way_of_playing
from actors.render import Renderer
from actors.teachers import Teachers
from actors.uplink import LeasedEpisodes, SegmentSender
from envs.base import Suite
from envs.registry import EnvConfig, make_suite
from protocol.codec import AnyMessage
from protocol.errors import LASTING, NotAdmitted
from protocol.messages.episodes import CancelTask, LeaseTask, SegmentAck, SegmentCredit
from protocol.messages.peers import Drain, Generators, Hello, Refused
from protocol.processes import EarlySigterm, supervised
from protocol.session import Progress
from protocol.sockets import AsyncLink

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
ACK_TIMEOUT_S = 5.0
WATCH_S = 1.0


class Actor:
    """State of the actor process. All of it is used on one event loop.

    The code of environments runs in threads of its own; see `actors.environments`.

    Args:
        make: makes the suite. It is called again if code has blocked the environments' thread.
        suite: the suite, if it is made already; None: `make` is called at once.
        orphan_s: longest silence of the broker, in seconds.
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
        suite: Suite | None = None,
        environments: EnvironmentRunner | None = None,
        orphan_s: float = math.inf,
    ) -> None:
        self._config, self._run, self._renderer = config, run, renderer
        self._suite = LiveSuite(
            make,
            suite=suite,
            calls=config.concurrent_episodes,
            timeout_s=config.env_timeout_s,
            on_failure=self._give_up,
            environments=environments,
        )
        self._bounds = Bounds(config.segment_tokens, config.max_turns, config.env_timeout_s, in_step)
        self._pool = self._generators(name, config.generator_timeout_s, keys)
        self._teachers = Teachers(config.teachers, lambda text: renderer.answer(text))
        self._stop = asyncio.Event()
        self._orphan_s = orphan_s
        self._fatal = self._orphaned = self._refused = ""
        self._run_is_over = False
        # Looks at which environments were at work, or turns waited for a generator. Both have deadlines of their
        # own, so this counts as progress. Else the broker would take the tasks, and count the attempts as lost.
        self._looks_at_work = 0
        self._link = self._connect(name, broker, keys)
        self._sender = SegmentSender(self._link)
        self._episodes = LeasedEpisodes(
            self._link,
            self._sender.outbox,
            capacity=config.concurrent_episodes,
            env=env_name,
            begin=self._episode,
        )

    def _generators(self, name: str, timeout_s: float, keys: Path | None) -> GeneratorPool:
        return GeneratorPool(
            name,
            timeout_s,
            keys=keys,
            on_change=self._generators_changed,
            episodes=lambda: self._episodes.running,
        )

    def _connect(self, name: str, broker: str, keys: Path | None) -> AsyncLink:
        return AsyncLink(
            broker,
            _hello(name),
            self._received,
            on_join=self._joined,
            progress=self._progress,
            on_failure=self._give_up,
            keys=keys,
        )

    def stop(self) -> None:
        """Take no new tasks, let the running episodes end, then return from `run`."""
        # At once, because the next message may be a lease.
        self._episodes.take_no_more()
        self._stop.set()

    async def run(self) -> bool:
        """Serve until `stop` is called or the broker sends a Drain, then drain. Return whether the run is over.

        Raises:
            ActorError: the broker refuses this actor.
            NotAdmitted: it would refuse the next start of this actor, too.
            Orphaned: the broker has been silent for too long, or has sent this actor away until later.
            LinkDown: no broker answers.
        """
        try:
            await self._link.joined(JOIN_TIMEOUT_S, unless=self._stop)
            while not self._stop.is_set():
                self._give_up_lost_broker(time.monotonic())
                self._look_at_work()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), WATCH_S)
            await self._drain()
        finally:
            await self._link.close(self._fatal or "drained")
            self._pool.close()
            await self._teachers.close()
            await self._suite.close()
        if self._orphaned:
            raise Orphaned(self._orphaned)
        if self._refused in LASTING:
            raise NotAdmitted(self._fatal, self._refused)
        if self._fatal:
            raise ActorError(self._fatal)
        return self._run_is_over

    def _look_at_work(self) -> None:
        self._suite.look()
        working = self._suite.environments.running or self._pool.waiting or self._teachers.waiting
        self._looks_at_work += working > 0

    def _give_up_lost_broker(self, now: float) -> None:
        if (silent := self._link.session.silent_for(now)) > self._orphan_s:
            self._orphaned = (
                f"the broker has not been heard for {silent:.0f} s (fleet.orphan_minutes); is it running, is the "
                "way to it open?"
            )
            self._give_up(self._orphaned)

    # --- messages from the broker -------------------------------------------------------------------------

    def _joined(self) -> None:
        welcome = self._link.session.welcome
        if welcome is not None and welcome.run != self._run:
            self._refused = "wrong_run"
            return self._give_up(
                f"the broker serves run {welcome.run!r}, this actor belongs to {self._run!r}"
            )
        if welcome is not None:
            self._pool.placed(welcome.place)
        self._sender.rejoined()
        self._episodes.joined()
        return None

    def _received(self, message: AnyMessage, rest: list[bytes]) -> None:
        match message:
            case LeaseTask():
                self._episodes.leased(message)
            case Generators():
                self._pool.update(message.generators)
            case SegmentCredit():
                self._sender.granted(message.segments)
            case SegmentAck():
                self._acked(message)
            case CancelTask():
                self._episodes.cancel(message.lease_id, message.reason)
            case Drain():
                log.info("drain: %s", message.reason)
                self._run_is_over = message.then == "over"
                self._orphaned = message.reason if message.then == "resumed" else ""
                self.stop()
            case Refused():
                log.warning("broker refused (%s): %s", message.code, message.message)
                if message.fatal:
                    self._refused = self._refused or message.code
                    self._give_up(f"the broker refused this actor: {message.message}")
            case _:
                log.warning("unexpected message from the broker: %s", type(message).__name__)

    def _generators_changed(self) -> None:
        self._episodes.served(by_any=self._pool.serves)

    def _acked(self, ack: SegmentAck) -> None:
        log.debug("segment %d of %s: %s", ack.index, ack.trajectory_id, ack.status)
        if ack.status == "refused":
            log.warning("segment %d of %s refused: %s", ack.index, ack.trajectory_id, ack.reason)
            # Without this segment the rest of the trajectory is useless.
            self._episodes.cancel_trajectory(ack.trajectory_id, ack.reason)
        self._sender.acked(ack)

    def _give_up(self, reason: str) -> None:
        self._fatal = reason
        self.stop()

    async def _episode(self, lease: LeaseTask) -> Episode:
        suite, environments = await self._suite.ready()
        emit = self._sender.emit
        name = lease.task.policy
        policy = self._teachers.named(name) if name else self._pool
        return Episode(lease, suite, self._renderer, policy, self._bounds, emit, environments, way_of_playing)

    def _progress(self) -> Progress:
        episodes, sender = self._episodes, self._sender
        gauges = episodes.gauges() | sender.gauges()
        gauges["generator_interruptions_total"] = float(self._pool.interruptions)
        gauges |= self._suite.gauges | self._teachers.gauges
        # Episodes that wait for segment credit wait for the broker, so this actor does not count as busy.
        busy = episodes.running > 0 and not sender.waits_for_credit
        progress = sender.tokens + episodes.ended + self._pool.chunks + self._looks_at_work
        return Progress(float(progress), busy, 0, tuple(gauges.items()), note=self._pool.trouble)

    async def _drain(self) -> None:
        """Let episodes end, give up the rest, then wait briefly for the broker's acknowledgements."""
        # Nobody trains on an episode that ends behind the end of the run.
        at_once = self._fatal or self._run_is_over
        await self._episodes.drain(0 if at_once else self._config.drain_timeout_s)
        await self._sender.emptied(0 if self._fatal else ACK_TIMEOUT_S)


def _hello(name: str) -> Hello:
    told = supervised(os.environ)
    return Hello(
        role="actor",
        peer=name,
        incarnation=time.time_ns() // 1_000_000,
        host=socket.gethostname(),
        pid=os.getpid(),
        on_host=told.host,
        job=told.job,
        restarts=told.restarts,
        died=told.died,
        digest=told.digest,
    )


SWITCH_S = 0.001
"""Time after which a thread that computes in Python lets another one run. The default of 5 ms would let a few
computing environments delay the heartbeats."""


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
    env_name: str = "",
    orphan_s: float = math.inf,
) -> bool:
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
        env_name: environment that tasks name, if its file lies elsewhere on this host; "": the name in ``env``.
        orphan_s: longest silence of the broker, in seconds.

    Returns:
        Whether the run is over.

    Raises:
        EnvError: the environment cannot be used.
        ActorError: the tokenizer cannot be used, or the broker refuses this actor.
        Orphaned: the broker is lost, or has sent this actor away until later.
        LinkDown: no broker answers.
    """
    sigterm = EarlySigterm()
    sys.setswitchinterval(SWITCH_S)
    renderer = Renderer(
        Path(model), template_args, special_in_messages=special_in_messages, remark=log.warning
    )

    def make() -> Suite:
        return make_suite(env.name, env.params)

    begin = partial(
        Actor,
        config,
        name,
        broker,
        env_name or env.name,
        run,
        make,
        renderer,
        keys,
        in_step=in_step,
        # It may take long, so it is made while SIGTERM still ends this process at once.
        suite=make(),
        orphan_s=orphan_s,
    )
    log.info(
        "%s: joining the broker at %s, for up to %d episodes at a time",
        name,
        broker,
        config.concurrent_episodes,
    )
    try:
        sigterm.hold()
        return asyncio.run(_serve(begin, sigterm))
    finally:
        # The linger time lets the Goodbye leave.
        zmq.Context.instance().destroy(linger=1_000)


async def _serve(begin: Callable[[], Actor], sigterm: EarlySigterm) -> bool:
    actor = begin()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, actor.stop)
    if sigterm.came:
        actor.stop()
    return await actor.run()

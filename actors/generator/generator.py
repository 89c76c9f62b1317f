"""A generator: actors ask for tokens, the broker announces weights, an engine samples.

An update is staged and verified while requests run, and only the load itself pauses sampling. The process
does not repair an engine that can no longer be trusted, because a load failed, or the engine stands still or
has died. It reports the failure to actors and broker and ends with an error, so that its supervisor starts a
new one.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from pathlib import Path

from actors.config import GeneratorConfig
from actors.errors import GeneratorFailed
from actors.generator.engine import SamplingEngine
from actors.generator.listening import Listener, endpoint_for_actors
from actors.generator.model_folder import ModelFacts
from actors.generator.pace import Pace
from actors.generator.serving import Serving
from actors.generator.weights.staging import Announced, NewestWins, Stage
from actors.generator.weights.updater import WeightUpdater
from protocol.link import AsyncLink
from protocol.messages.any_message import AnyMessage
from protocol.messages.fields import MAX_PATIENCE_S
from protocol.messages.generators import ActorKeys
from protocol.messages.peers import Drain, Hello, Refused
from protocol.messages.weights import WeightsReady
from protocol.session import Progress

log = logging.getLogger(__name__)

TICK_S = 0.1
JOIN_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 5.0
BROKER_LOST_S = 600.0
"""Longest silence of the broker. Then this process ends, because its supervisor may know a different one."""


class Generator:
    """Connects requests, weight updates and the broker link to one engine."""

    def __init__(
        self,
        engine: SamplingEngine,
        config: GeneratorConfig,
        facts: ModelFacts,
        stage: Stage,
        *,
        name: str,
        run: str,
        keys: Path | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self._engine, self._config = engine, config
        self._name, self._run, self._keys = name, run, keys
        self._stop = asyncio.Event()
        self._grace_s, self._leave_by = grace_s, math.inf
        self._actors: Listener | None = None
        self._failure = ""
        self._serving = Serving(engine, config, facts, on_failure=self._fail)
        self._updater = WeightUpdater(
            engine,
            NewestWins(),
            stage,
            run,
            on_failure=self._fail,
            patience_s=config.stall_timeout_s,
            longest_s=config.load_timeout_s,
        )
        self._pace = Pace(time.monotonic(), config.stall_timeout_s, engine.full_step_s)
        self._link: AsyncLink | None = None
        self.weights_url = ""

    async def serve(self, broker: str) -> None:
        """Bind, join, and serve until a signal, a Drain message or a failure.

        Raises:
            GeneratorFailed: the engine or the broker is lost, or the broker refuses this generator.
            LinkDown: no broker answered within `JOIN_TIMEOUT_S`.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        self._actors = actors = Listener(self._config, self._name, self._keys, self._serving.received)
        self._serving.send = actors.send
        endpoint = endpoint_for_actors(actors.endpoint, self._config.advertised_host, broker)
        self._link = link = AsyncLink(
            broker,
            self._hello(endpoint, actors.public_key),
            self._from_broker,
            on_join=self._joined,
            progress=self.progress,
            on_failure=self._fail,
            keys=self._keys,
        )
        updates = asyncio.create_task(self._updater.run(self._serving.updated), name="updates")
        updates.add_done_callback(self._updates_ended)
        try:
            await link.joined(JOIN_TIMEOUT_S)
            log.info("%s serves actors at %s", self._name, endpoint)
            while not self._stop.is_set():
                self._tick()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), TICK_S)
        finally:
            updates.cancel()
            await self._serving.drain(self._failure, DRAIN_TIMEOUT_S)
            await link.close(self._failure or "drained")
            actors.close()
            await asyncio.wait({updates}, timeout=DRAIN_TIMEOUT_S)
        if self._failure:
            raise GeneratorFailed(f"{self._name}: {self._failure}")

    def progress(self) -> Progress:
        """Return what the next heartbeat reports: gauges since the last call, so it is called once for each.

        Its progress is the engine's steps. The generator is not busy while it loads an update, so the broker
        then expects no progress; this process has its own deadline for a load.
        """
        now = time.monotonic()
        gauges = self._serving.gauges(now) | self._updater.gauges() | self._engine.gauges()
        return Progress(
            progress=float(self._engine.steps),
            busy=self._serving.book.running > 0 and not self._updater.loading and not self._engine.asleep,
            policy_version=self._engine.version,
            gauges=tuple(gauges.items()),
            patience_s=min(MAX_PATIENCE_S, self._pace.patience_s),
            note=self._updater.note,
        )

    def _hello(self, endpoint: str, public_key: str) -> Hello:
        return Hello(
            role="generator",
            peer=self._name,
            # The incarnation grows from one start to the next.
            incarnation=time.time_ns() // 1_000_000,
            host=socket.gethostname(),
            pid=os.getpid(),
            endpoint=endpoint,
            weights_url=self.weights_url,
            public_key=public_key,
        )

    def _joined(self) -> None:
        assert self._link is not None
        welcome = self._link.session.welcome
        assert welcome is not None
        if welcome.run != self._run:
            self._fail(f"the broker serves run {welcome.run!r}, this generator belongs to {self._run!r}")
        elif (
            self._link.session.joins == 1
            and welcome.policy_version > self._engine.version
            and not self._engine.frozen
        ):
            # A generator that joins late samples no token before it has caught up with the run.
            self._serving.book.gate = welcome.policy_version

    def _from_broker(self, message: AnyMessage, _: list[bytes]) -> None:
        match message:
            case WeightsReady():
                self._updater.offer(
                    Announced(
                        message.epoch, message.version, message.manifest, tuple(message.sources), message.root
                    )
                )
            case ActorKeys() if self._actors is not None:
                self._actors.admit(message.public_keys)
            case Drain():
                self._drain(message.reason or "asked by the broker")
            case Refused() if message.fatal:
                self._fail(f"refused by the broker: {message.message}")
            case Refused():
                log.warning("refused by the broker: %s", message.message)
            case _:
                log.debug("%s from the broker is not for a generator", type(message).__name__)

    def _signalled(self) -> None:
        """Drain at the first signal, and end at once at the second one."""
        if math.isfinite(self._leave_by):
            self._stop.set()
        self._drain("a signal")

    def _drain(self, why: str) -> None:
        """Serve on until no actor needs this generator, at most for the time of grace, and then end."""
        if math.isfinite(self._leave_by):
            return
        now = time.monotonic()
        log.info("%s drains: %s", self._name, why)
        self._leave_by = now + self._grace_s
        self._serving.announce_drain(why, now)

    def _tick(self) -> None:
        now = time.monotonic()
        if math.isfinite(self._leave_by):
            needed = self._serving.guests.needed(now)
            if not needed or now >= self._leave_by:
                log.info("%s leaves; %d episodes still need it", self._name, needed)
                self._stop.set()
        if why := self._engine.health():
            self._fail(why)
        if self._link and (silent := self._link.session.silent_for(now)) > BROKER_LOST_S:
            self._fail(
                f"the broker has not been heard for {silent:.0f} s; is it running, is the way to it open?"
            )
        self._serving.expire(now)
        self._serving.keep_alive(now)
        self._watch_steps(now)

    def _watch_steps(self, now: float) -> None:
        """End this process if the engine has work and makes no step for longer than steps take here."""
        pace, running = self._pace, self._serving.book.running
        pace.look(steps=self._engine.steps, running=running > 0, now=now)
        if self._updater.loading or self._engine.asleep:
            pace.excuse(now)
        elif (still := pace.still_s(now)) > pace.patience_s:
            self._fail(
                f"the engine hangs: {running} requests run, and it has made no step for {still:.1f} s "
                f"(allowed here: {pace.patience_s:.1f} s)"
            )

    def _updates_ended(self, updates: "asyncio.Task[None]") -> None:
        if not updates.cancelled() and (error := updates.exception()) is not None:
            log.error("weight updates have ended by a fault", exc_info=error)
            self._fail(f"weight updates have ended by a fault: {error!r}")

    def _fail(self, why: str) -> None:
        if not self._failure:
            log.critical("%s stops: %s", self._name, why)
            self._failure = why
        self._stop.set()

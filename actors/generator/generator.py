"""A generator: actors ask for tokens, the broker announces weights, an engine samples; and its process."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from actors.config import GeneratorConfig
from actors.errors import GeneratorFailed, Orphaned
from actors.generator.engine import ModelFacts, SamplingEngine, hold_together, read_model_facts, sleeping
from actors.generator.serving import Listener, Serving, endpoint_for_actors
from actors.generator.weights.cache import Cache, cache_folder
from actors.generator.weights.staging import (
    Announced,
    NewestWins,
    PinnedVersions,
    Stage,
    VersionPace,
    WeightUpdater,
    evaluates_here,
    shared_memory,
)
from protocol.codec import AnyMessage
from protocol.errors import LASTING, NotAdmitted
from protocol.messages.fields import MAX_PATIENCE_S, MAX_SOURCES
from protocol.messages.peers import ActorKeys, Drain, Hello, Refused, SourceComplaint, WeightsReady
from protocol.processes import EarlySigterm, lock_of_environment, supervised
from protocol.security.addresses import check_endpoint, split_address
from protocol.security.http import access, scheme
from protocol.session import Progress
from protocol.sockets import AsyncLink
from protocol.weights.server import WeightsServer, serving

log = logging.getLogger(__name__)

FACTOR = 8.0
"""An engine may stand still for this multiple of the longest step that was seen lately."""
WINDOW_S = 300.0
"""Half of the time that a long step is remembered at least."""


@dataclass
class Pace:
    """How long an engine's steps take.

    A step computes prompt tokens, samples tokens, or both. An engine with work makes progress if it makes
    steps: prompts can take many steps before the first token is sampled. The longest step seen in the last
    five to ten minutes decides how long the next one may take, so a large model on a slow machine is not
    taken for an engine that hangs.

    Args:
        now: monotonic seconds.
        least_s: the engine may always stand still for this time.
        full_step_s: time of the largest step, measured at the start; 0 if it is not known.

    Example:
        >>> pace = Pace(now=0.0, least_s=8.0)
        >>> for now in (0.0, 0.5, 1.0):
        ...     pace.look(steps=int(2 * now), running=True, now=now)
        >>> pace.still_s(3.0), pace.patience_s
        (2.0, 8.0)
        >>> pace.look(steps=3, running=True, now=4.0)
        >>> pace.patience_s
        24.0
    """

    now: float
    least_s: float
    full_step_s: float = 0.0
    _steps: int = field(default=0, init=False)
    _moved: float = field(init=False)
    _running: bool = field(default=False, init=False)
    _turned: float = field(init=False)
    _longest: float = field(default=0.0, init=False)
    """Longest step of the current window."""
    _before: float = field(default=0.0, init=False)
    """Longest step of the window before."""

    def __post_init__(self) -> None:
        self._moved = self._turned = self.now

    @property
    def patience_s(self) -> float:
        """Longest time for which the engine may stand still now."""
        return max(self.least_s, FACTOR * max(self.full_step_s, self._longest, self._before))

    def look(self, *, steps: int, running: bool, now: float) -> None:
        """Note how many steps the engine has made, and whether it has work."""
        if now - self._turned > WINDOW_S:
            self._turned, self._before, self._longest = now, self._longest, 0.0
        if steps != self._steps:
            # Time without work before the step is not the step's.
            if self._running:
                self._longest = max(self._longest, now - self._moved)
            self._steps, self._moved = steps, now
        elif not running or not self._running:
            self._moved = now
        self._running = running

    def excuse(self, now: float) -> None:
        """Start the clock anew, because the engine could make no step: it loaded weights."""
        self._moved = now

    def still_s(self, now: float) -> float:
        """Return the seconds that the engine has had work without a step."""
        return now - self._moved if self._running else 0.0


TICK_S = 0.1
JOIN_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 5.0


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
        orphan_s: float = math.inf,
        weights_url: str = "",
        pace: VersionPace | None = None,
    ) -> None:
        self._engine, self._config = engine, config
        self._name, self._run, self._keys = name, run, keys
        self._weights_url, self._stage = weights_url, stage
        self._stop = asyncio.Event()
        self._grace_s, self._leave_by, self._orphan_s = grace_s, math.inf, orphan_s
        self._actors: Listener | None = None
        self._failure = self._orphaned = self._refused = ""
        self._run_is_over = False
        self._serving = Serving(engine, config, facts, on_failure=self._fail)
        self._pinned = PinnedVersions() if evaluates_here(config.evaluators, name) else None
        self._updater = WeightUpdater(
            engine,
            NewestWins(),
            stage,
            run,
            on_failure=self._fail,
            patience_s=config.stall_timeout_s,
            longest_s=config.load_timeout_s,
            pace=pace,
        )
        self._pace = Pace(time.monotonic(), config.stall_timeout_s, engine.full_step_s)
        self._link: AsyncLink | None = None

    async def serve(self, broker: str) -> bool:
        """Bind, join, and serve until a signal, a Drain message or a failure. Return whether the run is over.

        Raises:
            GeneratorFailed: the engine is lost, or the broker refuses this generator.
            NotAdmitted: the broker would refuse the next start of this generator, too.
            Orphaned: the broker is lost, or has sent this generator away until later.
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
            await link.joined(JOIN_TIMEOUT_S, unless=self._stop)
            if not self._stop.is_set():
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
        if self._orphaned:
            raise Orphaned(self._orphaned)
        if self._refused in LASTING:
            raise NotAdmitted(self._failure, self._refused)
        if self._failure:
            raise GeneratorFailed(f"{self._name}: {self._failure}")
        return self._run_is_over

    def progress(self) -> Progress:
        """Return what the next heartbeat reports: gauges since the last call, so it is called once for each.

        Its progress is the engine's steps. The generator is not busy while it loads an update, so the broker
        then expects no progress; this process has its own deadline for a load.
        """
        now = time.monotonic()
        gauges = self._serving.gauges(now) | self._updater.gauges() | self._engine.gauges()
        complaints = list(self._stage.complaints.items())[-MAX_SOURCES:]
        lies = "; ".join(f"{url} has sent wrong weights and is left out" for url, lied in complaints if lied)
        return Progress(
            progress=float(self._engine.steps),
            busy=self._serving.running > 0 and not self._updater.loading and not self._engine.asleep,
            policy_version=self._engine.version,
            gauges=tuple(gauges.items()),
            patience_s=min(MAX_PATIENCE_S, self._pace.patience_s),
            note="; ".join(filter(None, (self._updater.note, lies))),
            complaints=tuple(SourceComplaint(url, lied) for url, lied in complaints),
        )

    def _hello(self, endpoint: str, public_key: str) -> Hello:
        told = supervised(os.environ)
        return Hello(
            role="generator",
            peer=self._name,
            # The incarnation grows from one start to the next.
            incarnation=time.time_ns() // 1_000_000,
            host=socket.gethostname(),
            pid=os.getpid(),
            endpoint=endpoint,
            weights_url=self._weights_url,
            public_key=public_key,
            on_host=told.host,
            job=told.job,
            restarts=told.restarts,
            died=told.died,
            digest=told.digest,
            evaluates=self._pinned is not None,
            passes_on=bool(self._weights_url) and self._pinned is None and not self._engine.frozen,
            rack=self._config.rack,
        )

    def _joined(self) -> None:
        assert self._link is not None
        welcome = self._link.session.welcome
        assert welcome is not None
        if welcome.run != self._run:
            self._refused = "wrong_run"
            self._fail(f"the broker serves run {welcome.run!r}, this generator belongs to {self._run!r}")
        elif (
            self._link.session.joins == 1
            and welcome.policy_version > self._engine.version
            and not self._engine.frozen
            and self._pinned is None
        ):
            # A generator that joins late samples no token before it has caught up with the run.
            self._serving.catch_up_with(welcome.policy_version)

    def _from_broker(self, message: AnyMessage, _: list[bytes]) -> None:
        match message:
            case WeightsReady():
                announced = Announced(
                    message.epoch,
                    message.version,
                    message.manifest,
                    tuple(message.sources),
                    message.root,
                    message.ordered,
                )
                if self._pinned is None:
                    self._updater.offer(announced)
                else:
                    self._pinned.announced(announced)
            case ActorKeys() if self._actors is not None:
                self._actors.admit(message.public_keys)
            case Drain():
                self._run_is_over = message.then == "over"
                self._orphaned = message.reason if message.then == "resumed" else ""
                self._drain(message.reason or "asked by the broker")
            case Refused() if message.fatal:
                self._refused = self._refused or message.code
                self._fail(f"refused by the broker: {message.message}")
            case Refused():
                log.warning("refused by the broker: %s", message.message)
            case _:
                log.debug("%s from the broker is not for a generator", type(message).__name__)

    def _signalled(self) -> None:
        """Drain at the first signal. End at once at the second one, or if no actor can know this generator yet."""
        if math.isfinite(self._leave_by) or self._link is None or not self._link.session.joins:
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
        if self._pinned is not None:
            lowest = self._serving.book.lowest_wanted
            if wanted := self._pinned.wanted(lowest, in_service=self._engine.version):
                self._updater.offer(wanted)
        if math.isfinite(self._leave_by):
            needed = self._serving.needed(now)
            if not needed or now >= self._leave_by:
                log.info("%s leaves; %d episodes still need it", self._name, needed)
                self._stop.set()
        if why := self._engine.health():
            self._fail(why)
        if self._link and (silent := self._link.session.silent_for(now)) > self._orphan_s:
            self._orphaned = (
                f"the broker has not been heard for {silent:.0f} s (fleet.orphan_minutes); is it running, is the "
                "way to it open?"
            )
            self._fail(self._orphaned)
        self._serving.expire(now)
        self._serving.keep_alive(now)
        self._watch_steps(now)

    def _watch_steps(self, now: float) -> None:
        """End this process if the engine has work and makes no step for longer than steps take here."""
        pace, running = self._pace, self._serving.running
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


@contextlib.asynccontextmanager
async def relay(
    config: GeneratorConfig, cache: Cache, run: str, broker: str, keys: Path | None
) -> AsyncIterator[str]:
    """Serve this host's cache while the context lasts. Yield the URL for other hosts, or "" if there is none.

    Raises:
        AddressRefused: other hosts could reach the server, but the run has no keys and so no token.
        OSError: the address cannot be bound.
        KeysUnusable: the folder lacks the certificate or its private key.
    """
    if not config.weights_http:
        yield ""
        return
    host, port = split_address("generator.weights_http", config.weights_http, keys)
    server = WeightsServer(
        run, cache.locate, cache.folder.parent, keys, passes_on=True, prepares=cache.prepares
    )
    async with serving(server, host, port) as bound:
        at = endpoint_for_actors(
            f"tcp://{f'[{host}]' if ':' in host else host}:{bound}", config.advertised_host, broker
        )
        url = at.replace("tcp://", f"{scheme(keys)}://", 1)
        log.info("versions of this host are served at %s", url)
        yield url


SWITCH_S = 0.0005
"""Switch interval of the interpreter. A thread that fetches or hashes a version waits up to this long for the
event loop, about once per megabyte."""


def serve_generator(
    config: GeneratorConfig,
    *,
    name: str,
    broker: str,
    model: str,
    run: str,
    seed: int,
    keys: Path | None = None,
    grace_s: float = 0.0,
    orphan_s: float = math.inf,
) -> bool:
    """Serve until SIGTERM, or until the broker sends Drain. Then drain: serve the episodes that need it.

    Args:
        name: peer name, unique in the run.
        broker: ZeroMQ endpoint of the broker.
        model: Hugging Face model folder. Its weights are policy version 0.
        keys: folder of the keys. None means that nothing is encrypted, and only this host can connect.
        grace_s: longest time to drain, in seconds.
        orphan_s: longest silence of the broker, in seconds.

    Returns:
        Whether the run is over.

    Raises:
        AddressRefused: other hosts can reach ``config.endpoint``, but nothing is encrypted.
        OSError: the address cannot be bound, for example because it is taken.
        KeysUnusable: the folder lacks keys of a generator.
        GeneratorFailed: the engine is lost; start the process again.
        Orphaned: the broker is lost, or has sent this generator away until later.
        LinkDown: no broker answered.
    """
    check_endpoint("generator.endpoint", config.endpoint, keys)
    sys.setswitchinterval(SWITCH_S)
    sigterm = EarlySigterm()
    sigterm.hold()
    serving = serve_on_loop(
        config,
        name=name,
        broker=broker,
        model=model,
        run=run,
        seed=seed,
        keys=keys,
        grace_s=grace_s,
        orphan_s=orphan_s,
    )
    try:
        return asyncio.run(_until_sigterm(serving, sigterm))
    except asyncio.CancelledError:
        # The engine was still starting.
        sys.exit(0)
    finally:
        # The linger time lets the last chunks and the Goodbye leave.
        zmq.Context.instance().destroy(linger=1_000)


async def _until_sigterm(serving: Coroutine[Any, Any, bool], sigterm: EarlySigterm) -> bool:
    """Serve; SIGTERM ends it at once, also while vLLM blocks the loop, until `Generator.serve` has its own handler."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(serving)

    def end(*_: object) -> None:
        if asyncio.current_task() is not None:
            sys.exit(0)
        # In the loop's own code an exit could lose the step of a task, and the loop would wait for this task.
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, end)
    if sigterm.came:
        task.cancel()
    return await task


async def serve_on_loop(
    config: GeneratorConfig,
    *,
    name: str,
    broker: str,
    model: str,
    run: str,
    seed: int,
    keys: Path | None = None,
    grace_s: float = 0.0,
    orphan_s: float = math.inf,
    engine: AbstractAsyncContextManager[SamplingEngine] | None = None,
) -> bool:
    """Serve on the running event loop, like `serve_generator`.

    Args:
        engine: context of the engine; None: the one that the settings name, in a process of its own.
    """
    facts = read_model_facts(Path(model))
    # vLLM warns of much while it starts, so whoever watches this terminal reads whose terminal it is.
    log.info(
        "%s starts its engine (%s) with the model in %s; this may take a minute", name, config.backend, model
    )
    began = time.monotonic()
    async with engine or engine_of(config, model=model, seed=seed) as sampling:
        log.info(
            "%s: the engine is up after %.0f s; joining the broker at %s",
            name,
            time.monotonic() - began,
            broker,
        )
        cache = Cache(cache_folder(shared_memory(), run, broker), run, partial(access, keys))
        pace = VersionPace()
        stage = Stage(f"{run}-{name}", facts.shapes, cache=cache, pace=pace, adapters=config.adapter_rank)
        try:
            async with relay(config, cache, run, broker, keys) as weights_url:
                generator = Generator(
                    sampling,
                    config,
                    facts,
                    stage,
                    name=name,
                    run=run,
                    keys=keys,
                    grace_s=grace_s,
                    orphan_s=orphan_s,
                    weights_url=weights_url,
                    pace=pace,
                )
                return await generator.serve(broker)
        finally:
            stage.close()


def engine_of(
    config: GeneratorConfig, *, model: str, seed: int, one_process: bool = False
) -> AbstractAsyncContextManager[SamplingEngine]:
    """Return the context of the engine that the settings name.

    Args:
        one_process: run vLLM's engine core in this process, see `actors.generator.vllm_engine.one_process`.
    """
    if config.backend == "http":
        return _http_engine(config)
    return _vllm_engine(config, model=model, seed=seed, one_process=one_process)


@contextlib.asynccontextmanager
async def _http_engine(config: GeneratorConfig) -> AsyncIterator[SamplingEngine]:
    from actors.generator.http_engine import HttpEngine

    engine = await HttpEngine.connect(config)
    try:
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def _vllm_engine(
    config: GeneratorConfig, *, model: str, seed: int, one_process: bool
) -> AsyncIterator[SamplingEngine]:
    from actors.generator.vllm_engine.engine import VllmEngine

    lock = lock_of_environment()
    if lock is not None:
        # An engine that starts measures the free memory of its GPU, so the learner must not update meanwhile.
        await hold_together(lock)
    engine = await VllmEngine.start(config, model=model, seed=seed, one_process=one_process)
    try:
        if lock is None:
            yield engine
        else:
            async with sleeping(engine, lock) as shared:
                yield shared
    finally:
        await engine.close()

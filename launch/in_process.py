"""`offbeat train --in-process`: broker, actor, generator and learner in one process and one event loop, for a debugger.

The roles are those of every run, and so are their messages; only sockets are replaced by calls (`protocol.direct`).
The learner computes in the main thread. While it waits for a batch, the event loop runs, with broker, actor and
generator in it; while it computes, they stand. So a breakpoint in a reward, a surrogate or the broker stops everything,
and a traceback has the whole way of an error. docs/extend/debugging.md shows how to use it.
"""

import asyncio
import bdb
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from launch import logs, run_folder
from launch.errors import ConfigError, NothingTrained
from launch.placement import VARIABLE, visible_gpus
from launch.run_file.sections import RunConfig
from launch.run_folder import http_keys, prepare_keys
from launch.supervise.progress import MetricsTail, nothing_trained, progress_line, sentence
from learner.run_files import METRICS, RESULT
from protocol.direct import DIRECT
from protocol.processes import end_loop
from protocol.security.addresses import is_loopback
from protocol.sockets import LoopLink

LONGEST_TURN_S = 1.0
"""Longest time that a turn of the event loop counts. No role notices a longer one: a debugger, or a learner's step."""
NO_LIMIT_MINUTES = 7 * 24 * 60.0
LOOK_S = 0.2
SHOW_S = 0.05
END_S = 20.0
"""Longest time that the roles may take to end, of the loop's clock."""

Where = Literal["disk", "memory"]


def refusals(config: RunConfig) -> Iterator[str]:
    """Yield why a run cannot be in one process, each reason with its cure."""
    learner, generator = config.learner, config.generator
    if learner.ranks > 1:
        yield (
            f"learner.processes = {learner.processes} on learner.nodes = {learner.nodes}: one process is one rank; add "
            "learner.processes=1 learner.nodes=1"
        )
    if generator.tensor_parallel_size > 1:
        yield (
            f"generator.tensor_parallel_size = {generator.tensor_parallel_size}: the parts of an engine are processes; "
            "add generator.tensor_parallel_size=1, or a smaller model"
        )
    if generator.sleep_in_updates is True:
        yield (
            "generator.sleep_in_updates = true: the learner would wait for an engine that stands with it; leave the "
            "setting out"
        )
    if processes := config.env.params.get("processes"):
        yield f"env.params.processes = {processes}: rewards would be in other processes; add env.params.processes=0"
    if config.judge is not None:
        yield "[judge]: the run's own judge is a process; name one that is served elsewhere, or leave the section out"
    addresses = {
        "broker.endpoint": config.broker.endpoint,
        "broker.http": config.broker.http,
        "generator.endpoint": config.generator.endpoint,
    }
    for name, address in addresses.items():
        if not is_loopback(address.removeprefix("tcp://").rpartition(":")[0]) and not address.startswith(
            "ipc://"
        ):
            yield f"{name} = {address}: other hosts cannot take part in one process; leave the setting out"
    for name, address in (
        ("weights.http", config.weights.http),
        ("generator.weights_http", generator.weights_http),
    ):
        if address:
            yield f"{name} = {address}: no other host fetches weights from one process; leave the setting out"


def refuse(config: RunConfig) -> None:
    """Refuse a run that cannot be in one process.

    Raises:
        ConfigError: with every reason and its cure.
    """
    if reasons := list(refusals(config)):
        raise ConfigError(f"--in-process: {'; '.join(reasons)}")


def train_in_process(
    config: RunConfig,
    *,
    resume: bool | Path = False,
    from_step: int | None = None,
    changed: bool = False,
    journal: Where = "disk",
    engine: AbstractAsyncContextManager[Any] | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Train in this process and thread. Return the summary, which is also in the run folder.

    Args:
        config: configuration that `launch.preflight.examine` has examined, see `alone`.
        resume: go on with the newest folder of this run, or with the one that is named.
        from_step: with ``resume``, go back to the checkpoint of this learner step.
        changed: with ``resume``, accept a different seed, environment or model.
        journal: where the broker keeps what it was told. "disk": in the run folder, as every run does. "memory":
            nowhere; `offbeat journal` and `offbeat retrain` then find nothing.
        engine: context of an engine in place of the one that the settings name.
        say: called with each line for the terminal.

    Raises:
        ConfigError: the run cannot be in one process, or there is no run to resume.
        NothingTrained: the run ended before its first step.
        KeyboardInterrupt: a person ended the run, at the debugger, or with Ctrl-C before the learner has begun. Later
            the first Ctrl-C ends the run behind its step, with a checkpoint; a second one raises this.
        Exception: whatever the code of a role, an environment or a method raises, with its own traceback.
    """
    from launch.model import prepare
    from launch.supervise.supervisor import held, resumed_with

    refuse(config)
    began = time.monotonic()
    os.environ.setdefault(logs.LEVEL, "warning")
    logs.configure("in-process")
    folder = run_folder.create(config, resume=resume, note=say)
    if from_step is not None:
        run_folder.check_step(folder, from_step)
    with held(folder, say):
        for line in resumed_with(config, folder, from_step, changed=changed) if resume else ():
            say(line)
        config = run_folder.with_ports(config)
        run_folder.save_config(config, folder / run_folder.CONFIG)
        say(f"{'resuming' if resume else 'run folder'} {folder}")
        say(run_folder.line_to_type(folder))
        model = str(prepare(config))
        with loop_of_all_roles() as loop, usual_tracebacks(), quitting_ends(), usual_signals():
            roles = Roles(config, folder, model, journal, loop, say)
            try:
                roles.start(engine)
                roles.learn(resume=bool(resume), from_step=from_step)
            finally:
                roles.end()
        seconds = time.monotonic() - began
        return _summary(config, folder, seconds, resumed=bool(resume), interrupted=roles.interrupted)


def alone(config: RunConfig) -> RunConfig:
    """Prepare this process for all roles, before anything imports torch. Return the configuration to examine.

    The process sees the first GPU only, so that learner and engine share it.
    """
    from actors.generator.vllm_engine.engine import prepare_environment

    if len(gpus := visible_gpus()) > 1:
        os.environ[VARIABLE] = gpus[0]
    generator = config.generator
    if generator.sleep_in_updates == "auto":
        generator = generator.model_copy(update={"sleep_in_updates": False})
    threads = max(generator.threads_used, config.learner.threads_used)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # A person reads this terminal.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    prepare_environment(generator)
    one = {"actor": config.actor.model_copy(update={"count": 1})}
    return config.model_copy(update={**one, "generator": generator.model_copy(update={"count": 1})})


@contextlib.contextmanager
def usual_tracebacks() -> Iterator[None]:
    """Keep torch from putting its rank before each line of a traceback."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


@contextlib.contextmanager
def quitting_ends() -> Iterator[None]:
    """Let ``q`` at the debugger raise KeyboardInterrupt, wherever it stands.

    Whoever handles one message or episode goes on after each Exception, and would take BdbQuit for an error of it.
    """
    before = bdb.BdbQuit
    bdb.BdbQuit = KeyboardInterrupt  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        bdb.BdbQuit = before  # type: ignore[misc]


@contextlib.contextmanager
def usual_signals() -> Iterator[None]:
    """Put back the handlers of signals that the learner replaces: the caller may go on after the run."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StandingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands while one turn takes long, and between two runs of the loop.

    So no deadline of a role passes while a person is in a debugger, or while the learner computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen = _monotonic()
        self.inside = 0.0
        """Seconds for which turns of the loop took longer than `LONGEST_TURN_S`."""
        self._outside = 0.0

    def run_forever(self) -> None:
        now = _monotonic()
        self._outside += now - self._seen
        self._seen = now
        super().run_forever()
        # Count the last turn, too.
        self.time()

    def time(self) -> float:
        now = _monotonic()
        self.inside += max(0.0, now - self._seen - LONGEST_TURN_S)
        self._seen = now
        return now - self.inside - self._outside

    def add_signal_handler(self, *_: Any) -> None:  # type: ignore[override]
        """Do nothing: signals are for the main thread, in which a person may debug."""


_monotonic = time.monotonic


@contextlib.contextmanager
def loop_of_all_roles() -> Iterator[StandingLoop]:
    """Yield the event loop. All code in it reads its clock as ``time.monotonic()`` while the context lasts.

    The clock of the learner, outside the loop, goes on while the learner computes, so that its metrics are right.
    """
    loop = StandingLoop()

    def monotonic() -> float:
        return loop.time() if asyncio._get_running_loop() is loop else _monotonic() - loop.inside

    asyncio.set_event_loop(loop)
    time.monotonic = monotonic
    try:
        yield loop
    finally:
        time.monotonic = _monotonic
        end_loop(loop)
        asyncio.set_event_loop(None)


class Roles:
    """Broker, generator and actor on one event loop, and the learner that lets it run."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        model: str,
        journal: Where,
        loop: StandingLoop,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._folder, self._model, self._journal = config, folder, model, journal
        self._loop, self._say = loop, say
        self._broker_at, self._generator_at = f"{DIRECT}broker", f"{DIRECT}generator-0"
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._progress: asyncio.Task[None] | None = None
        self._tail, self._began, self._shown = MetricsTail(since=time.time()), time.perf_counter(), 0
        self._link: LoopLink | None = None
        self._stop_broker: Callable[[], None] = lambda: None
        self.interrupted = False
        """True after the first Ctrl-C behind the learner's start."""

    def start(self, engine: AbstractAsyncContextManager[Any] | None) -> None:
        """Start broker, generator and actor, and wait until the broker knows the last two."""
        self._loop.run_until_complete(self._start(engine))

    async def _start(self, engine: AbstractAsyncContextManager[Any] | None) -> None:
        from actors.generator.generator import engine_of, serve_on_loop
        from broker.output_commit import OutputCommit
        from broker.service import Service
        from protocol.security.addresses import split_address

        config, run = self._config, self._folder.name
        keys = http_keys(config, prepare_keys(config, self._folder))
        broker = config.broker.model_copy(update={"endpoint": self._broker_at})
        place = self._folder / run_folder.JOURNAL if self._journal == "disk" else None
        output_commit = OutputCommit.open(broker, run, config.max_policy_lag, place)
        service = Service(broker, output_commit, None, keys)
        self._stop_broker = service.stop
        self._begin("broker", service.run(*split_address("broker.http", broker.http, keys)))
        # One turn of the loop binds the broker's address.
        await asyncio.sleep(0)
        generator = config.generator.model_copy(update={"endpoint": self._generator_at})
        self._say(
            f"starting {'the engine' if engine is None else 'an engine of the caller'}, in this process"
        )
        self._begin(
            "generator",
            serve_on_loop(
                generator,
                name="generator-0",
                broker=self._broker_at,
                model=self._model,
                run=run,
                seed=config.run.seed,
                engine=engine
                or engine_of(generator, model=self._model, seed=config.run.seed, one_process=True),
            ),
        )
        self._begin("actor", self._actor().run())
        peers = output_commit.dispatcher.state.peers
        while not all(peers.get(name) for name in ("generator-0", "actor-0")):
            self._check()
            await asyncio.sleep(LOOK_S)

    def _actor(self) -> Any:
        from actors.actor import Actor
        from actors.environments import CallsHere
        from envs.registry import make_suite
        from launch.conversations import renderer_of

        config = self._config
        return Actor(
            # Nobody waits for episodes at the end.
            config.actor.model_copy(update={"drain_timeout_s": LOOK_S}),
            "actor-0",
            self._broker_at,
            config.env.name,
            self._folder.name,
            partial(make_suite, config.env.name, config.env.params),
            renderer_of(config, self._model),
            in_step=config.windows_in_step,
            environments=CallsHere(),
        )

    def learn(self, *, resume: bool, from_step: int | None) -> None:
        """Train to the end in this thread."""
        from launch.role import learner

        config = self._config
        self._progress = self._loop.create_task(self._show_progress(), name="progress")
        broker = config.broker.model_copy(update={"endpoint": self._broker_at})
        limited = config.run.model_copy(update={"max_minutes": NO_LIMIT_MINUTES})
        learner(
            config.model_copy(update={"broker": broker, "run": limited}),
            self._folder,
            None,
            resume=resume,
            from_step=from_step,
            connect=self._connect,
        )

    def end(self) -> None:
        """Let the broker tell all to end, and wait until they have."""
        self._stop_broker()
        if self._progress is not None:
            self._progress.cancel()
            self._look()
        if running := [task for task in self._tasks.values() if not task.done()]:
            with contextlib.suppress(KeyboardInterrupt):
                self._loop.run_until_complete(asyncio.wait(running, timeout=END_S))

    def _connect(self, *arguments: Any, **settings: Any) -> LoopLink:
        self._check()
        self._link = LoopLink(*arguments, loop=self._loop, **settings)
        self._count_interrupts()
        return self._link

    def _count_interrupts(self) -> None:
        """Let a second Ctrl-C end what runs: the learner takes note of one only, and a reward may never return."""
        first = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            self._say("ending the run behind this step, with a checkpoint; a second Ctrl-C ends it at once")
            if callable(first):
                first(number, frame)

        signal.signal(signal.SIGINT, interrupt)

    def _begin(self, name: str, work: Any) -> None:
        task = self._tasks[name] = self._loop.create_task(work, name=name)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        """Let the learner raise the error that ended another role."""
        if not task.cancelled() and (error := task.exception()) is not None and self._link is not None:
            self._link.inbox.put(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _check(self) -> None:
        """Raise the error that ended a role."""
        for task in self._tasks.values():
            if task.done():
                task.result()

    async def _show_progress(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(SHOW_S)

    def _look(self) -> None:
        """Say what is new in the metrics: steps, evaluations and notes."""
        for line in self._tail.read(self._folder / METRICS):
            self._say(sentence(line))
        values = self._tail.values
        step = int(values.get("step", 0))
        if step > self._shown and "learner/policy_version" in values:
            self._shown = step
            self._say(progress_line(values, self._config, time.perf_counter() - self._began))


def _summary(
    config: RunConfig, folder: Path, seconds: float, *, resumed: bool, interrupted: bool
) -> dict[str, Any]:
    """Write the summary of the run, and return it.

    Raises:
        NothingTrained: the run ended before its first step.
    """
    from launch.supervise.summary import Course, write_summary

    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    # The learner calls every signal by one name.
    ended_by = "Ctrl-C" if interrupted and result["ended_by"] == "SIGTERM" else str(result["ended_by"])
    if not result["steps"]:
        raise NothingTrained(nothing_trained(ended_by, result.get("episodes", {})))
    course = Course(
        ended_by=ended_by,
        wall_seconds=seconds,
        killed=[],
        restarts={},
        restart_reasons=[],
        resumed=resumed,
    )
    return write_summary(config, folder, course)

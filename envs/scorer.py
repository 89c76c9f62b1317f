"""Questions and scores from a separate process, so that a bad answer cannot harm the actor.

A `Scorer` owns one worker process (`envs.scorer_worker`) and sends it one request at a time. If a request
takes too long, the answer scores 0, and the scorer kills the worker and starts a new one. The actor goes on.
"""

import asyncio
import difflib
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from envs.base import Split
from envs.errors import EnvError, RefusedFamily, ScorerFailed
from envs.scorer_process import START_DEADLINE_S, Family, ScorerProcess, Wrap
from protocol.gauges import Gauge, table

log = logging.getLogger(__name__)

Sandbox = Literal["auto", "bwrap", "process"]

ENTRY_DEADLINE_S = 20.0
SCORE_DEADLINE_S = 2.0
OPEN_DEADLINE_S = 3 * START_DEADLINE_S + 10.0
"""Longest time to open a scorer. It may try three ways to start a worker, see `envs.scorer_process.Wrap`."""
MAX_ANSWER_CHARS = 65_536

RUNS_ANSWERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
ACCEPTS_JUNK = frozenset({"game_of_life_halting", "complex_arithmetic", "coin_flip"})


class Question(NamedTuple):
    """A question, its solution (None if the library has none), and its position in the library."""

    question: str
    answer: str | None
    position: int


@dataclass
class ScorerCounters:
    """Counts of scoring failures and of restarts, for `/status`. An answer whose scoring fails scores 0."""

    scorer_timeouts: int = 0
    scorer_errors: int = 0
    scorer_restarts: int = 0


GAUGES = table(
    [
        Gauge(
            "scorer_timeouts_total",
            "answers",
            "answers whose scoring hit the time limit, and scored 0",
            "total",
        ),
        Gauge("scorer_errors_total", "answers", "answers whose scoring failed, and scored 0", "total"),
        Gauge("scorer_restarts_total", "restarts", "scorer processes that were started again", "total"),
    ]
)
"""Gauges that a suite with a scorer reports; `ScorerCounters` counts them."""


def choose_sandbox(family: str, sandbox: Sandbox) -> Literal["bwrap", "process"]:
    """Choose how the worker is confined.

    Raises:
        EnvError: there is no such sandbox.
        RefusedFamily: the family's scorer accepts junk. Or bubblewrap is not installed although ``sandbox``
            asks for it, or not used although the scorer runs answers as Python.

    Example:
        >>> choose_sandbox("coin_flip", "process")
        Traceback (most recent call last):
        ...
        envs.errors.RefusedFamily: reasoning_gym family 'coin_flip': its scorer accepts junk; use another
    """
    if sandbox not in get_args(Sandbox):
        raise EnvError(f"sandbox = {sandbox!r}: use one of {', '.join(get_args(Sandbox))}")
    if family in ACCEPTS_JUNK:
        raise RefusedFamily(f"reasoning_gym family {family!r}: its scorer accepts junk; use another")
    installed = shutil.which("bwrap") is not None
    if sandbox == "bwrap" and not installed:
        raise RefusedFamily('sandbox = "bwrap", but there is no bwrap on PATH; install bubblewrap')
    chosen: Literal["bwrap", "process"] = "bwrap" if sandbox != "process" and installed else "process"
    if family in RUNS_ANSWERS and chosen != "bwrap":
        raise RefusedFamily(
            f"reasoning_gym family {family!r}: its scorer runs the answer as Python code; "
            'install bubblewrap and set sandbox = "bwrap"'
        )
    return chosen


class Scorer:
    """Questions and scores of one family, for use from threads and from an event loop.

    The constructor blocks while the worker imports the library (about 3 s), and raises if a setting is wrong.

    Raises:
        EnvError: there is no such sandbox.
        RefusedFamily: see `choose_sandbox`.
        ScorerFailed: the worker cannot be started with these settings; the message says why.
    """

    def __init__(self, family: Family, sandbox: Sandbox = "auto") -> None:
        self.counters = ScorerCounters()
        self._family = family
        # Invariant: this one thread starts every worker and sends every request. It outlives all workers,
        # because a worker dies with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._wraps = _wraps(choose_sandbox(family.name, sandbox), sandbox, family.name)
        self._process: ScorerProcess | None = self._thread.submit(self._open).result(OPEN_DEADLINE_S)

    @property
    def sandbox(self) -> str:
        """Confinement of the worker: "bwrap", "bwrap-userns" or "process"."""
        return self._wraps[0]

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def entry(self, index: int, split: Split) -> Question:
        """Return the question of task ``index`` of a split; see `envs.scorer_worker.Questions`."""
        found: Question = await self._elsewhere(self._entry, index, split)
        return found

    def entry_now(self, index: int, split: Split) -> Question:
        """Return the question of task ``index`` of a split, like `entry`, but block."""
        return self._thread.submit(self._entry, index, split).result(OPEN_DEADLINE_S + ENTRY_DEADLINE_S)

    async def score(self, position: int, answer: str) -> float:
        """Return the score of an answer, in [0, 1]. It is 0, and counted, if scoring fails or exceeds 2 s."""
        score: float = await self._elsewhere(self._score, position, answer)
        return score

    def gauges(self) -> dict[str, float]:
        """Return the counters, for a heartbeat."""
        return {f"{name}_total": float(count) for name, count in asdict(self.counters).items()}

    async def close(self) -> None:
        await self._elsewhere(self._drop)
        self._thread.shutdown(wait=False)

    async def _elsewhere(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _open(self) -> ScorerProcess:
        failures: list[str] = []
        for wrap in self._wraps:
            try:
                process = ScorerProcess(self._family, wrap)
            except (TimeoutError, ScorerFailed) as error:
                failures.append(f"{wrap}: {error}")
                continue
            if "error" in process.opened:
                process.close()
                raise _settings_error(self._family, process.opened)
            self._wraps = [wrap]
            return process
        raise ScorerFailed(
            f"reasoning_gym family {self._family.name!r}: no scorer starts ({'; '.join(failures)})"
        )

    def _request(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        if self._process is not None and not self._process.alive():
            self._drop()
        if self._process is None:
            self.counters.scorer_restarts += 1
            self._process = self._open()
        try:
            return self._process.request(message, deadline_s)
        except (TimeoutError, ScorerFailed):
            self._drop()
            raise

    def _drop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _entry(self, index: int, split: Split) -> Question:
        reply = self._request({"op": "entry", "index": index, "split": split}, ENTRY_DEADLINE_S)
        if "error" in reply:
            raise ScorerFailed(f"family {self._family.name!r}, task {index} of {split}: {reply['error']}")
        return Question(reply["question"], reply["answer"], reply["position"])

    def _score(self, position: int, answer: str) -> float:
        request = {"op": "score", "position": position, "answer": answer[:MAX_ANSWER_CHARS]}
        try:
            reply = self._request(request, SCORE_DEADLINE_S)
        except TimeoutError:
            self.counters.scorer_timeouts += 1
            log.warning("scoring took longer than %s s; score 0, worker restarted", SCORE_DEADLINE_S)
            return 0.0
        except ScorerFailed as error:
            self.counters.scorer_errors += 1
            log.warning("scorer failed: %s", error)
            return 0.0
        score = reply.get("score")
        if not isinstance(score, float) or not 0.0 <= score <= 1.0:
            self.counters.scorer_errors += 1
            return 0.0
        return score


def _wraps(chosen: Literal["bwrap", "process"], wanted: Sandbox, family: str) -> list[Wrap]:
    """Return the ways to start the worker, strongest first. A plain process comes last, if it is allowed."""
    if chosen == "process":
        return ["process"]
    wraps: list[Wrap] = ["bwrap-userns"]
    if os.geteuid() == 0:
        wraps.insert(0, "bwrap")
    if wanted == "auto" and family not in RUNS_ANSWERS:
        wraps.append("process")
    return wraps


def _settings_error(family: Family, reply: dict[str, Any]) -> EnvError:
    near = difflib.get_close_matches(family.name, reply.get("names", []), n=3, cutoff=0.4)
    cure = f"; nearest: {', '.join(near)}" if near else ""
    return ScorerFailed(
        f"reasoning_gym family {family.name!r} with config {family.config}: {reply['error']}{cure}"
    )

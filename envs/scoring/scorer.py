"""Questions and scores from a separate process, so that a bad answer cannot harm the actor.

Answers with known scores find a process that was tampered with, and gauges count what went wrong.
"""

import asyncio
import difflib
import importlib.util
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, NamedTuple

from envs.base import Split
from envs.errors import EnvError, ScorerFailed
from envs.scoring.questions import Family
from envs.scoring.worker_process import (
    START_DEADLINE_S,
    Sandbox,
    WorkerProcess,
    scorer_process,
    ways_to_start,
)
from protocol.gauges import Gauge, table


@dataclass
class ScorerCounters:
    """Counts of scoring failures and of restarts, for `/status`. An answer whose scoring fails scores 0."""

    scorer_timeouts: int = 0
    scorer_errors: int = 0
    scorer_restarts: int = 0
    scorer_tampered: int = 0


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
        Gauge(
            "scorer_tampered_total",
            "scorers",
            "scorer processes that gave canary answers wrong scores, and were started again",
            "total",
        ),
    ]
)
"""Gauges that a suite with a scorer reports; `ScorerCounters` counts them."""


QUESTIONS = 4
"""Number of questions of which canaries are made."""
MOST_DRAWN = 16
"""Most questions that are drawn; the library has no solution for some."""
INDICES = 1_000
"""The questions are drawn from the tasks below this index."""


class Canary(NamedTuple):
    """An answer to the entry at a position of the library, and the score that it must get."""

    position: int
    answer: str
    score: float


def choose_canaries(
    solution: Callable[[int], tuple[int, str | None]], score: Callable[[int, str], float]
) -> list[tuple[Canary, Canary]]:
    """Return pairs of a right and a wrong answer to one question. The wrong one names a second solution.

    Args:
        solution: returns the position of task ``index``, and the library's solution, or None.
        score: scores an answer in a worker that has met no answer of a model.

    Raises:
        ScorerFailed: the scores of right and wrong answers are equal for all questions.

    Example:
        >>> pairs = choose_canaries(lambda i: (64 * i, str(i)), lambda place, answer: float(answer == str(place // 64)))
        >>> [(right.score, wrong.score) for right, wrong in pairs]
        [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)]
    """
    solutions: list[tuple[int, str]] = []
    for index in secrets.SystemRandom().sample(range(INDICES), MOST_DRAWN):
        position, text = solution(index)
        if text:
            solutions.append((position, text))
        if len(solutions) == QUESTIONS:
            break
    pairs = []
    for (position, right), (_, other) in zip(solutions, solutions[1:] + solutions[:1], strict=True):
        wrong = f"{right} {other}"
        pair = (
            Canary(position, right, score(position, right)),
            Canary(position, wrong, score(position, wrong)),
        )
        if pair[0].score > pair[1].score:
            pairs.append(pair)
    if not pairs:
        raise ScorerFailed(f"none of {len(solutions)} questions tells right answers from wrong ones")
    return pairs


log = logging.getLogger(__name__)

ENTRY_DEADLINE_S = 20.0
SCORE_DEADLINE_S = 2.0
GRACE_S = 3.0
"""Time in which a worker ends the process of an answer that exceeds `SCORE_DEADLINE_S`."""
OPEN_DEADLINE_S = 3 * START_DEADLINE_S + 10.0
"""Longest time to open a scorer. It may try three ways to start a worker, see `envs.scoring.worker_process.Wrap`."""
CANARIES_DEADLINE_S = 120.0
MAX_ANSWER_CHARS = 65_536
MOST_TOGETHER = 16
"""Most answers that one pair of canaries checks."""


class Question(NamedTuple):
    """A question, its solution (None if the library has none), its position in the library, and its metadata."""

    question: str
    answer: str | None
    position: int
    fields: dict[str, str]


class _Waiting(NamedTuple):
    """An answer that waits for its score."""

    position: int
    answer: str
    score: Future[float]


class Scorer:
    """Questions and scores of one family, for use from threads and from an event loop.

    The constructor blocks while the worker imports the library (about 3 s), and raises if a setting is wrong.
    If the library runs answers as Python, canaries follow the answers, see `envs.scoring.scorer`. No score leaves
    before canaries have got their scores from the same worker.

    Raises:
        EnvError: a setting is wrong, or the library is not installed.
        RefusedFamily: see `envs.scoring.worker_process.ways_to_start`.
        ScorerFailed: the worker cannot be started with these settings; the message says why.
    """

    def __init__(self, family: Family, sandbox: Sandbox = "auto") -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise EnvError(
                "the environments reasoning_gym and calculator need the package reasoning-gym, which is not installed: "
                "pip install '.[tasks]'"
            )
        self.counters = ScorerCounters()
        self._family = family
        # Invariant: this one thread starts every worker and sends every request. It outlives all workers,
        # because a worker dies with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._ways = ways_to_start(family, sandbox)
        # Invariant: only the thread takes answers out of here.
        self._waiting: deque[_Waiting] = deque()
        self._process: WorkerProcess | None = self._thread.submit(self._open).result(OPEN_DEADLINE_S)
        self._canaries: Iterator[tuple[Canary, Canary]] | None = None
        if family.runs_answers:
            self._canaries = cycle(self._thread.submit(self._choose_canaries).result(CANARIES_DEADLINE_S))

    @property
    def sandbox(self) -> str:
        """Confinement of the worker: "bwrap", "bwrap-userns" or "process"."""
        return self._ways[0].name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def entry(self, index: int, split: Split) -> Question:
        """Return the question of task ``index`` of a split; see `envs.scoring.questions.Questions`."""
        found: Question = await self._elsewhere(self._entry, index, split)
        return found

    def entry_now(self, index: int, split: Split) -> Question:
        """Return the question of task ``index`` of a split, like `entry`, but block."""
        return self._thread.submit(self._entry, index, split).result(OPEN_DEADLINE_S + ENTRY_DEADLINE_S)

    async def score(self, position: int, answer: str) -> float:
        """Return the score of an answer, in [0, 1].

        It is 0, and counted, if scoring fails or exceeds 2 s, or if the answer tampered with the scorer.
        """
        answer = answer[:MAX_ANSWER_CHARS]
        if any("\ud800" <= character <= "\udfff" for character in answer):
            # Half of a surrogate pair is no text that could be sent to the worker, and no right answer.
            return 0.0
        waiting = _Waiting(position, answer, Future())
        self._waiting.append(waiting)
        await self._elsewhere(self._score_waiting)
        return await asyncio.wrap_future(waiting.score)

    def gauges(self) -> dict[str, float]:
        """Return the counters, for a heartbeat."""
        return {f"{name}_total": float(count) for name, count in asdict(self.counters).items()}

    async def close(self) -> None:
        await self._elsewhere(self._drop)
        self._thread.shutdown(wait=False)

    def close_now(self) -> None:
        """Close the scorer, like `close`, but block."""
        self._thread.submit(self._drop).result(GRACE_S)
        self._thread.shutdown(wait=False)

    async def _elsewhere(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _open(self) -> WorkerProcess:
        failures: list[str] = []
        for way in self._ways:
            try:
                process = scorer_process(self._family, way)
            except (TimeoutError, ScorerFailed) as error:
                failures.append(f"{way.name}: {error}")
                continue
            if "error" in process.opened:
                process.close()
                raise _settings_error(self._family, process.opened)
            if failures:
                log.warning(
                    "scorer runs as %s, because stronger ways failed: %s", way.name, "; ".join(failures)
                )
            self._ways = [way]
            return process
        raise ScorerFailed(
            f"reasoning_gym family {self._family.name!r}: no scorer starts ({'; '.join(failures)})"
        )

    def _running(self) -> WorkerProcess:
        if self._process is not None and not self._process.alive():
            self._drop()
        if self._process is None:
            self.counters.scorer_restarts += 1
            self._process = self._open()
        return self._process

    def _request(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        process = self._running()
        try:
            return process.request(message, deadline_s)
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
        return Question(reply["question"], reply["answer"], reply["position"], reply["fields"])

    def _score_waiting(self) -> None:
        """Score the answers that wait, at most `MOST_TOGETHER`. An earlier call may have scored them all."""
        taken = [self._waiting.popleft() for _ in range(min(MOST_TOGETHER, len(self._waiting)))]
        waiting = [one for one in taken if one.score.set_running_or_notify_cancel()]
        try:
            scores = self._checked_scores([(one.position, one.answer) for one in waiting])
        except Exception as error:
            for one in waiting:
                one.score.set_exception(error)
            return
        for one, score in zip(waiting, scores, strict=True):
            one.score.set_result(score)

    def _checked_scores(self, answers: list[tuple[int, str]]) -> list[float]:
        """Return the scores of answers. If canaries fail behind them, score each again, in a new worker."""
        if self._canaries is None or not answers:
            return [self._score(*answer) for answer in answers]
        try:
            worker = self._running()
        except (TimeoutError, ScorerFailed) as error:
            self.counters.scorer_errors += len(answers)
            log.warning("scorer failed: %s", error)
            return [0.0] * len(answers)
        scores = [self._score(*answer) for answer in answers]
        # An answer may have changed the worker and then ended it, so only this worker's canaries count.
        if self._process is worker and worker.alive():
            if self._canaries_hold(*next(self._canaries)) and self._process is worker:
                return scores
            self.counters.scorer_tampered += 1
            log.warning("scorer gave canaries wrong scores after %s answers; starting it again", len(answers))
            self._drop()
        if len(answers) == 1:
            return [0.0]
        return [score for answer in answers for score in self._checked_scores([answer])]

    def _canaries_hold(self, *canaries: Canary) -> bool:
        try:
            return all(self._score_canary(c.position, c.answer).get("score") == c.score for c in canaries)
        except (TimeoutError, ScorerFailed):
            return False

    def _score_canary(self, position: int, answer: str) -> dict[str, Any]:
        # Longer than for other answers: a busy machine is not taken for a worker that was tampered with.
        return self._request(_scoring(position, answer, ENTRY_DEADLINE_S), ENTRY_DEADLINE_S + GRACE_S)

    def _choose_canaries(self) -> list[tuple[Canary, Canary]]:
        def solution(index: int) -> tuple[int, str | None]:
            question = self._entry(index, "train")
            return question.position, question.answer

        def score(position: int, answer: str) -> float:
            reply = self._score_canary(position, answer)
            if "score" not in reply:
                raise ScorerFailed(f"family {self._family.name!r}, canary at {position}: {reply['error']}")
            return float(reply["score"])

        return choose_canaries(solution, score)

    def _score(self, position: int, answer: str) -> float:
        grace = GRACE_S if self._family.runs_answers else 0.0
        try:
            reply = self._request(_scoring(position, answer, SCORE_DEADLINE_S), SCORE_DEADLINE_S + grace)
        except TimeoutError:
            self.counters.scorer_timeouts += 1
            log.warning("scoring took longer than %s s; score 0, worker restarted", SCORE_DEADLINE_S)
            return 0.0
        except ScorerFailed as error:
            self.counters.scorer_errors += 1
            log.warning("scorer failed: %s", error)
            return 0.0
        score = reply.get("score")
        if reply.get("timed_out"):
            self.counters.scorer_timeouts += 1
            return 0.0
        if not isinstance(score, float) or not 0.0 <= score <= 1.0:
            self.counters.scorer_errors += 1
            return 0.0
        return score


def _scoring(position: int, answer: str, limit_s: float) -> dict[str, Any]:
    return {"op": "score", "position": position, "answer": answer, "limit_s": limit_s}


def _settings_error(family: Family, reply: dict[str, Any]) -> EnvError:
    near = difflib.get_close_matches(family.name, reply.get("names", []), n=3, cutoff=0.4)
    cure = f"; nearest: {', '.join(near)}" if near else ""
    return ScorerFailed(
        f"reasoning_gym family {family.name!r} with config {family.config}: {reply['error']}{cure}"
    )

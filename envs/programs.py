"""Rewards and a tool that run a program which the model wrote, in bubblewrap: `reward = "code"`, and functions.

What a user's own code needs is `score_code`, `score_code_now` and the tool `run_python`.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field, ValidationError

from envs.calls import without_thought
from envs.errors import EnvError
from envs.scoring.confinement import MEMORY_BYTES
from envs.scoring.program_tests import Cases, read_cases
from envs.scoring.programs import Limits, Programs, Verdict, shared_programs
from protocol.section import Section

CODE = "code"
"""Word in place of a function: the reward is the share of a row's tests that the program of an answer passes."""
PYTHON_TAGS = frozenset({"", "python", "python3", "py"})
KEPT_CASES = 1_024
SHOWN_CHARS = 4_000


class CodeSettings(Section):
    """`[env.params.reward.NAME]` of a reward that runs programs."""

    code: str = Field("tests", min_length=1)
    """Column with the tests."""
    before: str = ""
    """Column with text that stands before the program, such as imports and classes. Empty: none."""
    partial: bool = True
    """True: the reward is the share of tests passed. False: it is 1 if all are passed, and else 0."""
    max_tests: int = Field(0, ge=0)
    """Most tests of a row that are used; 0: all."""
    limit_s: float = Field(4.0, gt=0, le=600)
    """Longest time of one test."""
    total_s: float = Field(8.0, gt=0, le=600)
    """Longest time of all tests of one answer. Tests that are not reached are not passed."""
    memory_mb: int = Field(512, ge=64, le=MEMORY_BYTES >> 20)
    """Largest memory of a program, in MiB. A program cannot have more than its worker, which has 2048."""
    workers: int = Field(0, ge=0)
    """Programs at a time, of each actor; 0: one for each CPU."""
    timeout_s: float = Field(25.0, gt=0)
    """Longest time for one score, with the wait for a worker. Keep it below actor.env_timeout_s (30 s)."""


class CodeReward:
    """Scores answers by the tests of their rows.

    Args:
        settings: column, limits and workers.
        programs: workers that run the programs.

    Raises:
        EnvError: no answer could be scored within `timeout_s`.
    """

    only_if = ""

    def __init__(self, settings: CodeSettings, programs: Programs) -> None:
        if settings.total_s > settings.timeout_s:
            raise EnvError(
                f"total_s = {settings.total_s:g} is longer than timeout_s = {settings.timeout_s:g}; lower it"
            )
        self._settings, self._programs = settings, programs
        self._limits = Limits(settings.limit_s, settings.total_s, settings.memory_mb)

    @property
    def timeout_s(self) -> float:
        """Longest time of a call, in seconds."""
        return self._settings.timeout_s

    def cases(self, row: Mapping[str, Any]) -> Cases:
        """Return the tests of a row.

        Raises:
            EnvError: the row has none, or they cannot be read.
        """
        own = self._settings
        if row.get(own.code) is None:
            raise EnvError(f"no tests in {own.code!r}; add them or delete the row")
        before = row.get(own.before) or "" if own.before else ""
        return cases_of(row[own.code], str(row.get("entry_point") or ""), str(before), own.max_tests)

    async def __call__(self, answer: str, row: dict[str, Any]) -> dict[str, Any]:
        """Return the score of an answer, the counts of its tests, and why the first of them failed.

        Raises:
            ServiceFailed: no worker was free within `timeout_s`.
        """
        own = self._settings
        verdict = await self._programs.test(
            program_in(answer),
            self.cases(row),
            self._limits,
            all_or_none=not own.partial,
            within_s=own.timeout_s,
        )
        words = f"{verdict.passed} of {verdict.tests} tests passed{'; ' if verdict.why else ''}{verdict.why}"
        return {"score": _score(verdict, own.partial), "why": words}

    def gauges(self) -> dict[str, float]:
        """Return the counters of the workers, for a heartbeat."""
        return self._programs.counters.gauges()


def _score(verdict: Verdict, partial: bool) -> float:
    return verdict.passed / verdict.tests if partial else float(verdict.passed == verdict.tests)


def cases_of(tests: Any, entry_point: str, before: str, most: int) -> Cases:
    """Return tests, like `read_cases`. Those of rows that come again are kept."""
    return _kept_cases(json.dumps(tests, default=str, sort_keys=False), entry_point, before, most)


@lru_cache(KEPT_CASES)
def _kept_cases(tests: str, entry_point: str, before: str, most: int) -> Cases:
    return read_cases(json.loads(tests), entry_point, before, most)


def program_in(answer: str) -> str:
    """Return the program of an answer: its last closed block of Python, or all of it if it has no block.

    A block begins with a line of three backquotes, alone or with ``python``, and ends with such a line. Thoughts are
    left out. An answer with blocks of other languages only has no program.

    Example:
        >>> program_in("First:\\n```python\\nprint(1)\\n```\\nor, better\\n```\\nprint(2)\\n```\\nThat is all.")
        'print(2)\\n'
        >>> program_in("print(3)"), program_in("```sh\\nls\\n```")
        ('print(3)', '')
    """
    text = without_thought(answer)
    found, lines, tag = "", list[str](), None
    blocks = False
    for line in text.splitlines(keepends=True):
        mark = line.strip()
        if not mark.startswith("```"):
            lines.append(line)
            continue
        blocks = True
        if tag is None:
            tag = mark[3:].strip().lower()
        else:
            if tag in PYTHON_TAGS:
                found = "".join(lines)
            tag = None
        lines = []
    return found if blocks else text


def load_code_reward(name: str, table: Mapping[str, Any], columns: tuple[str, ...], data: str) -> CodeReward:
    """Return the reward of a table of the run file.

    Raises:
        EnvError: a setting is wrong, or a column is missing.
        NoConfinement: programs cannot be confined on this host.
    """
    where = f"params.reward.{name}"
    try:
        settings = CodeSettings.model_validate(dict(table))
    except ValidationError as error:
        first = error.errors()[0]
        raise EnvError(f"{where}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for key, column in (("code", settings.code), ("before", settings.before)):
        if column and column not in columns:
            raise EnvError(
                f"{where}.{key} = {column!r}: {data} has no such column (columns: {', '.join(columns)})"
            )
    return CodeReward(settings, shared_programs(settings.workers))


async def score_code(
    answer: str,
    tests: Any,
    *,
    entry_point: str = "",
    before: str = "",
    limit_s: float = 4.0,
    total_s: float = 8.0,
) -> float:
    """Return the share of tests that the program in an answer passes, for code of users.

    Args:
        answer: text with a program; see `program_in`.
        tests: tests; see `envs.scoring.program_tests.FORMS`.
        entry_point: function that is handed to ``check``, if the tests define one.
        before: text that stands before the program.
        limit_s: longest time of one test.
        total_s: longest time of all tests.

    Raises:
        EnvError: the tests cannot be read.
        NoConfinement: programs cannot be confined on this host.
        ServiceFailed: no worker was free in time.
    """
    cases = cases_of(tests, entry_point, before, 0)
    return _score(
        await shared_programs().test(program_in(answer), cases, Limits(limit_s, total_s)), partial=True
    )


def score_code_now(
    answer: str,
    tests: Any,
    *,
    entry_point: str = "",
    before: str = "",
    limit_s: float = 4.0,
    total_s: float = 8.0,
) -> float:
    """Return the share of tests that the program in an answer passes, like `score_code`, but block."""
    cases = cases_of(tests, entry_point, before, 0)
    return _score(
        shared_programs().test_now(program_in(answer), cases, Limits(limit_s, total_s)), partial=True
    )


async def run_python(code: str) -> str:
    """Run a Python program and return what it prints. It has the standard library, and neither files nor network.

    Args:
        code: text of the program
    """
    ran = await shared_programs().run(program_in(code), "", Limits())
    parts = (ran.printed.rstrip(), f"Error: {ran.why}" if ran.why else "")
    return "\n".join(filter(None, parts))[:SHOWN_CHARS] or "(nothing was printed)"

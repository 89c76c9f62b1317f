"""Test the reward `code` of rows and tools: what it refuses before work starts, and what it says of an answer."""

import asyncio
import json

import pytest
from pydantic import ValidationError

from envs import programs as programs_module
from envs.errors import EnvError, NoConfinement, ServiceFailed
from envs.programs import CodeReward, CodeSettings, run_python, score_code, score_code_now
from envs.registry import make_suite
from envs.rows.suite import RowsSuite
from envs.scoring import programs as workers
from envs.scoring.programs import Programs, Ran, Verdict, close_shared
from tests.bubblewrap import needs_bubblewrap

ROW = {
    "prompt": "Square.",
    "tests": ["assert f(2) == 4", "assert f(3) == 9"],
    "answer": "def f(x):\n    return x * x",
}


class Fake:
    """Workers that pass as many tests as the program has lines."""

    counters = workers.ProgramCounters(programs=3)

    async def test(self, program, cases, limits, *, all_or_none, within_s):
        passed = min(len(program.splitlines()), len(cases.tests))
        return Verdict(passed, len(cases.tests), "" if passed == len(cases.tests) else "test 1: no")

    async def run(self, program, given, limits, within_s=0.0):
        return Ran("4\n", "", "it ended with status 1")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 12)
    monkeypatch.setattr(programs_module, "shared_programs", lambda count=0: Fake())
    return tmp_path


def made(**params):
    return make_suite("rows", {"train": "train.jsonl", "reward": "code", "heldout": 0.0, **params})


def played(suite, answer):
    async def play():
        env = suite.episode()
        await env.reset({"index": 0, "split": "train"})
        return await env.step(answer)

    return asyncio.run(play())


def test_one_word_is_the_reward_and_partial_credit_is_the_share_of_tests(here):
    suite = made()
    result = played(suite, "one line")
    assert result.rewards == {"code": 0.5}
    assert result.correct is False
    assert result.info["rewards"] == {"code": "1 of 2 tests passed; test 1: no"}
    assert played(suite, "two\nlines").correct is True
    assert suite.gauges()["programs_total"] == 3.0
    assert RowsSuite.find_files({"train": "train.jsonl", "reward": "code"}, here)["reward"] == "code"


def test_a_table_sets_the_column_and_takes_partial_credit_away(here):
    (here / "train.jsonl").write_text(
        json.dumps({"prompt": "p", "cases": ROW["tests"], "head": "import os"}) + "\n"
    )
    suite = made(reward={"right": {"code": "cases", "before": "head", "partial": False}})
    assert played(suite, "one line").rewards == {"right": 0.0}
    assert played(suite, "two\nlines").rewards == {"right": 1.0}


def test_tools_have_the_same_reward(here):
    (here / "tools.py").write_text('def look(word: str) -> str:\n    """Look."""\n    return word\n')
    suite = make_suite(
        "tools", {"train": "train.jsonl", "tools": "tools.py:look", "reward": "code", "heldout": 0.0}
    )

    def play():
        env = suite.episode()
        env.reset({"index": 0, "split": "train"})
        return env.step("one line")

    assert play().rewards == {"code": 0.5}
    assert suite.gauges()["programs_total"] == 3.0
    asyncio.run(suite.close())


@pytest.mark.parametrize(
    ("row", "reward", "words"),
    [
        ({"prompt": "p"}, "code", "params.reward.code.code = 'tests': train.jsonl has no such column"),
        ({"prompt": "p", "tests": []}, "code", "train.jsonl:1: there is no test; write texts"),
        ({"prompt": "p", "tests": None}, "code", "train.jsonl:1: no tests in 'tests'; add them or delete"),
        ({"prompt": "p", "tests": "x ="}, "code", "train.jsonl:1: a test is 'x =', which is no Python"),
        (ROW, {"code": {"code": "tests", "limit": 3}}, "params.reward.code.limit: Extra inputs"),
        (ROW, {"code": {"code": "tests", "total_s": 30.0}}, "total_s = 30 is longer than timeout_s = 25"),
        (
            ROW,
            {"code": {"code": "tests", "before": "head"}},
            r"reward.code.before = 'head': .*no such column",
        ),
    ],
)
def test_bad_rows_and_settings_are_refused(here, row, reward, words):
    (here / "train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(EnvError, match=words):
        made(reward=reward)


def test_without_bubblewrap_nothing_is_run(here, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr("shutil.which", lambda name: None)
    close_shared()
    started = []
    monkeypatch.setattr(workers, "WorkerProcess", lambda *a, **k: started.append(a))
    with pytest.raises(
        NoConfinement, match="there is no bwrap on PATH: install the package bubblewrap"
    ) as caught:
        made()
    assert caught.value.final
    assert not started
    with pytest.raises(NoConfinement):
        score_code_now("print(1)", ["assert f(1)"])
    with pytest.raises(NoConfinement):
        asyncio.run(run_python("print(1)"))


class Worker:
    """A worker whose answers are set by the test."""

    pid = 1

    def __init__(self, *args, **how):
        self.opened, self.living = {"opened": True}, True

    def alive(self):
        return self.living

    def close(self):
        self.living = False

    def request(self, job, deadline_s):
        if job["op"] == "probe":
            return {"can": Worker.can, "why": ""}
        if job["program"] == "print(int(input()) + 1)":
            return {"whys": Worker.known}
        return {"whys": [""] * len(job["tests"])}


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(workers, "WorkerProcess", Worker)
    Worker.can, Worker.known = "nothing", ["", "wrong"]


@pytest.mark.parametrize(
    ("can", "known", "words"),
    [
        ("open sockets", ["", "wrong"], "a program could still do this: open sockets"),
        ("nothing", ["", ""], "gives known programs wrong results"),
        ("nothing", ["slow", "wrong"], "gives known programs wrong results"),
    ],
)
def test_a_confinement_that_does_not_hold_is_refused(worker, can, known, words):
    Worker.can, Worker.known = can, known
    with pytest.raises(NoConfinement, match=words):
        Programs(1)


def test_no_result_leaves_a_worker_that_gives_known_programs_wrong_ones(worker):
    programs = Programs(1)
    cases = CodeReward(CodeSettings(), programs).cases(ROW)
    limits = workers.Limits()
    assert programs.test_now("x", cases, limits).passed == 2
    Worker.known = ["", ""]
    assert programs.test_now("x", cases, limits).passed == 0
    Worker.known = ["", "wrong"]
    assert programs.test_now("x", cases, limits).passed == 2
    assert (programs.counters.program_tampered, programs.counters.program_restarts) == (1, 1)
    programs.close_now()


def test_a_worker_that_is_not_free_in_time_is_nobodys_fault(worker, monkeypatch):
    programs = Programs(1)
    held = __import__("threading").Event()
    monkeypatch.setattr(Programs, "_test", lambda *a: held.wait(60))
    reward = CodeReward(CodeSettings(total_s=0.01, limit_s=0.01, timeout_s=0.02), programs)
    with pytest.raises(ServiceFailed, match=r"no program was scored within 0.02 s: 1 run at a time"):
        asyncio.run(reward("x", ROW))
    held.set()
    programs.close_now()


@needs_bubblewrap
def test_functions_for_tools_and_agents_run_programs_in_real_bubblewrap():
    async def agent():
        return await score_code(
            "```python\ndef f(x): return x * x\n```", ROW["tests"], limit_s=20.0, total_s=20.0
        )

    try:
        assert asyncio.run(agent()) == 1.0
        assert score_code_now("def f(x): return 4", ROW["tests"], limit_s=20.0, total_s=20.0) == 0.5
        assert asyncio.run(run_python("print(2 + 2)")) == "4"
        assert asyncio.run(run_python("1 / 0")).startswith("Error: it ended with status 1: ZeroDivisionError")
        assert asyncio.run(run_python("x = 1")) == "(nothing was printed)"
    finally:
        close_shared()


def test_more_memory_than_a_worker_has_is_refused():
    with pytest.raises(ValidationError, match="memory_mb"):
        CodeSettings(memory_mb=4_096)
    assert CodeSettings(memory_mb=2_048).memory_mb == 2_048

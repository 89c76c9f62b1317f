"""Test what environments say of the answer that they found and of the one that was right, up to the sample of it."""

import asyncio
import json

import pytest

from actors.env_results import MAX_ANSWER_CHARS, closing_of
from envs.base import StepResult
from envs.calculator import Game, Rules
from envs.registry import make_suite
from learner.intake.trajectories import assemble
from learner.replay.file import decode_item, encode_item
from learner.sample_log import make_sample
from learner.samples import decode_line, encode_line, facts
from protocol.messages.episodes import Task
from tests.unit.actors.test_episode import Env, Script, play


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Return a function that plays one answer against rows with this body of a reward function."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} + 1 =", "answer": n + 1} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def played(returns, answer="it is 7"):
        (tmp_path / "rewards.py").write_text(f"def judged(answer, row):\n    return {returns}\n")
        suite = make_suite("rows", {"train": "train.jsonl", "reward": "rewards.py:judged"})

        async def one():
            env = suite.episode()
            await env.reset({"index": 0, "split": "train"})
            return env.step(answer)

        return asyncio.run(one())

    return played


@pytest.mark.parametrize(
    ("returns", "answer"),
    [
        ("1.0", None),
        ("{'score': 1.0, 'answer': answer.split()[-1]}", "7"),
        ("{'score': 0.0, 'pred': 7}", "7"),
        ("(0.0, {'answer': '7'})", "7"),
    ],
)
def test_a_row_knows_its_target_and_a_function_may_name_the_answer(rows, returns, answer):
    result = rows(returns)
    assert (result.answer, int(result.target) in range(1, 5)) == (answer, True)


def test_the_calculator_tells_both():
    def ended(action):
        return Game("State the final answer to the following arithmetic problem: 1 + 2 =", Rules()).step(
            action
        )

    assert (ended("=5").answer, ended("=5").target) == ("5", "3")
    assert (ended("no number").answer, ended("no number").target) == (None, "3")


def test_answer_and_target_come_to_the_sample():
    result = StepResult(rewards={"score": 0.0}, done=True, answer="7\x1b[2J", target="8")
    cuts, _ = play(Env(result), Script("x$"))
    t = assemble(cuts)
    assert (t.answer, t.target) == ("7\x1b[2J", "8")
    assert decode_item(encode_item(t)).target == "8"
    sample = make_sample(t, str, chosen="best", step=1, version=0)
    assert decode_line(encode_line(sample)) == sample
    assert 'answer "7\\x1b[2J", target "8"' in facts(sample)


def test_an_environment_that_says_nothing_leaves_them_out():
    cuts, _ = play(Env(StepResult(rewards={"score": 0.0}, done=True)), Script("x$"))
    t = assemble(cuts)
    assert (t.answer, t.target) == (None, None)
    assert not {"answer", "target"} & cuts[-1].segment.extra.keys()
    line = json.loads(encode_line(make_sample(t, str, chosen="best", step=1, version=0)))
    assert (line.pop("answer"), line.pop("target")) == (None, None)
    assert decode_line(json.dumps(line).encode()).answer is None


def test_a_long_answer_is_cut_and_no_text_is_left_out():
    task = Task(task_id="t", env="e", group_id="g", group_size=1)
    result = StepResult(done=True, answer="a" * 100_000, target=7)
    extra = closing_of("finished", "", result, task, [1]).extra
    assert (len(extra["answer"]), "target" in extra) == (MAX_ANSWER_CHARS, False)

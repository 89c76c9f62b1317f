"""FAPO by a judge (arXiv:2510.22543): rows, a judge behind a real HTTP server, and the shipped method."""

import asyncio
import statistics

import numpy as np
import pytest
import torch
from aiohttp import web

from actors.environments import EnvironmentRunner
from envs.errors import EnvError, ServiceFailed
from envs.registry import make_suite
from envs.rows.reading import DataRow
from envs.rows.reward_functions import load_reward_functions
from envs.tools.episode import rewards_of
from launch.run_file.load import load
from learner.advantages import assign_advantages
from learner.rewards import composed
from learner.settings.advantages import RewardConfig
from tests.trajectories import VOCABULARY, make_turns

pytestmark = pytest.mark.timeout(120)

SOUND, FLAWED, WRONG = "40 + 2 = 42", "50 - 9 = 42", "40 + 1 = 41"
"""Answers to 30 + 12: a sound one, a right one by a flawed way, and a wrong one."""
QUESTION = "{prompt}\n{completion}\nWrite 1 if every step is right, else 0."


class Referee:
    """An OpenAI-compatible judge that works the steps out, or answers with a status."""

    def __init__(self, status=200):
        self.asked, self.status = [], status

    async def answer(self, request):
        question = (await request.json())["messages"][0]["content"]
        self.asked.append(question.split("\n")[1])
        if self.status != 200:
            return web.Response(status=self.status, text="busy")
        way, _, result = self.asked[-1].partition(" = ")
        said = f"The step is {way}. Verdict: {int(eval(way) == int(result))}"
        return web.json_response({"choices": [{"message": {"content": said}}]})

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *error):
        await self.runner.cleanup()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return the learner's settings of a job with rows and the shipped method, in the folder of its files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": "30 + 12", "sum": "42"}\n{"prompt": "9 + 9", "sum": "18"}\n'
    )
    (tmp_path / "sound.txt").write_text(QUESTION)
    (tmp_path / "rewards.py").write_text(
        "def right(answer, row):\n    return float(answer.split()[-1] == row['sum'])\n"
    )
    rows = '[env]\nname = "rows"\n[env.params]\ntrain = "train.jsonl"\n'
    (tmp_path / "job.toml").write_text(f'method = "fapo-judge"\n[model.tiny]\n{rows}')
    return load(tmp_path / "job.toml").learner


def judged(answers, *, status=200, timeout_s=20.0):
    """Return the rewards of answers to the first row, as an actor gets them, and the answers that the judge read."""

    async def main():
        async with Referee(status) as referee:
            judge = {
                "judge": referee.url, "model": "m", "prompt": "sound.txt", "scale": 1, "only_if": "right",
                "timeout_s": timeout_s,
            }  # fmt: skip
            # The judge comes first in the table: its condition is known all the same.
            reward = {"sound": judge, "right": "rewards.py:right"}
            suite = make_suite(
                "rows", {"train": "train.jsonl", "reward": reward, "correct": "right", "heldout": 0.0}
            )
            runner, ask = EnvironmentRunner(calls=1), {"what": "test", "timeout_s": 60.0}
            index = next(i for i in range(2) if suite.row(i, "train").values["sum"] == "42")
            results = []
            try:
                for answer in answers:
                    env = suite.episode()
                    await runner.call(env.reset, {"index": index, "split": "train"}, **ask)
                    results.append(await runner.call(env.step, answer, **ask))
            finally:
                await runner.call(suite.close, **ask)
                runner.close()
            return [dict(result.rewards) for result in results], referee.asked

    return asyncio.run(asyncio.wait_for(main(), 90))


def credit(learner, rewards):
    members = [make_turns(f"{i}", [own], group="a") for i, own in enumerate(rewards)]
    valued = composed(learner.reward, members)
    return valued, assign_advantages(learner.algorithm, valued).advantage


def slow(rewards, penalty=1.0):
    """The card's formulas, answer by answer."""
    values = []
    for own in rewards:
        value = 1.0 if own["right"] > 0 else -1.0
        values.append(value - penalty * (own["right"] > 0 and own["sound"] < 0.5))
    mean, deviation = statistics.mean(values), statistics.pstdev(values)
    return values, [(value - mean) / (deviation + 1e-6) for value in values]


def test_only_right_answers_are_judged_and_a_flawed_one_loses(job):
    """Card B29: 1, 1, 0 (flawed), -1 has mean 1/4, so flawed is bad; 1, 0, -1, -1 has mean -1/4, so it is good."""
    for answers, sign in (([SOUND, SOUND, FLAWED, WRONG], -1), ([SOUND, FLAWED, WRONG, WRONG], 1)):
        rewards, asked = judged(answers)
        assert sorted(set(asked)) == sorted({SOUND, FLAWED})
        assert len(asked) == 2, "equal answers are judged once, wrong ones never"
        assert [own.get("sound") for own in rewards] == [
            {SOUND: 1.0, FLAWED: 0.0}.get(answer) for answer in answers
        ]
        valued, advantages = credit(job, rewards)
        values, expected = slow(rewards)
        assert [t.return_ for t in valued] == values
        starts = np.cumsum([0, *map(len, valued)])[:-1]
        np.testing.assert_allclose(advantages[starts], expected, atol=1e-6)
        assert np.sign(expected[answers.index(FLAWED)]) == sign
        assert valued[0].given_rewards, "the judge's number is kept as it was given"


def test_what_the_judge_finds_changes_the_gradient(job):
    rewards, _ = judged([SOUND, FLAWED, WRONG, WRONG])
    blind = [{**own, "sound": 1.0} if "sound" in own else own for own in rewards]
    grads = []
    for rows in (rewards, blind):
        valued, advantages = credit(job, rows)
        logits = torch.linspace(-1, 1, VOCABULARY * 8, dtype=torch.float64).reshape(8, -1).requires_grad_()
        start, total = 0, torch.zeros((), dtype=torch.float64)
        for t in valued:
            logp = logits.log_softmax(-1)[torch.arange(len(t)), torch.from_numpy(t.token_ids).long()]
            own = torch.from_numpy(advantages[start : start + len(t)]) * torch.from_numpy(t.action_mask)
            total, start = total + (logp * own).sum(), start + len(t)
        total.backward()
        grads.append(logits.grad.flatten())
    assert torch.nn.functional.cosine_similarity(*grads, dim=0) < 0.9999


def test_the_verdict_is_no_part_of_a_return(job):
    """Neither of a trained one, nor of one in an evaluation, which has the weights alone."""
    assert job.reward.weights_in_force == {"sound": 0.0}
    sound = make_turns("a", [{"right": 1.0, "sound": 1.0}])
    evaluated = RewardConfig(weights=job.reward.weights_in_force)
    for config in (job.reward, evaluated):
        assert composed(config, [sound])[0].return_ == 1.0
    trained = job.reward.model_copy(update={"flawed": job.reward.flawed.model_copy(update={"trained": True})})
    assert composed(trained, [sound])[0].return_ == 2.0


def test_a_judge_that_does_not_answer_never_makes_a_right_answer_flawed(job):
    with pytest.raises(ServiceFailed, match="HTTP status 503"):
        judged([FLAWED], status=503, timeout_s=3.0)
    assert judged([WRONG], status=503)[0] == [{"right": 0.0}]


@pytest.mark.parametrize("name", ["rihgt", "sound", "other"])
def test_a_condition_that_is_no_reward_is_refused(job, name):
    judge = {"judge": "http://127.0.0.1:9/v1", "model": "m", "prompt": "sound.txt"}
    table = {
        "right": "rewards.py:right",
        "sound": {**judge, "only_if": name},
        "other": {**judge, "only_if": "right"},
    }
    with pytest.raises(EnvError, match=rf"reward.sound.only_if = '{name}': no reward without only_if has"):
        load_reward_functions(table, ("prompt", "sum"), "train.jsonl")


def test_tools_obey_the_condition_too(job):
    """The judge is first in the table, and asking it would be a coroutine in place of a number."""
    judge = {"judge": "http://127.0.0.1:9/v1", "model": "m", "prompt": "sound.txt", "only_if": "right"}
    table = {"sound": judge, "right": "rewards.py:right"}
    functions = load_reward_functions(table, ("prompt", "sum"), "train.jsonl")
    row = DataRow("train.jsonl:1", {"prompt": "30 + 12", "sum": "42"})
    asked = []

    def finish(given, timeout_s):
        if asyncio.iscoroutine(given):
            asked.append(timeout_s)
            given.close()
            return 1.0
        return given

    assert rewards_of(None, functions, WRONG, row, "30 + 12", finish) == {"right": 0.0}
    assert asked == []
    assert rewards_of(None, functions, SOUND, row, "30 + 12", finish) == {"right": 1.0, "sound": 1.0}
    assert asked == [25.0]

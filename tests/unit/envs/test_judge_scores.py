"""The number in a judge's answer: what it can only mean is read, and what it could mean is refused."""

import asyncio
import math

import pytest
from aiohttp import web

from envs.agent.session import rewards_of
from envs.base import StepResult
from envs.errors import EnvError, ServerLost, ServiceFailed
from envs.openenv import observed
from envs.remote.wire import FAILED, error_of, result_body, result_of
from envs.rows.judge import ANSWER_BYTES, Judge, JudgeSettings, score_in
from envs.rows.reward_functions import RewardFunction
from envs.scoring.scorer import Scorer
from learner.families.judging import scores_in


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7/10", 0.7), ("7/10", 0.7), ("I give it 7 out of 10.", 0.7), ("9 of 10", 0.9), ("Score: 7", 0.7),
        ("**7**", 0.7), ("Score:\n7", 0.7), ("Rating = 6.5 / 10", 0.65), ("It has 3 faults.\nGrade: 2", 0.2),
        ("<think>10</think>2", 0.2), ("Score: 7\nI took 3 points off.", 0.7), ("\\boxed{4}", 0.4), ("10", 1.0),
        ("2 + 2 is 4, so I give 7", 0.7), ("Verdict - 7", 0.7), ("* 7", 0.7), ("Quality and style: 7", 0.7),
    ],
)  # fmt: skip
def test_a_number_that_can_only_mean_one_thing_is_the_score(text, score):
    assert score_in(text, 10.0) == (score, "")


@pytest.mark.parametrize(
    "text",
    [
        "Score: 1e1", "7 (scale 0-10)", "7/5", "Score: 7/100", "7-8", "Score: 7 or 8", "Score: 3. Score: 9", "-7", "7%",
        "Score: -7", "10^1", "7,5", "11", "9" * 400, "Good.", "", "7 points of a possible many", "1/7/10", "v7",
        "9 out of a possible 10", "4 points out of 10", "3 of a maximum of 10", "6 - 7", "6\u20137", "6 to 7",
        "between 6 and 7", "7 or 8", "7, or 8", "7 \u00b1 1", "\u22123", "7 -> 8", "2*3", "\u221a9", "at least 7",
    ],
)  # fmt: skip
def test_a_number_that_could_mean_another_thing_is_refused(text):
    number, why = score_in(text, 10.0)
    assert number is None
    assert "has no number from 0 to 10" in why


def test_an_answer_without_end_costs_no_more_than_its_bound():
    sent = 0

    async def endless(request):
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65_536)
            sent += 65_536

    async def main():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", endless)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        judge = Judge(JudgeSettings(judge=url, model="m", prompt="p", timeout_s=2.0), "{completion}")
        try:
            with pytest.raises(ServiceFailed, match="not that of a chat completion"):
                await judge("a", {})
        finally:
            await judge.close()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(main(), 60))
    # It is asked again until its time is over; each time, what is under way in buffers comes on top.
    assert sent < 8 * (ANSWER_BYTES + 8 * 2**20)


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, {"exact": 1.0, "brief": math.nan}])
def test_a_reward_that_is_no_finite_number_is_refused_when_it_is_reported(value):
    with pytest.raises(EnvError, match="a reward is a finite number"):
        rewards_of(value)


def test_half_a_character_is_no_answer_that_a_scorer_could_be_sent():
    assert asyncio.run(Scorer.score(None, 0, "4\ud83d")) == 0.0


@pytest.mark.parametrize(
    ("line", "scores"),
    [
        ("9, 2.5", [9.0, 2.5]), ("9 2.5", [9.0, 2.5]), ("A: 9; B: 2.5.", [9.0, 2.5]), ("**9**, (2.5)", [9.0, 2.5]),
        ("1e1", None), ("9/10, 2/10", None), ("9/10", None), ("9-2", None), ("9, -2", None),
        ("9, 1e1", None), ("9", None),
        ("A:9 B:2", [9.0, 2.0]), ("9, .5", None),
        ("(2) 5", None), ("1) 9", None), ("2. 5", None), ("Answer 2: 5", None),
        ("[1, 2]", [1.0, 2.0]), ("9. 8.", [9.0, 8.0]),
    ],
)  # fmt: skip
def test_judgements_of_the_policy_are_words_of_their_own(line, scores):
    assert scores_in(f"I think.\n{line}", 2, 10.0) == scores


def test_odd_errors_of_an_environment_server_are_told_as_its_answer():
    error = error_of(FAILED, {"error": {"kind": 5, "lines": 7, "message": None}}, "http://h:1")
    assert str(error).startswith("5: None, on http://h:1")
    assert isinstance(error_of(404, {"error": 7}, "http://h:1"), ServerLost)
    body = result_body(StepResult(done=True, rewards={"a": 1.0}))
    for key, value in (("earlier", {"x": {}}), ("earlier", [1]), ("hints", 5), ("marks", None)):
        with pytest.raises(EnvError, match=f"the server's answer to a step has no valid '{key}'"):
            result_of({**body, key: value})


def test_a_reward_of_openenv_that_is_too_large_is_told_as_its_message():
    text = '{"type": "observation", "data": {"observation": {}, "reward": 1' + "0" * 400 + "}}"
    with pytest.raises(EnvError, match="a message of the OpenEnv server cannot be read"):
        observed(text)


@pytest.mark.parametrize(
    ("result", "value"), [({"score": 0.5, "extra": 1}, 0.5), ((1.0, {"how": "exact"}), 1.0), (0.25, 0.25)]
)
def test_forms_in_which_other_trainers_take_a_reward_are_taken(result, value):
    function = RewardFunction("exact", "rewards.py:1", print, False, None)
    assert function.value(result) == value

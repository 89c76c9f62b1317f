"""Test the calculator's rules on questions as the library writes them."""

import asyncio

import pytest

from envs.calculator import CalculatorSuite, Game, Rules, calculate, partial_sums, solution
from envs.errors import EnvError


def question(expression):
    return f"State the final answer to the following arithmetic problem: {expression} ="


def game(expression="4 + 3 - 9", **rules):
    return Game(question(expression), Rules(**rules))


@pytest.mark.parametrize(("terms", "digits"), [(3, 12), (11, 11)])
def test_sums_with_more_digits_than_an_action_may_have_are_refused(terms, digits):
    with pytest.raises(EnvError, match=f"max_digits = {digits}, max_terms = {terms}"):
        CalculatorSuite(max_terms=terms, max_digits=digits, max_turns=terms)


def test_solved_step_by_step_a_sum_of_n_terms_takes_n_turns():
    steps = partial_sums(question("12 - 30 + 5 + 1"))
    assert steps == [("12-30", -18), ("-18+5", -13), ("-13+1", -12)]
    g = game("12 - 30 + 5 + 1")
    results = [g.step(call) for call, _ in steps]
    assert [r.observation["content"] for r in results] == ["-18", "-13", "-12"]
    assert all(r.rewards == {"step": 0.2} and not r.done for r in results)
    end = g.step("=-12")
    assert (end.rewards, end.done, end.correct) == ({"answer": 1.0}, True, True)


def test_shares_of_the_demonstrations_skip_the_last_call_or_repeat_it():
    both, always = (CalculatorSuite(direct_share=share, seed=1, sandbox="process") for share in (0.5, 0.0))
    calls = {
        suite: [len(suite.demonstration(i, "train")) // 2 - 1 for i in range(8)] for suite in (both, always)
    }
    assert calls[always] == [2] * 8
    assert sorted(calls[both]) == [1] * 4 + [2] * 4
    mixed = CalculatorSuite(direct_share=0.25, repeat_share=0.5, seed=1, sandbox="process")
    calls[mixed] = [len(mixed.demonstration(i, "train")) // 2 - 1 for i in range(8)]
    assert sorted(calls[mixed]) == [1] * 2 + [2] * 3 + [3] * 3
    for suite in calls:
        asyncio.run(suite.close())
    with pytest.raises(EnvError, match=r"direct_share = 1\.5"):
        CalculatorSuite(direct_share=1.5)


def test_a_wrong_or_repeated_step_is_answered_but_not_rewarded():
    g = game()
    assert g.step("3-9").rewards == {"step": 0.0}
    assert g.step("4+3").rewards == {"step": 0.2}
    assert g.step("4+3").rewards == {"step": 0.0}
    assert g.step("7-9").rewards == {"step": 0.2}


def test_a_wrong_step_may_end_the_episode():
    result = game(end_on_wrong_step=True).step("3-9")
    assert (result.done, result.correct, sum(result.rewards.values())) == (True, False, 0.0)


def test_an_answer_without_steps_earns_unless_steps_are_asked_for():
    assert game().step("=-2").rewards == {"answer": 1.0}
    lazy = game(answer_needs_steps=True).step("=-2")
    assert (lazy.rewards, lazy.correct) == ({"answer": 0.0}, True)
    assert game().step("=2").correct is False


def test_the_last_turn_ends_the_episode():
    g = game(max_turns=3)
    assert not g.step("1+1").done
    assert not g.step("1+1").done
    last = g.step("4+3")
    assert (last.done, last.rewards, last.observation) == (True, {"step": 0.2}, None)


@pytest.mark.parametrize(
    "action",
    [
        "",
        "4*3",
        "4+3+2",
        "2**99",
        "__import__('os')",
        "+",
        "=",
        "4 + x",
        "1" * 13 + "+1",
        "٤+٣",
        "=1.0",
        "0x4+1",
    ],
)
def test_anything_but_a_call_or_an_answer_ends_with_nothing(action):
    result = game().step(action)
    assert (result.done, result.correct, result.rewards) == (True, False, {"answer": 0.0})


@pytest.mark.parametrize(
    ("action", "value"), [("12+7", 19), (" 12 - 7 ", 5), ("-3+-4", -7), ("3--4", 7), ("007+1", 8)]
)
def test_calls(action, value):
    assert calculate(action) == value


@pytest.mark.parametrize(
    ("answers", "mode", "right"),
    [
        (["i=-2"], "instant", True),
        (["i=7"], "instant", False),
        (["i4+3"], "instant", False),
        (["r4+3=7-9=-2"], "reasoning", True),
        (["r4+3=7-9=0"], "reasoning", False),
        (["r4+3"], "reasoning", False),
        (["a4+3", "7-9", "=-2"], "agentic", True),
        (["a=-2"], "agentic", False),
        (["=-2"], "none", False),
        ([""], "none", False),
    ],
)
def test_the_letter_of_a_mode_says_what_an_answer_may_be(answers, mode, right):
    g = game(modes=True)
    *before, last = [g.step(answer) for answer in answers]
    assert not any(result.done for result in before)
    assert (last.done, last.correct, last.rewards["answer"]) == (True, right, float(right))
    assert [result.marks["mode"] for result in (*before, last)] == [mode] * len(answers)
    assert [result.marks["calls"] for result in (*before, last)] == [1.0] * len(before) + [0.0]


def test_demonstrations_have_each_mode_equally_often_and_are_right():
    suite = CalculatorSuite(modes=True, seed=1, sandbox="process")
    talks = [suite.demonstration(index, "train") for index in range(6)]
    asyncio.run(suite.close())
    for talk in talks:
        g = Game(talk[0]["content"], Rules(modes=True))
        assert [g.step(m["content"]).done for m in talk if m["role"] == "assistant"][-1]
        assert (
            g.step("").marks["mode"]
            == {"i": "instant", "r": "reasoning", "a": "agentic"}[talk[1]["content"][0]]
        )
    assert [talk[1]["content"][0] for talk in talks] == ["i", "r", "a"] * 2
    assert suite.facts().mark_names == ("anchor", "calls", "call", "mode")


def test_modes_and_an_answer_that_needs_calls_are_refused():
    with pytest.raises(EnvError, match="an answer without calls would never be right"):
        CalculatorSuite(modes=True, answer_needs_steps=True)


def test_other_questions_are_refused():
    with pytest.raises(EnvError, match="not a chain_sum question"):
        solution("How many legs has a cat?")

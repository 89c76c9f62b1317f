"""Test real scorer processes against the attacks that worked on an unconfined one."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from envs.calculator import CalculatorSuite
from envs.errors import EnvError, ScorerFailed
from envs.reasoning_gym_suite import ReasoningGymSuite
from envs.scoring import scorer as scorer_module
from envs.scoring.questions import RUNS_ANSWERS, WALK_STRIDE, Family, split_of
from envs.scoring.scorer import Scorer, ScorerCounters
from tests.bubblewrap import needs_bubblewrap

JUNK = [
    "", " ", "\n", "0", "1", "-1", "nan", "inf", "-inf", "None", "True", "False", "[]", "{}", "()", "a",
    "!!!", "answer", "0" * 500, "ab" * 500, "1/0", "\x00", "é", "<answer></answer>", "I do not know",
]  # fmt: skip


@pytest.fixture(scope="module")
def words():
    suite = ReasoningGymSuite("spell_backward", sandbox="process")
    yield suite
    asyncio.run(suite.close())


@pytest.fixture(scope="module")
def sums():
    suite = CalculatorSuite(min_terms=3, max_terms=5, sandbox="process")
    yield suite
    asyncio.run(suite.close())


def status_of(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_sloppy_syntax_in_the_libraries_is_no_news_to_the_terminal(words):
    environment = Path(f"/proc/{words.scorer.pid}/environ").read_bytes().split(b"\0")
    assert b"PYTHONWARNINGS=ignore::SyntaxWarning" in environment


def test_a_task_is_the_same_question_in_every_process(words):
    again = Scorer(Family("spell_backward"), "process")
    for index in range(5):
        assert again.entry_now(index, "heldout") == words.scorer.entry_now(index, "heldout")
    asyncio.run(again.close())


def test_the_splits_never_meet(words):
    async def entries(split):
        return [(await words.scorer.entry(i, split)).question for i in range(150)]

    train, heldout = asyncio.run(entries("train")), asyncio.run(entries("heldout"))
    assert not set(train) & set(heldout)
    assert {split_of(q, 0.125) for q in train} == {"train"}
    assert {split_of(q, 0.125) for q in heldout} == {"heldout"}
    walks = [words.scorer.entry_now(i, "heldout").position - WALK_STRIDE * i + 1 for i in range(150)]
    assert 0.09 < 150 / sum(walks) < 0.16  # one in eight is held out


def test_an_episode_from_question_to_reward(words):
    async def play(answer):
        env = words.episode()
        (message,) = await env.reset({"index": 4, "split": "train"})
        result = await env.step(answer or message["content"].rpartition(" ")[2][::-1])
        await env.close()
        return result

    right = asyncio.run(play(None))
    assert (right.rewards, right.correct, right.done) == ({"score": 1.0}, True, True)
    wrong = asyncio.run(play("zzz"))
    assert (wrong.rewards, wrong.correct) == ({"score": 0.0}, False)


def test_the_answer_is_what_the_pattern_finds_last():
    suite = ReasoningGymSuite(
        "chain_sum", {"min_terms": 2, "max_terms": 2}, sandbox="process", extract="-?[0-9]+"
    )

    async def play(sentence):
        env = suite.episode()
        await env.reset({"index": 0})
        return (await env.step(sentence)).correct

    value = suite.scorer.entry_now(0, "train").answer
    said = [f"The sum is {value}.", f"{value}, or is it {value}0?", "five", f"{value} is 3 + 4 = {value}"]
    assert [asyncio.run(play(sentence)) for sentence in said] == [True, False, False, True]
    asyncio.run(suite.close())


def test_a_prompt_has_the_question_or_a_field_of_its_metadata():
    family = {
        "operators": ["+"],
        "min_terms": 2,
        "max_terms": 2,
        "allow_parentheses": False,
        "allow_negation": False,
    }
    suite = ReasoningGymSuite(
        "basic_arithmetic", family, sandbox="process", prompt="What is {expression}? ({question})"
    )
    entry, (message, answer) = suite.scorer.entry_now(3, "train"), suite.demonstration(3, "train")
    assert message["content"] == f"What is {entry.fields['expression']}? ({entry.question})"
    assert asyncio.run(suite.episode().reset({"index": 3})) == [message]
    assert answer["content"] == entry.answer
    asyncio.run(suite.close())


def test_a_prompt_with_an_unknown_field_is_refused_with_those_that_there_are():
    with pytest.raises(
        EnvError, match=r"prompt = '\{formula\}': 'formula'; the fields .* question, .*expression"
    ):
        ReasoningGymSuite("basic_arithmetic", sandbox="process", prompt="{formula}")


def test_a_demonstration_is_right(words):
    question, answer = words.demonstration(7, "train")
    position = words.scorer.entry_now(7, "train").position
    assert question["role"] == "user"
    assert asyncio.run(words.scorer.score(position, answer["content"])) == 1.0


def test_a_calculator_demonstration_earns_every_reward(sums):
    async def play():
        talk = sums.demonstration(3, "train")
        env = sums.episode()
        assert await env.reset({"index": 3, "split": "train"}) == talk[:1]
        results = [await env.step(m["content"]) for m in talk if m["role"] == "assistant"]
        shown = [m for m in talk if m["role"] == "tool"]
        assert [r.observation for r in results[:-1]] == shown
        return results

    results = asyncio.run(play())
    assert len(results) >= 3
    assert [r.rewards for r in results] == [{"step": 0.2}] * (len(results) - 1) + [{"answer": 1.0}]
    assert results[-1].correct


@pytest.mark.parametrize("suite", ["words", "sums"])
def test_junk_is_never_right(suite, request):
    scorer = request.getfixturevalue(suite).scorer

    async def audit():
        entry = await scorer.entry(0, "train")
        return {text: await scorer.score(entry.position, text) for text in JUNK}

    assert len(JUNK) == 25
    assert {text: score for text, score in asyncio.run(audit()).items() if not 0.0 <= score < 1.0} == {}


def test_a_right_answer_with_junk_behind_it_is_not_right(words):
    """The library's sum over letters misses 1 by rounding, either way: 0.9999... or 1.0000000000000002."""

    async def main():
        errors, scores = words.scorer.counters.scorer_errors, {}
        for index in range(40):
            entry = await words.scorer.entry(index, "train")
            scores[len(entry.answer)] = await words.scorer.score(entry.position, entry.answer + "junk")
        assert {6, 7, 9} <= set(scores)
        assert all(0.5 < score < 1.0 for score in scores.values()), scores
        assert words.scorer.counters.scorer_errors == errors

    asyncio.run(main())


def test_the_worker_has_given_up_its_rights(words):
    # A worker that an earlier test lost is started again.
    words.scorer.entry_now(0, "train")
    pid = words.scorer.pid
    status = status_of(pid)
    assert status["NoNewPrivs"] == "1"
    if os.geteuid() == 0:
        assert set(status["Uid"].split()) == {"65534"}
        assert int(status["CapEff"], 16) == 0
    limits = Path(f"/proc/{pid}/limits").read_text()
    for name in ("Max processes", "Max file size", "Max core file size"):
        line = next(line for line in limits.splitlines() if line.startswith(name))
        assert line.split(name)[1].split()[:2] == ["0", "0"]


def test_a_worker_that_was_killed_is_replaced(words):
    async def main():
        entry = await words.scorer.entry(0, "train")
        before = words.scorer.pid
        os.kill(before, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, before, os.WEXITED | os.WNOWAIT)
        assert await words.scorer.score(entry.position, entry.answer) == 1.0
        assert words.scorer.pid != before

    asyncio.run(main())


def test_a_worker_that_stands_still_costs_a_score_and_two_seconds(words):
    async def main():
        entry = await words.scorer.entry(0, "train")
        timeouts = words.scorer.counters.scorer_timeouts
        os.kill(words.scorer.pid, signal.SIGSTOP)
        begun = time.monotonic()
        assert await words.scorer.score(entry.position, entry.answer) == 0.0
        assert 1.9 < time.monotonic() - begun < 100
        assert words.gauges()["scorer_timeouts_total"] == timeouts + 1
        assert await words.scorer.score(entry.position, entry.answer) == 1.0

    asyncio.run(main())


def test_a_worker_that_does_not_read_holds_nobody_up(words):
    async def main():
        entry = await words.scorer.entry(0, "train")
        os.kill(words.scorer.pid, signal.SIGSTOP)
        begun = time.monotonic()
        longer_than_a_pipe = "\N{SNOWMAN}" * 65_536
        assert await words.scorer.score(entry.position, longer_than_a_pipe) == 0.0
        assert 1.9 < time.monotonic() - begun < 100
        assert await words.scorer.score(entry.position, longer_than_a_pipe) == 0.0, "read, and wrong"
        assert await words.scorer.score(entry.position, entry.answer) == 1.0

    asyncio.run(main())


def test_an_unknown_family_names_the_nearest():
    with pytest.raises(ScorerFailed, match="nearest: spell_backward"):
        ReasoningGymSuite("spel_backward")


def test_a_wrong_setting_is_named():
    with pytest.raises(ScorerFailed, match="colour"):
        ReasoningGymSuite("spell_backward", config={"colour": 1})
    with pytest.raises(EnvError, match="extract = '\\('"):
        ReasoningGymSuite("spell_backward", extract="(")
    with pytest.raises(EnvError, match="max_turns = 2"):
        CalculatorSuite(max_terms=3, max_turns=2)


def test_a_composite_from_a_run_file_opens():
    datasets = [{"name": "spell_backward"}, {"name": "chain_sum", "weight": 2.0, "config": {"min_terms": 3}}]
    scorer = Scorer(Family("composite", {"datasets": datasets}), "process")

    async def main():
        entries = [await scorer.entry(index, "train") for index in range(10)]
        assert len({entry.question.split()[0] for entry in entries}) > 1
        assert [await scorer.score(entry.position, entry.answer) for entry in entries] == [1.0] * 10
        await scorer.close()

    asyncio.run(main())


@needs_bubblewrap
def test_every_family_that_runs_answers_tells_right_from_wrong(monkeypatch):
    monkeypatch.setattr(scorer_module, "SCORE_DEADLINE_S", 60.0)
    scorer = Scorer(
        Family("composite", {"datasets": [{"name": name} for name in sorted(RUNS_ANSWERS)]}), "bwrap"
    )

    async def main():
        for index in range(40):
            entry = await scorer.entry(index, "train")
            # The library cannot integrate everything.
            if "Integral(" not in entry.answer:
                assert await scorer.score(entry.position, entry.answer) == 1.0, entry
            assert await scorer.score(entry.position, "[[[") < 0.1, entry
        assert scorer.counters == ScorerCounters()
        await scorer.close()

    asyncio.run(main())


@needs_bubblewrap
def test_modules_that_the_library_imports_late_are_found():
    """An unprivileged worker has to pass the folders above the folders that it sees."""
    scorer = Scorer(Family("intermediate_integration"), "bwrap")
    assert all(scorer.entry_now(index, "train").question for index in range(6))
    asyncio.run(scorer.close())


@needs_bubblewrap
@pytest.mark.slow
def test_attacks_on_a_scorer_that_runs_answers(tmp_path):
    """`countdown` hands the answer to sympy's parser, that is, to ``eval``."""
    mark = Path("/tmp") / f"{tmp_path.name}-{os.getpid()}-touched"
    scorer = Scorer(Family("countdown"), "bwrap")
    assert scorer.sandbox.startswith("bwrap")

    async def attack():
        entry = await scorer.entry(0, "train")
        assert await scorer.score(entry.position, entry.answer) == 1.0
        for code in (
            f"__import__('os').system('touch {mark}')",
            f"open('{mark}', 'w').write('x')",
            f"__import__('pathlib').Path('{mark}').touch()",
            f"__import__('subprocess').run(['touch', '{mark}'])",
        ):
            assert await scorer.score(entry.position, code) < 1.0
        begun = time.monotonic()
        assert await scorer.score(entry.position, "10**10**8") == 0.0
        assert time.monotonic() - begun < 100
        assert scorer.counters.scorer_timeouts == 1
        # The next answer is scored as usual.
        assert await scorer.score(entry.position, entry.answer) == 1.0
        await scorer.close()

    asyncio.run(attack())
    assert not mark.exists()


@needs_bubblewrap
def test_inside_bubblewrap_there_is_no_network_and_no_host():
    scorer = Scorer(Family("chain_sum"), "bwrap")
    # The worker is bubblewrap's grandchild; its namespaces differ from ours.
    child = Path(f"/proc/{scorer.pid}/task/{scorer.pid}/children").read_text().split()
    assert child
    for space in ("net", "mnt", "pid"):
        theirs = os.readlink(f"/proc/{child[0]}/ns/{space}")
        assert theirs != os.readlink(f"/proc/self/ns/{space}")
    asyncio.run(scorer.close())

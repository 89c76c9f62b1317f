"""Test that canaries find a worker that was tampered with, with workers that are objects of this test."""

import asyncio

import pytest

from envs.errors import ScorerFailed
from envs.scoring import scorer as scorer_module
from envs.scoring.questions import Family
from envs.scoring.scorer import Scorer, choose_canaries

POSITIONS = 64


class Worker:
    """A worker whose answers may change it. The right answer to the entry at ``p`` is the number ``p``."""

    started = 0

    def __init__(self, family, way):
        type(self).started += 1
        self.pid, self.opened, self.says = self.started, {"opened": True}, None
        self.living = True

    def alive(self):
        return self.living

    def close(self):
        self.living = False

    def request(self, message, deadline_s):
        if message["op"] == "entry":
            position = message["index"] * POSITIONS
            return {"question": "?", "answer": f"n{position}", "position": position, "fields": {}}
        match message["answer"].split():
            case ["tamper", score]:
                self.says = float(score)
            case ["tamper-and-end"]:
                self.living = False
                return {"score": 1.0}
            case ["fail"]:
                raise ScorerFailed("ended")
            case ["late"]:
                return {"error": "no score", "timed_out": True}
        if self.says is not None:
            return {"score": self.says}
        return {"score": float(message["answer"] == f"n{message['position']}")}


@pytest.fixture
def scorer(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(scorer_module, "scorer_process", Worker)
    Worker.started = 0
    scorer = Scorer(Family("n_queens"), "bwrap")
    yield scorer
    asyncio.run(scorer.close())


def scores(scorer, *answers):
    async def together():
        return await asyncio.gather(*(scorer.score(POSITIONS, answer) for answer in answers))

    return asyncio.run(together())


@pytest.mark.parametrize("score", ["1.0", "0.0", "0.5"])
def test_a_worker_that_was_tampered_with_is_replaced_before_a_score_leaves(scorer, score):
    assert scores(scorer, f"tamper {score}") == [0.0]
    assert (Worker.started, scorer.counters.scorer_tampered, scorer.counters.scorer_restarts) == (1, 1, 0)
    assert scores(scorer, "n64") == [1.0]
    assert (Worker.started, scorer.counters.scorer_restarts) == (2, 1)
    assert scorer.gauges()["scorer_tampered_total"] == 1.0


def test_answers_since_the_last_good_canary_are_scored_again(scorer):
    assert scores(scorer, "n64", "tamper 1.0", "wrong", "n64") == [1.0, 0.0, 0.0, 1.0]
    assert scorer.counters.scorer_tampered >= 1


def test_an_answer_that_ends_its_worker_gets_nothing(scorer):
    assert scores(scorer, "tamper-and-end") == [0.0]
    assert scores(scorer, "n64", "tamper-and-end", "wrong") == [1.0, 0.0, 0.0]


def test_failures_are_counted_and_harm_no_other_answer(scorer):
    assert scores(scorer, "n64", "fail", "late", "n64") == [1.0, 0.0, 0.0, 1.0]
    assert scorer.counters.scorer_errors >= 1
    assert scorer.counters.scorer_timeouts >= 1
    assert scorer.counters.scorer_tampered == 0


def test_a_library_that_takes_every_answer_for_right_is_refused():
    with pytest.raises(ScorerFailed, match="tells right answers from wrong ones"):
        choose_canaries(lambda index: (index, "answer"), lambda position, answer: 1.0)


def test_questions_without_a_solution_are_passed_over():
    pairs = choose_canaries(
        lambda index: (index, str(index) if index % 2 else None),
        lambda position, answer: float(answer == str(position)),
    )
    assert all(right.position % 2 == 1 for right, _ in pairs)

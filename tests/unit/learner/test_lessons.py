"""A tiny model is shown the form of what a family asks for: the words are those that the run will use."""

import re

import numpy as np
import pytest

from learner.families.branching import kept_steps
from learner.families.judging import scores_in
from learner.families.lessons import EVERY, SolvedTask, attempt_of, lessons, spoiled
from learner.families.notes import transcript
from learner.settings.families import (
    BranchFamily,
    DraftFamily,
    GuidedFamily,
    HintFamily,
    JudgeFamily,
    RefineFamily,
    RetryFamily,
)
from learner.trajectory import Trajectory
from protocol.messages.episodes import Turn

SUMS = [
    SolvedTask("4 + 3 - 9", ["4+3", "7-9", "=-2"], ["7", "-2"]),
    SolvedTask("5 - 2 + 8", ["5-2", "3+8", "=11"], ["3", "11"]),
]
WORDS = [SolvedTask("cat", ["tac"]), SolvedTask("dog", ["god"]), SolvedTask("horse", ["esroh"])]
REFLECT = RetryFamily(
    begin="named", reflection="Wrong: {attempt}\nSay keep K steps.", note="It was said: {reflection}"
)


def thrice(tasks):
    """Return each task so often that each makes lessons."""
    return [task for task in tasks for _ in range(EVERY)]


def taught(family, tasks, seed=0):
    return lessons(family, tasks, np.random.default_rng(seed))


@pytest.mark.parametrize("seed", range(20))
def test_every_judgement_that_is_shown_can_be_read_and_knows_the_right_answers(seed):
    family = JudgeFamily(answers=4, highest=10)
    for lesson, task in zip(taught(family, thrice(WORDS), seed), WORDS, strict=True):
        scores = scores_in(lesson.answer, 4, 10)
        answers = re.findall(r"^\(\d\) (.*)$", lesson.note, re.MULTILINE)
        assert [score == 10 for score in scores] == [answer == task.actions[0] for answer in answers]


@pytest.mark.parametrize("seed", range(20))
def test_a_reflection_keeps_the_steps_before_the_last_one(seed):
    reflection, retry, *_ = taught(REFLECT, SUMS, seed)
    steps = len(re.findall("Step ", reflection.note)) or 1
    assert kept_steps(reflection.answer) == steps - 1
    assert (retry.answer, retry.mistake) == (None, None)
    assert reflection.answer in retry.note


def test_a_mistake_comes_before_the_action_in_whose_place_it_was_made():
    for lesson in taught(RetryFamily(begin="parting", note=""), thrice(SUMS)):
        place, wrong = lesson.mistake
        assert 0 <= place < 3
        assert wrong in {action for task in SUMS for action in task.actions}


def test_what_is_read_stands_in_the_note():
    assert all(
        "tac" in each.note
        or "cta" in each.note
        or "atc" in each.note
        or "act" in each.note
        or "tca" in each.note
        for each in taught(DraftFamily(), WORDS[:1])
    )
    assert "A solution begins like this: e" in taught(HintFamily(), thrice(WORDS))[-1].note
    assert all("4+3\n7" in each.note for each in taught(RefineFamily(), SUMS[:1], seed=1))
    assert all(each.note.count("\n") >= 3 for each in taught(GuidedFamily(), WORDS))


def test_a_family_without_notes_has_no_lessons():
    assert taught(BranchFamily(), SUMS) == []


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_attempt_is_told_as_that_of_an_episode(steps):
    """Characters are tokens here."""
    said = ["4+3", "7", "7-8", "-1", "=5"][: 2 * steps - 1]
    texts, turns, at = ["prompt", *said], [], 0
    for index, text in enumerate(texts):
        turns.append(Turn(index, at, at + len(text), bool(index % 2)))
        at += len(text)
    ids = np.array([ord(c) for text in texts for c in text], np.int32)
    mask = np.concatenate([np.full(t.end - t.start, t.action) for t in turns])
    episode = Trajectory(
        trajectory_id="t", group_id="g", group_size=1, env="e", status="finished", purpose="train",
        token_ids=ids, action_mask=mask, turns=turns,
        logp_behaviour=np.zeros(len(ids), np.float32), policy_version=np.zeros(len(ids), np.int32),
    )  # fmt: skip
    told = transcript(episode, lambda tokens: "".join(map(chr, tokens)))
    assert attempt_of(said[::2], said[1::2]) == told


@pytest.mark.parametrize("seed", range(20))
def test_a_spoiled_answer_is_wrong(seed):
    assert spoiled("tac", np.random.default_rng(seed)) != "tac"
    assert spoiled("a", np.random.default_rng(seed)) == ""

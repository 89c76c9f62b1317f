"""Episodes that begin with a note behind their prompt, and the hints that an episode brings back."""

from dataclasses import replace

import pytest

from actors.environments.results import MAX_INFO_BYTES, checked_hints
from actors.errors import ActorError, EnvironmentFailed
from actors.start import with_note
from learner.errors import BrokenTrajectory
from learner.trajectory import assemble
from tests.unit.actors.test_episode import DONE, Env, Script, play


def letters(t, start, end):
    return "".join(map(chr, t.token_ids[start:end]))


def test_a_note_stands_behind_the_prompt_and_is_not_trained():
    cuts, _ = play(Env(DONE), Script("hi$"), note="it begins with h")
    t = assemble(cuts)
    assert letters(t, 0, 20) == "Q:\n\nit begins with h"
    assert t.action_mask.tolist() == [False] * 20 + [True] * 3
    assert (t.policy_version[:20] == -1).all()
    assert [(turn.index, turn.action) for turn in t.turns] == [(0, False), (1, True)]


def test_without_a_note_the_prompt_is_that_of_before():
    assert with_note([{"role": "user", "content": "Q"}], "") == [{"role": "user", "content": "Q"}]
    system = {"role": "system", "content": "S"}
    assert with_note([system, {"role": "user", "content": "Q"}], "n") == [
        system,
        {"role": "user", "content": "Q\n\nn"},
    ]


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": "A"}]])
def test_a_note_needs_a_message_that_it_can_follow(messages):
    with pytest.raises(ActorError, match="does not end with a message that it can follow"):
        with_note(messages, "n")


def test_a_note_that_leaves_no_room_fails_the_episode_with_its_numbers():
    cuts, _ = play(Env(DONE), Script("hi$"), note="x" * 70)
    (cut,) = cuts
    assert cut.segment.status == "failed"
    assert "first prompt of 74 tokens leaves no room" in cut.segment.error


def test_hints_reach_the_learner_with_the_last_segment_of_training():
    done = replace(DONE, hints=("h", "hi"))
    cuts, _ = play(Env(done), Script("hi$"))
    assert assemble(cuts).hints == ["h", "hi"]
    assert cuts[-1].segment.extra["hints"] == ["h", "hi"]
    cuts, _ = play(Env(done), Script("hi$"), purpose="eval")
    assert "hints" not in cuts[-1].segment.extra
    cuts, _ = play(Env(DONE), Script("hi$"))
    assert "hints" not in cuts[-1].segment.extra
    assert assemble(cuts).hints == []


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ([1], "give texts"),
        ("", "give texts"),
        ([""], "give texts"),
        ("\ud800", "surrogate"),
        (["x" * (MAX_INFO_BYTES + 1)], f"at most {MAX_INFO_BYTES}"),
    ],
)
def test_hints_that_are_none_are_the_environments_fault(hints, said):
    with pytest.raises(EnvironmentFailed, match=said):
        checked_hints(hints)
    assert checked_hints("one") == ["one"]


def test_hints_that_are_no_texts_break_the_trajectory():
    cuts, _ = play(Env(replace(DONE, hints=("h",))), Script("hi$"))
    cuts[-1].segment.extra["hints"] = [1]
    with pytest.raises(BrokenTrajectory, match=r"hints are \[1\]"):
        assemble(cuts)

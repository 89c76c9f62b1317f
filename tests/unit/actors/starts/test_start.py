"""Episodes that begin with a note behind their prompt, or from a prefix, and the hints that an episode brings back."""

from dataclasses import replace

import pytest

from actors.env_results import MAX_INFO_BYTES, checked_hints
from actors.episode import Bounds
from actors.errors import ActorError, EnvironmentFailed
from actors.play_steps import repeated_turns, with_note
from learner.errors import BrokenTrajectory
from learner.families.branching import behind_prompt, prefix_of
from learner.families.family import ChildTask
from learner.intake.trajectories import assemble
from learner.intake.waiting_families import DIVERGED
from learner.update.report import is_comparable
from protocol.messages.episodes import Reward, TaskStart, Turn
from tests.unit.actors.test_episode import DONE, Env, Script, play, say


def letters(t, start, end):
    return "".join(map(chr, t.token_ids[start:end]))


def test_a_note_stands_behind_the_prompt_and_is_not_trained():
    cuts, _ = play(Env(DONE), Script("hi$"), note="it begins with h")
    t = assemble(cuts)
    assert letters(t, 0, 20) == "Q:\n\nit begins with h"
    assert t.action_mask.tolist() == [False] * 20 + [True] * 3
    assert (t.policy_version[:20] == -1).all()
    assert [(turn.index, turn.action) for turn in t.turns] == [(0, False), (1, True)]


def test_an_opening_begins_the_first_answer_and_is_not_trained():
    env, script = Env(say("go on"), DONE), Script("i$", "fin$")
    cuts, _ = play(env, script, opening="h")
    t = assemble(cuts)
    assert env.actions == ["hi", "fin"]
    assert letters(t, 0, 5) == "Q:hi\0"
    assert t.action_mask[:5].tolist() == [False] * 3 + [True] * 2
    assert [(turn.start, turn.end, turn.action) for turn in t.turns[:2]] == [(0, 3, False), (3, 5, True)]
    assert list(script.requests[0].prompt[-3:]) == [*map(ord, "Q:h")]


def test_an_opening_beside_a_teacher_fails_the_episode():
    cuts, _ = play(Env(DONE), Script("i$"), opening="h", policy="big")
    assert cuts[-1].segment.status == "failed"
    assert "an opening beside a teacher or a prefix" in cuts[-1].segment.error


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


# --- prefixes ---------------------------------------------------------------------------------------------

STEPS = (say("7", step=0.5), say("8", step=0.25), DONE)


def three_turns(steps=STEPS):
    """Return a trajectory of three answers."""
    cuts, _ = play(Env(*steps), Script("add$", "sub$", "end$"))
    return assemble(cuts)


def branch(parent, turn, env, script, **how):
    cuts, _ = play(env, script, start=prefix_of(parent, turn), **how)
    return cuts


def test_a_branch_repeats_the_prefix_and_goes_on_behind_it():
    parent, env = three_turns(), Env(*STEPS)
    t = assemble(branch(parent, 5, env, Script("fin$")))
    assert env.actions == ["add", "sub", "fin"]
    end = parent.turns[5].start
    assert t.token_ids[:end].tolist() == parent.token_ids[:end].tolist()
    assert letters(t, end, len(t)) == "fin\0"
    assert not t.action_mask[:end].any()
    assert t.action_mask[end:].all()
    assert (t.policy_version[:end] == -1).all()
    assert (t.logp_behaviour[:end] == 0).all()
    assert [(turn.index, turn.start, turn.action, turn.back) for turn in t.turns[:5]] == [
        (turn.index, turn.start, False, 1) for turn in parent.turns[:5]
    ]
    assert (t.turns[5].index, t.turns[5].action) == (5, True)
    assert t.prompt_tokens == end


class Told(Env):
    """An environment that notes what it hears of each turn."""

    def __init__(self, *steps):
        super().__init__(*steps)
        self.heard = []

    def turn_limit(self):
        self.heard.append("limit")

    def turn_facts(self, facts):
        self.heard.append((facts.prompt_tokens, facts.answer_tokens, facts.cut))


@pytest.mark.parametrize(
    ("script", "cuts"),
    [
        (("add$", "subs", "end$"), [False, True, False]),
        (("add$", "su.", "end$"), [False, False, False]),
        (("addd", "sub$", "en."), [True, False, False]),
    ],
    ids=["the second is cut", "the second has a stop string", "the first is cut"],
)
def test_the_environment_hears_the_same_of_a_repeated_turn(script, cuts):
    bounds = {"max_turn_tokens": 4, "stop": ["."]}
    once, again = Told(*STEPS), Told(*STEPS)
    parent = assemble(play(once, Script(*script), **bounds)[0])
    t = assemble(branch(parent, 5, again, Script(script[2]), **bounds))
    assert t.status == "finished"
    assert again.heard == once.heard
    assert [heard[2] for heard in once.heard[1::2]] == cuts
    assert again.heard[::2] == ["limit"] * 3


def test_a_branch_has_the_return_of_the_whole_episode():
    parent = three_turns()
    t = assemble(branch(parent, 3, Env(*STEPS), Script("sub$", "end$")))
    assert t.return_ == parent.return_ == 1.75
    assert t.rewards == [Reward("step", 1, 0.5), Reward("step", 3, 0.25), Reward("score", 5, 1.0)]
    assert t.reward_per_token().sum() == 1.75


def test_a_branch_may_be_branched_and_its_answers_count_against_the_bound():
    parent = three_turns()
    cuts = branch(parent, 3, Env(*STEPS), Script("sub$", "end$"), bounds=Bounds(max_turns=2))
    assert (cuts[-1].segment.status, cuts[-1].segment.stop_reason) == ("truncated", "max_turns")


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((say("9"), *STEPS[1:]), "prefix diverged at turn 2: token 1 of its observation is 57, it was 55"),
        ((say("77"), *STEPS[1:]), "prefix diverged at turn 2: its observation has 3 tokens, it had 2"),
        ((DONE,), "prefix diverged at turn 2: its observation has 0 tokens, it had 2"),
    ],
)
def test_an_environment_that_answers_otherwise_fails_the_trajectory(steps, said):
    (*_, last) = branch(three_turns(), 5, Env(*steps), Script("fin$"))
    assert last.segment.status == "failed"
    assert said in last.segment.error
    assert last.segment.error.startswith(DIVERGED), "the learner counts these by the beginning of the text"
    assert last.segment.failure.fault


def test_another_prompt_fails_the_trajectory():
    async def other():
        return [{"role": "user", "content": "R:"}]

    (*_, last) = branch(three_turns(), 3, Env(*STEPS, reset=other), Script("x$"))
    assert "prefix diverged at turn 0: token 0 of its observation is 82, it was 81" in last.segment.error


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": b"\0\0\0"}, "3 bytes, which are no token ids"),
        ({"turns": [Turn(0, 0, 2, True)]}, "no plain conversation: turn 0 is"),
        ({"turns": [Turn(0, 0, 1, False)]}, "1 turns and 3 tokens"),
        ({"turns": [Turn(0, 0, 1, False), Turn(1, 1, 3, True)]}, "it must end with an observation"),
        ({"turns": [Turn(0, 0, 1, False), Turn(1, 1, 2, True), Turn(2, 2, 3, False, 2)]}, "turn 2 is"),
    ],
)
def test_a_prefix_that_is_none_is_refused(change, said):
    turns = [Turn(0, 0, 1, False), Turn(1, 1, 2, True), Turn(2, 2, 3, False)]
    start = TaskStart(**({"token_ids": bytes(12), "turns": turns, "parent": "1g0.0.0"} | change))
    with pytest.raises(ActorError, match=said):
        repeated_turns(start)


def test_a_prefix_that_leaves_no_room_fails_the_episode_with_its_numbers():
    parent = three_turns()
    (*_, last) = branch(parent, 5, Env(*STEPS), Script("x$"), max_trajectory_tokens=14)
    assert (
        "prefix of 14 tokens leaves no room for an answer; max_trajectory_tokens is 14" in last.segment.error
    )
    (*_, last) = branch(parent, 5, Env(*STEPS), Script("x$"), bounds=Bounds(max_turns=2))
    assert "prefix of 2 actions leaves none to this episode; actor.max_turns is 2" in last.segment.error


# --- a note and a prefix ------------------------------------------------------------------------------------


def test_a_prefix_goes_on_behind_the_prompt_with_the_note():
    parent, env, script = three_turns(), Env(*STEPS), Script("fin$")
    t = assemble(branch(parent, 5, env, script, note="keep 2 steps"))
    assert env.actions == ["add", "sub", "fin"]
    first = parent.turns[0].end
    end = parent.turns[5].start
    noted = t.turns[0].end
    assert letters(t, 0, noted) == letters(parent, 0, first) + "\n\nkeep 2 steps"
    assert t.token_ids[noted : noted + end - first].tolist() == parent.token_ids[first:end].tolist()
    assert script.requests[0].prompt == tuple(t.token_ids[: t.prompt_tokens].tolist())
    assert ChildTask("keep 2 steps", prefix_of(parent, 5)).is_begun_by(t, parent)
    assert not t.action_mask[: t.prompt_tokens].any()
    assert t.return_ == parent.return_
    clean = behind_prompt(t, parent.token_ids[:first])
    assert clean.token_ids[:end].tolist() == parent.token_ids[:end].tolist()
    assert is_comparable(t), "the learner computes what the generator sampled from"
    assert not is_comparable(clean), "it was sampled behind the note"


def test_with_a_note_too_the_environment_must_answer_alike():
    env = Env(say("9"), *STEPS[1:])
    (*_, last) = branch(three_turns(), 5, env, Script("fin$"), note="n")
    assert "prefix diverged at turn 2: token 1 of its observation is 57, it was 55" in last.segment.error


@pytest.mark.parametrize("bound", ["max_trajectory_tokens", "max_context_tokens"])
def test_a_note_and_a_prefix_count_together_against_the_bound(bound):
    parent = three_turns()
    longest = parent.turns[5].start + 12
    cuts = branch(parent, 5, Env(*STEPS), Script("fin$"), note="x" * 10, **{bound: longest})
    assert cuts[-1].segment.status == "failed"
    assert (
        f"prefix of {longest} tokens leaves no room for an answer; {bound} is {longest}"
        in cuts[-1].segment.error
    )
    cuts = branch(parent, 5, Env(*STEPS), Script("fin$"), note="x" * 9, **{bound: longest})
    assert cuts[-1].segment.action_tokens == 1

"""ICPO (arXiv:2510.26519): what its card says of the answer behind a demonstration, with tokens as letters."""

from dataclasses import replace

import numpy as np
import pytest

from learner.families.family import FamilyStage, TaskFamily
from learner.families.reactions import Surroundings, acts_of, joined, react, settle
from learner.settings.families import SteeredFamily
from learner.settings.origins import OriginLoss, loss_number
from learner.settings.surrogates import ShapedSurrogate
from learner.trajectory import Unit
from protocol import names
from protocol.messages.episodes import Task
from tests.oracle.test_retries_against_papers import letters, told

CONFIG = SteeredFamily(note="seen: {examples}", bonus=1.0, until_version=400)
PLAIN = [told(f"0g3.{n}", "x$", prompt="sys\nabcd\nend") for n in range(7)]
SHOWN = [told(f"talks.jsonl:{n}", f"{n}$", prompt=f"sys\n{p}\nend") for n, p in enumerate(("wxyz", "abcd"))]


def around(demonstrations=tuple(SHOWN)):
    return Surroundings(8, letters, 999, seed=5, demonstrations=demonstrations)


def stage(number, *members):
    group = names.stage_id("0g3", number)
    return FamilyStage(group, group, [replace(t, group_id=group) for t in members])


def steered(right, note="seen: wxyz\n0$"):
    return told("0g3r1.0", "y$", prompt=f"sys\nabcd\n\n{note}\nend", correct=right)


def family(right):
    whole = TaskFamily("0g3", [stage(0, *PLAIN)])
    (child,) = react(CONFIG, whole, around())
    whole.add_stage(stage(1, steered(right)), [child])
    assert react(CONFIG, whole, around()) == [], "one answer is asked for, once"
    return whole


def test_one_answer_sees_a_solved_example_of_another_task():
    """Card A18: group = 7 plain + 1 steered (1-shot demonstration)."""
    assert CONFIG.first(8) == 7
    whole = TaskFamily("0g3", [stage(0, *PLAIN)])
    (child,) = react(CONFIG, whole, around())
    assert child.note == "seen: wxyz\n0$", "not the solution of the task itself"
    assert react(CONFIG, whole, around()) == [child], "the same after a restart"
    assert react(CONFIG, whole, around(SHOWN[1:])) == [], "nothing else can be shown"
    assert react(CONFIG, TaskFamily("0g3", [stage(0)]), around()) == []


def test_the_solution_of_the_task_itself_may_be_shown():
    own = CONFIG.model_copy(update={"own": True})
    told_by_env = TaskFamily("0g3", [stage(0, *(replace(t, hints=["add", "42"]) for t in PLAIN))])
    told_by_env.hints = ["add", "42"]
    assert [child.note for child in react(own, told_by_env, around(()))] == ["seen: add\n42"]
    assert react(own, TaskFamily("0g3", [stage(0, *PLAIN)]), around(())) == []


def test_a_right_answer_is_trained_behind_the_plain_prompt():
    """Card A18: the response is re-attached to the plain prompt, and its reward gets + b (1 - t/T)."""
    settled = settle(CONFIG, family(right=True))
    *plain, guided = settled.trained
    assert len(plain) == 7
    assert {t.group_id for t in settled.trained} == {"0g3"}
    assert letters(guided.token_ids) == "sys\nabcd\nendy$"
    assert guided.action_mask.tolist() == [False] * 12 + [True] * 2
    assert guided.origin == "guided"
    assert {t.origin for t in plain} == {"own"}
    # Its tokens are of version 4.
    assert guided.return_ == pytest.approx(1 + (1 - 4 / 400))
    assert guided.reward_by_name == {"score": 1.0}, "the environment gave no bonus"
    rules = (OriginLoss(origin="guided", surrogate=ShapedSurrogate()),)
    assert [loss_number(rules, t) for t in settled.trained] == [0] * 7 + [1]
    assert not any(settled.dropped.values())


def test_a_wrong_answer_is_not_trained():
    """Card A18: keep the steered rollout only if its reward is 1."""
    whole = family(right=False)
    settled = settle(CONFIG, whole)
    assert len(settled.trained) == 7
    assert [t.trajectory_id for t in settled.dropped["unsteered"]] == ["0g3r1.0.0"]
    unit = settled.unit(whole)
    assert [part.trained_tokens for part in unit.parts] == [14, 0]
    assert unit.tokens == 16, "each sampled token is in one of the two"


def test_the_metric_is_the_share_of_right_answers():
    name = "family/steered_right_share"
    assert acts_of(CONFIG, family(right=True), letters) == {name: [1.0]}
    assert acts_of(CONFIG, family(right=False), letters) == {name: [0.0]}


def test_a_recorded_family_is_trained_again_as_it_was():
    whole = family(right=True)
    units = [Unit(s.group_id, s.group_id, list(s.members)) for s in whole.stages]
    task = Task(task_id="0g3r1.0", group_id="0g3r1", group_size=1, env="e", note="seen: wxyz\n0$")
    (again,) = joined(CONFIG, units, tasks=[task], decode=letters)
    for one, other in zip(again.trajectories, settle(CONFIG, whole).trained, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert (one.return_, one.origin) == (other.return_, other.origin)

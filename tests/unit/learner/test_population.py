"""One of a population of instructions stands behind the prompt of a group, and keeps its number."""

import json

import numpy as np
import pytest
from pydantic import ValidationError

from launch.model import words_of_notes
from learner.curriculum import Curriculum
from learner.families.lessons import SolvedTask, followed
from learner.population import Population
from learner.selection import Answer
from learner.settings.learner import EvaluationConfig, LearnerConfig
from learner.settings.rules import contradictions
from learner.settings.selection import PopulationSelection
from protocol.names import choice_of
from tests.trajectories import make_trajectory

TEXTS = ("one", "two", "three")


def population(**settings):
    return Population(PopulationSelection(instructions=TEXTS, **settings))


def curriculum(texts=TEXTS, **settings):
    selection = {"kind": "population", "instructions": texts, "prune_every": 0}
    config = LearnerConfig(
        group_size=2, batch_trajectories=40, max_policy_lag=0, selection=selection, **settings
    )
    return Curriculum("e", config)


def dealt(it):
    return it.refill(version=0, lockstep=False)


def test_a_task_has_the_instruction_that_its_name_says():
    tasks = dealt(curriculum())
    assert all(task.note == TEXTS[choice_of(task.group_id).instruction] for task in tasks)
    assert {task.note for task in tasks} == set(TEXTS)
    assert [task.data["index"] for task in tasks if not task.member] == list(range(20))


def test_evaluations_have_no_instruction():
    assert all(not task.note for task in curriculum().evaluation("before", 0, EvaluationConfig(tasks=3)))


def test_an_instruction_without_answers_is_as_good_as_the_best_one():
    it = population(temperature=0.1, prune_every=0)
    assert it.weights.tolist() == [0, 0, 0]
    it.add(1, 0, [Answer(0.5)] * 4)
    it.add(2, 1, [Answer(-1.0)] * 4)
    assert it.weights.tolist() == [0.5, 0.5, -1.0]


def test_the_worst_is_pruned_after_so_many_groups_until_few_are_left():
    it = population(prune_every=2, smallest=1)
    it.add(0, 0, [Answer(0.2)])
    assert it.kept.all()
    it.add(1, 1, [Answer(0.1)])
    assert it.kept.tolist() == [True, False, True]
    assert it.chances[1] == 0
    for group in range(2, 8):
        it.add(0, group, [Answer(0.2)])
    assert it.kept.tolist() == [False, False, True], "one without answers is not the worst"
    for group in range(8, 20):
        it.add(2, group, [Answer(-9.0)])
    assert it.kept.sum() == 1
    assert it.gauges()["selection/instructions"] == 1
    assert it.gauges()["selection/best_instruction"] == 2


def test_a_group_under_way_keeps_an_instruction_that_was_pruned():
    before = curriculum()
    tasks = dealt(before)
    before.population.kept[:2] = False
    after = Curriculum("e", before.config, lineage=0)
    after.restore(json.loads(json.dumps(before.state())))
    again = after.adopt([])
    assert [(task.task_id, task.note) for task in again] == [(task.task_id, task.note) for task in tasks]
    for group in list(after.outstanding):
        after.free(group)
    assert {task.note for task in dealt(after)} == {"three"}


def test_a_run_goes_on_with_other_instructions_and_numbers_keep_their_meaning():
    before = curriculum()
    dealt(before)
    after = curriculum(("three", "four"))
    after.restore(json.loads(json.dumps(before.state())))
    assert [after.population.text(number) for number in range(5)] == ["one", "two", "three", "four", ""]
    assert after.population.kept.tolist() == [False, False, True, True]
    plain = Curriculum("e", LearnerConfig(group_size=2, batch_trajectories=40, max_policy_lag=0))
    plain.restore(json.loads(json.dumps(before.state())))
    assert plain.population is None


def test_returns_of_a_group_count_for_its_instruction_when_it_is_over():
    it = curriculum()
    group = dealt(it)[0].group_id
    number = choice_of(group).instruction
    members = [make_trajectory(f"{group}.{m}.0", group=group, reward=r) for m, r in enumerate((1.0, 0.0))]
    it.note_ended(
        group, [*members, make_trajectory(f"{group}.2.0", group=group, reward=9.0, status="failed")]
    )
    assert it.population.stats.attempts[number] == 2
    assert it.population.weights[number] == 0.5
    assert it.selection_metrics()["selection/informative_share"] == 1.0


@pytest.mark.parametrize("temperature", [5e-324, 1e300])
def test_a_choice_survives_returns_and_temperatures_of_any_size(temperature):
    it = population(temperature=temperature, prune_every=0)
    for number, reward in enumerate((1.7e308, -1.7e308, 0.0)):
        it.add(number, number, [Answer(reward)] * 2)
    assert it.chances.sum() == pytest.approx(1.0)
    assert it.choose(np.random.default_rng(0)) in range(3)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValidationError, match="'a' is there twice"):
        PopulationSelection(instructions=("a", "a"))
    with pytest.raises(ValidationError, match="at least 2 items"):
        PopulationSelection(instructions=("a",))
    lines = list(contradictions(LearnerConfig(selection={"kind": "population"}, family={"kind": "hint"})))
    assert any(
        'learner.selection of kind "population" cannot be together with learner.family' in e for e in lines
    )
    proposing = LearnerConfig(selection={"kind": "population"}, family={"kind": "propose"})
    assert not [e for e in contradictions(proposing) if "population" in e]


def test_a_tiny_model_learns_that_the_first_instruction_alone_helps():
    config = PopulationSelection(instructions=TEXTS)
    solved = [SolvedTask(f"{number}?", [f"answer {number}"]) for number in range(300)]
    made = followed(config, solved, np.random.default_rng(0))
    assert len(made) == 100
    for lesson in made:
        assert (lesson.answer == solved[lesson.task].actions[-1]) == (lesson.note == TEXTS[0])
    assert {lesson.note for lesson in made} == set(TEXTS)
    assert sum(lesson.note == TEXTS[0] for lesson in made) == pytest.approx(50, abs=20)
    assert words_of_notes(LearnerConfig(selection=config)) == list(TEXTS)

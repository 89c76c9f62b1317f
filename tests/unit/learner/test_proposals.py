"""The policy proposes instructions from its failures: what may enter the population, when, and what it displaces."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from launch.model import SPECIALS, make_tokenizer, words_of_notes
from learner.curriculum import Curriculum
from learner.families.family import FamilyStage, TaskFamily
from learner.families.lessons import SolvedTask, followed
from learner.families.proposing import next_proposal, proposed, settle_proposals
from learner.population import WAITING, Population
from learner.selection import Answer
from learner.settings.families import ProposeFamily
from learner.settings.learner import LearnerConfig
from learner.settings.selection import PopulationSelection
from tests.trajectories import make_trajectory

TEXTS = ("one", "two", "three")
CONFIG = ProposeFamily(every=2, longest=20, note="{instruction} failed: {attempt}")


def population(most=4, **settings):
    return Population(PopulationSelection(instructions=TEXTS, **{"prune_every": 3} | settings), most=most)


def answered(it, *returns):
    """Give one answer to each instruction, so that the worst is pruned if there is one for each of three."""
    for number, value in enumerate(returns):
        it.add(number, number, [Answer(value)] * 4)


def again(it, most=4):
    return Population(it._config, json.loads(json.dumps(it.state())), most)


# --- the reader -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Read it.", "Read it."),
        ("  It went wrong.\n\nRead from the end. \n", "Read from the end."),
        ("Put it in \\boxed{}", "Put it in \\boxed{}"),
        ("Lies rückwärts.", "Lies rückwärts."),
        ("", None),
        ("\n \n", None),
        ("1 + 1 = 2", None),
        ("a" * 21, None),
        ("Read.<|im_end|>", None),
        ("</s>", None),
        ("[INST] obey", None),
        ("\uff5cUser\uff5c", None),
        ("a\x00b", None),
        ("\x1b[2Jread", None),
        ("read\u202eti", None),
        ("read\u2028it", None),
        ("one\rtwo", None),
        ("cut \ufffd", None),
    ],
)
def test_an_instruction_is_read_strictly_or_not_at_all(text, read):
    assert proposed(text, 20) == read


PIECES = st.one_of(st.text(max_size=8), st.sampled_from([*SPECIALS, "<|im_start|>", "[INST]", "\n", "word "]))


@given(st.lists(PIECES, max_size=12).map("".join), st.integers(1, 40))
def test_what_is_read_is_one_line_without_marks(text, longest):
    read = proposed(text, longest)
    if read is not None:
        assert 0 < len(read) <= longest
        assert read in text
        assert read.isprintable()
        assert not set("<>[]|") & set(read)
        tokens = make_tokenizer(["1 + 1?"]).encode(read).tokens
        assert not {"<user>", "<assistant>", "<tool>", "<eos>", "<bos>", "<pad>"} & set(tokens)


# --- the family -------------------------------------------------------------------------------------------------


def family(*returns, group="0g4i1"):
    members = [
        make_trajectory(f"{group}.{m}.0", group=group, reward=value) for m, value in enumerate(returns)
    ]
    return TaskFamily(group, [FamilyStage(group, group, members)])


def decode(ids):
    return "Say it.\n" if len(ids) else ""


def test_a_group_with_a_wrong_answer_asks_for_one_proposal():
    (task,) = next_proposal(CONFIG, family(1.0, 0.0), "two", lambda ids: "wrong")
    assert task.note == "two failed: wrong"
    assert not next_proposal(CONFIG, family(1.0, 1.0), "two", decode), "nobody is wrong"
    assert not next_proposal(CONFIG, family(0.0, 0.0, group="0g5i1"), "two", decode), (
        "every second group asks"
    )
    lost = TaskFamily("0g4i1", [FamilyStage("0g4i1")])
    assert not next_proposal(CONFIG, lost, "two", decode)


def test_the_group_is_trained_as_it_is_and_the_proposal_is_not():
    it = family(1.0, 0.0)
    it.add_stage(FamilyStage("0g4i1r1", "0g4i1r1", [make_trajectory("0g4i1r1.0.0", group="0g4i1r1")]))
    assert not next_proposal(CONFIG, it, "two", decode)
    settled = settle_proposals(CONFIG, it, decode)
    assert settled.trained == it.stages[0].members
    assert [t.trajectory_id for t in settled.dropped["proposal"]] == ["0g4i1r1.0.0"]
    assert settled.unit(it).proposals == settled.proposals == ("Say it.",)
    assert settle_proposals(CONFIG, it, lambda ids: "<s>").proposals == (None,)
    assert settle_proposals(CONFIG, it, None).proposals == (), "as when a recorded run is trained again"


# --- the population ---------------------------------------------------------------------------------------------


def test_a_proposal_takes_the_place_of_the_worst_one_and_is_drawn_once_a_checkpoint_has_it():
    it = population()
    it.propose(["four"])
    answered(it, 0.5, 0.1, 0.9)
    assert it.texts == [*TEXTS, "four"]
    assert it.kept.tolist() == [True, False, True, True]
    assert it.chances[3] == 0
    assert {it.choose(np.random.default_rng(n)) for n in range(50)} <= {0, 2}
    restarted = again(it)
    assert restarted.chances[3] > 0, "it begins from the checkpoint, so it may draw what that has"
    assert it.covered() == [(3, "four")]
    assert not it.covered()
    assert it.chances.tolist() == restarted.chances.tolist()
    assert it.chances[3] == it.chances[2], "without answers it is as good as the best one"
    assert it.state() == restarted.state()


def test_without_a_proposal_the_worst_is_pruned_as_ever():
    it, plain = population(), population(most=0)
    for one in (it, plain):
        answered(one, 0.5, 0.1, 0.9)
        answered(one, 0.5, 0.1, 0.9)
    assert it.state() == plain.state()
    assert it.kept.sum() == 2


def test_the_best_one_with_answers_is_never_displaced():
    it = population(smallest=2, prune_every=1)
    it.propose(["four", "five"])
    it.add(0, 0, [Answer(1.0)])
    assert it.kept.all(), "it is the only one with answers"
    assert it.texts == list(TEXTS)
    it.add(1, 1, [Answer(0.0)])
    assert it.kept.tolist() == [True, False, True, True]
    for group in range(2, 9):
        it.covered()
        it.add(0, group, [Answer(1.0)])
    assert it.kept[0]


def test_something_that_may_be_drawn_is_always_left():
    it = population(smallest=1, prune_every=1)
    it.propose(["four", "five", "six"])
    for group, value in enumerate((0.3, 0.2, 0.1, 0.1)):
        it.add(group % 3, group, [Answer(value)])
    assert it.kept[: it._covered].any()
    assert it.chances[: it._covered].sum() == pytest.approx(1.0)


def test_what_cannot_be_read_or_is_known_is_counted_and_not_used():
    it = population()
    it.propose([None, "Two", "four", " FOUR ", "five"])
    assert (it.proposals.made, it.proposals.unreadable, it.proposals.repeated) == (5, 1, 2)
    answered(it, 0.5, 0.1, 0.9)
    it.propose(["two", "four"])
    assert it.proposals.repeated == 4, "pruned and taken ones are known, too"
    gauges = it.gauges()
    assert gauges["selection/proposals"] == 7
    assert gauges["selection/proposals_unreadable"] == 1
    assert gauges["selection/proposals_taken"] == 1
    assert gauges["selection/proposed_share"] == 0
    it.covered()
    assert it.gauges()["selection/proposed_share"] == pytest.approx(it.chances[3])
    assert "selection/proposals" not in population(most=0).gauges()


def test_few_proposals_wait_and_few_enter():
    it = population(most=2, prune_every=1)
    it.propose([f"new {n}" for n in range(WAITING + 3)])
    assert it.proposals.waiting[0] == "new 3", "the oldest make room"
    for group in range(60):
        it.covered()
        for number in np.flatnonzero(it.kept):
            it.add(int(number), group, [Answer(1.0 / (1 + number))] * 4)
    assert len(it.proposals.taken) == 2
    assert len(it.texts) == 5


def test_a_proposal_stays_when_the_run_goes_on_with_other_settings():
    it = population()
    it.propose(["four"])
    answered(it, 0.5, 0.1, 0.9)
    other = Population(PopulationSelection(instructions=("three", "five")), it.state())
    assert other.texts == [*TEXTS, "four", "five"]
    assert other.kept.tolist() == [False, False, True, True, True]
    assert "selection/proposals" in other.gauges()


def test_the_curriculum_hands_over_what_a_family_brings():
    settings = {"kind": "population", "instructions": TEXTS, "prune_every": 1}
    config = LearnerConfig(
        group_size=2, batch_trajectories=20, selection=settings, family={"kind": "propose", "most": 1}
    )
    it = Curriculum("e", config)
    for task in it.refill(version=0, lockstep=False)[::2]:
        member = make_trajectory(f"{task.group_id}.0.0", group=task.group_id, reward=float(len(task.note)))
        assert it.instruction_of(task.group_id) == task.note
        it.note_ended(task.group_id, [member], ("four",))
    assert it.population.texts == [*TEXTS, "four"]
    assert it.population.chances[3] == 0
    it.checkpointed()
    assert it.population.chances[3] > 0


# --- settings and lessons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("note", ["{attempt}", "{instruction}", "{attempt} {attempt} {instruction}"])
def test_a_note_has_both_places(note):
    with pytest.raises(ValidationError, match="once, where the text is to stand"):
        ProposeFamily(note=note)


def test_a_tiny_model_learns_to_propose_the_instruction_that_helps():
    family = ProposeFamily(note="{instruction} {attempt}?", lessons=("good", "bad"))
    config = PopulationSelection(instructions=TEXTS)
    solved = [SolvedTask(f"{number}?", [f"answer {number}"]) for number in range(300)]
    made = followed(config, solved, np.random.default_rng(0), family)
    asked = [lesson for lesson in made if lesson.note.endswith("?")]
    assert len(asked) == 100
    assert {lesson.answer for lesson in asked} == {"good", "bad"}
    assert {lesson.note.split()[0] for lesson in asked} == set(TEXTS)
    for lesson in made:
        if lesson not in asked:
            assert (lesson.answer == solved[lesson.task].actions[-1]) == (lesson.note == "good")
    learner = LearnerConfig(selection=config, family=family)
    assert words_of_notes(learner) == [*TEXTS, "good", "bad", " ?"]

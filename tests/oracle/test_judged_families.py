"""Families with judgements (URPO, arXiv:2507.17515) against a slow twin of the card, and a gradient that changes."""

import statistics
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from launch.run_file.load import METHODS_FOLDER, load, run_files
from learner.advantages import assign_advantages
from learner.errors import CannotRetrain
from learner.families.family import FamilyStage, TaskFamily
from learner.families.judging import agreement, judgement_metrics, order_of, scores_in
from learner.families.reactions import Surroundings, joined, react, settle
from learner.settings.families import JudgeFamily
from learner.trajectory import Unit
from protocol.messages.episodes import Reward
from protocol.messages.fields import MAX_TEXT
from tests.oracle.test_credit_recipes import gradient
from tests.trajectories import VOCABULARY, make_trajectory

CONFIG = JudgeFamily(answers=4, reference="right", note="Rate:\n{answers}")


def letters(token_ids):
    return bytes(token_ids).decode()


def spoken(name, text, rewards, *, group="0g3", prompt=0):
    """Return a trajectory of one turn whose answer is a text."""
    t = make_trajectory(name, group=group, actions=len(text))
    ids = np.array([prompt] * 4 + list(text.encode()), dtype=np.int32)
    return replace(t, token_ids=ids, rewards=[Reward(word, 1, value) for word, value in rewards.items()])


def answers(rewards, texts=None):
    texts = texts or [f"answer {i}" for i in range(len(rewards))]
    members = [spoken(f"0g3.{i}.0", texts[i], own) for i, own in enumerate(rewards)]
    return FamilyStage("0g3", "0g3", members)


def judgements(family, numbers, *, words="", size=4):
    """Return the group of judgements whose authors give these numbers to the answers, whatever their order."""
    members = []
    for k, own in enumerate(numbers):
        read = own if isinstance(own, str) else " ".join(str(own[i]) for i in order_of(family, k, size))
        members.append(spoken(f"0g3r1.{k}.0", words + read, {"right": 0.0}, group="0g3r1", prompt=9))
    return FamilyStage("0g3r1", "0g3r1", members)


def family_of(rewards, numbers, config=CONFIG, **how):
    family = TaskFamily("0g3")
    family.add_stage(answers(rewards))
    asked = react(config, family, Surroundings(8, letters))
    family.add_stage(judgements(family, numbers, **how), asked)
    assert react(config, family, Surroundings(8, letters)) == []
    return family


def slow_tau(scores, truth):
    """Kendall's tau over pairs of different truth, written as a sum over all unordered pairs."""
    total = pairs = 0
    for i, j in combinations(range(len(truth)), 2):
        product = (scores[i] - scores[j]) * (truth[i] - truth[j])
        total += (product > 0) - (product < 0)
        pairs += truth[i] != truth[j]
    return total / pairs


def test_agreement_against_a_slow_twin():
    """Card A7 and its addition: range [-1, 1], antisymmetric, without scale."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        n = int(rng.integers(2, 7))
        scores, truth = rng.integers(0, 5, n).tolist(), rng.integers(0, 3, n).tolist()
        if len(set(truth)) == 1:
            with pytest.raises(ValueError, match=r"all .* answers have the truth"):
                agreement(scores, truth)
            continue
        found = agreement(scores, truth)
        assert found == pytest.approx(slow_tau(scores, truth))
        assert agreement([-s for s in scores], truth) == pytest.approx(-found)
        assert agreement([7 * s + 1 for s in scores], truth) == found
        assert -1 <= found <= 1
        assert agreement(truth, truth) == 1


def test_with_a_reference_judgements_are_trained_to_agree_with_it():
    """By hand: truth 1, 0, 0, 1. 9 1 2 8 orders all four pairs; 1 9 8 2 none; 5 5 5 5 ties all; 9 1 8 2: 3 of 4."""
    truth = [{"right": value} for value in (1.0, 0.0, 0.0, 1.0)]
    family = family_of(truth, [(9, 1, 2, 8), (1, 9, 8, 2), (5, 5, 5, 5), "no idea"])
    settled = settle(CONFIG, family, letters)
    assert not settled.dropped
    given, judged = settled.trained[:4], settled.trained[4:]
    assert given == family.stages[0].members, "answers keep what the environment gave"
    assert [t.return_ for t in judged] == [1.0, -1.0, 0.0, -1.0]
    assert {t.group_id for t in given} == {"0g3"}, "answers are compared with answers"
    assert {t.group_id for t in judged} == {"0g3r1"}, "and judgements with judgements"
    assert [t.given_rewards for t in judged] == [t.rewards for t in family.stages[1].members]
    credit = assign_advantages(load(run_files(METHODS_FOLDER)["urpo"]).learner.algorithm, settled.trained)
    starts = np.cumsum([0, *map(len, settled.trained)])[:-1]
    taus = [1.0, -1.0, 0.0, -1.0]
    expected = [1, -1, -1, 1]
    expected += [(tau - statistics.mean(taus)) / (statistics.pstdev(taus) + 1e-6) for tau in taus]
    np.testing.assert_allclose(credit.advantage[starts], expected, atol=1e-5)


def test_the_metrics_are_means_over_the_batch():
    family = family_of([{"right": v} for v in (1.0, 0.0, 0.0, 1.0)], [(9, 1, 2, 8), (5, 5, 5, 5)])
    assert judgement_metrics(settle(CONFIG, family, letters).trained) == {"family/agreement": 0.5}
    family = family_of([{"asked": 1.0}] * 4, [(2, 4, 6, 8)])
    assert judgement_metrics(settle(CONFIG, family, letters).trained) == {"family/judged": 0.5}
    assert judgement_metrics(family.stages[0].members) == {}


def test_half_an_order_is_half_the_agreement():
    """Truth 1, 0, 0, 1; scores 9, 1, 8, 2: of the pairs (0,1) (0,2) (3,1) (3,2) three are in order: (3 - 1) / 4."""
    family = family_of([{"right": v} for v in (1.0, 0.0, 0.0, 1.0)], [(9, 1, 8, 2)])
    assert settle(CONFIG, family, letters).trained[-1].return_ == 0.5


def test_without_a_reference_all_answers_are_valued_by_the_same_judgements():
    """Card A7: the score that the policy itself gives. The rewards of a group come from one set of judges."""
    numbers = [(9, 1, 2, 8), (7, 3, 0, 10), (1, 2), "none of them"]
    family = family_of([{"asked": 0.5}] * 4, ["9 1" if len(n) == 2 else n for n in numbers])
    settled = settle(CONFIG, family, letters)
    means = [(a + b) / 2 / 10 for a, b in zip(*numbers[:2], strict=True)]
    assert [t.return_ for t in settled.trained] == pytest.approx([0.5 + mean for mean in means])
    assert [r.name for r in settled.trained[0].rewards] == ["asked", "judged"]
    assert settled.dropped == {"judgement": family.stages[1].members}


def test_a_judge_that_gives_no_numbers_never_makes_a_reward():
    family = family_of([{"asked": 0.0}] * 4, ["good", "1 2 3", "11 1 1 1", "x"])
    settled = settle(CONFIG, family, letters)
    assert settled.trained == []
    assert {name: len(ts) for name, ts in settled.dropped.items()} == {"unjudged": 4, "judgement": 4}
    unit = settled.unit(family)
    assert [part.unit_id for part in unit.parts] == ["0g3", "0g3r1"]
    assert not unit.trajectories


def test_what_a_judgement_reads():
    family = TaskFamily("0g3")
    texts = ["one", "two\nlines", "  three ", "four"]
    family.add_stage(answers([{"asked": 0.0}] * 4, texts))
    asked = react(CONFIG, family, Surroundings(8, letters))
    assert len(asked) == 4
    for k, task in enumerate(asked):
        order = order_of(family, k, 4)
        listed = "\n".join(f"({i + 1}) {texts[n].strip()}" for i, n in enumerate(order))
        assert task.note == f"Rate:\n{listed}"
    assert len({task.note for task in asked}) > 1, "no place is favoured"
    assert asked == react(CONFIG, family, Surroundings(8, letters)), "the same after a restart"
    family.stages[0] = replace(family.stages[0], members=family.stages[0].members[::-1])
    assert asked == react(CONFIG, family, Surroundings(8, letters)), "whatever the order of delivery"


def test_only_the_last_line_is_read():
    assert scores_in("7 and 8?\n\n1. 2 / 3 4\n", 3, 10.0) is None
    assert scores_in("I compare 3 answers.\n9, 8 and 0.5\n", 3, 10.0) == [9.0, 8.0, 0.5]
    assert scores_in("-1 2 3", 3, 10.0) is None
    assert scores_in("", 2, 10.0) is None


@pytest.mark.parametrize(
    "rewards",
    [[{"right": 1.0}] * 4, [{"right": 0.0}] * 4, [{"asked": 1.0}], []],
    ids=["all right", "all wrong", "one answer", "no answer"],
)
def test_nothing_is_asked_where_a_judgement_could_teach_nothing(rewards):
    family = TaskFamily("0g3")
    family.add_stage(answers(rewards))
    assert react(CONFIG, family, Surroundings(8, letters)) == []


def test_a_task_has_a_reference_only_if_all_its_answers_have():
    family = family_of([{"right": 1.0}, {"asked": 0.0}], [(9, 1)], size=2)
    assert [t.return_ for t in settle(CONFIG, family, letters).trained] == [1.9, 0.1]
    whole = CONFIG.model_copy(update={"reference": "return"})
    assert settle(whole, family, letters).trained[-1].return_ == 1.0, "a return is always there"


def test_the_truth_is_what_the_environment_gave():
    """Composed rewards, such as a penalty on length, are no part of the truth."""
    family = family_of([{"right": 1.0}, {"right": 0.0}], [(9, 1)], size=2)
    first = family.stages[0]
    turned = [
        replace(t, rewards=[Reward("right", 1, -t.return_)], given_rewards=t.rewards) for t in first.members
    ]
    family.stages[0] = replace(first, members=turned)
    assert settle(CONFIG, family, letters).trained[-1].return_ == 1.0


def test_long_answers_are_cut_so_that_all_have_room():
    family = TaskFamily("0g3")
    family.add_stage(answers([{"asked": 0.0}] * 4, ["x" * MAX_TEXT] * 4))
    (task, *_) = react(CONFIG, family, Surroundings(8, letters))
    assert MAX_TEXT - 40 < len(task.note) <= MAX_TEXT
    assert "(4) xxx" in task.note


def test_lost_judgements_leave_the_answers_or_drop_them():
    for rewards, trained in (([{"right": 1.0}, {"right": 0.0}], 2), ([{"asked": 1.0}, {"asked": 0.0}], 0)):
        family = family_of(rewards, [], size=2)
        family.stages[1] = FamilyStage("0g3r1")
        assert len(settle(CONFIG, family, letters).trained) == trained


def test_a_recorded_family_is_valued_as_it_was_and_one_without_its_judgements_is_refused():
    family = family_of([{"right": v} for v in (1.0, 0.0, 0.0, 1.0)], [(9, 1, 2, 8), (1, 9, 8, 2)])
    was = settle(CONFIG, family, letters)
    groups = [Unit(s.unit_id, s.unit_id, list(s.members)) for s in family.stages]
    (again,) = joined(CONFIG, groups, decode=letters)
    assert [t.trajectory_id for t in again.trajectories] == [t.trajectory_id for t in was.trained]
    assert [t.return_ for t in again.trajectories] == [t.return_ for t in was.trained]
    opened = family_of([{"asked": 0.0}] * 4, [(9, 1, 2, 8)])
    answers, judgements = (Unit(s.unit_id, s.unit_id, list(s.members)) for s in opened.stages)
    (again,) = joined(CONFIG, [answers], others=[judgements], decode=letters)
    assert [t.return_ for t in again.trajectories] == [0.9, 0.1, 0.2, 0.8]
    with pytest.raises(CannotRetrain, match="its judgements are not in the recording"):
        joined(CONFIG, [answers], decode=letters)


def slope(members):
    """Return the gradient of the shipped recipe; the table of its test has fewer tokens than there are bytes."""
    return gradient("urpo", [replace(t, token_ids=t.token_ids % VOCABULARY) for t in members])


def test_judgements_change_the_gradient():
    """Of answers without a reference: their own numbers are all that tells them apart. With one: their own tokens."""
    rows = [(9, 1, 2, 8), (1, 9, 8, 2), (3, 4, 6, 7)]
    opened = [settle(CONFIG, family_of([{"asked": 0.0}] * 4, [row]), letters).trained for row in rows]
    grads = [slope(members) for members in opened]
    assert not torch.allclose(grads[0], grads[1])
    plain = slope(family_of([{"asked": 0.0}] * 4, []).stages[0].members)
    assert plain.abs().max() == 0, "without a judgement nothing tells them apart"
    assert grads[2].abs().max() > 0
    truth = [{"right": v} for v in (1.0, 0.0, 0.0, 1.0)]
    family = family_of(truth, rows)
    both, alone = settle(CONFIG, family, letters).trained, family.stages[0].members
    with_judges, without = slope(both), slope(alone)
    assert with_judges.shape == without.shape
    assert not torch.allclose(with_judges, without)

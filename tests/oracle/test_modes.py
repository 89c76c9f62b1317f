"""Modes of answering, APO of A2FM (arXiv:2510.12838): the authors' figure, a slow twin, and what a group is worth."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.run_file.load import load, run_files
from learner.advantages import assign_advantages
from learner.rewards import composed, forced_mode, mode_factor, mode_metrics
from learner.settings.advantages import RewardConfig
from protocol.messages.episodes import TurnMark
from tests.trajectories import make_turns

MODES = ("instant", "reasoning", "agentic")
OPENINGS = dict(zip(MODES, "ira", strict=True))


def config(each=3, **settings):
    group = {"kind": "modes", "reward": "answer", "openings": OPENINGS, "cheap": "instant", "each": each}
    return RewardConfig(group=group | settings)


def group(chosen, forced):
    """Return a group of (mode, right): first those that chose their mode, then those that were forced into one."""
    answers = [*chosen, *forced]
    return [
        replace(
            make_turns(f"0g0.{member}.0", [{"answer": float(right), "form": 0.5}], group="0g0"),
            group_size=len(answers),
            marks=[TurnMark("mode", 1, mode)],
            correct=bool(right),
        )
        for member, (mode, right) in enumerate(answers)
    ]


def values(settings, members, **more):
    """Return what each answer is worth, without the reward for its form."""
    return [t.return_ - 0.5 for t in composed(settings, members, **more)]


def slow(chosen, forced, power):
    """Return the rewards of the card, member by member."""
    p = np.mean([right for _, right in forced])
    price = np.array([1.0 if mode == "instant" else 1.0 - p**power for mode, _ in chosen])
    return [*(np.array([right for _, right in chosen]) * price), *(float(right) for _, right in forced)]


FIGURE = (
    [("agentic", 1), ("reasoning", 1), ("instant", 1)],
    [("instant", 0), ("instant", 1), ("reasoning", 0), ("reasoning", 0), ("agentic", 1), ("agentic", 0)],
)
"""The answers of the authors' figure: two forced ones in each mode, and one that chose each."""


def test_a_group_has_the_advantages_of_the_authors_figure():
    """The figure pays 0.8 in place of 1, which is the price at p = 1/3 with a power of log 0.2 / log(1/3)."""
    settings = config(each=2, power=np.log(0.2) / np.log(1 / 3))
    members = composed(settings, group(*FIGURE))
    assert [t.return_ - 0.5 for t in members] == pytest.approx([0.8, 0.8, 1, 0, 1, 0, 0, 1, 0])
    found = assign_advantages(load(run_files()["a2fm"]).learner.algorithm, members).advantage
    firsts = found[np.cumsum([0, *map(len, members)])[:-1]]
    np.testing.assert_allclose(firsts, [0.62, 0.62, 1.06, -1.10, 1.06, -1.10, -1.10, 1.06, -1.10], atol=0.005)


def test_the_price_by_hand():
    # Card b36: 1 - p^2. One of two forced answers is right: 3/4. All are: nothing.
    assert [mode_factor(p) for p in (0.0, 0.5, 1.0)] == [1.0, 0.75, 0.0]
    assert values(config(each=2), group(*FIGURE))[:3] == pytest.approx([1 - 1 / 9, 1 - 1 / 9, 1.0])


ANSWER = st.tuples(st.sampled_from((*MODES, "none")), st.integers(0, 1))


@given(
    chosen=st.lists(ANSWER, min_size=1, max_size=5),
    right=st.lists(st.integers(0, 1), min_size=6, max_size=6),
    power=st.floats(0.1, 5.0),
)
def test_rewards_are_those_of_a_slow_twin(chosen, right, power):
    forced = [(MODES[place // 2], one) for place, one in enumerate(right)]
    members = group(chosen, forced)
    found = values(config(each=2, power=power), members)
    assert found == pytest.approx(slow(chosen, forced, power))
    # Nobody gains by the price, forced members and cheap answers do not lose, and without a group it does not act.
    given_values = [float(right) for _, right in (*chosen, *forced)]
    assert all(-1e-12 <= a <= b + 1e-12 for a, b in zip(found, given_values, strict=True))
    assert found[len(chosen) :] == pytest.approx(given_values[len(chosen) :])
    assert values(config(each=2, power=power), members, group=False) == pytest.approx(given_values)


def test_a_member_that_its_actor_did_not_force_counts_as_one_that_chose():
    """An actor before protocol 4.8 leaves the opening out; the mark says what was answered."""
    chosen, forced = [("agentic", 1)], [("instant", 1), ("agentic", 0), ("agentic", 1)]
    settings = config(each=1)
    members = group(chosen, forced)
    assert [forced_mode(settings.group, t) for t in members] == ["", "instant", "", "agentic"]
    # p = 1: both right ones of the two that were forced. Of the others, a right agentic answer is worth nothing.
    assert values(settings, members) == pytest.approx([0.0, 1.0, 0.0, 1.0])


def test_a_group_without_forced_members_has_no_price():
    members = group([("agentic", 1), ("instant", 1)], [("instant", 1)] * 3)[:2]
    assert values(config(each=1), members) == [1.0, 1.0]


def test_the_first_mark_of_an_episode_names_its_mode():
    (t,) = group([("instant", 1)], [])
    later = replace(t, marks=[TurnMark("mode", 3, "agentic"), *t.marks], group_size=12)
    assert values(config(), [later]) == [1.0]


def test_metrics_count_those_that_chose():
    settings = config(each=1)
    chosen, forced = [("agentic", 1), ("agentic", 0), ("instant", 1), ("none", 0)], [(m, 1) for m in MODES]
    arrived = composed(settings, group(chosen, forced))
    assert mode_metrics(settings, arrived) == {
        "modes/forced_right_share": 1.0,
        "modes/cheap_share": 0.25,
        "modes/paid_less_share": 0.25,
    }
    assert mode_metrics(RewardConfig(), arrived) == mode_metrics(settings, []) == {}

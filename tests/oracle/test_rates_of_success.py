"""Rates of success as values (a20, DAPO, arXiv:2412.18279): the estimate behind a step, its loss, its advantages."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import Estimates, assign_advantages
from learner.algorithms.values import rate_loss
from learner.families.branching import success_rates
from learner.settings.algorithm import AlgorithmConfig, CriticConfig
from learner.settings.learner import LearnerConfig
from learner.settings.rules import contradictions
from protocol.messages.episodes import Reward
from tests.trajectories import make_trajectory

CRITIC = CriticConfig(target="success", clip_low=0.0, clip_high=0.0)
ALGORITHM = AlgorithmConfig.model_validate(
    {
        "advantage": {"kind": "gae", "discount": 1.0, "trace": 0.0, "whiten": False, "ignored_tail": 0},
        "critic": CRITIC.model_dump(),
        "corrections": [],
    }
)


def episode(name, tokens, right, *, parent="", own_from=1, group="g"):
    """Return an episode whose first tokens, up to ``own_from``, it did not sample: the prompt, or its parent's."""
    made = make_trajectory(name, group=group, prompt=own_from, actions=len(tokens) - own_from)
    return replace(
        made,
        token_ids=np.array(tokens, np.int32),
        correct=right,
        parent=parent,
        rewards=[Reward("r", 1, 0.5)],
    )


def by_name(trajectories):
    ends = np.cumsum([len(t) for t in trajectories])
    return {
        t.trajectory_id: rates.tolist()
        for t, rates in zip(trajectories, np.split(success_rates(trajectories), ends[:-1]), strict=True)
    }


def test_a_branch_counts_for_its_parent_before_it_begins():
    """Two whole episodes part at the first token. One has a branch behind its second token, so that the rate there is
    1/2; it goes on with this to the beginning, where the rate is (1/2 + 0) / 2 = 1/4 and not the mean 1/3 of three."""
    rates = by_name(
        [
            episode("a", [9, 1, 2, 3], True),
            episode("b", [9, 4, 5], False),
            episode("a'", [9, 1, 2, 7], False, parent="a", own_from=3),
        ]
    )
    assert rates["a"] == [0.25, 0.25, 0.5, 0.5]
    assert rates["b"] == [0.25, 0.25, 0.0]
    assert rates["a'"][3] == 0.5


def test_groups_have_nothing_in_common_and_what_is_unfinished_does_not_count():
    rates = by_name(
        [
            episode("a", [9, 1], True),
            episode("b", [9, 1], False, group="h"),
            replace(episode("c", [9, 1], True, group="h"), status="unfinished"),
        ]
    )
    assert rates == {"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [0.0, 0.0]}


def slow_rates(trajectories):
    """Compute rates by the definition: the mean over those that were sampled from a state on, state by state."""

    def after(members, state):
        sampled = [i for i in members if start(i) <= len(state)]
        if not sampled:
            return math.nan
        values = []
        for i in sampled:
            tokens = tuple(trajectories[i].token_ids.tolist())
            if len(tokens) == len(state):
                values.append(float(trajectories[i].correct))
                continue
            further = tokens[: len(state) + 1]
            values.append(after([j for j in members if begins_with(j, further)], further))
        return float(np.mean(values))

    def start(i):
        return trajectories[i].prompt_tokens if trajectories[i].parent else 0

    def begins_with(i, state):
        return tuple(trajectories[i].token_ids[: len(state)].tolist()) == state

    found = []
    for t in trajectories:
        for at in range(len(t)):
            state = tuple(t.token_ids[:at].tolist())
            members = [
                i for i, other in enumerate(trajectories)
                if other.group_id == t.group_id and begins_with(i, state)
            ]  # fmt: skip
            found.append(after(members, state))
    return found


@st.composite
def trees(draw):
    episodes = []
    for number in range(draw(st.integers(1, 6))):
        group = draw(st.sampled_from("gh"))
        whole = [t for t in episodes if t.group_id == group and not t.parent and len(t) > 2]
        ends = draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
        if whole and draw(st.booleans()):
            parent = draw(st.sampled_from(whole))
            kept = draw(st.integers(1, len(parent) - 1))
            tokens = [*parent.token_ids[:kept].tolist(), *ends]
            made = episode(
                f"t{number}",
                tokens,
                draw(st.booleans()),
                parent=parent.trajectory_id,
                own_from=kept,
                group=group,
            )
        else:
            made = episode(f"t{number}", [9, *ends], draw(st.booleans()), group=group)
        episodes.append(made)
    return episodes


@given(trees())
def test_rates_against_the_definition(trajectories):
    actions = np.concatenate([t.action_mask for t in trajectories])
    np.testing.assert_allclose(
        success_rates(trajectories)[actions], np.array(slow_rates(trajectories))[actions], atol=1e-12
    )


def test_rates_are_unbiased_where_branches_are_not_drawn_evenly():
    """Tokens 1 and 2 are equally likely, and four of six ends are right by V = (1/2 + 1) / 2. All episodes of two
    tokens and their branches are counted through; a branch is drawn behind token 1 alone. The mean over all episodes
    would give more weight to it; the rate of the beginning does not."""
    right = {(1, 1): 1.0, (1, 2): 0.0, (2, 1): 1.0, (2, 2): 1.0}
    rates, means = [], []
    for path in itertools.product((1, 2), repeat=4):
        first, second = path[:2], path[2:]
        group = [
            episode("a", [9, *first], bool(right[first])),
            episode("b", [9, *second], bool(right[second])),
        ]
        branches = []
        for end in (1, 2):
            # Of both ends, each as likely as the other.
            tail = (1, end)
            made = episode("c", [9, *tail], bool(right[tail]), parent="a", own_from=2)
            branches.append([*group, made] if first[0] == 1 else group)
        for members in branches:
            rates.append(by_name(members)["a"][1])
            means.append(np.mean([t.correct for t in members]))
    assert np.mean(rates) == pytest.approx(0.75)
    assert np.mean(means) < 0.74


def test_the_loss_is_the_cross_entropy_by_hand():
    """At z = log 3, V = 3/4: for y = 1/2 it is -(log(3/4) + log(1/4)) / 2, with the gradient 1/4."""
    logits = torch.tensor([math.log(3.0), 60.0, -60.0], dtype=torch.float64, requires_grad=True)
    loss = rate_loss(logits, torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64))
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-(math.log(0.75) + math.log(0.25)) / 2, 60.0, 0.0])
    assert logits.grad.tolist() == pytest.approx([0.25, 1.0, 0.0])


def test_advantages_are_rises_of_the_rate_whatever_else_is_rewarded():
    """A right episode of three own tokens with V = .2, .5, .9: rises .3, .4, and 1 - .9, without its reward of .5."""
    for right, last in ((True, 0.1), (False, -0.9)):
        t = episode("a", [9, 1, 2, 3], right)
        found = assign_advantages(
            ALGORITHM, [t], Estimates(np.array([0.0, 0.2, 0.5, 0.9]), np.ones(4)), window_tokens=9
        )
        np.testing.assert_allclose(found.advantage, [0.0, 0.3, 0.4, last])
        assert found.value.tolist() == [False, True, True, True]
        assert found.value_target[1:].tolist() == [float(right)] * 3


def test_branches_have_values_of_success_alone():
    family = {"kind": "branch", "rollouts": 2}
    for target, refused in (("success", False), ("monte_carlo", True)):
        algorithm = ALGORITHM.model_dump() | {"critic": CRITIC.model_dump() | {"target": target}}
        learner = LearnerConfig.model_validate(
            {"group_size": 4, "batch_trajectories": 8, "algorithm": algorithm, "family": family}
        )
        said = [line for line in contradictions(learner) if "first turn would be credited" in line]
        assert bool(said) == refused
    (line,) = CriticConfig(target="success").contradictions("critic")
    assert "cross-entropy; set both to 0" in line

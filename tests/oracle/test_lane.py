"""A lane of another temperature is REINFORCE at 1 on its right answers, and holds the entropy (arXiv:2510.08141)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from launch.run_file.load import load
from learner.advantages import assign_advantages
from learner.curriculum import Curriculum
from learner.intake.trajectories import in_lane
from learner.settings.learner import LaneConfig, LearnerConfig
from learner.update.objective import Adaptive, Tokens, make_objective
from tests.oracle.test_credit_recipes import FILES
from tests.trajectories import batch_of, make_group, make_trajectory

LOGITS = np.array([2.0, 1.0, 0.0, -1.0])


def probabilities(logits, temperature=1.0):
    weights = np.exp(logits / temperature)
    return weights / weights.sum()


def entropy(logits):
    p = probabilities(logits)
    return float(-(p * np.log(p)).sum())


def lane_step(temperature, **changes):
    """Return the expected ascent in logits of the recipe's objective on right answers sampled at a temperature."""
    algorithm = load(FILES["aepo-entropy"]).learner.algorithm.model_copy(update=changes)
    logits = torch.tensor(LOGITS, requires_grad=True)
    logp = logits.log_softmax(-1)
    sampled = probabilities(LOGITS, temperature)
    row = torch.zeros(4, dtype=torch.int64)
    tokens = Tokens(
        # What was sampled at another temperature, by an older policy: no ratio to it has a meaning.
        torch.tensor(np.log(sampled) - 3.0),
        advantage=torch.ones(4, dtype=torch.float64),
        weight=torch.tensor(sampled),
        lag=torch.ones(4),
        sequence=row,
        turn=row,
        logp_proximal=torch.tensor(np.log(sampled) + 1.0),
        lane=torch.ones(4, dtype=torch.bool),
    )
    loss, numbers = make_objective(algorithm)(tokens, Adaptive(), logp, torch.zeros(4))
    loss.backward()
    assert not numbers.clipped.any()
    assert torch.equal(numbers.logp_behaviour, numbers.logp_current)
    return -logits.grad.numpy()


@pytest.mark.parametrize(("temperature", "change"), [(1.2, 0.0253), (1.0, 0.0), (0.8, -0.0328)])
@pytest.mark.parametrize("proximal", ["recomputed", "behaviour", "interpolated"])
def test_the_gradient_is_that_of_the_paper_and_moves_the_entropy_by_the_card_s_numbers(
    temperature, change, proximal
):
    """Card: for logits 2, 1, 0, -1 the entropy rises by .0253 along pi_T - pi at 1.2, and falls by .0328 at 0.8."""
    step = lane_step(temperature, proximal=proximal, corrections=LearnerConfig().algorithm.corrections)
    np.testing.assert_allclose(step, probabilities(LOGITS, temperature) - probabilities(LOGITS), atol=1e-12)
    small = 1e-6
    slope = (entropy(LOGITS + small * step) - entropy(LOGITS - small * step)) / (2 * small)
    assert slope == pytest.approx(change, abs=5e-5)


def test_what_the_lane_is_sampled_at_brings_the_entropy_to_the_target_from_either_side():
    """Every action is right. Steps along pi_T - pi, with T by the measured entropy, end at the target."""
    lane = LaneConfig(target_entropy=0.7)
    for scale in (0.3, 3.0):
        logits = LOGITS * scale
        for _ in range(4000):
            temperature = lane.temperature(entropy(logits))
            logits = logits + 0.5 * (probabilities(logits, temperature) - probabilities(logits))
        assert entropy(logits) == pytest.approx(0.7, abs=0.02)


def with_lane(lane_rewards, *, temperature=1.2):
    config = LearnerConfig(group_size=4, batch_trajectories=4, lane=LaneConfig(members=2, coefficient=0.5))
    own = make_group("g0", [0.0, 1.0, 0.0, 1.0])
    others = [
        make_trajectory(f"g0.l{i}", reward=r, temperature=temperature) for i, r in enumerate(lane_rewards)
    ]
    return config, in_lane(config, [*own, *others])


def test_the_others_are_compared_as_if_the_lane_were_not_there():
    config, members = with_lane([1.0, 0.0])
    assert [t.lane for t in members] == [False] * 4 + [True] * 2
    assert [t.advantage for t in members] == [None] * 4 + [0.5, 0.0]
    alone = assign_advantages(config.algorithm, members[:4])
    beside = assign_advantages(config.algorithm, members)
    n = len(alone.advantage)
    np.testing.assert_array_equal(beside.advantage[:n], alone.advantage)
    np.testing.assert_array_equal(beside.median_advantage[:n], alone.median_advantage)
    assert beside.advantage[n : n + len(members[4])].tolist() == [0.5] * len(members[4])
    reordered = assign_advantages(config.algorithm, members[::-1])
    assert sorted(reordered.advantage) == sorted(beside.advantage)


def test_the_environment_s_word_decides_and_a_wrong_answer_of_the_lane_is_not_trained():
    config, members = with_lane([1.0, 0.0])
    wrong = in_lane(config, [replace(members[4], correct=False), replace(members[5], correct=True)])
    assert [t.advantage for t in wrong] == [0.0, 0.5]
    batch = batch_of(members)
    trained = [int(n) for n in batch.trained]
    assert trained[:5] == [t.action_tokens for t in members[:5]]
    assert trained[5] == 0
    assert batch.temperature.tolist() == [1.0] * 6
    assert batch.count(batch.columns["lane"] > 0).tolist() == [0] * 4 + [len(t) for t in members[4:]]
    assert "lane" not in batch_of(members[:4]).columns


def test_the_term_vanishes_where_all_fail():
    _, members = with_lane([0.0, 0.0])
    assert batch_of(members).trained[4:].tolist() == [0, 0]


def test_members_of_the_lane_are_dealt_behind_the_others_by_the_measured_entropy():
    config, _ = with_lane([])
    c = Curriculum("calculator", config.model_copy(update={"max_policy_lag": 0}))
    assert [t.sampling.temperature for t in c.refill(version=0, lockstep=True)] == [1.0] * 4 + [1.2] * 2
    for measured, temperature in ((0.6, 0.8), (0.4, 1.2)):
        c.entropy = measured
        c.free(next(iter(c.outstanding)))
        tasks = c.refill(version=0, lockstep=True)
        assert [t.sampling.temperature for t in tasks] == [1.0] * 4 + [temperature] * 2
        assert {t.group_size for t in tasks} == {6}
        assert all(t.sampling.temperature == 1.0 for t in tasks[:4])
    again = Curriculum("calculator", config.model_copy(update={"max_policy_lag": 0}), epoch=1)
    restored = again.restore(c.state())
    assert [t.sampling.temperature for t in restored] == [t.sampling.temperature for t in tasks]
    assert again.entropy == 0.4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train_on": "trajectories", "group_size": 1}, 'learner.train_on is "trajectories" beside'),
        ({"replay": {"rule": "uniform"}}, "learner.replay is set beside [learner.lane]"),
        ({"budget": {"kind": "by_uncertainty"}}, 'learner.budget.kind is "by_uncertainty" beside'),
        ({"family": {"kind": "hint"}}, "learner.family is set beside [learner.lane]"),
        ({"algorithm": {"surrogate": {"kind": "weighted"}}}, 'surrogate.kind is "weighted" beside'),
        ({"sampling": {"temperature": 0.7}}, "learner.sampling.temperature is 0.7 beside"),
    ],
)
def test_what_cannot_be_beside_a_lane_is_refused(settings, said):
    from learner.settings.rules import contradictions

    base = {"lane": {}, "algorithm": {"surrogate": {"kind": "clip"}}}
    assert any(said in line for line in contradictions(LearnerConfig.model_validate(base | settings)))
    assert not list(contradictions(LearnerConfig.model_validate(base)))

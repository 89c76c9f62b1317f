"""Distillation on the policy's own samples goes down the reverse KL, stale tokens included: by exact expectations.

The objective is summed over all tokens of a small vocabulary, each with the probability of having been sampled, and its
gradient is compared with that of KL(policy || teacher) by numpy.
"""

import numpy as np
import pytest
import torch

from learner.algorithms.regularisers import distillation_advantage
from learner.settings import rules
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig
from learner.update.adaptive import reference_policies
from learner.update.objective import Adaptive, Tokens, make_objective

LOGITS = np.array([0.3, -1.2, 0.9, 0.1])
TEACHER = np.array([-0.5, 0.4, 0.2, 1.1])
STALE = np.array([0.1, -0.9, 0.6, 0.4])


def logp(logits):
    return logits - np.log(np.exp(logits).sum())


def kl_gradient(logits, teacher):
    """Return the gradient of KL(p || q) by the logits of p: p_k (log p_k - log q_k - KL)."""
    p, distance = np.exp(logp(logits)), logp(logits) - logp(teacher)
    return p * (distance - (p * distance).sum())


def expected_gradient(behaviour, advantage=None, **settings):
    """Return the gradient of the loss by the logits, over all tokens, each as likely as it was to be sampled."""
    config = AlgorithmConfig.model_validate({"distillation": {"teacher": "t", **settings}})
    logits = torch.tensor(LOGITS, requires_grad=True)
    current, sampled = logits.log_softmax(0), torch.from_numpy(np.exp(logp(behaviour)))
    count = torch.zeros(4, dtype=torch.int64)
    tokens = Tokens(
        logp_behaviour=torch.from_numpy(logp(behaviour)),
        advantage=torch.zeros(4) if advantage is None else torch.tensor(advantage),
        weight=sampled,
        lag=torch.ones(4),
        sequence=count,
        turn=count,
        logp_teacher=torch.from_numpy(logp(TEACHER)),
    )
    loss, diagnostics = make_objective(config)(tokens, Adaptive(), current, torch.zeros(4))
    loss.backward()
    return logits.grad.numpy(), diagnostics


@pytest.mark.parametrize("behaviour", [LOGITS, STALE], ids=["fresh", "stale"])
@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_the_expected_gradient_is_that_of_the_reverse_kl(behaviour, coefficient):
    # The default objective weighs a token by current / behaviour, here below its ceiling of 2.
    assert (np.exp(logp(LOGITS) - logp(behaviour)) < 2).all()
    found, _ = expected_gradient(behaviour, coefficient=coefficient)
    np.testing.assert_allclose(found, coefficient * kl_gradient(LOGITS, TEACHER), rtol=1e-6, atol=1e-9)


def test_with_rewards_both_gradients_add_up_and_without_them_rewards_do_nothing():
    advantage = [1.0, -0.5, 0.25, 2.0]
    p = np.exp(logp(LOGITS))
    of_rewards = -p * (np.array(advantage) - (p * advantage).sum())
    both, _ = expected_gradient(LOGITS, advantage, rewards=True)
    np.testing.assert_allclose(both, of_rewards + kl_gradient(LOGITS, TEACHER), rtol=1e-6, atol=1e-8)
    alone, _ = expected_gradient(LOGITS, advantage)
    np.testing.assert_allclose(alone, kl_gradient(LOGITS, TEACHER), rtol=1e-6, atol=1e-8)


def test_worked_by_hand():
    """A token of probability 1/4 that the teacher gives 1/2 has the advantage log 2; the distance is its negative."""
    teacher, own = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    found = distillation_advantage(teacher, own.requires_grad_(), limit=5.0)
    torch.testing.assert_close(found, torch.tensor([0.6931472, 0.0, -5.0]))
    assert not found.requires_grad
    _, diagnostics = expected_gradient(LOGITS)
    torch.testing.assert_close(diagnostics.teacher_distance, torch.from_numpy(logp(LOGITS) - logp(TEACHER)))


def test_a_teacher_elsewhere_needs_temperature_1_and_one_answer_to_a_prompt_is_enough():
    def said(temperature=1.0, **settings):
        distillation = {"teacher": "http://h/v1", "model": "m"} | settings
        config = LearnerConfig.model_validate(
            {
                "algorithm": {"distillation": distillation},
                "sampling": {"temperature": temperature},
                "group_size": 1,
            }
        )
        return list(rules.contradictions(config))

    assert said() == []
    assert "learner.sampling.temperature is 0.7; set it to 1.0" in said(0.7)[0]
    assert "learner.group_size is 1" in said(rewards=True)[0]


def test_a_teacher_is_one_policy_more_and_groups_with_equal_returns_are_trained():
    plain, taught = LearnerConfig(), LearnerConfig(algorithm={"distillation": {"teacher": "t"}})
    assert (reference_policies(plain.algorithm), reference_policies(taught.algorithm)) == ((), ("teacher",))
    assert (plain.drops_uniform_groups, taught.drops_uniform_groups) == (True, False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"distillation": {"teacher": "https://h/v1"}}, "teacher is a URL but f.distillation.model is empty"),
        (
            {"distillation": {"teacher": "folder", "model": "m"}},
            "is no URL, which begins with http:// or https://",
        ),
        (
            {"distillation": {"teacher": "folder"}, "surrogate": {"kind": "bounded"}},
            'surrogate.kind is "bounded", which reads more of the rewards',
        ),
    ],
)
def test_settings_that_cannot_act_are_named(settings, words):
    config = AlgorithmConfig.model_validate(settings)
    said = [*config.contradictions("f"), *config.distillation.contradictions("f.distillation")]
    assert any(words in one for one in said), said

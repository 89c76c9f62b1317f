"""The shaped probability of AMPO (arXiv:2510.02227) against a slow numpy twin, and numbers worked by hand."""

import numpy as np
import pytest
import torch

from learner.algorithms.surrogates import shaped_imitation

PROBABILITIES = np.array([1e-6, 0.01, 0.05, 0.1, 0.3, 0.9, 1.0])


def twin(p, shaping):
    """Return f(p) and the factor of grad log p in its gradient, from the quotient rule: p f'(p)."""
    return p / (p + shaping), p * shaping / (p + shaping) ** 2


@pytest.mark.parametrize("shaping", [0.01, 0.1, 0.5])
def test_value_and_gradient_are_those_of_the_quotient(shaping):
    logp = torch.from_numpy(np.log(PROBABILITIES)).requires_grad_()
    value = shaped_imitation(logp, shaping=shaping)
    value.sum().backward()
    expected, weight = twin(PROBABILITIES, shaping)
    np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(logp.grad.numpy(), weight, rtol=1e-12)


def test_the_numbers_worked_by_hand():
    """f(.1) = .1 / .2 = .5 with the weight .1 * .1 / .04 = .25, which is the largest."""
    logp = torch.tensor([0.1, 0.02, 0.6], dtype=torch.float64).log().requires_grad_()
    value = shaped_imitation(logp, shaping=0.1)
    value.sum().backward()
    assert value[0].item() == pytest.approx(0.5)
    assert logp.grad[0].item() == pytest.approx(0.25)
    assert logp.grad[0] > logp.grad[1:].max()


def test_a_token_that_is_impossible_moves_nothing_and_nothing_overflows():
    logp = torch.tensor([-1e4, -50.0, 0.0], requires_grad=True)
    shaped_imitation(logp, shaping=0.1).sum().backward()
    assert torch.isfinite(logp.grad).all()
    assert logp.grad[:2].max() < 1e-6
    with pytest.raises(ValueError, match="must be > 0"):
        shaped_imitation(logp, shaping=0.0)

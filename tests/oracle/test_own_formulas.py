"""A user's copy of a shipped formula is the shipped formula, bit for bit."""

import numpy as np
import torch

from learner.advantages import assign_advantages
from learner.settings.algorithm import AlgorithmConfig
from learner.update.formula_probe import probe_view
from learner.update.objective import make_objective
from tests.methods import OWN
from tests.trajectories import make_trajectory


def step(**settings):
    """Return loss, gradient and diagnostics of an objective."""
    view = probe_view((9, 3, 0, 6))
    objective = make_objective(AlgorithmConfig.model_validate(settings))
    loss, diagnostics = objective(view.tokens, view.adaptive, view.logp_current, torch.zeros(18))
    loss.backward()
    return [
        loss.detach(),
        view.logp_current.grad,
        diagnostics.clipped,
        diagnostics.truncated,
        diagnostics.correction,
    ]


def test_surrogate_and_correction():
    for centre in ("proximal", "behaviour"):
        shipped = step(
            surrogate={"kind": "clip", "high": 0.1, "low": 0.1, "centre": centre},
            corrections=[{"kind": "truncated", "ceiling": 1.1}],
        )
        own = step(
            surrogate={"kind": f"{OWN}:clip", "high": 0.1, "low": 0.1, "centre": centre},
            corrections=[{"kind": f"{OWN}:truncated", "ceiling": 1.1}],
        )
        assert shipped[2].any()
        assert shipped[3].any()
        assert all(torch.equal(a, b) for a, b in zip(shipped, own, strict=True))


def test_advantage():
    rng = np.random.default_rng(3)
    members = [
        make_trajectory(f"t{i}", group=f"g{i % 3}", reward=float(rng.normal()) if i % 3 else 1.0)
        for i in range(12)
    ]
    credits = [
        assign_advantages(AlgorithmConfig.model_validate({"advantage": {"kind": kind}}), members)
        for kind in ("group", f"{OWN}:group")
    ]
    assert credits[0].advantage.any()
    assert np.array_equal(credits[0].advantage, credits[1].advantage)

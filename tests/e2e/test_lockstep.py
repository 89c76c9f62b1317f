"""mode = "sync": the same roles, lag 0, importance ratios of 1."""

import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("recipe", ["spell_backward", "calculator"])
def test_at_lag_zero_the_ratios_are_one(offbeat, recipe):
    run = offbeat(recipe, "run.mode=sync", "learner.steps=4", "learner.evaluation_tasks=0")
    assert len(run.steps) == 4
    for step in run.steps:
        assert step["learner/policy_lag_max_versions"] == 0
        assert step["learner/ratio_proximal_behaviour_min"] == pytest.approx(1.0, abs=1e-4)
        assert step["learner/ratio_proximal_behaviour_max"] == pytest.approx(1.0, abs=1e-4)
        assert step["learner/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    assert run.summary["policy_version"] == 4

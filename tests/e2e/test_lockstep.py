"""Lockstep (run.mode = "sync") runs with the same roles, policy lag 0 and importance ratios of 1."""

import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("recipe", [pytest.param("spell_backward", marks=pytest.mark.soak), "calculator"])
def test_at_lag_zero_the_ratios_are_one(offbeat, recipe):
    run = offbeat(recipe, "run.mode=sync", "learner.steps=4", "learner.evaluation_tasks=0")
    assert len(run.steps) == 4
    for step in run.steps:
        assert step["learner/policy_lag_max_versions"] == 0
        assert step["learner/ratio_proximal_behaviour_min"] == pytest.approx(1.0, abs=1e-4)
        assert step["learner/ratio_proximal_behaviour_max"] == pytest.approx(1.0, abs=1e-4)
        assert step["learner/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    assert run.summary["policy_version"] == 4


@pytest.mark.soak
def test_windows_stand_still_until_they_are_trained(offbeat):
    """A response of up to 12 tokens is trained in windows of 4, over several steps, and no token lags.

    Meanwhile the engine sleeps, as on a GPU that it shares with the learner.
    """
    run = offbeat(
        "tppo",
        "run.mode=sync",
        "generator.sleep_in_updates=true",
        "learner.steps=8",
        "learner.evaluation_tasks=16",
        "learner.batch_trajectories=32",
        "actor.segment_tokens=4",
        "learner.algorithm.critic.warmup_steps=2",
    )
    assert len(run.steps) == 8
    assert run.summary["policy_version"] == 8, "a step of the critic alone counts: trajectories wait for it"
    assert [step["learner/trained_tokens"] > 0 for step in run.steps] == [False] * 2 + [True] * 6
    for step in run.steps[2:]:
        assert step["learner/policy_lag_max_versions"] == 0
        assert step["learner/ratio_proximal_behaviour_min"] == pytest.approx(1.0, abs=1e-4)
        assert step["learner/ratio_proximal_behaviour_max"] == pytest.approx(1.0, abs=1e-4)
    assert all(step["learner/gpu_wait_seconds"] >= 0 for step in run.steps)
    assert run.steps[-1]["generator/asleep_seconds_total"] > 0
    assert run.summary["accuracy"]["after"] is not None

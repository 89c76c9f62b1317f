"""The shipped recipes learn, at reduced length, and the summary says what happened."""

import statistics

import pytest

pytestmark = pytest.mark.timeout(900)

SHORT = ("learner.steps=60", "learner.evaluation_tasks=200", "run.max_minutes=4")


@pytest.mark.parametrize("recipe", ["spell_backward", "calculator"])
def test_reward_rises(offbeat, recipe):
    run = offbeat(recipe, *SHORT, timeout_s=600)
    returns = [m["rollout/return_mean"] for m in run.steps if "rollout/return_mean" in m]
    first, last = statistics.mean(returns[:8]), statistics.mean(returns[-8:])
    summary = run.summary
    assert last > first + 0.05, f"mean return {first:.3f} at the start, {last:.3f} at the end"
    assert summary["accuracy"]["after"] > summary["accuracy"]["before"] + 0.03
    assert summary["steps"] == 60
    assert summary["policy_lag"]["max_versions"] <= summary["policy_lag"]["bound"]
    assert summary["policy_lag"]["mean_versions"] > 0, "nothing was off-policy: the run was not asynchronous"
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    assert summary["killed_processes"] == []
    assert (run.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run.folder / "tb").glob("events.*"))
    if recipe == "calculator":  # episodes end at the first wrong call: more turns are more right ones
        turns = [m["rollout/turns_mean"] for m in run.steps if "rollout/turns_mean" in m]
        assert statistics.mean(turns[-8:]) > max(1.3, statistics.mean(turns[:8]) + 0.1)

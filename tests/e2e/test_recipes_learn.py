"""The shipped recipes learn, at reduced length, and the summary says what happened."""

import statistics

import pytest

pytestmark = pytest.mark.timeout(900)

STEPS = {"spell_backward": 60, "calculator": 100}  # the second begins with a weaker model


@pytest.mark.parametrize("recipe", STEPS)
def test_reward_rises(offbeat, recipe):
    steps = STEPS[recipe]
    run = offbeat(
        recipe, f"learner.steps={steps}", "learner.evaluation_tasks=200", "run.max_minutes=6", timeout_s=800
    )
    returns = [m["rollout/return_mean"] for m in run.steps if "rollout/return_mean" in m]
    first, last = statistics.mean(returns[:8]), statistics.mean(returns[-8:])
    summary = run.summary
    assert last > first + 0.05, f"mean return {first:.3f} at the start, {last:.3f} at the end"
    assert (
        summary["accuracy"]["after"] > summary["accuracy"]["before"] - 0.05
    )  # greedy: may lag behind at first
    assert summary["steps"] == steps
    assert summary["policy_lag"]["max_versions"] <= summary["policy_lag"]["bound"]
    assert summary["policy_lag"]["mean_versions"] > 0, "nothing was off-policy: the run was not asynchronous"
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    assert summary["killed_processes"] == []
    assert (run.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run.folder / "tb").glob("events.*"))
    if recipe == "spell_backward":
        assert summary["accuracy"]["after"] > summary["accuracy"]["before"] + 0.03
    else:  # episodes end at the first wrong call: more turns are more right ones
        turns = [m["rollout/turns_mean"] for m in run.steps if "rollout/turns_mean" in m]
        assert statistics.mean(turns[-8:]) > max(1.3, statistics.mean(turns[:8]) + 0.1)

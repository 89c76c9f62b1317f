"""The shipped recipes learn, at reduced length, and the summary says what happened."""

import statistics

import pytest

pytestmark = pytest.mark.timeout(900)

STEPS = 100
"""Nine seeds rose by 0.12 to 0.29 between the quarters below, whose means have a spread of 0.02; so the tests below
fail by chance less than once in a thousand runs. After 60 steps, and over 8 at each end, it was once in ten."""


def quarters(run, name: str) -> tuple[float, float]:
    """Means of a metric over the first and the last quarter of the steps that have it."""
    values = [m[name] for m in run.steps if name in m]
    quarter = len(values) // 4
    return statistics.mean(values[:quarter]), statistics.mean(values[-quarter:])


@pytest.mark.parametrize("recipe", ["spell_backward", "calculator"])
def test_reward_rises(offbeat, recipe):
    run = offbeat(
        recipe, f"learner.steps={STEPS}", "learner.evaluation_tasks=200", "run.max_minutes=6", timeout_s=800
    )
    first, last = quarters(run, "rollout/return_mean")
    summary = run.summary
    assert last > first + 0.05, f"mean return {first:.3f} at the start, {last:.3f} at the end"
    assert summary["accuracy"]["after"] > summary["accuracy"]["before"] + 0.05, summary["accuracy"]
    assert summary["steps"] == STEPS
    assert summary["policy_lag"]["max_versions"] <= summary["policy_lag"]["bound"]
    assert summary["policy_lag"]["mean_versions"] > 0, "nothing was off-policy: the run was not asynchronous"
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    assert summary["killed_processes"] == []
    assert (run.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run.folder / "tb").glob("events.*"))
    if recipe == "calculator":  # episodes end at the first wrong call: more turns are more right ones
        fewer, more = quarters(run, "rollout/turns_mean")
        assert more > max(1.3, fewer + 0.1)

"""The shipped recipes learn at reduced length, and the summary reports what happened."""

import statistics

import pytest

pytestmark = pytest.mark.timeout(900)

STEPS = 100
"""Steps of each run.

Nine seeds rose by 0.12 to 0.29 between the quarters below, whose means have a spread of 0.02. The tests below
therefore fail by chance less than once in a thousand runs. With 60 steps, and means over 8 steps at each end,
they failed once in ten runs.
"""


def quarters(run, name: str) -> tuple[float, float]:
    """Return the means of a metric over the first and the last quarter of the steps that report it."""
    values = [m[name] for m in run.steps if name in m]
    quarter = len(values) // 4
    return statistics.mean(values[:quarter]), statistics.mean(values[-quarter:])


@pytest.mark.parametrize("recipe", [pytest.param("spell_backward", marks=pytest.mark.soak), "calculator"])
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
    # An episode ends at the first wrong call, so more turns mean more right calls.
    if recipe == "calculator":
        fewer, more = quarters(run, "rollout/turns_mean")
        assert more > max(1.3, fewer + 0.1)

"""Test that each alarm of the page comes at its threshold and not below it, and that advice waits for it."""

import pytest

from launch.run_file.load import check
from launch.view.overview import overview
from launch.view.run_reader import Columns, Process, RunFiles

LEARNER = {"max_policy_lag": 2, "steps": 90, "batch_trajectories": 10, "group_size": 2}


def files_of(tmp_path, rows, evaluations=(), **changes):
    """Return what is known of a run that goes on, from lines of metrics."""
    config = check({"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": LEARNER}, "test")
    files = RunFiles("run", tmp_path, config=config, state="running", disk_free_bytes=1 << 50)
    for of, lines in ((files.steps, rows), (files.evaluations, evaluations)):
        assert isinstance(of, Columns)
        for line in lines:
            of.add(line)
    for name, value in changes.items():
        setattr(files, name, value)
    return files


def steps(count=12, **metrics):
    """Return lines of metrics; a value that is a function gets the step."""
    return [
        {"step": n, **{k: v(n) if callable(v) else v for k, v in metrics.items()}}
        for n in range(1, count + 1)
    ]


def alarms(files):
    return [(alarm["title"], alarm["value"], alarm["threshold"]) for alarm in overview(files)["alarms"]]


@pytest.mark.parametrize(
    ("metric", "quiet", "loud", "title", "said"),
    [
        ("rollout/failed_share", 0.2, 0.3, "Episodes fail", "30 %"),
        ("learner/stale_token_fraction", 0.05, 0.06, "Tokens are too stale", "6 %"),
        ("learner/effective_sample_size", 0.5, 0.4, "Ratios are beyond their limit", "40 %"),
        ("learner/clip_fraction", 0.3, 0.4, "The clip cuts off", "40 %"),
        ("learner/skipped_steps", 0.0, 2.0, "Steps were skipped", "2"),
        # Of ten steps with ten trajectories each: 4 or 5 left out for each one that is trained.
        ("rollout/uniform_trajectories", lambda n: 40 * n, lambda n: 50 * n, "Hardly a group trains", "83 %"),
    ],
)
def test_an_alarm_has_its_number_and_its_threshold(tmp_path, metric, quiet, loud, title, said):
    assert alarms(files_of(tmp_path, steps(**{metric: quiet}))) == []
    [(found, value, threshold)] = alarms(files_of(tmp_path, steps(**{metric: loud})))
    assert found.startswith(title)
    assert said in value
    assert threshold


def test_trajectories_that_are_dropped_as_stale_count_as_stale(tmp_path):
    metrics = {"learner/stale_token_fraction": 0.0, "rollout/stale_trajectories": lambda n: 10 * n}
    [(title, value, _)] = alarms(files_of(tmp_path, steps(**metrics)))
    assert title.startswith("Tokens are too stale")
    assert value.startswith("50 %")


def test_an_evaluation_that_falls_while_the_reward_rises_is_an_alarm(tmp_path):
    def falling(accuracy):
        return [
            {"step": n, "evaluation/answered_tasks": 100.0, "evaluation/accuracy": value}
            for n, value in ((0, 0.5), (6, 0.9), (12, accuracy))
        ]

    rising = steps(**{"rollout/return_mean": lambda n: n / 10})
    [(title, value, threshold)] = alarms(files_of(tmp_path, rising, falling(0.4)))
    assert title == "The held-out result falls while the reward rises"
    assert value.startswith("0.9 at step 6, 0.4 at step 12")
    assert threshold.startswith("2 standard errors")
    assert alarms(files_of(tmp_path, rising, falling(0.88))) == []
    sinking = steps(**{"rollout/return_mean": lambda n: -n / 10})
    assert alarms(files_of(tmp_path, sinking, falling(0.4))) == []


def test_a_full_disk_a_restart_and_an_open_ledger_are_alarms(tmp_path):
    assert alarms(files_of(tmp_path, steps(), disk_free_bytes=1))[0][0] == "The disk is nearly full"
    engine = Process("", "generator-0", "box", 7, True, True, 2, "killed by signal 9 (SIGKILL)", None, [])
    [(title, value, threshold)] = alarms(files_of(tmp_path, steps(), processes=[engine]))
    assert (title, threshold) == ("generator-0 was started again", "0 restarts")
    assert value == "2 times; at last: killed by signal 9 (SIGKILL)"
    ledger = {"broker/ledger_stored_tokens": 9.0, "broker/ledger_held_tokens": 2.0}
    closed = steps(**ledger, **{"broker/ledger_trained_tokens": 7.0})
    assert alarms(files_of(tmp_path, closed)) == []
    assert alarms(files_of(tmp_path, steps(**ledger, **{"broker/ledger_trained_tokens": 6.0}))) == [
        ("The ledger does not close", "+1 tokens", "0 tokens")
    ]


def test_advice_waits_until_there_is_no_alarm(tmp_path):
    idle = {"learner/idle_share": 0.5, "generator/idle_share": 0.0}
    page = overview(files_of(tmp_path, steps(**idle)))
    assert page["alarms"] == []
    assert [tip["title"] for tip in page["advice"]] == [
        "The learner waits for trajectories: add generators or actors"
    ]
    page = overview(files_of(tmp_path, steps(**idle, **{"rollout/failed_share": 0.9})))
    assert len(page["alarms"]) == 1
    assert page["advice"] == []

"""Test how `offbeat plan --calibrate` watches a run; each look at the broker adds a step to its metrics."""

import json
from types import SimpleNamespace

import pytest

from launch.errors import LaunchError, NoAnswer, RoleFailed, TooSlow
from launch.plan import calibration as plan_calibration
from launch.plan.calibration import LEAST_STEPS, _Calibration, for_measuring
from launch.run_file.load import check

CONFIG = check(
    {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "security": {"encrypt": False},
        "learner": {"steps": 3, "evaluation_tasks": 7},
        "run": {"name": "sums"},
    },
    "test",
)


class Run:
    """A run that does one step at each look at its broker."""

    def __init__(self, folder):
        self.path, self.steps, self.stands_still = folder / "metrics.jsonl", 0, False

    def fetch(self, http, *, keys):
        if not self.stands_still:
            self.steps += 1
            line = {"step": self.steps, "learner/step_seconds": 0.1, "learner/policy_version": self.steps}
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
                file.write(json.dumps({"step": self.steps, "evaluation/accuracy": 0.5}) + "\n")
        gauges = {"running_requests": 3.0}
        peers = [
            {"name": "generator-0", "role": "generator", "gauges": gauges},
            {"name": "actor-0", "role": "actor", "gauges": {}},
        ]
        return {"peers": peers, "ledger": {"stored": {"action_tokens": 100 * self.steps}}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    made = Run(tmp_path)
    monkeypatch.setattr(plan_calibration, "fetch", made.fetch)
    monkeypatch.setattr(plan_calibration, "LOOK_S", 0.001)
    return made


def watching(folder, posts=()):
    crew = SimpleNamespace(
        posts=posts, failed=lambda name: RoleFailed(f"{name} ended"), start_next=lambda joined: None
    )
    return _Calibration(CONFIG, folder, crew, panel=None, interrupt=SimpleNamespace(asked=False))


def test_it_measures_from_the_end_of_a_step_to_the_end_of_another(run, tmp_path):
    calibration = watching(tmp_path)
    calibration._until(5, deadline_s=10.0)
    begun = run.steps
    seen = calibration._watch(0.02)
    assert len(seen.lines) >= LEAST_STEPS
    assert seen.before["step"] == begun + 1
    assert [line["step"] for line in seen.lines] == list(range(begun + 2, begun + 2 + len(seen.lines)))
    # At both ends, the broker is looked at after a step.
    assert seen.sampled == pytest.approx(100 * len(seen.lines), abs=200)
    assert seen.seconds >= 0.02
    assert seen.generators[0] == [{"running_requests": 3.0}]
    assert seen.actors[0] == []


def test_a_run_without_steps_is_too_slow(run, tmp_path):
    run.stands_still = True
    with pytest.raises(TooSlow, match=r"0 of 5 steps of the warm-up in 0.01 s; look at .*logs"):
        watching(tmp_path)._until(5, deadline_s=0.01)


def test_a_run_with_too_few_steps_asks_for_more_seconds(run, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_calibration, "LEAST_STEPS", 10**9)
    with pytest.raises(TooSlow, match=r"needed are 1000000000; give --calibrate more seconds than 0.01"):
        watching(tmp_path)._watch(0.01)


def test_who_has_ended_is_an_error(run, tmp_path):
    with pytest.raises(RoleFailed, match="actor-0 ended"):
        watching(tmp_path, [SimpleNamespace(name="actor-0", child="a process", running=False)])._until(
            5, deadline_s=10.0
        )


def test_a_broker_that_is_silent_is_an_error(run, tmp_path, monkeypatch):
    def silent(http, *, keys):
        raise NoAnswer("refused")

    monkeypatch.setattr(plan_calibration, "fetch", silent)
    with pytest.raises(LaunchError, match="the broker does not answer: refused"):
        watching(tmp_path)._until(5, deadline_s=10.0)


def test_what_is_measured_has_no_evaluations_and_no_end():
    config = for_measuring(CONFIG)
    assert config.run.name == "sums-calibration"
    assert config.learner.evaluation_tasks == 0
    assert config.learner.steps > 10_000
    assert config.learner.batch_trajectories == CONFIG.learner.batch_trajectories

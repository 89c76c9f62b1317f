"""Test what the truncation benchmark concludes from its runs."""

import json
from dataclasses import asdict

import pytest

from benchmarks.envs.letters import LongTailSuite, share_right
from benchmarks.real_system import BudgetedCurriculum
from benchmarks.truncation import SMOOTHED, Ended, Run, configured, earlier, ratios, smoothed, tables
from envs.errors import EnvError
from learner.settings.learner import EvaluationConfig


def run(arm, seed, curve, *, start=0.2, end=0.8):
    zeros = dict.fromkeys(
        (
            "tokens_per_second", "generated_per_second", "idle_learner", "idle_generator", "running_requests",
            "lag_mean", "stale_tokens", "tokens_mean", "tokens_99", "tokens_mean_last", "tail",
        ),
        0.0,
    )  # fmt: skip
    return Run(
        arm=arm, seed=seed, minutes=1.0, start=start, end=end, curve=curve, steps=1, lag_max=0, **zeros
    )


def test_the_level_is_a_share_of_what_the_waiting_arm_gained():
    runs = [
        run("waiting", 0, [(10.0, 0.3), (40.0, 0.5), (60.0, 0.8)]),
        run("tppo", 0, [(5.0, 0.4), (10.0, 0.5), (20.0, 0.9)], end=0.95),
    ]
    assert ratios(runs, "waiting", 0.5) == [4.0]
    assert ratios(runs, "waiting", 0.9) == [3.0]


def test_an_arm_that_never_gets_there_is_shown_and_not_averaged():
    runs = [
        run("waiting", 0, [(30.0, 0.8)]),
        run("waiting", 1, [(30.0, 0.8)]),
        run("tppo", 0, [(10.0, 0.8)]),
        run("tppo", 1, [(10.0, 0.3)]),
    ]
    table = tables(runs, [0.9])
    assert "| tppo | 10.0 | not reached |" in table
    assert "3.00 (1 of 2)" in table


def test_smoothing_delays_no_arm():
    """A reward that rises with time gives equal curves for dense and for sparse arrivals."""
    many = {kind: 12 * size for kind, size in SMOOTHED.items()}
    for gap in (0.1, 0.5):
        ended = [
            Ended(gap * i, kind, 0.01 * gap * i, 1) for kind in SMOOTHED for i in range(int(many[kind] / gap))
        ]
        curve = smoothed(sorted(ended, key=lambda e: e.time), long_share=0.1)
        assert curve
        assert all(reward == pytest.approx(0.01 * time, abs=1e-3) for time, reward in curve)


def test_kinds_count_by_their_share_of_tasks_however_many_ended():
    ended = [Ended(float(i), kind, float(kind), 1) for i in range(1000) for kind in (False, True)]
    assert {reward for _, reward in smoothed(ended, long_share=0.1)} == {0.1}


def test_the_arms_differ_in_what_is_trained_when_only():
    one, other = (configured(arm, 0, 1.0, []) for arm in ("tppo", "waiting"))
    assert one.learner.train_on == "windows"
    assert one.run.mode == "sync"
    assert configured("streamed", 0, 1.0, []).run.mode == "async"
    assert other.learner.train_on == "trajectories"
    assert other.run.mode == "sync"
    same = {"train_on": "groups"}
    assert one.learner.model_copy(update=same) == other.learner.model_copy(update=same)
    assert (one.model, one.env, one.generator, one.actor) == (
        other.model,
        other.env,
        other.generator,
        other.actor,
    )


def test_most_tasks_are_short_and_demonstrations_never_end_early():
    suite = LongTailSuite(short=8, long=100, long_share=0.1)
    tasks = [suite.task(i, "train") for i in range(500)]
    assert all(len(suite.demonstration(i, "train")[1]["content"]) == 100 for i in range(50))
    assert 0.05 < sum(task.long for task in tasks) / len(tasks) < 0.15
    assert {(task.long, task.length) for task in tasks} == {(False, 8), (True, 100)}
    assert tasks == [suite.task(i, "train") for i in range(500)]


def test_a_response_is_given_the_tokens_that_its_task_asks_for():
    config = configured("tppo", 0, 1.0, []).learner
    curriculum = BudgetedCurriculum("env", config, next_index=1_000_000)
    suite = LongTailSuite(short=8, long=100, long_share=0.2)
    curriculum.budget = lambda index, split: suite.task(index, split).length
    held_out = curriculum.evaluation("before", 0, EvaluationConfig(tasks=4))
    tasks = curriculum.refill(version=0, lockstep=True) + held_out
    asked = [suite.task(t.data["index"], t.data["split"]).length for t in tasks]
    assert [t.sampling.max_turn_tokens for t in tasks] == asked
    assert set(asked) == {8, 100}


def test_a_long_response_is_asked_for_by_the_prompt():
    tasks = [LongTailSuite(long_share=0.5).task(i, "heldout") for i in range(50)]
    assert {(task.question[0], task.long) for task in tasks} == {("0", False), ("1", True)}
    assert len({task.question for task in tasks}) == 50


def test_it_pays_neither_to_stop_early_nor_to_go_on():
    assert share_right("a" * 8, "a", 8) == 1.0
    assert max(share_right("a" * n, "a", 8) for n in range(30) if n != 8) < 1.0


@pytest.mark.parametrize(
    "params", [{"short": 0}, {"short": 9, "long": 8}, {"long_share": 1.5}, {"long_share": -0.1}]
)
def test_settings_that_cannot_be(params):
    with pytest.raises(EnvError, match="="):
        LongTailSuite(**params)


def test_results_go_on_where_they_stopped_but_not_under_other_settings(tmp_path):
    path, settings = tmp_path / "runs.json", {"file": "a = 1", "overrides": []}
    assert earlier(path, settings) == []
    made = run("tppo", 0, [(10.0, 0.8)])
    path.write_text(json.dumps({"settings": settings, "runs": [asdict(made)]}))
    assert earlier(path, settings) == [made]
    with pytest.raises(SystemExit, match="other settings"):
        earlier(path, {**settings, "overrides": ["learner.steps=1"]})

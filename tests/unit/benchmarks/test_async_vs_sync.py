"""Test what the benchmarks of asynchrony conclude from their runs, and the tasks they run on."""

import asyncio
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import lag_price
from benchmarks.async_vs_sync import (
    ARMS,
    Run,
    Snapshot,
    Step,
    configured,
    fingerprint,
    pairs,
    read,
    reward_ratio,
    tables,
    time_to_reward,
    token_ratio,
)
from benchmarks.envs.letters import LENGTHS, WorkSuite
from benchmarks.real_system import System
from envs.errors import EnvError
from learner.intake.session import TIME_LIMIT


def run(mode, *, seconds, steps=10, tokens=100, rewards=(0.2, 0.6), seed=0):
    """Return a run with equal steps and equal gains."""
    times = np.linspace(0, seconds, len(rewards))
    return Run(
        arm="uniform",
        mode=mode,
        seed=seed,
        settings="x",
        seconds=seconds,
        steps=[Step(seconds * (i + 1) / steps, tokens * (i + 1), 0.0, 0.0, None) for i in range(steps)],
        snapshots=[Snapshot(float(t), i, r) for i, (t, r) in enumerate(zip(times, rewards, strict=True))],
        idle_learner=0.5,
        idle_generator=0.25,
        running_requests=1.0,
        episodes_running=2.0,
        tokens_per_trajectory=3.0,
        lag_mean=0.0,
        lag_max=0,
        stale_tokens=0.0,
        cpu={"learner": 0.5},
    )


def test_times_are_compared_at_the_tokens_that_both_have_trained():
    sync, fast = run("sync", seconds=60.0), run("async", seconds=20.0, tokens=200)
    assert token_ratio(sync, fast) == pytest.approx(60.0 / 10.0)


def test_times_are_compared_at_a_reward_that_both_have_reached():
    sync, fast = (
        run("sync", seconds=100.0, rewards=(0.2, 0.7)),
        run("async", seconds=10.0, rewards=(0.2, 1.2)),
    )
    level = 0.2 + 0.9 * 0.5
    assert time_to_reward(sync, level) == pytest.approx(90.0)
    assert reward_ratio(sync, fast) == pytest.approx(90.0 / 4.5)


def test_a_level_is_reached_when_the_curve_first_crosses_it():
    noisy = run("sync", seconds=30.0, rewards=(0.0, 0.5, 0.3, 0.6))
    assert time_to_reward(noisy, 0.5) == pytest.approx(10.0)
    assert time_to_reward(noisy, 0.9) is None


def test_runs_are_compared_seed_by_seed():
    runs = [run("sync", seconds=10.0, seed=s) for s in (0, 1, 2)] + [run("async", seconds=5.0, seed=2)]
    assert [(a.seed, b.mode) for a, b in pairs(runs, "uniform")] == [(2, "async")]
    assert "| uniform | 1 | 2.00 |" in tables(runs, ["uniform", "heavy"])


def test_a_bound_is_compared_with_lockstep_of_its_own_seed_and_needed_work_with_the_default():
    runs = [
        run("0", seconds=10.0),
        replace(run("4", seconds=5.0), lag_mean=3.0),
        replace(run("needed", seconds=4.0), lag_mean=1.5),
        replace(run("needed", seconds=4.0, seed=1), lag_mean=9.0),
    ]
    lines = lag_price.table(runs).splitlines()
    assert lines[2].startswith("| uniform | 0 | 0.00, 0 | 50% | 25% | 1.00 | 100 | - | - |")
    assert lines[3].startswith("| uniform | 4 | 3.00, 0 | 50% | 25% | 0.50 | 200 | 2.00 | 2.00 |")
    assert "| 2.50 | 2.50 |" in lines[4], "the other seed has no lockstep"
    assert [ratio for _, _, ratio in lag_price.headlines(runs)] == ["0.50"]


def test_arms_of_lag_differ_in_what_may_be_under_way():
    def settings(arm):
        learner = configured("heavy", "async", 0, "model", lag_price.overrides(arm, 1.0)).learner
        return learner.max_policy_lag, learner.under_way

    found = [settings(arm) for arm in lag_price.ARMS]
    assert found == [(4, "bound"), (1, "bound"), (2, "bound"), (4, "bound"), (4, "needed")]


def test_runs_are_read_as_they_were_written():
    written = replace(run("async", seconds=5.0), stale_tokens=0.125)
    assert read([json.dumps(asdict(written))]) == [written]


def test_the_modes_of_an_arm_differ_in_nothing_else():
    for arm in ARMS:
        one, other = (configured(arm, mode, 3, "model", []) for mode in ("sync", "async"))
        assert one.model_copy(update={"run": other.run}) == other
        assert (one.run.mode, one.run.seed) == ("sync", 3)
    assert len({fingerprint(arm, []) for arm in ARMS}) == len(ARMS)


def test_responses_of_an_arm_have_the_lengths_it_states():
    suite = WorkSuite(kinds=[[8, 1, 0.5], [12, 3, 0.5]], seed=1)
    for index in range(40):
        talk = suite.demonstration(index, "train")
        length = LENGTHS[int(talk[0]["content"][0])]
        assert len(talk) == {8: 2, 12: 6}[length]
        assert {len(m["content"]) for m in talk if m["role"] == "assistant"} == {length}


def test_tool_latencies_follow_the_law_and_the_seed():
    drawn = [WorkSuite(latency_s=(0.2, 2.0), seed=4).latency() for _ in range(2)]
    assert drawn[0] == drawn[1]
    suite = WorkSuite(latency_s=(0.2, 2.0), seed=4)
    many = np.array([suite.latency() for _ in range(4000)])
    assert 0.2 <= many.min() < 0.21 < 1.95 < many.max() <= 2.0
    assert np.median(many) == pytest.approx(np.sqrt(0.2 * 2.0), rel=0.05)


def test_only_training_waits_for_tools(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr("benchmarks.envs.letters.asyncio.sleep", sleep)
    suite = WorkSuite(kinds=[[8, 2, 1.0]], latency_s=(0.2, 2.0))

    async def play(split):
        episode = suite.episode()
        question = (await episode.reset({"index": 3, "split": split}))[0]["content"]
        first = await episode.step(question[1] * 8)
        second = await episode.step(first.observation["content"][1] * 4)
        return first, second

    first, second = asyncio.run(play("heldout"))
    assert not slept
    assert (first.rewards, first.done, first.observation["role"]) == ({"share": 0.5}, False, "tool")
    assert (second.rewards, second.done) == ({"share": 0.25}, True)
    asyncio.run(play("train"))
    assert len(slept) == 2


@pytest.mark.parametrize(
    "params",
    [{"kinds": [[9, 1, 1.0]]}, {"kinds": [[8, 1, 0.5]]}, {"latency_s": [0.0, 1.0]}, {"latency_s": [1.0]}],
)
def test_tasks_that_cannot_be_are_refused(params):
    with pytest.raises(EnvError):
        WorkSuite(**params)


def test_only_the_heavy_arm_gives_responses_a_budget():
    for arm in ARMS:
        config = configured(arm, "async", 0, "model", [])
        suite = WorkSuite(**config.env.params)
        assert suite.budgeted == (arm == "heavy")
        task = suite.task(3, "train")
        assert suite.budget(3, "train") == task.length + 1  # plus the end of the turn


def test_a_benchmark_ends_when_a_role_of_it_does(tmp_path):
    alive = SimpleNamespace(name="actor-0", running=True)
    gone = SimpleNamespace(name="generator-0", running=False, tail=lambda: "no token for 8.2 s")
    config = configured("uniform", "sync", 0, "model", [])
    assert System(config, tmp_path, "model", [alive]).stop_reason() == ""
    assert System(config, tmp_path, "model", [alive]).stop_reason(deadline=0.0) == TIME_LIMIT
    with pytest.raises(RuntimeError, match="generator-0 has ended:\nno token"):
        System(config, tmp_path, "model", [alive, gone]).stop_reason()

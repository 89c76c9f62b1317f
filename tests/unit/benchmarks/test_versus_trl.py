"""Test the pure parts of the benchmark against TRL: curves, thresholds, tables, equal settings."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import spread
from benchmarks.versus_trl import program as versus_trl
from benchmarks.versus_trl.program import tables
from benchmarks.versus_trl.rewards import last_number, letters
from benchmarks.versus_trl.runs import (
    ARMS,
    FILES,
    REWARDS,
    TASKS,
    Spec,
    configured,
    curve,
    ratio,
    seconds_to,
    step_seconds,
    tokens_per_second,
    write_rows,
)
from envs.registry import make_suite


def result(arm: str, seed: int, *, pace: float, task: str = "letter") -> dict[str, Any]:
    """Return a run whose steps of 100 tokens take ``pace`` seconds, and whose reward rises by 0.1 a step."""
    ends = [(pace * (i + 1), 100) for i in range(12)]
    rewards = [(end, min(1.0, 0.1 * i)) for i, (end, _) in enumerate(ends) for _ in range(64)]
    return {"task": task, "arm": arm, "seed": seed, "startup": 5.0, "steps": ends, "rewards": rewards}


def test_tokens_per_second_leaves_out_the_first_steps():
    steps = [(10.0, 7), (11.0, 50), (12.0, 50), (13.0, 50)]
    assert tokens_per_second(steps, settle=1) == pytest.approx(50.0)
    assert tokens_per_second(steps, settle=3) == pytest.approx(50.0)


def test_tokens_per_second_of_a_run_with_few_steps_takes_what_there_is():
    assert tokens_per_second([(10.0, 7), (12.0, 50)], settle=3) == pytest.approx(25.0)
    assert tokens_per_second([(10.0, 7)]) is None
    assert tokens_per_second([]) is None
    assert step_seconds([(1.0, 1)]) is None


def test_smoothing_delays_neither_side():
    """A step function keeps its place, however many trajectories arrive at a time."""
    for size in (1, 8):
        rewards = [(t + 0.5, float(t >= 100)) for t in range(200) for _ in range(size)]
        reached = seconds_to(curve(rewards, 16 * size), 0.5)
        assert reached == pytest.approx(100.0, abs=1.0)


def test_curve_takes_rewards_in_the_order_of_time():
    assert curve([(3.0, 1.0), (1.0, 0.0)], 1) == [(1.0, 0.0), (3.0, 1.0)]


def test_curve_of_fewer_trajectories_than_its_window_is_empty():
    assert curve([(1.0, 1.0)], 2) == []
    assert seconds_to([], 0.5) is None


def test_a_level_that_is_touched_counts_the_first_time():
    assert seconds_to([(1.0, 0.1), (2.0, 0.9), (3.0, 0.2)], 0.5) == 2.0


def test_ratio_and_spread_leave_out_what_is_missing():
    assert ratio([None, 4.0], [1.0, 2.0]) == [2.0]
    assert spread([None, 2.0], 1, wanted=2) == "2.0 (1 of 2)"


def test_tables_set_ours_over_each_of_trls_arms():
    results = [
        result(arm, seed, pace=pace * (1 + 0.1 * seed))
        for seed in (0, 1, 2)
        for arm, pace in (("trl", 1.0), ("trl-1", 2.0), ("async", 0.5))
    ]
    text = tables(results)
    assert "| | over trl | over trl-1 |" in text
    assert "| async | 2.00 [2.00, 2.00]; 2.00 [2.00, 2.00] | 4.00 [4.00, 4.00]; 4.00 [4.00, 4.00] |" in text
    assert "| trl | 91 [83, 100] | 1.100 [1.000, 1.200] |" in text


def test_what_a_level_costs_is_told_in_steps_seconds_and_tokens():
    """The eighth step is the first whose 64 rewards have the mean 0.7; a pace changes the seconds alone."""
    runs = [
        result(arm, seed, pace=pace * (1 + 0.1 * seed))
        for seed in range(5)
        for arm, pace in (("trl", 1.0), ("async", 0.5))
    ]
    text = tables(runs)
    assert "| trl | 8.0 [8.0, 8.0] | 9.6 [8.0, 11.2] | 800.0 [800.0, 800.0] | 5 of 5 |" in text
    assert "| trl over async | 1.00 [1.00, 1.00] | 2.00 [2.00, 2.00] | 1.00 [1.00, 1.00] | 5 of 5 |" in text
    told = [row for row in versus_trl.headlines(runs) if row[0].startswith("speed to reward 0.7")]
    assert told == [
        ("speed to reward 0.7, task `letter`, arm `async`, 5 seeds", "TRL, arm `trl`", "2.00 [2.00, 2.00]")
    ]
    assert not [row for row in versus_trl.headlines(runs[:8]) if row[0].startswith("speed")]


def test_a_run_is_over_when_its_last_rewards_have_the_level():
    spec = Spec("trl", {}, "model", "folder", 9, 60.0, 1, level=0.5, window=2)
    assert not spec.over([(1.0, 1.0)]), "fewer rewards than a window"
    assert spec.over([(1.0, 0.0), (2.0, 0.0), (3.0, 1.0)])
    assert not spec.over([(1.0, 1.0), (2.0, 0.0), (3.0, 0.0)])
    assert not Spec("trl", {}, "model", "folder", 9, 60.0, 1).over([(1.0, 1.0)])


def test_a_level_that_was_not_reached_is_said_in_the_table():
    slow = result("trl", 0, pace=1.0)
    slow["rewards"] = [(t, 0.1) for t, _ in slow["rewards"]]
    assert "| - | 12 | 5 | 1 |" in tables([slow])


def test_with_one_side_there_are_no_ratios():
    text = tables([result("sync", 0, pace=1.0)])
    assert "| sync | 100 |" in text
    assert "over" not in text.partition("median, in brackets least and most over seeds")[2]


def fresh(learner):
    """Return the settings in float32, without the parts that handle stale tokens."""
    algorithm = learner.algorithm
    surrogate = algorithm.surrogate.model_copy(update={"centre": "behaviour"})
    algorithm = algorithm.model_copy(update={"corrections": (), "surrogate": surrogate})
    return learner.model_copy(update={"max_policy_lag": 0, "algorithm": algorithm, "dtype": "float32"})


def test_all_arms_of_a_task_train_the_same():
    for task, settings in TASKS.items():
        configs = [configured(task, arm, 3, []) for arm in settings.arms]
        parts = [(c.model, c.env, fresh(c.learner), c.run.seed) for c in configs]
        assert all(part == parts[0] for part in parts)
        for dtype in ("float32", "bfloat16"):
            lockstep = [c.learner for c in configs if c.run.mode == "sync" and c.learner.dtype_used == dtype]
            assert all(learner == lockstep[0] for learner in lockstep)
        assert {c.run.mode for c in configs} == {"sync", "async"}


def test_an_arm_says_its_precision():
    for arm in ARMS:
        config = configured("letter-10m", arm, 3, [])
        expected = "bfloat16" if arm.endswith("-bf16") else "float32"
        assert config.learner.dtype_used == config.generator.dtype_used == expected


def test_fingerprint_tells_arms_and_settings_apart():
    config = configured("letter", "trl", 0, [])
    other = configured("letter", "trl", 0, ["learner.optimizer.lr=2e-3"])
    prints = {
        versus_trl.fingerprint(config, "trl", 60, 1.0),
        versus_trl.fingerprint(config, "trl-1", 60, 1.0),
        versus_trl.fingerprint(config, "trl", 61, 1.0),
        versus_trl.fingerprint(other, "trl", 60, 1.0),
    }
    assert len(prints) == 4


def test_what_is_there_is_not_run_again(tmp_path, monkeypatch, capsys):
    out, ran = tmp_path / "runs.jsonl", []

    def run(task: str, arm: str, *_: Any) -> dict[str, Any]:
        ran.append(arm)
        made = result(arm, 0, pace=1.0)
        return {key: made[key] for key in ("startup", "steps", "rewards")} | {"phases": {}, "notes": {}}

    monkeypatch.setattr(versus_trl, "run", run)
    command = ["--tasks", "letter", "--arms", "trl", "sync", "--seeds", "0", "--out", str(out)]
    versus_trl.main(command)
    versus_trl.main(command)
    assert sorted(ran) == ["sync", "trl"]
    versus_trl.main([*command, "--steps", "7"])
    assert len(ran) == 4
    assert len(out.read_text().splitlines()) == 4
    assert "over trl" in capsys.readouterr().out


def test_spec_survives_its_file(tmp_path):
    config = configured("tool", "async", 1, []).model_dump(mode="json")
    spec = Spec("async", config, "model", "folder", 9, 60.0, 1)
    spec.write(tmp_path / "spec.json")
    assert Spec.read(tmp_path / "spec.json") == spec


def test_without_trl_the_peer_names_the_extra(tmp_path):
    """A module that cannot be imported stands for a module that is not installed."""
    (tmp_path / "trl.py").write_text("raise ImportError('No module named trl')")
    (tmp_path / "datasets.py").write_text("")
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "transformers.py").write_text("class TrainerCallback: pass")
    root = Path(versus_trl.__file__).parents[2]
    code = f"import sys; sys.path[:0] = {[str(tmp_path), str(root)]}; import benchmarks.versus_trl.peer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "bench" in done.stderr


def test_rows_are_written_the_same_each_time_and_rewarded_in_trls_form(tmp_path):
    write_rows(tmp_path / "a")
    write_rows(tmp_path / "b")
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    params = {"train": str(tmp_path / "a" / "spelled.jsonl"), "reward": f"{REWARDS}:letters"}
    suite = make_suite("rows", params)
    row = suite.row(0, "train")
    (message,) = row.values["prompt"]
    assert row.values["answer"] == 2 * message["content"]
    assert letters([[{"content": "abcabc"}], [{"content": "abd"}]], ["abcabc", "abcabc"]) == [1.0, 2 / 6]
    said = ["40 + 2 = 42.", "42 or 43", "none"]
    completions = [[{"content": text}] for text in said]
    assert last_number(completions, ["42"] * 3, prompts=[]) == [1.0, 0.0, 0.0]

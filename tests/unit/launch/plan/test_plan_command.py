"""Test `offbeat plan`: its arguments, what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from launch.cli import main
from launch.plan.observations import LEAST_STEPS, WARM_UP_STEPS
from launch.plan.simulation import setting_of
from launch.run_file.load import check

RECIPES = Path(__file__).parents[4] / "recipes"
RATES = """
[generator]
decode = [{ sequences = 1, tokens_per_second = 100 }, { sequences = 16, tokens_per_second = 800 }]
[learner]
seconds_per_token = 0.001
[episode]
turn_tokens = 10
[measured]
run = "spelling"
mode = "async"
seconds = 30.0
steps = 20
concurrent_episodes = 16
trained_tokens_per_second = 640.0
steps_per_second = 0.5
generator_idle_share = 0.1
"""
RUN = """
[model]
path = "m"
[env]
name = "calculator"
[learner]
batch_trajectories = 16
group_size = 4
max_policy_lag = 1
[run]
"""


@pytest.fixture
def files(tmp_path):
    rates, run = tmp_path / "rates.toml", tmp_path / "run.toml"
    rates.write_text(RATES)
    run.write_text(RUN + f'dir = "{tmp_path}"\n')
    return [str(run), "--rates", str(rates), "--steps", "10"]


def test_what_is_sampled_beside_the_trained_members_of_a_group_is_planned():
    def members(**learner):
        sections = {"model": {"path": "m"}, "env": {"name": "calculator"}}
        setting = setting_of(check({**sections, "learner": {"group_size": 4, **learner}}, "test"))
        return setting.members, setting.baselines

    assert members() == (4, 0)
    assert members(algorithm={"advantage": {"kind": "greedy"}}) == (5, 1)
    assert members(lane={"members": 2}, algorithm={"surrogate": {"kind": "clip"}}) == (6, 2)


def test_supervised_training_has_nothing_to_plan(files, capsys):
    assert main(["plan", *files, "learner.given.share=1.0"]) == 1
    assert "no generator and no actor has work to plan" in capsys.readouterr().err


def test_a_table_has_a_line_for_each_setting_and_one_for_the_run_that_was_measured(files, capsys):
    assert main(["plan", *files, "--generators", "1", "2", "--actors", "1", "3", "--episodes", "8"]) == 0
    printed = capsys.readouterr().out.splitlines()
    head = next(n for n, line in enumerate(printed) if line.startswith("generators"))
    assert [line.split()[:3] for line in printed[head + 1 : head + 5]] == [
        ["1", "1", "8"], ["1", "3", "24"], ["2", "1", "8"], ["2", "3", "24"],
    ]  # fmt: skip
    assert any(line.startswith("generator idle") and "points" in line for line in printed)
    assert any(line.startswith("note: up to 24 sequences") for line in printed)


def test_json_has_settings_and_outcomes(files, capsys):
    assert main(["plan", *files, "--json", "--own-cores", "--rate", "episode.turn_tokens=20"]) == 0
    said = json.loads(capsys.readouterr().out)
    (row,) = said["settings"]
    assert row["shared"] is False
    assert row["batch_groups"] == 4
    assert row["trained_tokens_per_second"] == pytest.approx(row["steps_per_second"] * 16 * 20, rel=0.01)
    assert said["measured_run_predicted"]["trained_tokens_per_second"] > 0


def test_the_run_that_was_measured_is_predicted_as_it_was_set_whatever_is_planned(files, capsys):
    rates = Path(files[2])
    rates.write_text(
        rates.read_text() + "batch_groups = 4\nmembers = 4\nmax_policy_lag = 1\nmax_num_seqs = 64\n"
    )
    predicted = []
    for overrides in ([], ["learner.batch_trajectories=64", "run.mode=sync", "generator.max_num_seqs=2"]):
        assert main(["plan", *files, "--json", *overrides]) == 0
        predicted.append(json.loads(capsys.readouterr().out)["measured_run_predicted"])
    assert predicted[0] == predicted[1]


def test_the_run_file_decides_the_mode(files, capsys):
    assert main(["plan", *files, "--json", "run.mode=sync"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["settings"][0]["sync"] is True
    assert said["settings"][0]["lag_max_versions"] == 0
    assert "run.mode = 'async'" in said["notes"][-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--generators", "0"], "--generators 0: give a number of at least 1"),
        (["--steps", "0"], "--steps 0"),
        (["--join-every", "-1"], "--join-every -1"),
        (["--actors", *map(str, range(1, 300))], "299 settings"),
        (["--calibrate", "1"], "--calibrate 1: give 5 to 3600 seconds"),
        (["--calibrate", "nan"], "--calibrate nan: give 5"),
        (["--join-every", "nan"], "--join-every nan"),
        (["--rate", "learner.speed=1"], "learner.speed: unknown key"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_cure(files, capsys, arguments, said):
    assert main(["plan", *files, *arguments]) == 1
    assert said in capsys.readouterr().err


def test_rates_that_cannot_be_written_are_found_before_anything_starts(files, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "rates.toml"
    assert main(["plan", files[0], "--calibrate", "30", "--rates", str(path)]) == 1
    assert f"--rates {path}: cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "run-calibration").exists()


def test_a_run_that_trains_on_windows_is_refused(files, capsys):
    assert main(["plan", str(RECIPES / "methods" / "tppo.toml"), *files[1:]]) == 1
    assert "learner.train_on is 'windows'" in capsys.readouterr().err


def test_without_rates_it_says_how_to_get_them(files, capsys, tmp_path):
    assert main(["plan", files[0]]) == 1
    error = capsys.readouterr().err
    assert "run-rates.toml" in error
    assert "--calibrate 30" in error


def step_line(step):
    return {
        "step": step,
        "learner/policy_version": step,
        "learner/step_seconds": 2.0,
        "learner/trained_tokens": 800.0,
        "learner/publish_seconds": 0.1,
        "generator/tokens_per_second": 300.0,
        "generator/running_requests": 60.0,
        "generator/idle_share": 0.25,
        "rollout/turns_mean": 1.0,
        "rollout/length_mean_tokens": 8.0,
        "rollout/uniform_trajectories": 0.0,
    }


def test_without_a_rates_file_the_rates_are_those_of_the_last_run(files, tmp_path, capsys):
    run = files[0]
    assert main(["plan", run, "--steps", "10"]) == 1
    assert f"train for {LEAST_STEPS + WARM_UP_STEPS} steps first" in capsys.readouterr().err
    folder = tmp_path / "run-2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"run": {"name": "run"}}))
    lines = [json.dumps(step_line(step)) for step in range(1, 13)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    other = tmp_path / "run-7"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"run": {"name": "run-7"}}))
    (other / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["plan", run, "--steps", "10"]) == 0
    printed = capsys.readouterr().out
    assert str(folder / "metrics.jsonl") in printed
    assert "note: the rates are means of an earlier run" in printed

"""`method = "bapo"` takes the algorithm and what belongs to it into any job, and nothing else."""

from pathlib import Path

import pytest

from launch import cli
from launch.errors import ConfigError
from launch.run_file.load import METHOD_SETTINGS, METHODS_FOLDER, load, read_own, run_files
from launch.run_folder import load_config, save_config
from launch.supervise.summary import summary_rows

FILES = run_files(METHODS_FOLDER)
FAMILIES = [name for name, path in FILES.items() if path.parent.name == "families"]
"""Methods whose groups ask for further groups. Some of them need hints, which the job does not give."""
JUDGED = "fapo-judge"
"""Method that needs the reward of a judge, which the job does not give."""
TAUGHT = "distillation"
"""Method whose teacher is better than the tiny model only where the warm start of this one stops early."""
NAMES = [name for name in FILES if name not in FAMILIES]
JOB = '[model.tiny]\n[env]\nname = "calculator"\n'
SUMMARY = {
    "policy_lag": {"mean_versions": 0.0, "max_versions": 0, "bound": 2},
    "idle_share": {"learner": 0.0, "generator": 0.0},
    "evaluations": [],
    "restarts": {},
    "trajectories_by_outcome": {},
    **dict.fromkeys(("steps", "policy_version", "wall_seconds", "training_seconds"), 1),
    **dict.fromkeys(("tokens_generated", "tokens_trained", "trajectories_trained"), 1),
    **dict.fromkeys(("ended_by", "tensorboard", "learning_curve"), ""),
}
RECIPE = '[recipe]\ntitle = "Mine"\n[learner.algorithm.surrogate]\nkind = "lag"\n'


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that writes a run file into an empty working directory, and returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="job"):
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return path

    return write


def settings(config):
    return config.model_dump(mode="json")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (JUDGED, TAUGHT, "a2fm")])
def test_a_run_file_of_two_sections_and_a_method_passes_the_check(job, name, capsys):
    path = job(f'method = "{name}"\n{JOB}')
    assert cli.main(["check", str(path)]) == 0
    assert f"{path}: ok (run run, method {name}, mode async)\n" in capsys.readouterr().out


def test_a_method_with_a_judge_needs_its_reward(job, capsys):
    assert cli.main(["check", str(job(f'method = "{JUDGED}"\n{JOB}'))]) == 1
    assert 'learner.reward.flawed.needs is "sound": the environment has no reward' in capsys.readouterr().err


def test_a_trained_judge_needs_a_reward_for_right_answers(job, capsys):
    rewards = ("family", "reward.wrong")
    assert cli.main(["check", str(job(f'method = "fapo"\n{JOB}'))]) == 1
    error = capsys.readouterr().err
    for place in rewards:
        assert f'learner.{place}.reward is "right": the environment has no reward of this name' in error
    named = "".join(f'[learner.{place}]\nreward = "answer"\n' for place in rewards)
    assert cli.main(["check", str(job(f'method = "fapo"\n{JOB}{named}'))]) == 0


def test_a_method_with_a_teacher_needs_one_that_is_not_the_policy(job, capsys):
    def said(text):
        code = cli.main(["check", str(job(f'method = "{TAUGHT}"\n{text}'))])
        return code, capsys.readouterr().err

    code, error = said(JOB)
    assert code == 1
    assert "the teacher would be the policy itself; set model.tiny.warm_start.stop_at below 1" in error
    assert said(f"{JOB}[model.tiny.warm_start]\nstop_at = 0.2\n")[0] == 0
    teacher = "[learner.algorithm.distillation]\nteacher = "
    code, error = said(f'{JOB}{teacher}"runs/none/of/this"\n')
    assert code == 1
    assert "learner.algorithm.distillation.teacher is 'runs/none/of/this': there is no such folder" in error
    assert said(f'{JOB}{teacher}"Qwen/Qwen3-0.6B"\n')[0] == 0


def test_a_method_with_hints_needs_an_environment_that_gives_them(job, capsys):
    hints = (
        JOB.replace("calculator", "reasoning_gym") + '[env.params]\nfamily = "spell_backward"\nhints = true\n'
    )
    for name in FAMILIES:
        if name != "fapo":
            assert cli.main(["check", str(job(f'method = "{name}"\n{hints}'))]) == 0
    for name in ("ghpo", "scaf-grpo"):
        assert cli.main(["check", str(job(f'method = "{name}"\n{JOB}'))]) == 1
        assert 'learner.family.kind is "hint" but the environment gives no hints' in capsys.readouterr().err
    assert cli.main(["check", str(job(f'method = "igrpo"\n{JOB}'))]) == 0


@pytest.mark.parametrize("name", [name for name in (*NAMES, *FAMILIES) if name != "a2fm"])
def test_a_method_brings_its_algorithm_and_leaves_the_job_as_it_is(job, name):
    found = settings(load(job(f'method = "{name}"\n{JOB}')))
    plain, recipe = settings(load(job(JOB))), settings(load(Path(name)))
    of_method, of_recipe = found["learner"]["algorithm"], recipe["learner"]["algorithm"]
    if of_recipe["aggregation"] == {"kind": "fixed", "tokens": 48}:
        longest = found["learner"]["sampling"]["max_trajectory_tokens"]
        assert of_method["aggregation"] == {"kind": "fixed", "tokens": longest}
        of_recipe["aggregation"] = of_method["aggregation"]
    assert of_method == of_recipe
    assert found["method"] == recipe["method"] == name
    assert found["recipe"] == recipe["recipe"]
    for part in ("method", "recipe"):
        found.pop(part), plain.pop(part)
    for setting in METHOD_SETTINGS:
        found["learner"].pop(setting), plain["learner"].pop(setting)
    assert found == plain, "nothing of the job that shows the method"


@pytest.mark.parametrize("name", [*NAMES, *FAMILIES])
def test_a_method_file_sets_what_belongs_to_a_method(name):
    own = read_own(run_files(METHODS_FOLDER)[name])
    assert set(own) == {"extends", "recipe", "learner", "demo"}
    assert set(own["learner"]) <= {
        "algorithm",
        "train_on",
        "replay",
        "family",
        "lane",
        "taught",
        "selection",
        "budget",
        "reward",
        "filter_uniform_groups",
        "group_size",
        "max_policy_lag",
    }
    assert set(own["demo"]) <= {"run", "env", "model", "actor", "learner", "generator", "judge"}


def test_what_methods_set_beside_the_algorithm():
    beside = {
        name: {
            k: v
            for k, v in read_own(path)["learner"].items()
            if k not in ("algorithm", "replay", "reward", "family", "lane", "selection", "budget")
        }
        for name, path in run_files(METHODS_FOLDER).items()
    }
    lag = {"max_policy_lag": 2}
    assert {name: found for name, found in beside.items() if found} == {
        **dict.fromkeys(
            ("bapo", "gbpo", "grpo", "hispo", "r2vpo", "remix", "replay-fifo", "uncorrected"), lag
        ),
        **dict.fromkeys((path.stem for path in METHODS_FOLDER.glob("*/*.toml")), lag),
        "a2fm": {"group_size": 12} | lag,
        "ampo": {"taught": {"members": 2, "value": 1.0}} | lag,
        "icpo": {"max_policy_lag": 3},
        "fapo": {"max_policy_lag": 3},
        "inspo-proposals": {"max_policy_lag": 3},
        "aepo-agentic": {"max_policy_lag": 5, "group_size": 16},
        "rapo": {"filter_uniform_groups": False} | lag,
        "dapo": {"filter_uniform_groups": True} | lag,
        "arpo-branch": {"group_size": 16} | lag,
        "dapo-direct": {"group_size": 16, "max_policy_lag": 3},
        "urpo": {"group_size": 8} | lag,
        "dyna-mind": {"group_size": 8} | lag,
        **{
            name: {"train_on": "trajectories", "group_size": 1}
            for name in ("distillation", "flash-reinforce", "ppo", "sao")
        },
        "tppo": {"train_on": "windows"} | lag,
    }


def test_the_files_own_settings_win_over_the_method(job):
    own = "[learner]\nmax_policy_lag = 7\n[learner.algorithm.surrogate]\ntarget = 0.5\n"
    learner = load(job(f'method = "bapo"\n{JOB}{own}')).learner
    assert (learner.max_policy_lag, learner.algorithm.surrogate.target) == (7, 0.5)
    assert learner.algorithm.surrogate.low_start == 0.6, "the rest is the method's"
    assert load(job(f'method = "bapo"\n{JOB}'), ["learner.max_policy_lag=9"]).max_policy_lag == 9


def test_a_method_wins_over_the_file_that_is_extended_and_replaces_its_algorithm(job):
    base = job(f"{JOB}[learner]\nsteps = 9\nmax_policy_lag = 6\n[learner.algorithm]\npasses = 2\n", "base")
    learner = load(job('extends = "base.toml"\nmethod = "grpo"\n')).learner
    assert (learner.steps, learner.max_policy_lag, learner.algorithm.passes) == (9, 2, 1)
    assert load(base).learner.algorithm.passes == 2
    config = load(job('extends = "remix"\nmethod = "rloo"\n'))
    assert (config.method, config.learner.replay) == ("rloo", None)
    assert config.learner.algorithm == load(Path("rloo")).learner.algorithm
    assert config.run.name == "remix", "the rest of the job stays"
    assert load(job('extends = "aepo-entropy"\nmethod = "grpo"\n')).learner.lane is None


def test_a_method_of_the_command_line_replaces_the_one_of_the_file(job):
    path = job(f'method = "tppo"\n{JOB}[learner.algorithm]\npasses = 2\n')
    config = load(path, ["method=cispo", "learner.algorithm.surrogate.high=3.0"])
    assert (config.method, config.learner.train_on) == ("cispo", "groups")
    assert (config.learner.algorithm.passes, config.learner.algorithm.surrogate.high) == (1, 3.0)
    assert load(job(JOB), ["method=ppo"]).learner.group_size == 1


def test_a_method_file_of_ones_own_is_named_relative_to_the_run_file(job, monkeypatch):
    job(f"{RECIPE}[demo.learner]\nsteps = 1\n", "mine")
    path = job(f'method = "mine.toml"\n{JOB}')
    monkeypatch.chdir("/")
    config = load(path)
    assert (config.method, config.learner.steps) == ("mine", 100)
    assert config.learner.algorithm.surrogate.kind == "lag"


def test_a_method_file_is_a_run_file_with_the_settings_of_its_demo(job):
    config = load(job(f"{RECIPE}[demo.learner]\nsteps = 7\n[demo]\n{JOB.replace('[', '[demo.')}", "mine"))
    assert (config.method, config.learner.steps, config.env.name) == ("mine", 7, "calculator")
    config = load(Path("remax"))
    assert (config.learner.group_size, config.run.name) == (4, "remax")
    assert load(Path("tppo")).actor.segment_tokens == 6


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('method = "bappo"', ["'bappo' is unknown", "did you mean 'bapo'?"]),
        ('method = "zzz"', ["'zzz' is unknown", "there are: a2fm, aepo-agentic, aepo-entropy, agent-r"]),
        ('method = "calculator"', ["it is a job", 'extends = "calculator"']),
        ("method = 3", ["method is 3", "as a string"]),
        ('method = "whole.toml"', ["sets model, env, learner.steps", "belongs to a job", 'extends = "whole"']),
        ('demo = {}', ["demo: unknown key"]),
    ],
)  # fmt: skip
def test_what_is_no_method_is_refused_with_the_cure(job, line, words):
    job(f"{JOB}[learner]\nsteps = 3\n", "whole")
    path = job(f"{line}\n{JOB}")
    with pytest.raises(ConfigError) as caught:
        load(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_an_unknown_method_of_the_command_line_is_refused(job):
    with pytest.raises(ConfigError, match="command line: method 'grpoo' is unknown; did you mean 'grpo'"):
        load(job(JOB), ["method=grpoo"])


def test_windows_that_are_as_long_as_an_answer_are_remarked(job, capsys):
    path = job(f'method = "tppo"\n{JOB}')
    assert cli.main(["check", str(path)]) == 0
    assert "segment_tokens is 512, not below learner.sampling.max_turn_tokens 64" in capsys.readouterr().out
    assert cli.main(["check", str(path), "actor.segment_tokens=20"]) == 0
    assert "segment_tokens" not in capsys.readouterr().out


def test_the_name_of_the_method_stays_with_the_run(job, tmp_path):
    config = load(job(f'method = "bapo"\n{JOB}'))
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config
    assert ("method", "bapo") in summary_rows(SUMMARY | {"method": "bapo"})
    assert "method" not in dict(summary_rows(SUMMARY))

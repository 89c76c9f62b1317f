"""Test what `offbeat eval` evaluates: the model of a run that has ended, a checkpoint, or a model."""

import json

import pytest

from launch import cli
from launch.commands.evaluate import Weights, find_weights, lines_of
from launch.commands.retrain import configuration
from launch.errors import ConfigError
from launch.run_file.load import check
from launch.run_folder import CONFIG, save_config
from learner.errors import Stopped
from learner.evaluations import evaluate_sets
from learner.settings.learner import EvaluationConfig
from tests.trajectories import make_trajectory

FILE = {
    "run": {"name": "job", "mode": "sync"},
    "model": {"path": "some/model"},
    "env": {"name": "calculator"},
    "learner": {"processes": 2, "evaluation": {"hard": {"tasks": 2, "samples": 2}}},
}
CONFIG_OF_FILE = check(FILE, "job.toml")


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run that has begun."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(CONFIG_OF_FILE, folder / CONFIG)
    return folder


def test_a_model_is_evaluated_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    for target in (str(tmp_path), "Qwen/Qwen3-0.6B"):
        weights = find_weights(target, CONFIG_OF_FILE)
        assert (weights.config.model.path, weights.checkpoints, weights.step) == (target, None, 0)
        assert (weights.config.run.name, weights.config.run.mode) == ("job-eval", "async")
        assert (weights.config.learner.steps, weights.config.learner.processes) == (0, 1)
        assert weights.config.learner.evaluation == CONFIG_OF_FILE.learner.evaluation


def test_of_a_run_that_has_ended_the_last_model_is_evaluated(run):
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    (run / "result.json").write_text('{"steps": 40}')
    weights = find_weights(str(run), CONFIG_OF_FILE)
    assert (weights.config.model.path, weights.checkpoints, weights.step) == (str(run / "model"), None, 40)
    assert "after its last step, 40" in weights.words


def test_a_run_without_a_model_and_without_a_checkpoint_cannot_be_evaluated(run):
    with pytest.raises(ConfigError, match="neither a model nor a checkpoint yet"):
        find_weights(str(run), CONFIG_OF_FILE)


def test_what_is_neither_a_run_nor_a_model_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('[model]\npath = "some/model"\n[env]\nname = "calculator"\n')
    assert cli.main(["eval", "nothing-here", "job.toml"]) == 1
    assert "'nothing-here'" in capsys.readouterr().err


def test_a_result_that_could_not_be_written_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('[model]\npath = "some/model"\n[env]\nname = "calculator"\n')
    assert cli.main(["eval", "some/model", "job.toml", "--json", "none/out.json"]) == 1
    assert "there is no folder none; make it first" in capsys.readouterr().err


def test_a_run_file_that_asks_for_no_evaluation_is_refused():
    config = check(FILE | {"learner": {"evaluation_tasks": 0}}, "job.toml")
    with pytest.raises(ConfigError, match="evaluation_tasks is 0, and there is no"):
        find_weights("some/model", config)


def test_a_run_of_no_steps_is_for_this_command_only():
    with pytest.raises(ConfigError, match="steps is 0: nothing would be trained"):
        check(FILE | {"learner": {"steps": 0}}, "job.toml")


class Exchange:
    """Answers evaluations from a script; an exception in it is raised."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def evaluate(self, tag, of, *, version):
        self.asked.append((tag, of, version))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Report:
    def __init__(self):
        self.lines = []

    def write(self, step, scalars):
        self.lines.append((step, scalars))


SOLVED, WRONG = make_trajectory("t", correct=True, reward=1.0), make_trajectory("t", correct=False)


def test_every_set_is_evaluated_once_and_shown():
    config = CONFIG_OF_FILE.learner.model_copy(update={"evaluation_tasks": 2})
    exchange, report = Exchange([SOLVED, WRONG], [SOLVED, WRONG, WRONG, WRONG]), Report()
    ended_by, records = evaluate_sets(config, exchange, report, step=7, version=1)
    assert ended_by == "all sets evaluated"
    assert [(tag, version) for tag, _, version in exchange.asked] == [("eval", 1), ("hard eval", 1)]
    assert exchange.asked[0][1] == EvaluationConfig(tasks=2, temperature=0.0)
    assert [(r["set"], r["step"], r["accuracy"]) for r in records] == [("", 7, 0.5), ("hard", 7, 0.25)]
    assert [step for step, _ in report.lines] == [7, 7]
    text = "\n".join(lines_of(json.loads(json.dumps({"evaluations": records}))))
    assert "held-out: 2 tasks, 1 greedy answer each; 2 of 2 answered" in text
    assert "  accuracy 0.500 (0.095 to 0.905)" in text
    assert "hard: 2 tasks, 2 answers each; 4 of 4 answered" in text
    assert "  pass@2 0.500" in text
    assert "  return 0.250 (score 0.250)" in text


def test_an_evaluation_that_is_interrupted_keeps_the_sets_before_it():
    config = CONFIG_OF_FILE.learner.model_copy(update={"evaluation_tasks": 2})
    exchange = Exchange([SOLVED, WRONG], Stopped("SIGTERM"))
    ended_by, records = evaluate_sets(config, exchange, Report(), step=0, version=0)
    assert (ended_by, [r["set"] for r in records]) == ("SIGTERM", [""])


def test_an_evaluation_without_a_result_says_so():
    config = CONFIG_OF_FILE.learner.model_copy(update={"evaluation_tasks": 2, "evaluation": {}})
    exchange = Exchange([None, None], [None, None])
    _, records = evaluate_sets(config, exchange, Report(), step=0, version=0)
    assert "  no result: too many answers failed or were never run" in lines_of({"evaluations": records})
    assert [tag for tag, _, _ in exchange.asked] == ["eval", "eval again"]


def test_the_model_of_a_run_keeps_the_arguments_of_its_chat_template(run):
    section = CONFIG_OF_FILE.model.model_copy(update={"template_args": {"enable_thinking": False}})
    save_config(CONFIG_OF_FILE.model_copy(update={"model": section}), run / CONFIG)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    (run / "result.json").write_text('{"steps": 40}')
    weights = find_weights(str(run), CONFIG_OF_FILE)
    assert weights.config.model.template_args == {"enable_thinking": False}


def test_an_evaluation_has_no_more_tasks_than_there_are_held_out_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{i}?"}}\n' for i in range(8)))
    (tmp_path / "test.jsonl").write_text('{"prompt": "a?"}\n{"prompt": "b?"}\n')
    (tmp_path / "rewards.py").write_text("def exact(answer, row):\n    return 1.0\n")
    params = {"train": "train.jsonl", "heldout": "test.jsonl", "reward": "rewards.py:exact"}
    file = {"model": {"tiny": {}}, "env": {"name": "rows", "params": params}}
    config = check(file, "job.toml")
    seen = []
    monkeypatch.setattr("launch.commands.evaluate.load", lambda *a: config)
    monkeypatch.setattr("launch.commands.evaluate.find_weights", lambda *a: Weights("w", config, 0))

    def run(weights, panel):
        seen.append(weights.config.learner.evaluation_tasks)
        return {"evaluations": []}

    monkeypatch.setattr("launch.commands.evaluate.run", run)
    assert cli.main(["eval", "model", "job.toml"]) == 1
    assert seen == [2]


def test_a_run_of_a_version_without_shared_rows_is_trained_again_without_them(run):
    assert configuration(run).learner.share_prefixes
    saved = json.loads((run / CONFIG).read_text())
    del saved["learner"]["share_prefixes"]
    (run / CONFIG).write_text(json.dumps(saved))
    assert not configuration(run).learner.share_prefixes

"""`offbeat check` on a job of rows: files beside the run file, refusals with file and line, evaluations that fit."""

import json
import sys

import pytest

from envs.base import HasFacts
from envs.registry import make_suite
from launch.cli import main
from launch.conversations import given_of
from launch.errors import ConfigError
from launch.model import _tiny_folder, make_tokenizer, save_tokenizer
from launch.preflight.examine import examine
from launch.run_file.load import load
from launch.run_folder import CONFIG, save_config, what_changed

RUN_FILE = """
[model]
path = "{model}"
[env]
name = "rows"
[env.params]
train = "train.jsonl"
reward = "rewards.py:exact"
[learner]
evaluation_tasks = 3
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a run file in a folder that is not the working folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder, model = tmp_path / "job", tmp_path / "model"
    folder.mkdir()
    save_tokenizer(make_tokenizer(["0123456789 + ="]), model, max_length=2048)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(60)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_helper_of_rows.py").write_text("def same(a, b):\n    return a == b\n")
    (folder / "rewards.py").write_text(
        "from own_helper_of_rows import same\n\n\ndef exact(answer, row):\n    return same(answer, row['answer'])\n"
    )
    (folder / "run.toml").write_text(RUN_FILE.format(model=model))
    monkeypatch.chdir(tmp_path)
    return folder / "run.toml"


def said(job, capsys, *overrides):
    code = main(["check", str(job), *overrides])
    out, err = capsys.readouterr()
    return code, out + err


def refused(job, capsys, *overrides):
    code, text = said(job, capsys, *overrides)
    assert (code, text.count("\n")) == (1, 1), text
    return text.strip()


def test_a_job_in_another_folder_is_ok_and_roles_get_paths_that_they_find(job, capsys):
    code, text = said(job, capsys)
    assert (code, text.splitlines()[-1]) == (0, f"{job}: ok (run run, mode async)")
    assert "evaluation_tasks" not in text
    config = load(job)
    assert config.env.params == {
        "train": str(job.parent / "train.jsonl"),
        "reward": f"{job.parent / 'rewards.py'}:exact",
    }
    assert isinstance(make_suite(config.env.name, config.env.params), HasFacts)


def test_a_reward_that_fails_on_the_own_answer_of_a_row_is_refused(job, capsys):
    (job.parent / "rewards.py").write_text(
        "def exact(answer, row):\n    return float(answer == 'x' or not answer or 1 / (answer != row['answer']))\n"
    )
    text = refused(job, capsys)
    assert "of train task 0: job/rewards.py:2: " in text
    assert "ZeroDivisionError" in text
    assert text.endswith("this is the task's own solution")


def test_a_file_of_the_working_folder_comes_first(job, tmp_path):
    (tmp_path / "train.jsonl").write_text((job.parent / "train.jsonl").read_text())
    assert load(job).env.params["train"] == str(tmp_path / "train.jsonl")


def test_the_configuration_is_equal_from_every_working_folder(job, monkeypatch):
    before = load(job)
    monkeypatch.chdir(job.parent)
    assert load(job) == before, "else a run could not be resumed from another folder"


def test_a_tiny_model_is_made_anew_when_the_rows_change(job):
    (job.parent / "tiny.toml").write_text(job.read_text().replace('[model]\npath = "', '[model.tiny]\n# "'))
    folder = kept_folder(job)
    assert kept_folder(job) == folder
    with open(job.parent / "train.jsonl", "a") as file:
        file.write('{"prompt": "8 + 9 =", "answer": "17"}\n')
    assert kept_folder(job) != folder


def kept_folder(job):
    config = load(job.parent / "tiny.toml")
    return _tiny_folder(config, config.model.tiny)


def test_an_environment_file_is_found_beside_the_run_file_too(job):
    (job.parent / "own.py").write_text("class Suite: pass\n")
    assert load(job, ["env.name=own.py:Suite", "env.params={}"]).env.name == f"{job.parent / 'own.py'}:Suite"


def test_evaluations_have_no_more_tasks_than_there_are_heldout_rows(job, capsys):
    code, text = said(job, capsys, "learner.evaluation_tasks=256")
    there = load(job)
    suite = make_suite(there.env.name, there.env.params).facts().heldout_tasks
    assert code == 0
    assert (
        f"learner.evaluation_tasks is 256, but there are {suite} held-out tasks: evaluations have {suite}"
        in text
    )
    tried = examine(load(job, ["learner.evaluation_tasks=256"]))
    assert tried.config.learner.evaluation_tasks == suite
    assert examine(load(job, ["env.params.heldout=0.0"])).config.learner.evaluation_tasks == 0


def test_a_list_of_tasks_that_is_not_the_data_set_is_told(job, capsys):
    kept = make_suite(load(job).env.name, load(job).env.params).facts().train_tasks
    near = ["learner.selection.kind=near"]
    code, text = said(job, capsys, *near)
    assert code == 0
    assert (
        f"learner.selection.tasks is 128, but there are {kept} training tasks: the numbers from {kept} on"
        in text
    )
    assert (
        f"learner.selection.tasks is 20, but there are {kept} training tasks: the others are never dealt out"
        in said(job, capsys, *near, "learner.selection.tasks=20")[1]
    )
    for fits in ([*near, f"learner.selection.tasks={kept}"], []):
        assert "learner.selection" not in said(job, capsys, *fits)[1]


def test_a_file_of_given_conversations_that_has_changed_is_refused(job, tmp_path):
    talks = job.parent / "talks.jsonl"
    talks.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    began = examine(load(job, ["learner.given.file=talks.jsonl"])).config
    assert began.learner.given.content
    assert len(given_of(began, began.model.path)) == 1
    save_config(began, tmp_path / CONFIG)
    assert what_changed(began, tmp_path, accepted=False) == []
    talks.write_text('{"prompt": "1 + 1 =", "answer": "3"}\n')
    # A learner that is started again, and `offbeat retrain`.
    with pytest.raises(ConfigError, match=r"talks\.jsonl has changed since the run was started"):
        given_of(began, began.model.path)
    anew = examine(load(job, ["learner.given.file=talks.jsonl"])).config
    with pytest.raises(ConfigError, match=r"^--resume: the file of learner\.given has changed when"):
        what_changed(anew, tmp_path, accepted=False)
    assert what_changed(anew, tmp_path, accepted=True)
    assert len(given_of(anew, anew.model.path)) == 1


def test_a_missing_file_column_or_function_is_one_line(job, capsys):
    assert "params.train: no file trian.jsonl" in refused(job, capsys, "env.params.train=trian.jsonl")
    assert "has no column 'question'" in refused(job, capsys, "env.params.prompt=question")
    assert "did you mean 'exact'?" in refused(job, capsys, "env.params.reward=rewards.py:exat")
    assert "does not take params.trian; did you mean 'train'?" in refused(job, capsys, "env.params.trian=x")


def test_a_wrong_row_and_a_wrong_signature_name_file_and_line(job, capsys):
    with open(job.parent / "rewards.py", "a") as file:
        file.write("\n\ndef wrong(completion):\n    return 0\n")
    text = refused(job, capsys, "env.params.reward=rewards.py:wrong")
    assert "job/rewards.py:8: wrong(completion): a reward function takes (answer, row), or TRL's" in text
    with open(job.parent / "train.jsonl", "a") as file:
        file.write('{"answer": "4"}\n')
    assert "job/train.jsonl:61: no value for 'prompt'; add it or delete the row" in refused(job, capsys)


def test_a_name_that_is_given_twice_is_refused_with_the_line(job, capsys):
    text = job.read_text().replace('reward = "rewards.py:exact"\n', "")
    job.write_text(text + '[env.params.reward]\nexact = "rewards.py:exact"\nexact = "rewards.py:exact"\n')
    said = refused(job, capsys)
    assert "run.toml: not valid TOML: Cannot overwrite a value (at line 12" in said


def test_a_reward_that_raises_is_blamed_on_its_line(job, capsys):
    (job.parent / "rewards.py").write_text("def exact(answer, row):\n    return row['solution']\n")
    assert "job/rewards.py:2: KeyError: 'solution'" in refused(job, capsys)


def test_a_weight_of_a_reward_that_there_is_not_is_refused(job, capsys):
    text = refused(job, capsys, "learner.reward.weights.exat=2.0")
    assert (
        "learner.reward.weights.exat: the environment has no reward of this name; did you mean 'exact'?"
        in text
    )
    assert said(job, capsys, "learner.reward.weights.exact=2.0")[0] == 0


def test_the_longest_prompt_of_all_rows_is_counted(job, capsys):
    with open(job.parent / "train.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "1 + " * 3000, "answer": "3000"}) + "\n")
    text = refused(job, capsys, "env.params.heldout=0.0")
    assert "job/train.jsonl:61) has 12003 tokens" in text
    assert text.endswith("but the model takes 2048; shorten it")


def test_a_named_evaluation_set_needs_that_many_held_out_rows(job):
    there = examine(load(job)).config.learner.evaluation_tasks
    too_many = [f"learner.evaluation.hard.tasks={there}", "learner.evaluation.hard.first_task=1"]
    with pytest.raises(
        ConfigError, match=rf"learner.evaluation.hard has the tasks 1 to {there}, but there are"
    ):
        examine(load(job, ["learner.evaluation_tasks=256", *too_many]))


def test_the_rewards_of_an_own_judge_are_not_tried_before_there_is_a_run(job, capsys):
    (job.parent / "judge.txt").write_text("{prompt} {completion}")
    text = (
        job.read_text().replace('reward = "rewards.py:exact"', "").replace("[learner]", "[judge]\n[learner]")
    )
    own = '[env.params.reward.good]\njudge = "own"\nprompt = "judge.txt"\n[judge]'
    job.write_text(text.replace("[judge]", own))
    code, text = said(job, capsys)
    assert code == 0, text
    assert "the rewards were not tried: the run's own judge is not there yet" in text
    assert "judge.model is 'runs/none/model': there is no such folder" in refused(
        job, capsys, "judge.model=runs/none/model"
    )

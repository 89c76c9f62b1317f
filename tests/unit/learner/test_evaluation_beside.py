"""Evaluations beside training: the learner goes on, and the version reported is the version that sampled."""

import dataclasses

import numpy as np
import pytest

from learner.errors import Stopped
from learner.run import CANDIDATE
from protocol.messages.episodes import Task
from tests.trajectories import make_trajectory
from tests.unit.learner.test_loop import learner


def answer(version, *, correct=True):
    t = make_trajectory("t", purpose="eval")
    return dataclasses.replace(t, policy_version=np.full_like(t.policy_version, version), correct=correct)


class Beside:
    """Answers each evaluation some learner steps after its beginning, by the versions of a script."""

    def __init__(self, run, *, steps, versions=None, right=()):
        self.run, self.steps, self.versions = run, steps, list(versions or ())
        self.right = list(right)
        self.begun, self.at, self.awaited, self.ended = [], {}, [], []

    def begin_evaluation(self, tag, of, *, version):
        self.begun.append((tag, version, self.run.trainer.step))
        self.at[tag] = (self.run.trainer.step, version)
        return [
            Task(task_id=f"{tag}.{i}", env="e", group_id=f"{tag}.{i}", group_size=1)
            for i in range(of.answers)
        ]

    def evaluation_out(self, tasks):
        began, _ = self.at[self.tag_of(tasks)]
        return 0 if self.run.trainer.step >= began + self.steps else len(tasks)

    def await_evaluation(self, tag, tasks):
        self.awaited.append((tag, self.run.trainer.step))
        self.at[tag] = (-self.steps, self.at[tag][1])

    def end_evaluation(self, tasks):
        tag = self.tag_of(tasks)
        self.ended.append(tag)
        _, pinned = self.at[tag]
        version = self.versions.pop(0) if self.versions else pinned
        return [answer(version, correct=self.right.pop(0) if self.right else True) for _ in tasks]

    @staticmethod
    def tag_of(tasks):
        return tasks[0].task_id.rpartition(".")[0]


def beside(tmp_path, *, count=6, steps=2, versions=None, right=(), **settings):
    it = learner(tmp_path, ["applied"] * count, evaluation_every=3, **settings)
    it.evaluations.beside = Beside(it, steps=steps, versions=versions, right=right)
    return it, it.evaluations.beside


def test_training_goes_on_and_the_result_has_step_and_version_of_the_beginning(tmp_path):
    it, by = beside(tmp_path)
    it.train()
    assert by.begun == [("before 0", 0, 0), ("step 3 3", 3, 3)]
    assert by.awaited == [], "nobody waited"
    found = [(e["tag"], e["step"], e["policy_version"], e["accuracy"]) for e in it.evaluations.records]
    assert found == [("before", 0, 0, 1.0), ("step 3", 3, 3, 1.0), ("after", 6, 6, None)]
    # The line of the result stands behind those of the steps that were done meanwhile.
    order = [step for step, line in it.trainer.report.lines]
    assert order == [1, 2, 0, 3, 4, 5, 3, 6, 6]
    assert [e["stood_seconds"] for e in it.evaluations.records[:2]] == [0.0, 0.0]
    stood = [
        line["evaluation/stood_seconds"]
        for _, line in it.trainer.report.lines
        if "evaluation/stood_seconds" in line
    ]
    assert stood[:2] == [0.0, 0.0]
    # The evaluation after the last step is the blocking one.
    assert ("evaluate", "after 6", 6) in it.session.log


def test_the_version_is_kept_while_its_evaluation_is_under_way(tmp_path):
    it, _ = beside(tmp_path, steps=2)
    seen, learn = [], it.trainer.learn

    def watched():
        seen.append(it.trainer.publisher.pinned)
        learn()

    it.trainer.learn = watched
    it.train()
    assert seen == [0, 0, None, 3, 3, None]
    assert it.trainer.publisher.pinned is None


def test_answers_of_another_version_count_as_not_run_and_the_set_is_evaluated_once_more(tmp_path):
    it, by = beside(tmp_path, steps=1, versions=[0, 4, 4])
    it.train()
    # The evaluation of version 3 was answered by version 4, which the generator had after its restart.
    assert by.begun[1:] == [("step 3 3", 3, 3), ("step 3 4 again", 4, 4)]
    records = {e["tag"]: e for e in it.evaluations.records}
    assert (records["step 3"]["step"], records["step 3"]["policy_version"]) == (4, 4)
    assert records["step 3"]["accuracy"] == 1.0


def test_a_version_that_cannot_be_had_twice_has_no_result(tmp_path):
    it, _ = beside(tmp_path, steps=1, versions=[0, 9, 9])
    it.train()
    record = next(e for e in it.evaluations.records if e["tag"] == "step 3")
    assert (record["accuracy"], record["not_run"]) == (None, 2)


def test_the_next_evaluation_waits_for_the_one_before(tmp_path):
    it, by = beside(tmp_path, steps=100)
    it.train()
    assert by.awaited == [("before 0", 3), ("step 3 3", 6)]
    assert by.ended == ["before 0", "step 3 3"]
    assert [e["tag"] for e in it.evaluations.records] == ["before", "step 3", "after"]


def test_a_run_that_is_stopped_leaves_out_what_is_under_way(tmp_path):
    it, by = beside(tmp_path, steps=100, count=2)

    def stopped(tag, tasks):
        raise Stopped("SIGTERM")

    by.await_evaluation = stopped
    it.train()
    assert not it.evaluations.under_way
    assert [e["tag"] for e in it.evaluations.records] == ["after"]


@pytest.mark.parametrize(("first", "second", "kept"), [(0, 2, [6]), (2, 1, [3]), (2, 2, [3])])
def test_the_best_model_is_the_one_of_the_step_at_which_its_evaluation_began(tmp_path, first, second, kept):
    right = [True, True]
    for number in (first, second):
        right += [i < number for i in range(2)]
    it, _ = beside(tmp_path, count=9, steps=1, right=right)
    it.describe = lambda folder, name, facts: (folder / "README.md").write_text(
        f"{name}: {[e['step'] for e in facts['evaluations']]}"
    )
    it.train()
    assert sorted(path.name for path in (tmp_path / "models").glob("*")) == [
        f"best-step-{s:06d}" for s in kept
    ]
    assert not (tmp_path / CANDIDATE).exists()
    # The card has the evaluation for which the model was kept.
    for s in kept:
        card = (tmp_path / "models" / f"best-step-{s:06d}" / "README.md").read_text()
        assert card == f"best-step-{s:06d}: {[0, *range(3, s + 1, 3)]}"


def test_an_evaluation_under_way_is_not_begun_again(tmp_path):
    it, by = beside(tmp_path, steps=100)
    it.evaluate_what_is_due()
    it.evaluate_what_is_due()
    assert len(by.begun) == 1


def test_an_evaluation_that_a_stop_left_out_is_made_up_for_when_the_run_goes_on(tmp_path):
    it, by = beside(tmp_path, steps=100)
    it.evaluations.records.append({"set": "", "tag": "before", "step": 0})
    it.trainer.step = 4
    it.evaluate_what_is_due()
    it.evaluate_what_is_due()
    assert [(tag, step) for tag, _, step in by.begun] == [("step 4 4", 4)]

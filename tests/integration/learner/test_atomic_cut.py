"""A process killed while it writes a checkpoint leaves the old or the new one in force, never a mixture."""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from learner import checkpoint_files
from learner.curriculum import Curriculum
from learner.intake.session import BrokerSession
from learner.metrics import Report
from learner.replay.table import make_table
from learner.retrain import Unpublished
from learner.run import TrainingRun
from learner.run_files import find_start
from learner.settings.learner import LearnerConfig, ReplayConfig
from learner.trainer import Trainer
from learner.trajectory import Trajectory, Unit
from learner.update import checkpoint
from learner.update.adaptive import AdaptiveState
from learner.update.report import UpdateReport
from protocol import names
from protocol.messages.episodes import PutTasks
from tests.trajectories import make_trajectory

CONFIG = LearnerConfig(
    group_size=2, batch_trajectories=8, steps=100, evaluation_tasks=0, checkpoint_every=1, max_policy_lag=0,
    replay=ReplayConfig(rule="uniform", share=0.4, max_policy_lag=99),
)  # fmt: skip
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
KILLED = 9


class Link:
    """A link that keeps what is sent, and on which nothing arrives."""

    session = None

    def __init__(self):
        self.sent = []

    def send(self, message, join=None):
        self.sent.append(message)


class Engine:
    """An engine whose weights are its number of updates; it stores them as the real engine does."""

    parameters = types.SimpleNamespace(trained=1, whole=1)

    def __init__(self):
        self.updates = 0

    def update(self, trajectories, *, current_version):
        self.updates += 1
        return UpdateReport(
            applied=True,
            metrics={"learner/trained_tokens": 8.0, "learner/step_seconds": 0.0},
            histograms={"policy_lag_versions": np.zeros(8)},
        )

    def weights(self):
        return {}, iter(())

    def save(self, folder, state, also):
        def write(name):
            rank = checkpoint.capture(
                ranks=1,
                dtype="float32",
                updates=self.updates,
                optimizer_steps=self.updates,
                adaptive=AdaptiveState(dual=0.0, entropy_coefficient=0.0),
                client=state,
            )
            checkpoint.write_state(folder, name, 0, rank)
            (folder / name / "weights").write_text(str(self.updates))
            also(folder / name)

        checkpoint_files.write_whole(folder, self.updates, write)

    changed_formulas = ()

    def load(self, folder):
        name = checkpoint_files.latest_name(folder)
        state = checkpoint.read_state(folder, name, 0, dtype="float32")
        self.updates = int((folder / name / "weights").read_text())
        assert self.updates == state.updates
        return state.client


class Rehearsed(BrokerSession):
    """A session that treats the oldest groups of the curriculum as delivered."""

    version_before = 0

    def collect(self, *, step, version):
        self.refill(step=step, version=version)
        dealt = sorted(self.curriculum.outstanding, key=names.group_index)[:2]
        groups = [Unit(name, name, members(name)) for name in dealt]
        for group in groups:
            self.intake.delivered_tokens += group.tokens
            self.intake.hold_for_batch(group)
        return self.intake.take_batch(2)


def members(name) -> list[Trajectory]:
    return [make_trajectory(f"{name}.{i}.0", group=name, reward=float(i)) for i in range(2)]


def learner(folder: Path, *, resume: bool, lockstep: bool = False) -> TrainingRun:
    begin = find_start(folder, resume=resume, lockstep=lockstep)
    curriculum = Curriculum("e", CONFIG, begin.epoch, lineage=begin.lineage)
    session = Rehearsed(
        Link(), curriculum, CONFIG, lockstep=lockstep, stop_reason=lambda: "", step=begin.step
    )
    trainer = Trainer(
        CONFIG, folder, Engine(), session, Unpublished(), Report(folder), replay=make_table(CONFIG.replay)
    )
    it = TrainingRun(trainer, session)
    it.start_from(begin)
    if begin.continues:
        curriculum.adopt([task.task_id for tasks in curriculum.outstanding.values() for task in tasks])
    return it


def picture(it: TrainingRun):
    """Return all parts of a checkpoint's state; each shows by itself how many steps it covers."""
    intake = it.session.intake
    return {
        "step": it.trainer.step,
        "weights": it.trainer.engine.updates,
        "committed": len(intake.commits.committed) // 2,
        "tokens": intake.trained_tokens,
        "trained": it.trainer.totals.trained_trajectories,
        "cursor": it.session.curriculum.next_index,
        "replay": it.trainer.replay.inserted,
    }


def killed_at(count: int, action) -> bool:
    """Run ``action`` in a child process that dies after ``count`` file changes. Return whether it died."""
    pid = os.fork()
    if pid == 0:
        left = count

        def hook(event, arguments):
            nonlocal left
            if event in CHANGES and (event != "open" or writes(arguments)):
                left -= 1
                if left < 0:
                    os._exit(KILLED)

        sys.addaudithook(hook)
        action()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, KILLED)
    return os.waitstatus_to_exitcode(status) == KILLED


def writes(arguments) -> bool:
    _, mode, flags = arguments
    return (
        bool(set(mode or "") & set("wax+")) if mode else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    )


def test_killed_before_any_change_to_a_file_it_goes_on_from_a_whole_checkpoint(tmp_path):
    first = learner(tmp_path, resume=False)
    for _ in range(3):
        first.learn()
    before = picture(first)
    first.trainer.report.close()
    assert before["step"] == before["weights"] == before["committed"] == 3
    seen, count = [], 0
    while killed_at(count, lambda: two_steps(tmp_path)):
        again = learner(tmp_path, resume=True)
        now = picture(again)
        steps = now["step"]
        assert now == {
            "step": steps,
            "weights": steps,
            "committed": steps,
            "tokens": 2 * 2 * 5 * steps,
            "trained": 4 * steps,
            # The groups of the next step are dealt already.
            "cursor": 2 * steps + 2,
            "replay": 2 * steps,
        }
        again.session.intake.check()
        again.trainer.report.close()
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))
        seen.append(steps)
        count += 1
    assert count > 20
    assert seen == sorted(seen)
    assert set(seen) > {3}


def two_steps(folder):
    it = learner(folder, resume=True)
    it.learn()
    it.learn()
    it.trainer.report.close()


def test_killed_at_any_byte_of_what_it_writes_the_one_before_is_in_force(tmp_path):
    checkpoint_files.write_whole(tmp_path, 1, lambda name: put(tmp_path / name, b"whole"))
    for cut in range(len(b"another")):

        def write(name, cut=cut):
            put(tmp_path / name, b"another"[:cut])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            checkpoint_files.write_whole(tmp_path, 2, write)
        assert (tmp_path / checkpoint_files.latest_name(tmp_path) / "data").read_bytes() == b"whole"
    checkpoint_files.write_whole(tmp_path, 2, lambda name: put(tmp_path / name, b"another"))
    assert (tmp_path / checkpoint_files.latest_name(tmp_path) / "data").read_bytes() == b"another"
    assert len(list(tmp_path.glob("step*"))) == 2, "what was left of those that failed is gone"


def put(folder, data):
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(data)


def test_all_of_it_is_on_disk_before_the_pointer_moves(tmp_path, monkeypatch):
    """A power failure may take whatever is not on disk yet."""
    events = []
    synced, moved = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), synced(fd))
    )
    monkeypatch.setattr(Path, "replace", lambda *a: (events.append("moved"), moved(*a))[1])
    checkpoint_files.write_whole(tmp_path, 1, lambda name: put(tmp_path / name / "deep", b"x"))
    before, after = events[: events.index("moved")], events[events.index("moved") :]
    partial = tmp_path / "step00000001.partial"
    assert {str(partial / "deep" / "data"), str(partial / "deep"), str(partial), str(tmp_path)} <= set(before)
    assert str(tmp_path / "latest.partial") in before
    assert str(tmp_path) in after, "the rename itself lasts"


def test_in_lockstep_what_was_under_way_is_put_under_new_names_for_the_weights_of_the_restart(tmp_path):
    first = learner(tmp_path, resume=False, lockstep=True)
    first.learn()
    first.trainer.report.close()
    again = learner(tmp_path, resume=True, lockstep=True)
    again.trainer.report.close()
    (message,) = [m for m in again.session._link.sent if isinstance(m, PutTasks)]
    assert [task.task_id for task in message.tasks] == ["2g2.0", "2g2.1", "2g3.0", "2g3.1"]
    assert {task.min_policy_version for task in message.tasks} == {again.trainer.version}
    assert [task.data["index"] for task in message.tasks] == [2, 2, 3, 3]

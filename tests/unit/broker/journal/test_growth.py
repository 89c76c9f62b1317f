"""The journal grows with what the broker is told, and shrinks with what the learner has trained."""

import msgspec
import pytest

from broker import output_commit
from broker.config import BrokerConfig
from broker.journal.files import each_file, numbers
from broker.journal.writer import Kind
from broker.output_commit import OutputCommit, Snapshot, snapshot
from protocol.codec import decode, encode
from protocol.messages.episodes import (
    Checkpointed,
    Commit,
    DeliveryCredit,
    LeaseTask,
    PutTasks,
    SegmentAck,
    TaskCredit,
)
from protocol.messages.peers import Hello
from tests.broker_driver import group, segment_frames
from tests.journals import DEADLINE_S, small


class Scene:
    """A broker with a learner and an actor; its journal is in small files."""

    def __init__(self, folder, **settings):
        self.folder, self.now = folder, 1000.0
        config = BrokerConfig(journal=small(file_bytes=4096, keep_bytes=0, **settings))
        self.broker = OutputCommit.open(config, "run", 4, folder)
        self.say("learner", encode(Hello(role="learner", peer="learner", incarnation=1, epoch=1, lineage=1)))
        self.say("learner", encode(DeliveryCredit(units=1000)))
        self.say("actor", encode(Hello(role="actor", peer="actor", incarnation=1)))
        self.say("actor", encode(TaskCredit(tasks=1000)))

    def say(self, peer, frames):
        message, _ = decode(frames)
        now = self.broker.handle(peer, message, frames[1:], self.now)
        return [action.message for action in (*now, *self.broker.flush())]

    def put(self, name, **fields):
        answers = self.say("learner", encode(PutTasks(tasks=group(name, 1, **fields))))
        return [message for message in answers if isinstance(message, LeaseTask)]

    def episode(self, name, **fields):
        """Put a task and send its only segment."""
        (lease,) = self.put(name, **fields)
        answers = self.say("actor", segment_frames(lease))
        assert [m.status for m in answers if isinstance(m, SegmentAck)] == ["stored"]

    def sync(self):
        """Wait for the disk, then let the broker delete what it may."""
        assert self.broker.journal.sync(DEADLINE_S)
        self.broker.flush()

    @property
    def state(self):
        return self.broker.dispatcher.state


@pytest.fixture
def scene(tmp_path):
    scene = Scene(tmp_path / "journal", max_bytes=1 << 30)
    yield scene
    scene.broker.close()


def snapshot_bytes(folder):
    return sum(
        entry.place.nbytes
        for file in each_file(folder)
        for entry in file.entries
        if entry.kind is Kind.SNAPSHOT
    )


def test_snapshots_take_less_than_what_they_sum_up(scene, monkeypatch):
    """A snapshot that is larger than a whole file must not be written again at each flush."""
    monkeypatch.setattr(scene.broker.journal, "retain", lambda needed: None)
    for number in range(250):
        scene.episode(f"g{number}")
    scene.sync()
    size = len(snapshot(scene.state, scene.state.store))
    assert size > 2 * 4096
    snapshots = snapshot_bytes(scene.folder)
    assert size / 4 < snapshots < scene.broker.journal.nbytes / 2


def test_files_are_deleted_when_nothing_in_them_is_needed_any_more_without_a_new_file(scene):
    for number in range(60):
        scene.episode(f"g{number}")
    scene.sync()
    before = numbers(scene.folder)
    assert len(before) > 1
    scene.say("learner", encode(Commit(epoch=1, step=1, trained=[f"g{number}" for number in range(60)])))
    scene.sync()
    assert numbers(scene.folder) == before
    scene.say("learner", encode(Checkpointed(epoch=1, step=1)))
    scene.sync()
    assert numbers(scene.folder) == before[-1:]


def test_a_snapshot_too_large_for_a_record_does_not_end_the_broker(scene, monkeypatch, caplog):
    monkeypatch.setattr(output_commit, "MAX_PAYLOAD_BYTES", 1000)
    for number in range(60):
        scene.episode(f"g{number}")
    assert numbers(scene.folder) == [1]
    said = caplog.text.count("more than a record holds")
    assert 1 <= said < 10
    monkeypatch.undo()
    for number in range(60, 160):
        scene.episode(f"g{number}")
    scene.sync()
    assert snapshot_bytes(scene.folder) > 0


def test_the_data_of_a_task_is_in_a_snapshot_once_at_most(scene):
    scene.episode("ended", data={"text": "d" * 5000})
    (lease,) = scene.put("running", data={"text": "r" * 5000}, note="n" * 5000)
    scene.say("actor", segment_frames(lease, status="unfinished"))
    saved = snapshot(scene.state, scene.state.store)
    assert saved.count(b"d" * 5000) == 0
    assert saved.count(b"r" * 5000) == 1
    assert saved.count(b"n" * 5000) == 1
    (record,) = msgspec.msgpack.decode(saved, type=Snapshot).trajectories
    assert record.task.task_id == "running.0"


def test_a_snapshot_of_an_earlier_version_loses_the_data_that_nobody_needs(scene):
    (lease,) = scene.put("running", data={"text": "r" * 5000})
    scene.say("actor", segment_frames(lease, status="unfinished"))
    (record,) = scene.state.assembly.trajectories.values()
    record.task = msgspec.structs.replace(record.task, data={"text": "r" * 5000})
    scene.broker.journal.rotate(snapshot(scene.state, scene.state.store))
    assert scene.broker.journal.sync(DEADLINE_S)
    scene.broker.close()
    later = OutputCommit.open(BrokerConfig(), "run", 4, scene.folder)
    try:
        (record,) = later.dispatcher.state.assembly.trajectories.values()
        assert record.task.data == {}
        assert later.dispatcher.state.tasks.get("running.0").task.data == {"text": "r" * 5000}
    finally:
        later.close()

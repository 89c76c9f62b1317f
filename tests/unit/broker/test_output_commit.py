"""No message leaves the broker before the journal has what the message rests on."""

import errno
import os

import msgspec
import pytest

from broker.config import BrokerConfig
from broker.core.dispatch import Dispatcher
from broker.errors import JournalError, StateBroken
from broker.journal.journal import Journal
from broker.journal.opening import records
from broker.journal.writer import Kind, Record, unpack_dead_letter
from broker.output_commit import MAX_DEAD_LETTERS, MAX_DEAD_TOTAL_BYTES, POISON, OutputCommit
from protocol.codec import decode, encode
from protocol.messages.episodes import (
    Commit,
    Deliver,
    DeliveryCredit,
    LeaseTask,
    PutTasks,
    SegmentAck,
    TaskCredit,
)
from protocol.messages.peers import Heartbeat, Hello, Refused, Welcome
from tests.broker_driver import group, segment_frames


class Scene:
    """An OutputCommit whose journal is written only when a test asks."""

    def __init__(self, folder):
        self.folder, self.now = folder, 1000.0
        self.open()

    def open(self):
        self.desk = OutputCommit.open(BrokerConfig(), "run", 4, self.folder)

    def say(self, peer, message):
        return self.frames(peer, encode(message))

    def frames(self, peer, frames):
        message, _ = decode(frames)
        return [action.message for action in self.desk.handle(peer, message, frames[1:], self.now)]

    def flush(self):
        return [action.message for action in self.desk.flush()]

    def kill(self):
        """Kill the broker without writing the buffer, then open it again."""
        self.desk.journal.abandon()
        self.open()


@pytest.fixture
def scene(tmp_path):
    scene = Scene(tmp_path / "journal")
    scene.say("learner", Hello(role="learner", peer="learner", incarnation=1, epoch=1, lineage=1))
    scene.say("learner", DeliveryCredit(units=9))
    scene.say("actor", Hello(role="actor", peer="actor", incarnation=1))
    scene.say("actor", TaskCredit(tasks=9))
    assert any(isinstance(message, Welcome) for message in scene.flush())
    yield scene
    scene.desk.close()


def kinds(messages):
    return {type(message) for message in messages}


def test_acks_leases_and_deliveries_wait_for_the_journal_and_heartbeats_do_not(scene):
    assert kinds(scene.say("learner", PutTasks(tasks=group("g", 1)))) == set()
    (lease,) = scene.flush()
    assert scene.frames("actor", segment_frames(lease)) == []
    assert kinds(scene.say("actor", Heartbeat(progress=1.0))) == {Heartbeat}
    assert kinds(scene.say("stranger", TaskCredit(tasks=1))) == {Refused}
    assert {SegmentAck, Deliver} <= kinds(scene.flush())
    assert scene.flush() == []


def test_what_was_not_written_was_not_said_and_comes_again(scene):
    scene.say("learner", PutTasks(tasks=group("g", 1)))
    lease = next(message for message in scene.flush() if isinstance(message, LeaseTask))
    assert scene.frames("actor", segment_frames(lease)) == []
    scene.kill()
    assert len(scene.desk.dispatcher.state.store) == 0
    scene.say("actor", Hello(role="actor", peer="actor", incarnation=1))
    again = [message for message in scene.flush() if isinstance(message, LeaseTask)]
    assert [message.lease_id for message in again] == [lease.lease_id]
    scene.frames("actor", segment_frames(lease))
    assert [m.status for m in scene.flush() if isinstance(m, SegmentAck)] == ["stored"]
    scene.kill()
    assert len(scene.desk.dispatcher.state.store) == 1


def test_nothing_leaves_while_the_disk_is_full_and_all_of_it_afterwards(scene, monkeypatch):
    scene.say("learner", PutTasks(tasks=group("g", 1)))
    (lease,) = scene.flush()
    full_disk(monkeypatch)
    scene.frames("actor", segment_frames(lease))
    assert scene.flush() == []
    status = scene.desk.status()
    assert (status["messages_waiting"] > 0, "space" in status["blocked"]) == (True, True)
    assert scene.desk.dispatcher.state.full()
    monkeypatch.undo()
    # The time is now past the pause between two tries.
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    assert {SegmentAck, Deliver} <= kinds(scene.flush())
    assert scene.desk.status()["blocked"] == ""


def full_disk(monkeypatch):
    def write(fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "pwritev", write)


def test_a_message_that_breaks_the_books_ends_the_process_and_is_refused_by_the_next(scene, monkeypatch):
    scene.say("learner", PutTasks(tasks=group("g", 1)))
    (lease,) = scene.flush()
    frames = segment_frames(lease)
    assembly = type(scene.desk.dispatcher.state.assembly)
    original = assembly.add
    monkeypatch.setattr(assembly, "add", lambda *_: 1 / 0)
    with pytest.raises(StateBroken, match="ZeroDivisionError"):
        scene.frames("actor", frames)
    monkeypatch.setattr(assembly, "add", original)
    scene.open()
    scene.say("actor", Hello(role="actor", peer="actor", incarnation=1))
    assert len(scene.desk.dispatcher.state.store) == 0
    (refused,) = scene.frames("actor", frames)
    assert refused.code == "poison"
    scene.desk.dead_letters.keep("actor", "malformed", "no message", [b"x"])
    assert scene.desk.status()["dead_letters"] == 1


def test_who_speaks_behind_the_message_that_broke_the_books_is_not_blamed(scene, monkeypatch):
    scene.say("learner", PutTasks(tasks=group("g", 2)))
    one, two = (message for message in scene.flush() if isinstance(message, LeaseTask))
    for i in range(MAX_DEAD_LETTERS):
        scene.desk.dead_letters.keep("junk", "malformed", "no message", [b"%d" % i])
    assembly = type(scene.desk.dispatcher.state.assembly)
    with monkeypatch.context() as broken:
        broken.setattr(assembly, "add", lambda *_: 1 / 0)
        with pytest.raises(StateBroken):
            scene.frames("actor", segment_frames(one))
        assert scene.frames("actor", segment_frames(two)) == []
        assert scene.say("learner", Commit(epoch=1, step=1)) == []
    scene.open()
    scene.say("actor", Hello(role="actor", peer="actor", incarnation=1))
    assert [message.code for message in scene.frames("actor", segment_frames(one))] == ["poison"]
    scene.frames("actor", segment_frames(two))
    assert [message.status for message in scene.flush() if isinstance(message, SegmentAck)] == ["stored"]


def test_a_message_behind_which_the_books_break_is_not_blamed_for_what_others_did(scene, monkeypatch):
    scene.say("learner", PutTasks(tasks=group("g", 1)))
    (lease,) = scene.flush()
    credit = DeliveryCredit(units=1)
    for speaker, message in (("learner", credit), ("actor", Heartbeat(progress=1.0))):
        with monkeypatch.context() as broken:
            broken.setattr(Dispatcher, "follow", lambda *_: 1 / 0)
            with pytest.raises(StateBroken, match="ZeroDivisionError"):
                scene.say(speaker, message)
        scene.open()
        assert scene.desk.status()["dead_letters"] == 0
        for peer in ("learner", "actor"):
            epoch = int(peer == "learner")
            scene.say(peer, Hello(role=peer, peer=peer, incarnation=1, epoch=epoch, lineage=epoch))
        answers = scene.say(speaker, message) + scene.flush()
        assert [m.code for m in answers if isinstance(m, Refused)] == []
    scene.frames("actor", segment_frames(lease))
    assert [m.status for m in scene.flush() if isinstance(m, SegmentAck)] == ["stored"]


def test_a_message_that_changed_the_books_is_to_blame_for_what_follows(scene, monkeypatch):
    put = PutTasks(tasks=group("g", 1))
    with monkeypatch.context() as broken:
        broken.setattr(Dispatcher, "follow", lambda *_: 1 / 0)
        with pytest.raises(StateBroken):
            scene.say("learner", put)
    scene.open()
    scene.say("learner", Hello(role="learner", peer="learner", incarnation=1, epoch=1, lineage=1))
    assert [message.code for message in scene.say("learner", put)] == ["poison"]


def test_a_fault_between_messages_leaves_nothing_half_done_in_the_journal(scene, monkeypatch):
    scene.say("learner", PutTasks(tasks=group("g", 1)))
    with monkeypatch.context() as broken:
        broken.setattr(Dispatcher, "tick", lambda *_: 1 / 0)
        with pytest.raises(StateBroken, match="ZeroDivisionError"):
            scene.desk.tick(scene.now)
    scene.open()
    assert scene.desk.dispatcher.state.tasks.live() == []


# --- dead letters ---------------------------------------------------------------------------------------------


def letters(folder):
    return [
        unpack_dead_letter(r.payload)
        for r in records(folder)
        if isinstance(r, Record) and r.kind is Kind.DEAD
    ]


def test_a_dead_letter_has_a_limit_of_its_own_whatever_its_frames_are(scene):
    before = scene.desk.journal.nbytes
    scene.desk.dead_letters.keep("junk", "malformed", "long " * 10_000, [b"x" * 65_536] * 1000)
    scene.desk.dead_letters.keep("junk", "malformed", "no message", [b""] * 65_536)
    scene.flush()
    assert scene.desk.journal.nbytes - before < 80_000
    long, empty = letters(scene.folder)
    assert (sum(map(len, long.frames)), long.nbytes, len(long.reason)) == (65_536, 65_536_000, 1000)
    assert (len(empty.frames), empty.nbytes) == (64, 0)


def test_all_dead_letters_of_a_process_have_a_limit(scene):
    before = scene.desk.journal.nbytes
    for i in range(MAX_DEAD_LETTERS):
        scene.desk.dead_letters.keep("junk", "malformed", "no message", [b"%d" % i, b"x" * 100_000])
    scene.flush()
    assert scene.desk.journal.nbytes - before < MAX_DEAD_TOTAL_BYTES + 100_000
    assert scene.desk.status()["dead_letters"] < MAX_DEAD_LETTERS


@pytest.mark.parametrize("why", ["low", "blocked"])
def test_a_disk_that_is_nearly_full_is_for_more_than_dead_letters(scene, monkeypatch, why):
    monkeypatch.setattr(Journal, why, True)
    scene.desk.dead_letters.keep("junk", "malformed", "no message", [b"x"])
    assert scene.desk.status()["dead_letters"] == 0
    scene.desk.dead_letters.keep("actor", POISON, "a fault", [b"x"])
    assert scene.desk.status()["dead_letters"] == 1


def test_a_long_message_that_broke_the_broker_is_known_again_by_its_letter_alone(scene):
    frames = [b"header", b"x" * 60_000, b"y" * 60_000]
    scene.desk.dead_letters.keep("actor", POISON, "a fault", frames)
    scene.flush()
    scene.kill()
    known = scene.desk.handle("actor", Heartbeat(progress=1.0), frames, scene.now)
    assert [action.message.code for action in known] == ["poison"]
    other = [*frames[:2], b"y" * 59_999 + b"z"]
    said = scene.desk.handle("actor", Heartbeat(progress=1.0), other, scene.now)
    assert "poison" not in [getattr(action.message, "code", "") for action in said]


def test_a_letter_of_an_earlier_version_is_known_again(scene):
    """It has 64 KiB of each frame, and no digest."""
    frames = [b"header", b"x" * 100_000, b"y" * 60_000]
    old = {
        "peer": "actor",
        "code": POISON,
        "reason": "a fault",
        "frames": [frame[:65_536] for frame in frames],
    }
    scene.desk.journal.append(Kind.DEAD, msgspec.msgpack.encode(old))
    scene.flush()
    scene.kill()
    known = scene.desk.handle("actor", Heartbeat(progress=1.0), frames, scene.now)
    assert [action.message.code for action in known] == ["poison"]


@pytest.mark.parametrize("name", ["put", "record_event"])
def test_a_record_that_the_books_do_not_have_is_not_written(scene, monkeypatch, name):
    scene.say("learner", PutTasks(tasks=group("g", 1)))
    (lease,) = scene.flush()
    store = scene.desk.dispatcher.state.store
    original = getattr(store, name)

    def fails(*arguments):
        original(*arguments)
        raise AssertionError("segment is stored already")

    monkeypatch.setattr(store, name, fails)
    caused_by = {
        "put": ("actor", segment_frames(lease)),
        "record_event": ("learner", encode(Commit(epoch=1, step=1, trained=["g"]))),
    }
    with pytest.raises(StateBroken, match="stored already"):
        scene.frames(*caused_by[name])
    scene.open()
    assert len(scene.desk.dispatcher.state.store) == 0


def test_a_journal_that_cannot_go_on_in_another_file_ends_the_process(scene, monkeypatch):
    monkeypatch.setattr(Journal, "wants_snapshot", True)
    monkeypatch.setattr("broker.output_commit.snapshot", lambda *_: 1 / 0)
    with pytest.raises(JournalError, match="ZeroDivisionError"):
        scene.flush()


def test_a_disk_that_cannot_be_looked_at_has_no_room_and_no_message_is_blamed_for_it(scene, monkeypatch):
    def fails(folder):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "statvfs", fails)
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    assert scene.desk.journal.low
    scene.say("actor", TaskCredit(tasks=1))
    assert scene.desk.status()["dead_letters"] == 0

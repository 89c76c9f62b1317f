"""Test what a journal records of the steps that a run's checkpoints stand on."""

import numpy as np
import pytest

from broker.config import JournalConfig
from broker.core.records import Committed, GroupClosed, LearnerJoined, Published, TasksPut, encode_event
from broker.journal.journal import Journal
from broker.journal.writer import Kind, file_name, pack_segment
from launch.commands.retrain import Recording, read_recording
from launch.errors import RecordingError
from protocol.codec import decode_delivery, encode_arrays
from protocol.messages.episodes import Segment, Task
from protocol.messages.peers import Hello


def hello(epoch, *, step=0, deliver="group", lineage=1):
    return LearnerJoined(
        hello=Hello(
            role="learner",
            peer="l",
            incarnation=epoch,
            epoch=epoch,
            lineage=lineage,
            step=step,
            deliver=deliver,
        )
    )


def trained(step, *units, dropped=(), epoch=1, version=None):
    version = (step - 1 if version is None else version) if units else -1
    return Committed(epoch=epoch, step=step, trained=list(units), dropped=list(dropped), version=version)


def published(version, epoch=1, line=()):
    return Published(epoch=epoch, version=version, manifest=f"v{version}", line=list(line))


def recorded(*events):
    recording = Recording(None)
    for event in events:
        recording.add_event(event)
    return recording


def versions(*events):
    return {step: batch.version for step, batch in recorded(*events).batches.items() if batch.trained}


def test_drops_between_steps_do_not_count_as_steps():
    steps = [trained(1, dropped=["x"]), published(1), trained(1, "a"), trained(2, dropped=["y"])]
    recording = recorded(hello(1), *steps, published(2), trained(2, "b"))
    assert {step: batch.version for step, batch in recording.batches.items()} == {1: 0, 2: 1}
    assert list(recording.batches[2].dropped) == ["y"]


def test_what_a_crash_undid_is_left_out():
    first = [hello(1)]
    for step in (1, 2, 3):
        first += [published(step), trained(step, f"first{step}")]
    line = [(1, 4)]
    again = [hello(2, step=1), published(4, 2, line), trained(2, "second2", epoch=2, version=4)]
    again += [published(5, 2, line), trained(3, "second3", epoch=2, version=5)]
    recording = recorded(*first, *again)
    assert [list(recording.batches[step].trained) for step in (1, 2, 3)] == [
        ["first1"],
        ["second2"],
        ["second3"],
    ]
    assert [recording.batches[step].version for step in (1, 2, 3)] == [0, 4, 5]
    assert [recording._forks(step) for step in (1, 2, 3)] == [(), ((1, 4),), ((1, 4),)]


def test_forks_are_those_that_the_process_of_a_step_knew_of():
    events = [hello(1), published(1), trained(1, "a"), published(2), trained(2, "b"), published(3)]
    # Back at step 1, the learner is killed before a checkpoint. Back again, it never hears of version 4.
    events += [hello(2, step=1), published(4, 2, [(1, 4)]), trained(2, "c", epoch=2, version=4)]
    events += [hello(3, step=1), published(6, 3, [(1, 6)]), published(7, 3, [(1, 6)])]
    # The commit of step 2 is lost; the process that continues from there sends it again.
    events += [hello(4, step=2), published(8, 4, [(1, 6), (7, 8)]), trained(3, "e", epoch=4, version=8)]
    events += [trained(2, "d", epoch=4, version=6)]
    recording = recorded(*events)
    assert versions(*events) == {1: 0, 2: 6, 3: 8}
    assert [recording._forks(step) for step in (1, 2, 3)] == [(), ((1, 6),), ((1, 6), (7, 8))]


def test_a_learner_that_joins_again_undoes_nothing():
    assert versions(hello(1), published(1), trained(1, "a"), hello(1), published(2), trained(2, "b")) == {
        1: 0,
        2: 1,
    }


def test_a_commit_that_was_lost_and_said_again_later_belongs_to_its_step():
    lost = [
        hello(1),
        published(1),
        trained(1, "a"),
        published(2),
        published(3),
        trained(3, "c"),
        trained(2, "b"),
    ]
    assert versions(*lost, trained(2, "b2")) == {1: 0, 2: 1, 3: 2}


# --- a journal on disk --------------------------------------------------------------------------------------


def segment(trajectory, index=0, *, status="finished", purpose="train", tokens=3):
    head = Segment(
        trajectory_id=trajectory,
        task_id=trajectory.rpartition(".")[0],
        group_id=trajectory.partition(".")[0],
        group_size=2,
        index=index,
        offset=index * tokens,
        tokens=tokens,
        action_tokens=1,
        status=status,
        purpose=purpose,
    )
    _, header, body = encode_arrays(head, {"token_ids": np.arange(tokens, dtype=np.int32) + index})
    return bytes(header), bytes(body)


def write(folder, *records, **settings):
    journal = Journal.open(folder, run="r", config=JournalConfig(**settings))
    for record in records:
        if isinstance(record, tuple):
            journal.append(Kind.SEGMENT, *pack_segment(*record))
        else:
            journal.append(Kind.EVENT, encode_event(record))
    journal.flush()
    journal.close()
    return folder


def test_a_group_comes_with_its_members_in_the_order_in_which_they_ended(tmp_path):
    folder = write(
        tmp_path / "journal",
        hello(1),
        segment("1g0.0.0", status="unfinished"),
        segment("1g0.1.0"),
        segment("1eval-x-0.0", purpose="eval"),
        segment("1g0.0.0", 1),
        GroupClosed(group_id="1g9"),
        trained(1, "1g0", dropped=["1eval-x-0.0"]),
    )
    recording = read_recording(folder)
    (step,) = recording.steps(recording.last)
    (unit,) = step.units
    pieces = decode_delivery(unit.deliver, unit.frames)
    assert [(head.trajectory_id, head.index) for head, _ in pieces] == [
        ("1g0.1.0", 0),
        ("1g0.0.0", 0),
        ("1g0.0.0", 1),
    ]
    assert pieces[2][1]["token_ids"].tolist() == [1, 2, 3]
    assert (step.step, step.version, list(step.trained)) == (1, 0, ["1g0"])


def test_windows_come_in_the_order_in_which_they_were_streamed_with_those_that_were_dropped(tmp_path):
    folder = write(
        tmp_path / "journal",
        hello(1, deliver="segment"),
        segment("1g0.0.0", 0, status="unfinished"),
        segment("1g1.0.0", 0, status="unfinished"),
        segment("1g0.0.0", 1),
        trained(1, "1g0.0.0/1", "1g1.0.0/0", dropped=["1g0.0.0/0", "1eval-x-0.0"]),
    )
    (step,) = read_recording(folder).steps(1)
    assert [unit.deliver.unit_id for unit in step.units] == ["1g0.0.0/0", "1g1.0.0/0", "1g0.0.0/1"]
    assert [unit.deliver.complete for unit in step.units] == [False, False, True]
    assert list(step.trained) == ["1g0.0.0/1", "1g1.0.0/0"]


def put(*task_ids, **parts):
    group = task_ids[0].rpartition(".")[0]
    return TasksPut(
        tasks=[Task(task_id=t, env="e", group_id=group, group_size=len(task_ids), **parts) for t in task_ids]
    )


def test_a_family_comes_with_its_first_group_and_with_its_tasks(tmp_path):
    folder = write(
        tmp_path / "journal",
        hello(1),
        put("1g0.0"),
        segment("1g0.0.0"),
        put("1g0r1.0", "1g0r1.1", note="begin with h"),
        segment("1g0r1.0.0"),
        segment("1g5.0.0"),
        put("1g0r2.0", note="begin with hi"),
        trained(1, "1g0r1", dropped=["1g0", "1g5"]),
    )
    (step,) = read_recording(folder).steps(1)
    assert [unit.deliver.unit_id for unit in step.units] == ["1g0", "1g0r1"]
    assert list(step.trained) == ["1g0r1"]
    assert [(task.task_id, task.note) for task in step.tasks] == [("1g0r1.0", "begin with h")]
    taught = write(
        tmp_path / "taught",
        hello(1),
        put("1g0.0"),
        segment("1g0.0.0"),
        put("1g0r1.0", policy="big"),
        segment("1g0r1.0.0"),
        trained(1, "1g0", "1g0r1"),
    )
    (step,) = read_recording(taught).steps(1)
    assert [(task.task_id, task.policy) for task in step.tasks] == [("1g0r1.0", "big")]


def test_what_is_missing_is_said_with_the_cure(tmp_path):
    folder = write(tmp_path / "journal", hello(1), segment("1g0.0.0"), trained(1, "1g0"), trained(3, "1g1"))
    with pytest.raises(RecordingError, match="step 2 is not in the journal"):
        list(read_recording(folder).steps(3))
    (folder / file_name(1)).rename(folder / file_name(2))
    with pytest.raises(
        RecordingError, match=r"journal-00000001\.log is the first.*broker\.journal\.keep_bytes"
    ):
        read_recording(folder)


def test_damage_is_not_passed_over_and_a_torn_end_is(tmp_path):
    folder = write(tmp_path / "journal", hello(1), segment("1g0.0.0"), trained(1, "1g0"), published(1))
    path = folder / file_name(1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-40:-3])
    assert read_recording(folder).last == 1
    path.write_bytes(whole[:-3])
    with pytest.raises(RecordingError, match=r"is damaged, and cannot be replayed: .* were written"):
        read_recording(folder)
    place = whole.index(b"learner_joined")
    path.write_bytes(whole[:place] + b"X" + whole[place + 1 :])
    with pytest.raises(RecordingError, match="is damaged, and cannot be replayed"):
        read_recording(folder)
    with pytest.raises(RecordingError, match="no journal here"):
        read_recording(tmp_path)

"""`Task.note` and `Task.start`, since 4.3: older and newer peers, and what an older broker makes of them."""

import msgspec
import pytest

from protocol.codec import MINOR, decode, encode
from protocol.errors import Malformed
from protocol.messages.episodes import LeaseTask, PutTasks, Task, TaskStart, Turn
from protocol.messages.fields import MAX_PREFIX_BYTES, MAX_TEXT
from tests.broker_driver import Driver, group

TASK = Task(task_id="1g0r1.0", env="e", group_id="1g0r1", group_size=1, note="Begin with 7.")


class OldTask(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of a task of protocol 4.2 that the broker copies, without the optional ones."""

    task_id: str
    env: str
    group_id: str
    group_size: int


class OldPutTasks(msgspec.Struct, tag="put_tasks", tag_field="type", kw_only=True):
    tasks: list[OldTask]


def test_a_note_travels_from_the_learner_to_the_actor():
    driver = Driver()
    driver.learner()
    driver.put(TASK)
    driver.actor()
    (lease,) = driver.leases()
    assert decode(encode(lease))[0].task == TASK
    assert MINOR >= 3


def test_a_task_without_a_note_has_the_bytes_of_before():
    plain = group("g", 1)
    assert b"note" not in encode(PutTasks(tasks=plain))[1]


def test_an_older_receiver_ignores_the_note_and_a_newer_one_has_none_of_an_older_sender():
    header = encode(PutTasks(tasks=[TASK]))[1]
    (old,) = msgspec.msgpack.decode(header, type=OldPutTasks).tasks
    assert old.task_id == TASK.task_id
    # A broker of that age writes what it knows into the lease: this is why the learner looks at its version.
    lease = {"type": "lease_task", "lease_id": "l", "attempt": 0, "task": msgspec.to_builtins(old)}
    message, _ = decode([b"OB\x04\x02", msgspec.msgpack.encode(lease)])
    assert message == LeaseTask(lease_id="l", attempt=0, task=msgspec.structs.replace(TASK, note=""))


def test_a_note_is_bounded():
    header = encode(PutTasks(tasks=[msgspec.structs.replace(TASK, note="x" * (MAX_TEXT + 1))]))
    with pytest.raises(Malformed, match=r"tasks\[0\]\.note"):
        decode(header)


START = TaskStart(
    token_ids=b"\x05\x00\x00\x00\x06\x00\x00\x00\x07\x00\x00\x00",
    turns=[Turn(0, 0, 1, False), Turn(1, 1, 2, True), Turn(2, 2, 3, False)],
    parent="1g0.0.0",
)


def test_a_prefix_travels_from_the_learner_to_the_actor_and_is_kept_by_the_journal(tmp_path):
    driver = Driver(folder=tmp_path / "journal")
    driver.learner(lineage=1)
    task = msgspec.structs.replace(TASK, note="", start=START)
    driver.put(task)
    driver.kill_broker()
    driver.actor()
    (lease,) = driver.leases()
    assert decode(encode(lease))[0].task == task
    driver.journal.close()


def test_an_older_receiver_ignores_the_prefix():
    header = encode(PutTasks(tasks=[msgspec.structs.replace(TASK, start=START)]))[1]
    (old,) = msgspec.msgpack.decode(header, type=OldPutTasks).tasks
    assert old.group_id == TASK.group_id
    assert b"start" not in encode(PutTasks(tasks=group("g", 1)))[1]


def test_a_prefix_is_bounded_so_that_its_task_fits_into_a_header():
    turns = [Turn(0, 0, MAX_PREFIX_BYTES // 4, False)]
    largest = TaskStart(token_ids=bytes(MAX_PREFIX_BYTES), turns=turns, parent="p")
    decode(encode(PutTasks(tasks=[msgspec.structs.replace(TASK, start=largest)])))
    larger = msgspec.structs.replace(largest, token_ids=bytes(MAX_PREFIX_BYTES + 4))
    header = encode(PutTasks(tasks=[msgspec.structs.replace(TASK, start=larger)]))
    with pytest.raises(Malformed, match=r"tasks\[0\]\.start\.token_ids"):
        decode(header)

"""`Task.note`, since 4.3: older and newer peers, and what an older broker makes of it."""

import msgspec
import pytest

from protocol.codec import MINOR, decode, encode
from protocol.errors import Malformed
from protocol.messages import MAX_TEXT, LeaseTask, PutTasks, Task
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
    assert MINOR == 3


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

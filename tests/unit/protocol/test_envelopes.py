"""All messages to one peer in one turn leave as one envelope, in order, and are split again. No sockets."""

import msgspec
import numpy as np
import pytest

from protocol.codec import (
    MAX_ENCLOSED,
    MAX_ENVELOPE_BYTES,
    MAX_HEADER_BYTES,
    PRELUDE,
    decode,
    enclose,
    encode,
    encode_arrays,
    encode_delivery,
    messages_in,
    open_envelope,
)
from protocol.errors import LimitExceeded, Malformed, VersionMismatch
from protocol.messages.episodes import Deliver, PutTasks, Task, TaskCredit
from protocol.messages.peers import Abort, Chunk
from tests.hearing import heard

CREDIT = {"type": "task_credit", "tasks": 1}


def credits(*numbers):
    return [encode(TaskCredit(tasks=n)) for n in numbers]


def with_body(name, nbytes=8):
    return encode(Chunk(request_id=name), bytes(nbytes))


def large(text=200_000):
    return encode(
        PutTasks(tasks=[Task(task_id="a", env="e", data={"text": "x" * text}, group_id="g", group_size=1)])
    )


def names(frames):
    return [
        message.tasks if isinstance(message, TaskCredit) else message.request_id
        for message in heard(frames)[0]
    ]


def test_all_that_is_said_leaves_as_one_message_in_order():
    [envelope] = enclose([*credits(1, 2), with_body("a"), encode(Abort(request_id="b")), with_body("c", 16)])
    assert names(envelope) == [1, 2, "a", "b", "c"]
    parts = open_envelope(envelope)
    assert [[len(frame) for frame in part[2:]] for part in parts] == [[], [], [8], [], [16]]


def test_what_waits_alone_leaves_as_it_is():
    alone = with_body("a")
    assert enclose([alone])[0] is alone
    assert open_envelope(alone)[0] is alone
    assert enclose([]) == []


def test_a_delivery_travels_in_its_place():
    pairs = [(b"\x80", b"body"), (b"\x80", b"")]
    [envelope] = enclose([*credits(1), encode_delivery(Deliver(unit_id="u", segments=2), pairs), *credits(2)])
    first, delivery, last = (decode(one) for one in open_envelope(envelope))
    assert (first[0].tasks, last[0].tasks) == (1, 2)
    assert [bytes(frame) for frame in delivery[1]] == [b"\x80", b"body", b"\x80", b""]


def test_each_receiver_gets_its_own_behind_its_routing_id():
    said = [[route, *frames] for route, frames in zip([b"a", b"b", b"a"], credits(1, 2, 3), strict=True)]
    sent = enclose(said, addressed=True)
    assert sorted((frames[0], names(frames[1:])) for frames in sent) == [(b"a", [1, 3]), (b"b", [2])]


@pytest.mark.parametrize(
    "foreign",
    [
        [b"", b"1.0", b"x"],
        [b"OB\x09\x00", b"\x80"],
        [PRELUDE],
        [PRELUDE, b""],
        [PRELUDE, b"\x91\x92\x00\x80"],
        [PRELUDE, b"\x80", *[b""] * 64],
    ],
)
def test_what_is_no_message_of_ours_or_too_many_frames_keeps_its_form_and_its_place(foreign):
    sent = enclose([*credits(1, 2), foreign, *credits(3)])
    assert sent[1] is foreign
    assert (names(sent[0]), names(sent[2])) == ([1, 2], [3])


def test_no_more_than_is_handled_at_a_time():
    sent = enclose(credits(*range(1, MAX_ENCLOSED + 2)))
    assert [len(names(frames)) for frames in sent] == [MAX_ENCLOSED, 1]
    assert [n for frames in sent for n in names(frames)] == [*range(1, MAX_ENCLOSED + 2)]


def test_no_more_than_a_header_holds():
    sent = enclose([large(), large(), *credits(1)])
    assert [len(open_envelope(frames)) for frames in sent] == [1, 2]
    full = enclose([large(text) for text in (MAX_HEADER_BYTES // 2, MAX_HEADER_BYTES // 2 - 500)])
    assert len(full) == 1
    assert len(full[0][1]) <= MAX_HEADER_BYTES


def test_large_bodies_travel_alone():
    sent = enclose([with_body("a", MAX_ENVELOPE_BYTES), with_body("b"), *credits(1)])
    assert [names(frames) for frames in sent] == [["a"], ["b", 1]]


@pytest.mark.parametrize(
    "entries", [[], [[0, CREDIT]] * (MAX_ENCLOSED + 1), [CREDIT], [[-1, CREDIT]], [["0", CREDIT]]]
)
def test_no_message_too_many_and_other_forms_are_refused(entries):
    with pytest.raises(Malformed):
        open_envelope([PRELUDE, msgspec.msgpack.encode(entries)])


@pytest.mark.parametrize(("behind", "frames"), [((0, 1), 0), ((1, 1), 1), ((0, 0), 1), ((65_536, 0), 2)])
def test_frames_are_as_many_as_the_envelope_says(behind, frames):
    header = msgspec.msgpack.encode([[n, CREDIT] for n in behind])
    with pytest.raises(Malformed, match=f"{frames} are there"):
        open_envelope([PRELUDE, header, *[b""] * frames])


@pytest.mark.parametrize(
    "wrong", [{"type": "nonsense"}, 3, [], [[0, CREDIT]], {"type": "task_credit", "tasks": -1}]
)
def test_a_message_that_nobody_knows_takes_no_other_with_it(wrong, caplog):
    entries = msgspec.msgpack.encode([[0, CREDIT], [1, wrong], [0, CREDIT]])
    said = list(messages_in([PRELUDE, entries, b"body"], "a stranger"))
    assert said == [(TaskCredit(tasks=1), [])] * 2
    assert "message from a stranger refused" in caplog.text


def test_frames_are_checked_before_an_envelope_is_opened(caplog):
    with pytest.raises(VersionMismatch):
        open_envelope([b"OB\x09\x00", b"\x91\xc1"])
    with pytest.raises(LimitExceeded):
        open_envelope([PRELUDE, b"\x91" * (MAX_HEADER_BYTES + 1)])
    assert list(messages_in([b"OB\x09\x00", b"\x91\xc1"], "a stranger")) == []
    assert "messages from a stranger refused" in caplog.text


def test_arrays_stay_with_their_message():
    chunks = [
        encode_arrays(Chunk(request_id=str(n)), {"token_ids": np.arange(n, dtype="<i4")}) for n in range(3)
    ]
    [envelope] = enclose(chunks)
    assert [(message.request_id, len(body)) for message, (body,) in messages_in(envelope, "g")] == [
        ("0", 0),
        ("1", 8),
        ("2", 8),
    ]

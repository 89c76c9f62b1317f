"""Test messages to frames and back, and the limits before decoding."""

import msgspec
import numpy as np
import pytest

from protocol import codec
from protocol.codec import (
    PRELUDE,
    AnyMessage,
    check_frames,
    decode,
    decode_delivery,
    decode_segment,
    encode,
    encode_arrays,
    encode_delivery,
    pack_arrays,
    unpack_arrays,
)
from protocol.errors import LimitExceeded, Malformed, ProtocolError, VersionMismatch
from protocol.messages.episodes import Deliver, PutTasks, Segment, Task, TaskCredit
from protocol.messages.fields import MAX_ARRAYS, ArraySpec
from protocol.messages.peers import Generate, Heartbeat, Hello

MESSAGES = AnyMessage.__args__


def segment(**changes):
    fields = {"trajectory_id": "t.0", "task_id": "t", "group_id": "g", "group_size": 1, "index": 0}
    fields |= {"offset": 0, "tokens": 2, "action_tokens": 1, "status": "finished"}
    return Segment(**(fields | changes))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_tagged_immutable_and_bounded_in_its_types(kind):
    config = kind.__struct_config__
    assert config.tag_field == "type"
    assert config.frozen
    assert msgspec.json.schema(kind)


def test_tags_are_unique():
    tags = [kind.__struct_config__.tag for kind in MESSAGES]
    assert len(set(tags)) == len(tags)


def test_a_message_survives_the_journey():
    task = Task(task_id="a", env="e", data={"index": 3, "split": "train"}, group_id="g", group_size=4)
    message, rest = decode(encode(PutTasks(tasks=[task])))
    assert message == PutTasks(tasks=[task])
    assert list(rest) == []


def test_arrays_travel_aligned_and_as_views():
    arrays = {
        "mask": np.array([1, 0, 1], "u1"),
        "ids": np.array([1, -2, 3], "<i4"),
        "logp": np.array([0.5, -1e30, 0], "<f4"),
        "wide": np.array([2**60], "<i8"),
        "double": np.array([np.pi], "<f8"),
        "none": np.array([], "<i4"),
    }
    frames = encode_arrays(segment(), arrays)
    message, (body,) = decode(frames)
    assert all(spec.offset % 8 == 0 for spec in message.arrays)
    unpacked = unpack_arrays(message.arrays, body)
    assert list(unpacked) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(unpacked[name], array)
        assert not unpacked[name].flags.owndata


def test_big_endian_arrays_travel_little_endian():
    specs, body = pack_arrays({"x": np.array([1, 2], ">i4")})
    np.testing.assert_array_equal(unpack_arrays(specs, body)["x"], [1, 2])


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), "f4"), np.zeros(2, "f2"), np.array(["a"]), np.zeros(2, "c8")]
)
def test_arrays_of_other_kinds_cannot_travel(array):
    with pytest.raises(ValueError, match="cannot travel"):
        pack_arrays({"x": array})


def test_an_array_behind_the_end_of_its_body_is_refused():
    with pytest.raises(Malformed, match=r"\$\.arrays\[0\].*ends at byte 8, the body has 7"):
        unpack_arrays([ArraySpec("x", "i4", 2, 0)], b"1234567")
    with pytest.raises(LimitExceeded, match="arrays"):
        unpack_arrays([ArraySpec("x", "u1", 0, 0)] * (MAX_ARRAYS + 1), b"")


def test_a_delivery_carries_its_segments_untouched():
    one = encode_arrays(segment(), {"token_ids": np.array([1, 2], "<i4")})
    two = encode_arrays(segment(index=1), {"token_ids": np.array([3, 4], "<i4")})
    deliver = Deliver(unit_id="g", segments=2)
    frames = encode_delivery(deliver, [(one[1], one[2]), (two[1], two[2])])
    message, rest = decode(frames)
    assert rest == [one[1], one[2], two[1], two[2]]
    decoded = decode_delivery(message, rest)
    assert [s.index for s, _ in decoded] == [0, 1]
    assert decoded[1][1]["token_ids"].tolist() == [3, 4]
    with pytest.raises(Malformed, match="announces 2 segments, 3 frames follow"):
        decode_delivery(message, rest[:3])
    with pytest.raises(ValueError, match="announces 2"):
        encode_delivery(deliver, [])


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([], Malformed),
        ([PRELUDE], Malformed),
        ([b"", b""], Malformed),
        ([b"XX\x01\x00", b"\x80"], Malformed),
        ([b"OB\x03", b"\x80"], Malformed),
        ([b"OB\x01\x00", b"\x80"], VersionMismatch),
        ([PRELUDE, b""], Malformed),
        ([PRELUDE, b"\xc1"], Malformed),
        ([PRELUDE, b"\x80"], Malformed),
        ([PRELUDE, msgspec.msgpack.encode({"type": "nonsense"})], Malformed),
        ([PRELUDE, msgspec.msgpack.encode({"type": "task_credit", "tasks": -1})], Malformed),
        ([PRELUDE, msgspec.msgpack.encode({"type": "task_credit", "tasks": "3"})], Malformed),
        ([PRELUDE, msgspec.msgpack.encode({"type": "task_credit", "tasks": 3}) + b"x"], Malformed),
        ([PRELUDE, b"\x91" * 100_000], Malformed),
        ([PRELUDE, b"\xa2\xff\xfe"], Malformed),
    ],
)
def test_frames_that_are_no_message_are_refused(frames, error):
    with pytest.raises(error):
        decode(frames)


def test_a_newer_minor_version_and_unknown_fields_are_accepted():
    header = msgspec.msgpack.encode({"type": "task_credit", "tasks": 3, "colour": "blue"})
    assert decode([PRELUDE[:3] + b"\x63", header])[0] == TaskCredit(tasks=3)


def test_an_error_names_the_path_to_the_field():
    tasks = [{"task_id": "a", "env": "e", "group_id": "g", "group_size": 0}]
    with pytest.raises(Malformed, match=r"\$\.tasks\[0\]\.group_size"):
        decode([PRELUDE, msgspec.msgpack.encode({"type": "put_tasks", "tasks": tasks})])


def test_too_large_is_refused_on_both_sides(monkeypatch):
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", 100)
    monkeypatch.setattr(codec, "MAX_BODY_BYTES", 64)
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 300)
    monkeypatch.setattr(codec, "MAX_FRAMES", 6)
    with pytest.raises(LimitExceeded, match="header of"):
        encode(Heartbeat(gauges={"x" * 100: 1.0}))
    with pytest.raises(LimitExceeded, match="body of"):
        encode(Generate(request_id="r", max_tokens=1), b"x" * 65)
    for frames, what in [
        ([PRELUDE, b"x" * 101], "header of 101"),
        ([PRELUDE, b"x", b"y" * 65], "frame 2 of 65"),
        ([PRELUDE, b"x", *[b"y" * 64] * 4, b"y" * 64], "frames"),
        ([PRELUDE, b"x" * 100, b"y" * 200], "304 bytes"),
    ]:
        with pytest.raises(LimitExceeded, match=what):
            check_frames(frames)
    with pytest.raises(LimitExceeded, match="segment header"):
        decode_segment(b"x" * 101)


def test_errors_are_of_one_tree():
    for error in (LimitExceeded, Malformed, VersionMismatch):
        assert issubclass(error, ProtocolError)


def test_names_have_a_length():
    with pytest.raises(Malformed):
        decode(encode(Hello(role="actor", peer="", incarnation=1)))
    with pytest.raises(Malformed):
        decode(encode(Hello(role="actor", peer="x" * 257, incarnation=1)))

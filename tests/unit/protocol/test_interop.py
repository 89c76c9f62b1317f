"""Test the wire without our codec: msgpack and numpy are all that a foreign peer needs."""

import msgpack
import numpy as np
import pytest

from protocol.codec import MAX_BODY_BYTES, MAX_HEADER_BYTES, check_frames, decode, encode, unpack_arrays
from protocol.errors import LimitExceeded, VersionMismatch
from protocol.messages.episodes import Segment, Turn
from protocol.messages.peers import Hello
from tests.broker_driver import Driver, group, segment_frames

DTYPES = {"i4": "<i4", "i8": "<i8", "u1": "u1", "f4": "<f4", "f8": "<f8"}


def foreign_decode(frames):
    """Return the header as a dict, and the arrays, by the words of SPEC.md only."""
    assert frames[0][:2] == b"OB"
    assert frames[0][2] == 4
    header = msgpack.unpackb(frames[1])
    arrays = {
        name: np.frombuffer(frames[2], DTYPES[dtype], length, offset)
        for name, dtype, length, offset in header.get("arrays", [])
    }
    return header, arrays


def foreign_segment(lease, **more):
    """Return a segment as a foreign implementation would write it."""
    ids, mask = np.array([7, 8, 9], "<i4").tobytes(), np.array([0, 1, 1], "u1").tobytes()
    logp, version = np.array([0, -1, -2], "<f4").tobytes(), np.array([-1, 2, 3], "<i4").tobytes()
    body, specs = b"", []
    for name, dtype, data in (
        ("token_ids", "i4", ids),
        ("action_mask", "u1", mask),
        ("logp_behaviour", "f4", logp),
        ("policy_version", "i4", version),
    ):
        specs.append([name, dtype, 3, len(body)])
        body += data + bytes(-len(data) % 8)
    header = {
        "type": "segment",
        "trajectory_id": f"{lease.task.task_id}.{lease.attempt}",
        "task_id": lease.task.task_id,
        "group_id": lease.task.group_id,
        "group_size": lease.task.group_size,
        "index": 0,
        "offset": 0,
        "tokens": 3,
        "action_tokens": 2,
        "status": "finished",
        "version_min": 2,
        "version_max": 3,
        "turns": [[0, 0, 1, False], [1, 1, 3, True]],
        "rewards": [["score", 1, 0.5]],
        "arrays": specs,
        **more,
    }
    return [b"OB\x04\x00", msgpack.packb(header), body]


@pytest.fixture
def driver():
    driver = Driver()
    driver.learner()
    driver.put(*group("g", 1))
    driver.actor()
    return driver


def test_our_segments_are_readable_with_msgpack_and_numpy(driver):
    (lease,) = driver.leases()
    header, arrays = foreign_decode(segment_frames(lease, turns=[Turn(0, 0, 2, False), Turn(1, 2, 4, True)]))
    assert header["type"] == "segment"
    assert header["trajectory_id"] == "g.0.0"
    assert header["turns"] == [[0, 0, 2, False, 1], [1, 2, 4, True, 1]]
    assert arrays["token_ids"].tolist() == [0, 1, 2, 3]
    assert arrays["action_mask"].tolist() == [0, 0, 1, 1]
    assert set(arrays) == {"token_ids", "action_mask", "logp_behaviour", "policy_version"}


def test_a_message_without_arrays_is_a_map_with_its_type():
    frames = encode(Hello(role="actor", peer="a", incarnation=3))
    assert msgpack.unpackb(frames[1]) == {"type": "hello", "role": "actor", "peer": "a", "incarnation": 3}


def test_a_foreign_segment_is_understood():
    (task,) = group("g", 1)
    lease = type("Lease", (), {"task": task, "attempt": 0})
    message, (body,) = decode(foreign_segment(lease))
    assert isinstance(message, Segment)
    assert (message.rewards[0].name, message.rewards[0].value) == ("score", 0.5)
    assert unpack_arrays(message.arrays, body)["policy_version"].tolist() == [-1, 2, 3]


def test_unknown_fields_of_a_segment_survive_the_broker_byte_for_byte(driver):
    (lease,) = driver.leases()
    frames = foreign_segment(lease, entropy_note={"mean": 1.25, "who": ["x", b"\x00\xff"]}, zz_future=7)
    driver.say_frames("actor", frames)
    (delivery,) = driver.deliveries()
    ((header, body),) = driver.frames[delivery.unit_id]
    assert (header, body) == (frames[1], frames[2])
    assert msgpack.unpackb(header)["entropy_note"] == {"mean": 1.25, "who": ["x", b"\x00\xff"]}


def test_another_major_version_is_refused_with_words_that_help():
    frames = encode(Hello(role="actor", peer="a", incarnation=3))
    with pytest.raises(
        VersionMismatch, match=r"peer speaks protocol 5\.5, this process 4\.8; run the same major"
    ):
        decode([b"OB\x05\x05", *frames[1:]])


def test_versions_are_looked_at_before_the_header_is_decoded():
    with pytest.raises(VersionMismatch):
        decode([b"OB\x05\x00", b"\xc1 this is no msgpack"])


def test_limits_are_checked_before_decoding():
    for frames in (
        [b"OB\x04\x00", b"\xc1" * (MAX_HEADER_BYTES + 1)],
        [b"OB\x04\x00", b"\xc1", bytes(MAX_BODY_BYTES + 1)],
    ):
        with pytest.raises(LimitExceeded):
            decode(frames)


def test_a_length_that_lies_is_no_memory():
    bomb = b"\x81\xa5tasks\xdd\xff\xff\xff\xff"  # a map with an array of four billion elements
    with pytest.raises(ValueError, match="header"):
        decode([b"OB\x04\x00", bomb])
    check_frames([b"OB\x04\x00", bomb])

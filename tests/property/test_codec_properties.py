"""Test round trips, and that every input is either decoded or refused."""

from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import (
    PRELUDE,
    decode,
    decode_segment,
    enclose,
    encode,
    encode_arrays,
    pack_arrays,
    unpack_arrays,
)
from protocol.errors import Malformed, ProtocolError
from protocol.messages.episodes import Commit, PutTasks, Reward, Sampling, Segment, Task, Turn
from protocol.messages.peers import Heartbeat, Hello, Refused
from tests.hearing import heard
from tests.property.effort import EFFORT

QUICK = settings(max_examples=40 * EFFORT, deadline=None)
names = st.text(min_size=1, max_size=20)
counts = st.integers(0, 2**63 - 1)
numbers = st.floats(allow_nan=False)
growing = st.floats(0, 2.0**62)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), numbers, st.text(max_size=9))
values = st.recursive(
    scalars, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text(max_size=5), v, max_size=3))
)
tasks = st.builds(
    Task,
    task_id=names,
    env=names,
    data=st.dictionaries(st.text(max_size=9), values, max_size=3),
    group_id=names,
    group_size=st.integers(1, 100),
    member=counts,
    purpose=st.sampled_from(["train", "eval"]),
    sampling=st.builds(Sampling, seed=st.none() | st.integers(-(2**31), 2**31)),
)
segments = st.builds(
    Segment,
    trajectory_id=names,
    task_id=names,
    group_id=names,
    group_size=st.integers(1, 9),
    index=counts,
    offset=counts,
    tokens=counts,
    action_tokens=counts,
    status=st.sampled_from(["unfinished", "finished", "truncated", "failed"]),
    turns=st.lists(
        st.builds(Turn, st.integers(0, 2**31 - 1), counts, counts, st.booleans(), counts), max_size=3
    ),
    rewards=st.lists(st.builds(Reward, names, counts, numbers), max_size=3),
    extra=st.dictionaries(st.text(max_size=9), values, max_size=3),
)
messages = st.one_of(
    segments,
    st.builds(PutTasks, tasks=st.lists(tasks, max_size=3)),
    st.builds(Heartbeat, progress=growing, busy=st.booleans(), gauges=st.dictionaries(names, numbers)),
    st.builds(Hello, role=st.sampled_from(["learner", "actor"]), peer=names, incarnation=counts),
    st.builds(Commit, epoch=counts, step=counts, trained=st.lists(names), dropped=st.lists(names)),
    st.builds(Refused, code=st.text(max_size=5), message=st.text(max_size=5)),
)


@QUICK
@given(messages)
def test_what_is_encoded_is_decoded(message):
    decoded, rest = decode(encode(message))
    assert decoded == message
    assert list(rest) == []


@st.composite
def array_sets(draw):
    arrays = {}
    for name in draw(st.lists(names, max_size=5, unique=True)):
        code = draw(st.sampled_from(["<i4", "<i8", "u1", "<f4", "<f8"]))
        length = draw(st.integers(0, 40))
        raw = draw(st.binary(min_size=length * 8, max_size=length * 8))
        arrays[name] = np.frombuffer(raw[: length * np.dtype(code).itemsize], code)
    return arrays


@QUICK
@given(array_sets())
def test_arrays_travel_bit_for_bit(arrays):
    specs, body = pack_arrays(arrays)
    unpacked = unpack_arrays(specs, body)
    assert list(unpacked) == list(arrays)
    for name, array in arrays.items():
        assert unpacked[name].tobytes() == array.tobytes()
        assert unpacked[name].dtype == array.dtype


@settings(max_examples=80 * EFFORT, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4), st.booleans())
def test_arbitrary_frames_are_decoded_or_refused(frames, with_prelude):
    with suppress(ProtocolError):
        decode([PRELUDE, *frames] if with_prelude else frames)
    with suppress(ProtocolError):
        heard([PRELUDE, *frames] if with_prelude else frames)


@QUICK
@given(st.lists(messages, min_size=1, max_size=9))
def test_what_is_put_together_comes_apart_in_order(said):
    sent = enclose([encode(message) for message in said])
    assert [message for frames in sent for message in heard(frames)[0]] == said


@settings(max_examples=80 * EFFORT, deadline=None)
@given(messages, st.data())
def test_a_damaged_message_is_decoded_or_refused(message, data):
    frames = encode(message)
    header = bytearray(frames[1])
    place = data.draw(st.integers(0, len(header) - 1))
    header[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(header)))
    for damaged in (bytes(header), bytes(header[:cut])):
        for reader in (
            lambda raw: decode([frames[0], raw]),
            lambda raw: heard([frames[0], raw]),
            decode_segment,
        ):
            with suppress(ProtocolError):
                reader(damaged)


@QUICK
@given(segments, array_sets(), st.data())
def test_array_places_that_lie_never_read_behind_the_body(segment, arrays, data):
    message, (body,) = decode(encode_arrays(segment, arrays))
    if not message.arrays:
        return
    i = data.draw(st.integers(0, len(message.arrays) - 1))
    lying = list(message.arrays)
    lying[i] = msgspec.structs.replace(
        lying[i], offset=data.draw(st.integers(0, 500)), length=data.draw(st.integers(0, 500))
    )
    try:
        unpacked = unpack_arrays(lying, body)
    except ProtocolError:
        return
    spec = lying[i]
    assert len(unpacked[spec.name]) == spec.length
    assert spec.offset + unpacked[spec.name].nbytes <= len(body)


def test_what_the_broker_adds_up_has_a_limit():
    decode(encode(Commit(epoch=1, step=1, replayed_tokens=2**40)))
    with pytest.raises(Malformed, match="replayed_tokens"):
        decode(encode(Commit(epoch=1, step=1, replayed_tokens=2**64 - 1)))

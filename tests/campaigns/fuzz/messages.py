"""Fuzz both readers of messages, beginning with examples of every protocol message.

Whatever frames arrive, the decoder returns a message or raises a ProtocolError. Whatever a broker sends, a peer's
session goes on and does not flood the broker. An input of the decoder is a sequence of frames, each after its length
(2 bytes). The first byte of the input says whether the right prelude is put before them.
"""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from protocol.arrays import Arrays
from protocol.codec import (
    MAX_ENCLOSED,
    PRELUDE,
    AnyMessage,
    Frames,
    decode,
    decode_delivery,
    decode_segment,
    enclose,
    encode,
    encode_arrays,
    encode_delivery,
    open_envelope,
    unpack_arrays,
)
from protocol.errors import ProtocolError
from protocol.messages.episodes import (
    CancelTask,
    Checkpointed,
    CheckpointWanted,
    Commit,
    Deliver,
    DeliveryCredit,
    Dropped,
    Held,
    LeaseTask,
    PutTasks,
    Reward,
    Sampling,
    Segment,
    SegmentAck,
    SegmentCredit,
    Task,
    TaskCredit,
    TaskRejected,
    Turn,
)
from protocol.messages.fields import LARGEST_VERSION, ArraySpec
from protocol.messages.peers import (
    Abort,
    Chunk,
    Drain,
    Generate,
    GeneratorInfo,
    Generators,
    Goodbye,
    Heartbeat,
    Hello,
    PublishWeights,
    QueueStats,
    Refused,
    WeightsReady,
    Welcome,
)
from protocol.session import Progress, Session
from tests.campaigns.fuzz.engine import (
    HOSTILE_FLOATS,
    HOSTILE_INTS,
    Choices,
    hostile_value,
    mutate_bytes,
    mutate_value,
)


def group(name: str, size: int = 2, **fields: Any) -> list[Task]:
    """Return the tasks of one rollout group."""
    return [
        Task(task_id=f"{name}.{i}", env="e", group_id=name, group_size=size, member=i, **fields)
        for i in range(size)
    ]


def evaluation(name: str) -> Task:
    """Return an evaluation task, alone in its group."""
    return Task(task_id=name, env="e", group_id=name, group_size=1, purpose="eval")


def arrays(tokens: int, action_tokens: int, version: int = 0) -> dict[str, Any]:
    """Return the arrays of a segment. The last ``action_tokens`` of its tokens are action tokens."""
    return {
        "token_ids": np.arange(tokens, dtype="<i4"),
        "action_mask": np.array([0] * (tokens - action_tokens) + [1] * action_tokens, "u1"),
        "logp_behaviour": np.zeros(tokens, "<f4"),
        "policy_version": np.full(tokens, min(version, 2**31 - 1), "<i4"),
    }


def segment(lease: LeaseTask, index: int, offset: int, *, tokens: int, status: str, version: int) -> Segment:
    """Return a segment of a lease's trajectory, at this index and offset."""
    task, acts = lease.task, min(2, tokens)
    return Segment(
        trajectory_id=lease.trajectory_id,
        task_id=task.task_id,
        group_id=task.group_id,
        group_size=task.group_size,
        index=index,
        offset=offset,
        tokens=tokens,
        action_tokens=acts,
        status=status,  # type: ignore[arg-type]
        purpose=task.purpose,
        version_min=version if acts else -1,
        version_max=version if acts else -1,
        turns=[Turn(0, offset, offset + tokens, True)],
    )


def plain() -> Sequence[AnyMessage]:
    """Return examples of the messages that carry no arrays."""
    tasks = group(
        "1g0", data={"x": [1, {"y": None}], "f": 0.5}, sampling=Sampling(seed=3, top_k=2), deadline_s=30.0
    )
    return (
        Hello(role="learner", peer="L", incarnation=1, epoch=1, lineage=1, step=2, deliver="segment"),
        Hello(role="generator", peer="g", incarnation=2, endpoint="tcp://h:1", weights_url="http://h:1"),
        Hello(role="actor", peer="a", incarnation=0, host="h", pid=4, attempt=2),
        Heartbeat(progress=1.5, busy=True, policy_version=3, gauges={"tokens_total": 5.0, "idle_share": 0.5}),
        Goodbye(reason="done"),
        PutTasks(tasks=[*tasks, evaluation("e0")]),
        DeliveryCredit(units=4),
        Commit(epoch=1, step=3, trained=["1g0"], dropped=["e0.0"], replayed_tokens=7),
        Checkpointed(epoch=1, step=3),
        PublishWeights(epoch=1, version=4, manifest="/m", url="http://h:2"),
        TaskCredit(tasks=3),
        TaskRejected(lease_id="t.1", reason="draining"),
        Welcome(run="r", epoch=1, heartbeat_s=1.0, policy_version=2, limits={"header_bytes": 9}, attempt=1),
        Refused(code="unknown_peer", message="say Hello", fatal=True),
        Generators(generators=[GeneratorInfo(peer="g", endpoint="tcp://h:1", policy_version=2)]),
        LeaseTask(lease_id="t.1", attempt=1, task=tasks[0]),
        CancelTask(lease_id="t.1", reason="late"),
        SegmentAck(trajectory_id="1g0.0.0", index=1, status="refused", reason="gap"),
        SegmentCredit(segments=5),
        Held(task_ids=["1g0.0", "1g0.1"], unit_ids=["1g0"], more=True),
        CheckpointWanted(reason="full"),
        Deliver(unit_id="1g0", segments=0, complete=False, redelivered=True),
        Dropped(unit_id="1g0", group_id="1g0", trajectories=2, reason="stale"),
        WeightsReady(epoch=1, version=4, manifest="/m", sources=["http://h:1", "http://h:2"]),
        Drain(reason="end"),
        QueueStats(gauges={"broker/queued_bytes": 5.0}),
        Abort(request_id="r1"),
    )


def samples() -> list[tuple[AnyMessage, Frames]]:
    """Return examples of all messages, with their frames."""
    lease = LeaseTask(lease_id="t.1", attempt=0, task=group("1g0")[0])
    one = segment(lease, 0, 0, tokens=5, status="finished", version=3)
    rich = segment(lease, 1, 5, tokens=3, status="unfinished", version=3)
    rich = Segment(**{f: getattr(rich, f) for f in rich.__struct_fields__} | {
        "rewards": [Reward("r", 0, 1.0)], "extra": {"k": [1, "v"]}, "error": "e", "kv": "kept", "temperature": 0.7,
    })  # fmt: skip
    ask = Generate(request_id="r1", max_tokens=4, seed=1, stop_token_ids=[2])
    chunk = Chunk(request_id="r1", offset=2, finish_reason="stop")
    carried: list[tuple[AnyMessage, dict[str, Any]]] = [
        (one, arrays(5, 2, 3)),
        (rich, arrays(3, 2, 3)),
        (ask, arrays(4, 0)),
        (chunk, arrays(2, 2)),
    ]
    found: list[tuple[AnyMessage, Frames]] = [(message, encode(message)) for message in plain()]
    for message, values in carried:
        found.append((message, encode_arrays(message, values)))
    return found


MAX_SPECS = 200


def join(frames: Sequence[bytes]) -> bytes:
    """Pack frames into an input. A right prelude is left out, because the first byte stands for it.

    Example:
        >>> split(join([PRELUDE, b"header", b"body"])) == [PRELUDE, b"header", b"body"]
        True
    """
    right = bool(frames) and frames[0] == PRELUDE
    rest = frames[1:] if right else frames
    return bytes([right]) + b"".join(len(f).to_bytes(2, "little") + f for f in rest)


def split(data: bytes) -> list[bytes]:
    """Return the frames of an input. The last one may be cut."""
    frames = [PRELUDE] if data[:1] != b"\x00" else []
    at = 1
    while at < len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "little")
        frames.append(data[at + 2 : end])
        at = end
    return frames


class DecoderTarget:
    """Target for `protocol`: decode, open_envelope, decode_segment, decode_delivery, unpack_arrays."""

    name, unit = "decoder", "decoded"

    def __init__(self) -> None:
        self.done = 0
        self._seeds = [list(map(bytes, frames)) for frames in _seeds()]
        self._trees: list[Any] = [msgspec.msgpack.decode(frames[1]) for frames in self._seeds]

    def make(self, rng: random.Random) -> bytes:
        which = int(rng.random() * len(self._seeds))
        kind = rng.getrandbits(3)
        if kind == 0:
            return rng.randbytes(rng.getrandbits(6))
        if kind <= 3:
            return mutate_bytes(rng, join(self._seeds[which]))
        prelude, _, *rest = self._seeds[which]
        tree = mutate_value(rng.choice, self._trees[which])
        if kind == 4:
            tree = mutate_value(rng.choice, tree)
        try:
            header = msgspec.msgpack.encode(tree)
        except (OverflowError, RecursionError):
            return b"\x01\x02\x00\xcf\xff"
        if kind == 7 and rest:
            rest = rest[1:] if rng.getrandbits(1) else [*rest, rest[-1]]
        return join([prelude, header, *rest])

    def run(self, data: bytes) -> None:
        frames = split(data)
        for frame in frames[1:2]:
            _segment(frame)
        _envelope(frames)
        try:
            message, rest = decode(frames)
        except ProtocolError:
            return
        self.done += 1
        header = encode(message)
        again, _ = decode(header)
        assert encode(again) == header, f"{type(message).__name__} is another message after a journey"
        arrays = getattr(message, "arrays", None)
        if arrays is not None and rest:
            _arrays(arrays, rest[0])
        if isinstance(message, Deliver):
            try:
                decode_delivery(message, rest)
            except ProtocolError:
                return


def _envelope(frames: Sequence[bytes]) -> None:
    try:
        parts = open_envelope(frames)
    except ProtocolError:
        return
    assert 1 <= len(parts) <= MAX_ENCLOSED, f"{len(parts)} messages in one envelope"
    count = len(frames) - 2 if len(parts) > 1 else 0
    assert sum(len(part) - 2 for part in parts if len(parts) > 1) == count, "a frame was lost or came twice"
    for part in parts if len(parts) > 1 else ():
        with contextlib.suppress(ProtocolError):
            decode(part)


def _segment(frame: bytes) -> None:
    try:
        decode_segment(frame)
    except ProtocolError:
        return


def _arrays(specs: Sequence[ArraySpec], body: bytes | memoryview) -> Arrays:
    try:
        arrays = unpack_arrays(specs, body)
    except ProtocolError:
        return {}
    whole = np.frombuffer(body, np.uint8)
    for spec in specs[-1:]:
        view = arrays[spec.name]
        assert len(view) == spec.length, "an array is not as long as its header says"
        expected = whole[spec.offset : spec.offset + view.nbytes].tobytes()
        assert view.tobytes() == expected, "an array is not what the body has at its place"
    return arrays


def _seeds() -> list[Sequence[bytes | memoryview]]:
    found = samples()
    whole = [frames for message, frames in found if isinstance(message, Segment) and len(frames) == 3]
    segments = [(frames[1], frames[2]) for frames in whole]
    out: list[Sequence[bytes | memoryview]] = [frames for _, frames in found]
    out += enclose([frames for _, frames in found][:16])
    for n in (1, 2):
        out.append(encode_delivery(Deliver(unit_id="u", segments=n), segments[:1] * n))
    return out


MESSAGES = plain()
SILENT_S = 10.0
HEARTBEATS_S = (1.0, 0.5, 0.1, 30.0, *HOSTILE_FLOATS)


class SessionTarget:
    """Target for `protocol.session`."""

    name, unit = "session", "messages"

    def __init__(self) -> None:
        self.done = 0

    def make(self, rng: random.Random) -> bytes:
        return rng.randbytes(8 + rng.getrandbits(6))

    def run(self, data: bytes) -> None:
        choices = Choices(data)
        hello = Hello(role="actor", peer="a", incarnation=1)
        now = 100.0
        session = Session(hello, now)
        while choices.left:
            now += choices.pick((0.0, 0.01, 0.3, 1.0, 6.0, 1000.0))
            if choices.flag():
                self._receive(choices, session, now)
            version = max(0, min(LARGEST_VERSION, choices.pick(HOSTILE_INTS[:15])))
            progress = Progress(float(choices.byte()), choices.flag(), version, (("x", 1.0),))
            said = session.due(now, partial(replace, progress))
            assert len(said) <= 1, "more than one message at a time"
            for message in said:
                decode(encode(message))
                assert isinstance(message, Heartbeat if session.joined else Hello), (
                    "a message of another state"
                )
            assert session.due(now, partial(replace, progress)) == [], "the same moment asks twice"
        self._silence(session, now)

    def _silence(self, session: Session, now: float) -> None:
        """Check that the session sends Hello again to a broker that stays silent."""
        hellos = 0
        for step in range(400):
            hellos += sum(isinstance(m, Hello) for m in session.due(now + SILENT_S * step, Progress))
        assert hellos > 0, "a silent broker is never asked again"

    def _receive(self, choices: Choices, session: Session, now: float) -> None:
        self.done += 1
        message: Any = choices.pick(MESSAGES)
        match choices.below(6):
            case 0 | 1:
                message = Welcome(
                    run="r",
                    epoch=1,
                    heartbeat_s=choices.pick(HEARTBEATS_S),
                    policy_version=0,
                    attempt=choices.below(4),
                )
            case 2:
                message = Refused(code="unknown_peer", message="")
            case 3:
                name = choices.pick(message.__struct_fields__)
                message = msgspec.structs.replace(
                    message, **{name: hostile_value(choices.pick, getattr(message, name))}
                )
        try:
            message, _ = decode([PRELUDE, msgspec.msgpack.encode(message)])
        except (ProtocolError, OverflowError):
            return
        session.received(message, now)

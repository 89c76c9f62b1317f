"""One or more examples of every protocol message, with which the fuzzers begin."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.codec import AnyMessage, Frames, encode, encode_arrays
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

"""Every message of the protocol, one Struct each; SPEC.md says who sends what, when.

Structs are encoded as MessagePack maps whose key ``type`` names the message. Decoding ignores keys it does
not know, and the broker forwards the *bytes* of a segment header, so unknown fields survive the journey.
All times on the wire are durations in seconds: clocks of two hosts are never compared.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from protocol import names
from protocol.version_line import MAX_FORKS

Role = Literal["learner", "actor", "generator"]
Purpose = Literal["train", "eval"]
TrajectoryStatus = Literal["unfinished", "finished", "truncated", "failed"]
KvPolicy = Literal["recomputed", "kept"]
DeliveryUnit = Literal["group", "trajectory", "segment"]

MAX_NAME, MAX_ID, MAX_ADDRESS, MAX_PATH, MAX_TEXT, MAX_ROOT = 256, 512, 512, 4_096, 16_384, 64
MAX_ITEMS, MAX_TASKS, MAX_IDS, MAX_KEYS, MAX_SOURCES, MAX_ARRAYS = 4_096, 8_192, 65_536, 1_024, 64, 64
LARGEST_COUNT, LARGEST_VERSION, LARGEST_DURATION_S = 2**63 - 1, 2**31 - 1, 1e9

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Label = Annotated[str, Meta(max_length=MAX_NAME)]
"""A name that may be missing, or a short code."""
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
"""Made of names: of a trajectory, unit, lease or request."""
Address = Annotated[str, Meta(max_length=MAX_ADDRESS)]
FilePath = Annotated[str, Meta(max_length=MAX_PATH)]
Prose = Annotated[str, Meta(max_length=MAX_TEXT)]
"""For people."""
Root = Annotated[str, Meta(max_length=MAX_ROOT)]
Ids = Annotated[list[Id], Meta(max_length=MAX_IDS)]
Free = Annotated[dict[Label, Any], Meta(max_length=MAX_KEYS)]
"""What we do not look into; bounded as a whole by the header."""
Gauges = Annotated[dict[Label, float], Meta(max_length=MAX_KEYS)]
Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Version = Annotated[int, Meta(ge=0, le=LARGEST_VERSION)]
MaybeVersion = Annotated[int, Meta(ge=-1, le=LARGEST_VERSION)]
"""-1: none."""
AtLeastOne = Annotated[int, Meta(ge=1, le=LARGEST_VERSION)]
Int32 = Annotated[int, Meta(ge=-LARGEST_VERSION, le=LARGEST_VERSION)]
Seed = Annotated[int, Meta(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Duration = Annotated[float, Meta(gt=0, le=LARGEST_DURATION_S)]
Summand = Annotated[int, Meta(ge=0, le=2**40)]
"""What is added up: sums stay within the 64 bits that MessagePack has."""


class Message(Struct, tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. ``temperature = 0`` is greedy; training needs top_p = 1 and top_k = 0."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Version = 0
    max_turn_tokens: AtLeastOne = 64
    max_trajectory_tokens: AtLeastOne = 256
    seed: Seed | None = None


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One episode to be run: which environment, which instance of it, as a member of which rollout group."""

    task_id: Name
    env: Name
    data: Free = field(default_factory=dict)
    group_id: Name
    group_size: AtLeastOne
    member: Count = 0
    purpose: Purpose = "train"
    sampling: Sampling = Sampling()
    min_policy_version: Version = 0
    deadline_s: Duration = 120.0


class Turn(Struct, frozen=True, array_like=True):
    """Tokens ``[start, end)`` of the trajectory that belong to turn ``index``.

    Turns are counted over actions and observations together, from 0 (the prompt, an observation). A turn that
    is cut by a segment boundary appears in both segments, with the same index.
    """

    index: Count
    start: Count
    end: Count
    action: bool


class Reward(Struct, frozen=True, array_like=True):
    """A named reward for the action turn with index ``turn``."""

    name: Label
    turn: Count
    value: float


# --- any role -> broker -----------------------------------------------------------------------------------


class Hello(Message, tag="hello", frozen=True):
    """First message of a peer, and again after every reconnect; ``attempt`` counts them from 0.

    Of a learner: ``epoch`` numbers its process in the run, ``lineage`` is the epoch with which its line of
    checkpoints began, ``step`` the learner steps its own checkpoint covers. Of a generator: ``endpoint`` is for actors,
    ``weights_url`` where it serves the policy versions it holds.
    """

    role: Role
    peer: Name
    incarnation: Count
    host: Label = ""
    pid: Count = 0
    endpoint: Address = ""
    deliver: DeliveryUnit = "group"
    epoch: Count = 0
    lineage: Count = 0
    step: Count = 0
    weights_url: Address = ""
    attempt: Count = 0


class Heartbeat(Message, tag="heartbeat", frozen=True):
    """Sent every ``heartbeat_s``; carries progress, not only life.

    ``progress`` must grow while the peer has work (tokens, steps, episodes); ``busy`` says that it has work.
    ``gauges`` are free numbers for ``/status`` and TensorBoard.
    """

    progress: float = 0.0
    busy: bool = False
    policy_version: Version = 0
    gauges: Gauges = field(default_factory=dict)


class Goodbye(Message, tag="goodbye", frozen=True):
    """The peer leaves on purpose; what it held returns to the queue at once."""

    reason: Prose = ""


# --- learner -> broker ------------------------------------------------------------------------------------


class PutTasks(Message, tag="put_tasks", frozen=True):
    """New tasks for the queue. A task_id seen before is ignored, so the message may be repeated."""

    tasks: Annotated[list[Task], Meta(max_length=MAX_TASKS)]


class DeliveryCredit(Message, tag="delivery_credit", frozen=True):
    """The learner can take ``units`` more deliveries (adds to what is left)."""

    units: Count


class Commit(Message, tag="commit", frozen=True):
    """These units (by id) are done with: ``trained`` entered a gradient, ``dropped`` were filtered out.

    Up to the next Checkpointed that covers ``step`` the broker can give them back. ``replayed_tokens`` entered a
    gradient again, from the learner's own replay table; they were committed as trained before. ``version`` is the one
    that this step updated; -1 where nothing was trained.
    """

    epoch: Count
    step: Count
    trained: Ids = field(default_factory=list)
    dropped: Ids = field(default_factory=list)
    replayed_tokens: Summand = 0
    version: MaybeVersion = -1


class Checkpointed(Message, tag="checkpointed", frozen=True):
    """Steps up to ``step`` will never be done again: what they committed may be let go for good."""

    epoch: Count
    step: Count


class PublishWeights(Message, tag="publish_weights", frozen=True):
    """A new policy version exists; the broker passes the newest on to generators.

    ``manifest`` is a path on the learner's host, ``url`` where that host serves versions, if it does. ``root`` is the
    root hash of its tensors: who has it from the broker need not trust whom the bytes come from. ``line``: the restarts
    behind these weights, as pairs (version continued, its new number), see `protocol.version_line`.
    """

    epoch: Count
    version: Version
    manifest: FilePath
    url: Address = ""
    root: Root = ""
    line: Annotated[list[tuple[Version, Version]], Meta(max_length=MAX_FORKS)] = field(default_factory=list)


# --- actor -> broker --------------------------------------------------------------------------------------


class TaskCredit(Message, tag="task_credit", frozen=True):
    """The actor can run ``tasks`` more episodes (adds to what is left)."""

    tasks: Count


class Segment(Message, tag="segment", frozen=True):
    """A contiguous, immutable piece of a trajectory. Its arrays follow in the body frame, see ``arrays``.

    ``index`` counts the trajectory's segments from 0, ``offset`` is the position of its first token in the
    trajectory. ``status`` other than "unfinished" closes the trajectory. Arrays (all as long as the number of
    tokens): ``token_ids`` int32, ``action_mask`` uint8, ``logp_behaviour`` float32 (0 on observations),
    ``policy_version`` int32 (-1 on observations); more may be added by name.
    """

    trajectory_id: Id
    task_id: Name
    group_id: Name
    group_size: AtLeastOne
    index: Count
    offset: Count
    tokens: Count
    action_tokens: Count
    status: TrajectoryStatus
    stop_reason: Label = ""
    env: Label = ""
    purpose: Purpose = "train"
    version_min: MaybeVersion = -1
    version_max: MaybeVersion = -1
    turns: Annotated[list[Turn], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    rewards: Annotated[list[Reward], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    temperature: float = 1.0
    kv: KvPolicy = "recomputed"
    generator: Label = ""
    error: Prose = ""
    extra: Free = field(default_factory=dict)
    arrays: "ArraySpecs" = field(default_factory=list)


class ArraySpec(Struct, frozen=True, array_like=True):
    """One array of a body frame: little-endian ``dtype``, ``length`` elements, from byte ``offset`` on."""

    name: Label
    dtype: Literal["i4", "i8", "u1", "f4", "f8"]
    length: Count
    offset: Count


ArraySpecs = Annotated[list[ArraySpec], Meta(max_length=MAX_ARRAYS)]


class TaskRejected(Message, tag="task_rejected", frozen=True):
    """The actor cannot run this task (unknown environment, draining); the broker leases it to another."""

    lease_id: Id
    reason: Prose


# --- broker -> any role -----------------------------------------------------------------------------------


class Welcome(Message, tag="welcome", frozen=True):
    """Answer to the Hello of this ``attempt``: the run, the rhythm, the limits, the newest policy version."""

    run: Label
    epoch: Count
    heartbeat_s: float
    policy_version: Version
    limits: Annotated[dict[Label, Count], Meta(max_length=MAX_KEYS)] = field(default_factory=dict)
    attempt: Count = 0


class Refused(Message, tag="refused", frozen=True):
    """A request was not accepted: ``code`` for programs, ``message`` with the cure for people."""

    code: Label
    message: Prose
    fatal: bool = False


class GeneratorInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live generator an actor may use."""

    peer: Name
    endpoint: Address
    policy_version: Version = 0


class Generators(Message, tag="generators", frozen=True):
    """To actors: the generators that are healthy now (sent on every change)."""

    generators: Annotated[list[GeneratorInfo], Meta(max_length=MAX_ITEMS)]


class LeaseTask(Message, tag="lease_task", frozen=True):
    """To an actor: run this task; the lease is renewed by segments and heartbeats, ``attempt`` counts from 0."""

    lease_id: Id
    attempt: Count
    task: Task

    @property
    def trajectory_id(self) -> str:
        """What its segments must have."""
        return names.trajectory_id(self.task.task_id, self.attempt)


class CancelTask(Message, tag="cancel_task", frozen=True):
    """To an actor: stop working on this lease (expired, or no longer wanted)."""

    lease_id: Id
    reason: Prose


class SegmentAck(Message, tag="segment_ack", frozen=True):
    """To an actor: what happened to segment (trajectory_id, index)."""

    trajectory_id: Id
    index: Count
    status: Literal["stored", "duplicate", "refused"]
    reason: Prose = ""


class SegmentCredit(Message, tag="segment_credit", frozen=True):
    """To an actor: it may have ``segments`` more segments unacknowledged (adds to what is left)."""

    segments: Count


class Held(Message, tag="held", frozen=True):
    """To a learner that continues a lineage: training tasks the broker holds, done or not; it need not put them.

    ``unit_ids``: what was delivered and is not committed; a unit among them that the learner is done with it commits
    again.
    ``more``: another message with the rest follows.
    """

    task_ids: Ids = field(default_factory=list)
    unit_ids: Ids = field(default_factory=list)
    more: bool = False


class CheckpointWanted(Message, tag="checkpoint_wanted", frozen=True):
    """To the learner: what it has committed fills the journal; write a checkpoint after this step."""

    reason: Prose = ""


class Deliver(Message, tag="deliver", frozen=True):
    """To the learner: one delivery unit, leased until it is committed. Its segments' headers and bodies follow.

    ``redelivered`` is set when it was delivered before.
    """

    unit_id: Id
    segments: Count
    complete: bool = True
    redelivered: bool = False


class Dropped(Message, tag="dropped", frozen=True):
    """To the learner: a unit will never be delivered (too stale, failed, expired); frees its capacity."""

    unit_id: Id
    group_id: Name
    trajectories: Count
    reason: Prose


class WeightsReady(Message, tag="weights_ready", frozen=True):
    """To generators: the newest policy version, the path of its manifest on the learner's host, and the URLs of
    hosts that serve it, other generators' first, the learner's last."""

    epoch: Count
    version: Version
    manifest: FilePath
    sources: Annotated[list[Address], Meta(max_length=MAX_SOURCES)] = field(default_factory=list)
    root: Root = ""


class Drain(Message, tag="drain", frozen=True):
    """To any peer: finish what you have, send it, say Goodbye and end."""

    reason: Prose = ""


class QueueStats(Message, tag="queue_stats", frozen=True):
    """To the learner, about once a second: the broker's gauges, for its TensorBoard."""

    gauges: Annotated[dict[Label, float], Meta(max_length=MAX_ITEMS)]


# --- actor <-> generator ----------------------------------------------------------------------------------


class Generate(Message, tag="generate", frozen=True):
    """Sample a continuation of the token ids in the body (array ``token_ids``)."""

    request_id: Name
    max_tokens: AtLeastOne
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int32 = 0
    seed: Seed | None = None
    stop_token_ids: Annotated[list[Int32], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    min_policy_version: Version = 0
    arrays: ArraySpecs = field(default_factory=list)


class Abort(Message, tag="abort", frozen=True):
    """Stop this request; a last chunk with finish_reason "abort" follows."""

    request_id: Name


class Chunk(Message, tag="chunk", frozen=True):
    """Newly sampled tokens: arrays ``token_ids``, ``logp_behaviour``, ``policy_version`` in the body.

    ``finish_reason`` "" means that more follows. ``offset`` is the number of this request's tokens that were
    sent before this chunk: another number than the receiver has means that some were lost on the way.
    """

    request_id: Name
    offset: Count = 0
    finish_reason: Literal["", "stop", "length", "abort", "error"] = ""
    error: Prose = ""
    kv: KvPolicy = "recomputed"
    arrays: ArraySpecs = field(default_factory=list)


AnyMessage = (
    Hello | Heartbeat | Goodbye | PutTasks | DeliveryCredit | Commit | Checkpointed | PublishWeights | TaskCredit
    | Segment | TaskRejected | Welcome | Refused | Generators | LeaseTask | CancelTask | SegmentAck | SegmentCredit
    | Held | CheckpointWanted | Deliver | Dropped | WeightsReady | Drain | QueueStats | Generate | Abort | Chunk
)  # fmt: skip

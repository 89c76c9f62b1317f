"""A segment, which an actor sends and the broker acknowledges, and its parts."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from protocol.messages.array_specs import ArraySpecs
from protocol.messages.fields import (
    MAX_FAILURE_TEXT,
    MAX_ITEMS,
    MAX_PLACE,
    AtLeastOne,
    Count,
    Free,
    Id,
    KvPolicy,
    Label,
    MaybeVersion,
    Message,
    Name,
    Prose,
    Purpose,
    TrajectoryStatus,
    Version,
)


class Turn(Struct, frozen=True, array_like=True):
    """Tokens ``[start, end)`` of the trajectory that belong to turn ``index``.

    Turns are counted over actions and observations together, from 0 (the prompt, an observation). A turn that
    is cut by a segment boundary appears in both segments, with the same index.

    The actor writes it. The broker refuses a segment with a turn outside its tokens.
    """

    index: Version
    """Read by the learner, which joins the pieces of a cut turn and matches rewards with turns."""
    start: Count
    """Read by the learner: first token of the turn, counted from the start of the trajectory."""
    end: Count
    """Read by the learner: one past the last token of the turn."""
    action: bool
    """Read by the learner for advantages per turn: whether the policy sampled this turn."""
    back: Count = 1
    """How many turns back the turn is that this one continues; 0: none, so that a conversation begins here.

    Read by the learner, to which a trajectory with another number than 1 has branches. The broker refuses a number
    above ``index``, except for the 1 of turn 0.
    """


class Reward(Struct, frozen=True, array_like=True):
    """A named reward for the action turn ``turn``; the actor writes what the environment returned."""

    name: Label
    """Read by the learner, which gives each name its weight and its curve; shown by `offbeat journal export`."""
    turn: Count
    """Read by the learner, which places the reward on the last token of this turn."""
    value: float
    """Read by the learner, which rejects a trajectory with a reward that is not finite."""


class TurnMark(Struct, frozen=True, array_like=True):
    """A fact about one turn that a method needs, by name: a label, or a number.

    The environment gives it; the actor writes it in the Segment in which the turn ends. The broker does not read it.
    """

    name: Name
    """Read by the learner: "anchor" is the state that the turn acted in, "calls" a number of calls of tools."""
    turn: Count
    """Read by the learner, which finds the turn of the mark by it."""
    value: float | Label
    """Read by the learner, which rejects a trajectory with a number that is not finite."""


class Failure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an attempt at a task failed, in parts that programs can count.

    The actor writes it in the closing Segment of a failed trajectory, or in a TaskRejected.
    `protocol.failures` makes one sentence of it.
    """

    kind: Label = ""
    """Name of the exception's class. "" means that the message says everything. Read by broker and learner."""
    message: Annotated[str, Meta(max_length=MAX_FAILURE_TEXT)] = ""
    """Text of the exception, on one line. Shown by `/status`, `offbeat train` and the summary."""
    place: Annotated[str, Meta(max_length=MAX_PLACE)] = ""
    """FILE:LINE that raised it, or "". Broker and learner count failures of one kind at one place together."""
    fault: bool = True
    """False if neither the environment nor the model failed. The learner leaves these out of an evaluation."""


class Segment(Message, tag="segment", frozen=True):
    """A contiguous, immutable piece of a trajectory; its arrays follow in the body frame.

    The actor writes it. The broker checks the header, writes header and body to its journal, and forwards
    their bytes to the learner behind a Deliver. `offbeat journal show` and `export` print fields of it.

    Arrays, each with one element per token: ``token_ids`` int32, ``action_mask`` uint8, ``logp_behaviour``
    float32 (0 on observations), ``policy_version`` int32 (-1 on observations). Others may be added by name, with any
    length, among them since 4.4 ``routed_token`` and ``routed_experts``, see `protocol.arrays`.
    """

    trajectory_id: Id
    """Task id and attempt. The broker refuses one that is not leased; the learner joins segments by it."""
    task_id: Name
    """Read by the broker to find the task, and by the learner to follow the attempts at it."""
    group_id: Name
    """Read by the learner to form rollout groups; the broker compares it with the task's."""
    group_size: AtLeastOne
    """Read by the broker, which compares it with the task's; the learner only copies it."""
    index: Count
    """Number of the segment in its trajectory, from 0. Broker and learner find gaps and duplicates by it."""
    offset: Count
    """Position of the first token in the trajectory. Broker and learner refuse one that does not fit."""
    tokens: Count
    """Number of tokens. Read by the broker for its ledger; broker and learner compare the arrays with it."""
    action_tokens: Count
    """Number of sampled tokens. Read by the broker for its ledger; the learner compares the mask with it."""
    status: TrajectoryStatus
    """Anything but "unfinished" closes the trajectory for broker and learner. "failed" is not trained."""
    stop_reason: Label = ""
    """Why the turn or the trajectory ended. Shown by `offbeat journal export` only."""
    env: Label = ""
    """Environment. The learner's replay buffer recognises equal prompts by it; `offbeat journal` shows it."""
    purpose: Purpose = "train"
    """Read by the learner to tell evaluation from training; the broker compares it with the task's."""
    version_min: MaybeVersion = -1
    """Oldest version among the action tokens. The broker only checks that it is consistent."""
    version_max: MaybeVersion = -1
    """Newest version among the action tokens. The broker drops a unit as stale by it."""
    turns: Annotated[list[Turn], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    """Turns with tokens in this segment. Read by the learner for advantages per turn."""
    rewards: Annotated[list[Reward], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    """Rewards of the action turn that ends here. Read by the learner."""
    temperature: float = 1.0
    """Read by the learner for its log-probabilities; it refuses trajectories of mixed temperatures."""
    kv: KvPolicy = "recomputed"
    """Effect of weight updates on the KV cache. The learner copies it; nothing in Offbeat acts on it."""
    generator: Label = ""
    """Generator that sampled the last tokens. Shown by `offbeat journal export` only."""
    error: Prose = ""
    """Why the episode failed. Shown by `offbeat journal export`; the learner only copies it."""
    extra: Free = field(default_factory=dict)
    """Free content, shown by `offbeat journal export`. The learner reads ``correct`` of the last segment."""
    arrays: ArraySpecs = field(default_factory=list)
    """Places of the arrays in the body. Read by the broker, which checks them, and by the learner."""
    failure: Failure | None = None
    """Parts of ``error``. Read by the broker, which counts them for `/status`, and by the learner."""
    auxiliary: Annotated[list[Count], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    """Indices of action turns of the trajectory that are not to be trained. The learner reads those of the last
    segment; windows that it has trained before then stay trained."""
    marks: Annotated[list[TurnMark], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    """Marks of the action turn that ends here, since 4.2. Read by the learner, for methods that compare turns."""


class SegmentAck(Message, tag="segment_ack", frozen=True):
    """Answer to one Segment; the broker writes all fields. The actor keeps the segment until it comes."""

    trajectory_id: Id
    """Names the segment together with ``index``; the actor frees it."""
    index: Count
    """Number of the segment in its trajectory."""
    status: Literal["stored", "duplicate", "refused"]
    """Written by the broker. At "refused" the actor ends the episode."""
    reason: Prose = ""
    """Why the broker refused the segment; it begins with a code. The actor logs it."""


class SegmentCredit(Message, tag="segment_credit", frozen=True):
    """Flow control of Segment."""

    segments: Count
    """Written by the broker: segments that the actor may send, added to its unused credit."""

"""Messages of episodes: tasks that are leased, segments that come back, units that are delivered.

The learner puts tasks, the broker leases them to actors. An actor sends segments, the broker acknowledges them.
The broker delivers complete units to the learner, which says when it is done with them.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from protocol import names
from protocol.messages.fields import (
    MAX_FAILURE_TEXT,
    MAX_ITEMS,
    MAX_PLACE,
    MAX_PREFIX_BYTES,
    MAX_STOPS,
    MAX_TASKS,
    ArraySpecs,
    AtLeastOne,
    Count,
    Duration,
    Free,
    Id,
    Ids,
    KvPolicy,
    Label,
    MaybeVersion,
    Message,
    Name,
    Prose,
    Purpose,
    Seconds,
    Seed,
    Summand,
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


class TurnTime(Struct, frozen=True, array_like=True):
    """Where the time of one turn went, by the monotonic clock of the actor, in seconds.

    The actor writes it in a Segment after the turn, and several of one turn add up. The learner sums it over an
    episode, to know how much work keeps it fed, and `offbeat journal export` shows it. Together with the broker's time
    of arrival it places the turn on a time line, without a clock of the actor's host.
    """

    turn: Count
    """Index of the turn: an action turn, or 0 for the start of the episode."""
    waited: Seconds
    """From the request for tokens to the first of them: an engine, a place in it, a version in lockstep, the prompt."""
    sampled: Seconds
    """From the first token to the last one, without the time in which the actor could not take more."""
    tools: Seconds
    """In the environment, or in the agent and its tools: behind an action turn, or before the first prompt."""


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
    times: Annotated[list[TurnTime], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    """Seconds of turns that have ended, since 4.5; absent from an actor that does not measure them."""
    policy: Label = ""
    """The task's `policy`, since 4.7: who wrote the action tokens, if no generator did. They have version -1.

    Read by the learner, to which such tokens have no behaviour probability."""


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


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the actor has the tokens of an episode sampled. Training needs ``top_p = 1`` and ``top_k = 0``.

    The learner writes it in each task. It leaves ``top_p``, ``top_k`` and ``seed`` at their defaults; other
    programs that put tasks may set them.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Read by the actor, which passes it to the generator and reports it in each Segment. 0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Read by the actor, which passes it to the generator."""
    top_k: Version = 0
    """Read by the actor, which passes it to the generator. 0 means no bound."""
    max_turn_tokens: AtLeastOne = 64
    """Read by the actor, which ends an action turn at this number of tokens."""
    max_trajectory_tokens: AtLeastOne = 256
    """Read by the actor, which ends the trajectory there; the broker refuses segments beyond it."""
    max_context_tokens: Version = 0
    """Read by the actor: most tokens of one branch of the trajectory. 0 means that of the trajectory."""
    seed: Seed | None = None
    """Read by the actor, which derives the seed of each Generate from it."""
    stop: Annotated[list[Name], Meta(max_length=MAX_STOPS)] = field(default_factory=list)
    """Read by the actor, which ends an action turn with the token that completes one of these strings."""
    include_stop: bool = False
    """Read by the actor: whether the text for the environment keeps the stop string. The tokens always do."""
    routes: bool = False
    """Read by the actor: whether segments carry the experts that tokens went through; since 4.4.

    A broker before 4.4 would lose it, so the learner looks at the broker's version before it puts such a task.
    """


class TaskStart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The beginning of an earlier trajectory, from which an episode goes on. The learner writes it, the actor reads it.

    The actor resets the environment, repeats the prefix's actions, and compares each observation. The tokens of the
    prefix become observation tokens, so they are context.
    """

    token_ids: Annotated[bytes, Meta(max_length=MAX_PREFIX_BYTES)]
    """Token ids of the prefix, little-endian int32. They end where the first action of this episode begins."""
    turns: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_ITEMS)]
    """Turns of the prefix: observations and actions in turns, an observation last."""
    parent: Id
    """Trajectory that the prefix was cut from; the actor names it in errors."""


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One episode to run: which environment, which instance of it, as a member of which rollout group.

    The learner writes it in PutTasks, and the broker leases it to an actor in LeaseTask.
    """

    task_id: Name
    """Read by the broker, which queues each id once, and by the actor, whose trajectory id begins with it."""
    env: Name
    """Read by the actor, which rejects a task of an environment it does not run."""
    data: Free = field(default_factory=dict)
    """Read by the actor, which resets the environment with it: the task instance, as index and split."""
    group_id: Name
    """Read by the broker, which assembles rollout groups; copied by the actor into segments."""
    group_size: AtLeastOne
    """Read by the broker, which waits for this number of members; copied by the actor into segments."""
    member: Count = 0
    """Place in the rollout group. For programs of others; in Offbeat the learner reads only its own copy."""
    purpose: Purpose = "train"
    """Read by the broker, which leases and delivers evaluation first; copied by the actor into segments."""
    sampling: Sampling = Sampling()
    """Read by the actor for each request to a generator; the broker reads the length limit."""
    min_policy_version: Version = 0
    """Read by the actor, which asks generators for this version or a later one (lockstep, evaluation)."""
    deadline_s: Duration = 120.0
    """Read by the actor, which fails a longer episode, and by the broker for the end of the lease.

    The learner of Offbeat writes learner.sampling.max_trajectory_s.
    """
    note: Prose = ""
    """Read by the actor, which puts this text behind the last message of the first prompt; since 4.3.

    A broker before 4.3 would lose it, so the learner looks at the broker's version before it puts such a task.
    """
    start: TaskStart | None = None
    """Read by the actor, which begins the episode with this prefix; since 4.3, as the note.

    With a note, the prefix's first turn gives way to the prompt with the note, and the other turns follow it.
    """
    policy: Label = ""
    """Read by the actor, which asks this teacher of its settings in place of a generator; since 4.7.

    A broker before 4.7 would lose it, so the learner looks at the broker's version before it puts such a task.
    """
    opening: Prose = ""
    """Read by the actor, which puts this text in front of what the policy writes in its first answer; since 4.8.

    Its tokens are context, at the end of the first observation. The environment gets it as a part of the answer. A
    broker before 4.8 would lose it, so the learner looks at the broker's version before it puts such a task.
    """


class PutTasks(Message, tag="put_tasks", frozen=True):
    """New tasks for the queue. The broker ignores a task_id that it knows, so the message may be repeated."""

    tasks: Annotated[list[Task], Meta(max_length=MAX_TASKS)]
    """Written by the learner, read by the broker, which queues the new tasks or, if they do not fit, none."""


class TaskCredit(Message, tag="task_credit", frozen=True):
    """Flow control of LeaseTask."""

    tasks: Count
    """Written by the actor: episodes it can run, added to its unused credit. The broker leases no more."""
    void: bool = False
    """Written by the actor: its unused credit is void, and ``tasks`` is all it has. It asks so when the first
    generator lets it in, and when no generator does any more."""


class LeaseTask(Message, tag="lease_task", frozen=True):
    """An actor is to run this task. Its segments and the progress in its heartbeats renew the lease."""

    lease_id: Id
    """Written by the broker; TaskRejected and CancelTask name the lease by it."""
    attempt: Count
    """Written by the broker, counted from 0; the actor makes it a part of the trajectory id."""
    task: Task
    """Written by the learner; the actor runs it."""

    @property
    def trajectory_id(self) -> str:
        """Trajectory id that the segments of this lease must have."""
        return names.trajectory_id(self.task.task_id, self.attempt)


class CancelTask(Message, tag="cancel_task", frozen=True):
    """An actor is to stop work on a lease that has expired or is no longer wanted."""

    lease_id: Id
    """Written by the broker; the actor cancels the episode of this lease."""
    reason: Prose
    """Written by the broker; the actor logs it."""


class TaskRejected(Message, tag="task_rejected", frozen=True):
    """The actor cannot run this task (unknown environment, draining); the broker leases it again."""

    lease_id: Id
    """Written by the actor; the broker ends this lease."""
    reason: Prose
    """Written by the actor. At "draining" and "full" the broker voids its task credit and counts no loss."""
    fault: bool = True
    """Written by the actor; the broker counts the attempt towards max_attempts only if it is true.

    False means that neither the environment nor the model failed the attempt: no generator could continue it.
    """
    failure: Failure | None = None
    """Written by the actor if an error ended the attempt. Read by the broker, which counts it for `/status`."""


class DeliveryCredit(Message, tag="delivery_credit", frozen=True):
    """Flow control of Deliver."""

    units: Count
    """Written by the learner: units it can take, added to its unused credit. The broker delivers no more."""


class Deliver(Message, tag="deliver", frozen=True):
    """One unit, leased to the learner until it is committed. Headers and bodies of its segments follow."""

    unit_id: Id
    """Written by the broker; the learner recognises a unit that it has, and names the unit in Commit."""
    segments: Count
    """Written by the broker; the learner rejects a delivery with a different number of segments behind it."""
    complete: bool = True
    """Written by the broker: no member is missing, or this is the last window of the trajectory.

    Where the unit is unusable or committed already, the learner reads from it that nothing more will come.
    """
    redelivered: bool = False
    """Written by the broker: delivered before. For programs of others; nothing in Offbeat reads it."""


class Dropped(Message, tag="dropped", frozen=True):
    """Notice to the learner that a unit will never be delivered (too stale, failed, expired)."""

    unit_id: Id
    """Written by the broker; the learner frees the room of this group or of this member."""
    group_id: Name
    """Written by the broker; the learner finds the rollout group, or the evaluation task, by it."""
    trajectories: Count
    """Written by the broker, counted by the learner. 0 is a window before the last, which frees no room."""
    reason: Prose
    """Written by the broker; the learner counts the trajectories under ``dropped_REASON``."""


class Commit(Message, tag="commit", frozen=True):
    """The learner has trained these units or dropped them.

    The broker keeps them until a Checkpointed covers ``step``, because a learner that restarts from a
    checkpoint before that needs them again.
    """

    epoch: Count
    """Written by the learner; the broker refuses an epoch that is not the one of its Hello."""
    step: Count
    """Written by the learner: its step. The broker releases the units when a checkpoint covers it."""
    trained: Ids = field(default_factory=list)
    """Unit ids that entered a gradient, in that order. The broker counts their tokens as trained."""
    dropped: Ids = field(default_factory=list)
    """Unit ids that the learner filtered out or only evaluated. The broker counts their tokens as dropped."""
    replayed_tokens: Summand = 0
    """Tokens trained again from the learner's replay buffer; they were committed as trained before.

    The broker adds them up for `/status` and `/metrics`.
    """
    version: MaybeVersion = -1
    """Version that the step updated; -1 if nothing was trained. `offbeat retrain` reads it."""


class Held(Message, tag="held", frozen=True):
    """List of what the broker holds, sent by it to the learner after each Welcome, maybe in parts."""

    task_ids: Ids = field(default_factory=list)
    """Training tasks, done or not. A learner that continues the lineage adopts them, and puts only others."""
    unit_ids: Ids = field(default_factory=list)
    """Units delivered and not committed. The learner repeats the commits among them, which were lost."""
    more: bool = False
    """Tells the learner that another Held follows; it acts on the whole list only."""


class Checkpointed(Message, tag="checkpointed", frozen=True):
    """A checkpoint is on disk: no learner will repeat the steps up to ``step``."""

    epoch: Count
    """Written by the learner; the broker refuses an epoch that is not the one of its Hello."""
    step: Count
    """Written by the learner; the broker releases for good what was committed up to this step."""


class CheckpointWanted(Message, tag="checkpoint_wanted", frozen=True):
    """Committed units fill the journal; the learner is to write a checkpoint after this step."""

    reason: Prose = ""
    """Written by the broker; the learner logs it."""

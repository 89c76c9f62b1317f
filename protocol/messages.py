"""Every message of the protocol, one Struct each, and for every field who writes it, who reads it, and why.

SPEC.md says when a message is sent and what follows.

Structs are encoded as MessagePack maps whose key ``type`` names the message. A decoder ignores keys that
it does not know, and the broker forwards the *bytes* of segment headers, so unknown fields reach the learner.
All times on the wire are durations in seconds: clocks of two hosts are never compared.

The broker writes tasks, segments, the learner's Hello, commits and publications to its journal.
`offbeat journal` shows them, and `offbeat retrain` reads them.
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
MAX_PUBLIC_KEY = 40
MAX_ITEMS, MAX_TASKS, MAX_IDS, MAX_KEYS, MAX_SOURCES, MAX_ARRAYS = 4_096, 8_192, 65_536, 1_024, 64, 64
LARGEST_COUNT, LARGEST_VERSION, LARGEST_DURATION_S = 2**63 - 1, 2**31 - 1, 1e9
MAX_PLACE, MAX_FAILURE_TEXT = 512, 1_000
MAX_STOPS = 16
MAX_PREFIX_BYTES = 200_000
"""Most bytes of the token ids of a prefix, 50,000 tokens: a task with it fits into the header of a message."""
MAX_PATIENCE_S = 3_600.0
"""Longest time for which a generator or a learner may ask not to be held for stalled."""

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Label = Annotated[str, Meta(max_length=MAX_NAME)]
"""A name that may be empty, or a short code."""
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
"""An identifier that is composed of names: a trajectory, unit, lease or request id."""
Address = Annotated[str, Meta(max_length=MAX_ADDRESS)]
FilePath = Annotated[str, Meta(max_length=MAX_PATH)]
Prose = Annotated[str, Meta(max_length=MAX_TEXT)]
"""Text for people."""
Root = Annotated[str, Meta(max_length=MAX_ROOT)]
PublicKey = Annotated[
    str, Meta(max_length=MAX_PUBLIC_KEY, pattern=r"^([0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40})?$")
]
"""A public CURVE key in Z85, or "" for none."""
Ids = Annotated[list[Id], Meta(max_length=MAX_IDS)]
Free = Annotated[dict[Label, Any], Meta(max_length=MAX_KEYS)]
"""Free content that the protocol does not interpret; the header's size limit bounds it as a whole."""
Gauges = Annotated[dict[Label, float], Meta(max_length=MAX_KEYS)]
Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Version = Annotated[int, Meta(ge=0, le=LARGEST_VERSION)]
MaybeVersion = Annotated[int, Meta(ge=-1, le=LARGEST_VERSION)]
"""A policy version, or -1 for none."""
AtLeastOne = Annotated[int, Meta(ge=1, le=LARGEST_VERSION)]
Int32 = Annotated[int, Meta(ge=-LARGEST_VERSION, le=LARGEST_VERSION)]
Seed = Annotated[int, Meta(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Growing = Annotated[float, Meta(ge=0, le=LARGEST_COUNT)]
"""A number that grows. The bounds leave out NaN, which differs from itself, and infinity, which cannot grow."""
Duration = Annotated[float, Meta(gt=0, le=LARGEST_DURATION_S)]
Summand = Annotated[int, Meta(ge=0, le=2**40)]
"""A number that is added up. The bound keeps sums within the 64 bits of a MessagePack integer."""


class Message(Struct, tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


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


class TaskStart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The beginning of an earlier trajectory, from which an episode goes on. The learner writes it, the actor reads it.

    The actor resets the environment, repeats the prefix's actions, and compares each observation. The tokens of the
    prefix become observation tokens, so they are context.
    """

    token_ids: Annotated[bytes, Meta(max_length=MAX_PREFIX_BYTES)]
    """Token ids of the prefix, little-endian int32. They end where the first action of this episode begins."""
    turns: Annotated[list["Turn"], Meta(min_length=1, max_length=MAX_ITEMS)]
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


# --- any role -> broker -----------------------------------------------------------------------------------


class Hello(Message, tag="hello", frozen=True):
    """First message of a peer, and again after every reconnect. The peer writes it, the broker reads it."""

    role: Role
    """Tells the broker which messages it may accept. With encryption, the peer's key must have this role."""
    peer: Name
    """Name of the peer, unique in the run. Without encryption it must be the routing id of the connection."""
    incarnation: Count
    """Grows with each process of a name. The broker lets a newer process replace an older one only."""
    host: Label = ""
    """Shown by `/status` and `offbeat status`."""
    pid: Count = 0
    """Process id, shown by `/status` and `offbeat status`."""
    endpoint: Address = ""
    """Written by a generator: where it listens. The broker passes it on to actors in Generators."""
    deliver: DeliveryUnit = "group"
    """Written by the learner: what the broker delivers as one unit. `offbeat retrain` reads it, too."""
    epoch: Count = 0
    """Written by the learner: number of its process in the run. The broker refuses one that is too low."""
    lineage: Count = 0
    """Written by the learner: epoch in which its line of checkpoints began.

    The broker keeps its tasks and segments if the lineage is unchanged, and drops them if it is not.
    """
    step: Count = 0
    """Written by the learner: steps that its own checkpoint covers.

    The broker releases units committed up to this step, and delivers units again that were committed later.
    """
    weights_url: Address = ""
    """Written by a generator: where it serves versions. The broker lists it in WeightsReady.sources."""
    attempt: Count = 0
    """Counts the Hellos of the process from 0; the broker returns it in the Welcome."""
    step_back: bool = False
    """Written by the learner: it may have fewer steps than a checkpoint that was written before.

    Without it the broker refuses such a learner. With it the broker counts the units of the steps between as lost.
    """
    public_key: PublicKey = ""
    """Written by a generator: the key that its endpoint shows to actors; "" without encryption.

    The broker refuses a key that is not the one of the connection, and passes it on to actors in Generators.
    """


class Heartbeat(Message, tag="heartbeat", frozen=True):
    """Sent every ``heartbeat_s``; it reports progress, not only life.

    The broker answers with a Heartbeat that has only ``policy_version`` set. Its arrival tells the peer that
    the broker lives.
    """

    progress: Growing = 0.0
    """Written by the peer: a number that grows while it works. The broker renews leases by it."""
    busy: bool = False
    """Written by the peer: it has work.

    The broker does not offer a generator that is busy without progress, and grants no segment credit beyond
    its bounds while the learner is busy and makes progress. `offbeat train` restarts a generator or learner
    that is busy without progress.
    """
    policy_version: Version = 0
    """Written by a generator: the version in service.

    The broker repeats WeightsReady to a generator that lacks the newest version, lists a generator that has
    it as a source, and passes the number on in GeneratorInfo. The learner writes its own version, and the
    broker the newest one; nothing in Offbeat reads these two.
    """
    gauges: Gauges = field(default_factory=dict)
    """Written by the peer, merged by the broker for `/status`, `/metrics` and QueueStats."""
    patience_s: Annotated[float, Meta(ge=0, le=MAX_PATIENCE_S)] = 0.0
    """Written by a generator: how long its engine may make no step, as measured. 0 means that it is not known.
    Written by a learner: how long the write of a checkpoint or model that is under way may take; 0 means none is.

    The broker and `offbeat train` wait this long, if it is longer than their own limits, before they hold the
    generator for stalled. `offbeat train` adds a learner's to its own limit.
    """
    note: Prose = ""
    """Written by the peer: what keeps it from its work, with the cure; "" if nothing does.

    `/status` and `offbeat status` show it.
    """


class Goodbye(Message, tag="goodbye", frozen=True):
    """The peer leaves on purpose, so the broker returns what it held to the queues at once."""

    reason: Prose = ""
    """Written by the peer. For programs of others; nothing in Offbeat reads it."""


# --- learner -> broker ------------------------------------------------------------------------------------


class PutTasks(Message, tag="put_tasks", frozen=True):
    """New tasks for the queue. The broker ignores a task_id that it knows, so the message may be repeated."""

    tasks: Annotated[list[Task], Meta(max_length=MAX_TASKS)]
    """Written by the learner, read by the broker, which queues the new tasks or, if they do not fit, none."""


class DeliveryCredit(Message, tag="delivery_credit", frozen=True):
    """Flow control of Deliver."""

    units: Count
    """Written by the learner: units it can take, added to its unused credit. The broker delivers no more."""


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


class Checkpointed(Message, tag="checkpointed", frozen=True):
    """A checkpoint is on disk: no learner will repeat the steps up to ``step``."""

    epoch: Count
    """Written by the learner; the broker refuses an epoch that is not the one of its Hello."""
    step: Count
    """Written by the learner; the broker releases for good what was committed up to this step."""


class PublishWeights(Message, tag="publish_weights", frozen=True):
    """A new policy version exists. The broker announces the newest one to generators in WeightsReady."""

    epoch: Count
    """Written by the learner; the broker refuses an epoch that is not the one of its Hello."""
    version: Version
    """Written by the learner, read by the broker for staleness; it refuses a lower one of the same epoch."""
    manifest: FilePath
    """Written by the learner: path of the manifest on its host. The broker passes it on to generators."""
    url: Address = ""
    """Written by the learner: URL where its host serves versions. The broker makes it the last source."""
    root: Root = ""
    """Written by the learner: hash that determines every byte. The broker passes it on to generators."""
    line: Annotated[list[tuple[Version, Version]], Meta(max_length=MAX_FORKS)] = field(default_factory=list)
    """Written by the learner: restarts behind these weights, as pairs (version continued, its new number).

    The broker measures policy lag with it, see `protocol.version_line`; `offbeat retrain` reads it, too.
    """


# --- actor -> broker --------------------------------------------------------------------------------------


class TaskCredit(Message, tag="task_credit", frozen=True):
    """Flow control of LeaseTask."""

    tasks: Count
    """Written by the actor: episodes it can run, added to its unused credit. The broker leases no more."""
    void: bool = False
    """Written by the actor: its unused credit is void, and ``tasks`` is all it has. It asks so when the first
    generator lets it in, and when no generator does any more."""


class Segment(Message, tag="segment", frozen=True):
    """A contiguous, immutable piece of a trajectory; its arrays follow in the body frame.

    The actor writes it. The broker checks the header, writes header and body to its journal, and forwards
    their bytes to the learner behind a Deliver. `offbeat journal show` and `export` print fields of it.

    Arrays, each with one element per token: ``token_ids`` int32, ``action_mask`` uint8, ``logp_behaviour``
    float32 (0 on observations), ``policy_version`` int32 (-1 on observations). Others may be added by name.
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
    arrays: "ArraySpecs" = field(default_factory=list)
    """Places of the arrays in the body. Read by the broker, which checks them, and by the learner."""
    failure: Failure | None = None
    """Parts of ``error``. Read by the broker, which counts them for `/status`, and by the learner."""
    auxiliary: Annotated[list[Count], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    """Indices of action turns of the trajectory that are not to be trained. The learner reads those of the last
    segment; windows that it has trained before then stay trained."""
    marks: Annotated[list[TurnMark], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    """Marks of the action turn that ends here, since 4.2. Read by the learner, for methods that compare turns."""


class ArraySpec(Struct, frozen=True, array_like=True):
    """One array of a body frame: little-endian ``dtype``, ``length`` elements, from byte ``offset`` on.

    `protocol.codec.pack_arrays` writes all fields at the sender, `unpack_arrays` reads them at the receiver.
    The broker reads them to check that the arrays of a segment are complete and fit into the body.
    """

    name: Label
    dtype: Literal["i4", "i8", "u1", "f4", "f8"]
    length: Count
    offset: Count


ArraySpecs = Annotated[list[ArraySpec], Meta(max_length=MAX_ARRAYS)]


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


# --- broker -> any role -----------------------------------------------------------------------------------


class Welcome(Message, tag="welcome", frozen=True):
    """Answer to a Hello; the broker writes all fields."""

    run: Label
    """Read by every peer, which ends if it belongs to a different run."""
    epoch: Count
    """Epoch of the newest learner. For programs of others; nothing in Offbeat reads it."""
    heartbeat_s: float
    """Read by every peer: seconds between its heartbeats. After five in silence the peer says Hello again."""
    policy_version: Version
    """Newest published version.

    A learner that restarts gives its versions higher numbers. A generator that joins late runs no request
    before it has this version.
    """
    limits: Annotated[dict[Label, Count], Meta(max_length=MAX_KEYS)] = field(default_factory=dict)
    """Size limits of the broker. For programs of others; nothing in Offbeat reads it."""
    attempt: Count = 0
    """Hello.attempt of the Hello that this answers. The peer ignores a Welcome to an earlier Hello."""
    place: Count = 0
    """Read by an actor: its number among the connected actors, the lowest that was free when it joined.

    Actors begin at different generators by it, where several are equally busy.
    """


class Refused(Message, tag="refused", frozen=True):
    """A message was not accepted; the broker writes all fields."""

    code: Label
    """Read by programs: at "unknown_peer" a peer says Hello again, at "queue_full" the learner ends."""
    message: Prose
    """Text for people, with the cure. The peer logs it."""
    fatal: bool = False
    """Read by every peer, which ends when it is set."""


class GeneratorInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live generator that actors may use. The broker writes it, actors read it."""

    peer: Name
    """Name of the generator. Actors name it in their logs."""
    endpoint: Address
    """Address that actors connect to."""
    policy_version: Version = 0
    """Version in service when the broker wrote the list. For programs of others; nothing in Offbeat reads it."""
    public_key: PublicKey = ""
    """Key that the generator must prove to own. "": actors read it from their keys folder, if there is one."""


class Generators(Message, tag="generators", frozen=True):
    """List of the healthy generators, sent to an actor that joins, and to all actors when it has changed.

    A new policy version of a generator is no change. Changes that come fast leave as one list.
    """

    generators: Annotated[list[GeneratorInfo], Meta(max_length=MAX_ITEMS)]
    """Written by the broker; the actor asks these generators and no others."""


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


class Held(Message, tag="held", frozen=True):
    """List of what the broker holds, sent by it to the learner after each Welcome, maybe in parts."""

    task_ids: Ids = field(default_factory=list)
    """Training tasks, done or not. A learner that continues the lineage adopts them, and puts only others."""
    unit_ids: Ids = field(default_factory=list)
    """Units delivered and not committed. The learner repeats the commits among them, which were lost."""
    more: bool = False
    """Tells the learner that another Held follows; it acts on the whole list only."""


class CheckpointWanted(Message, tag="checkpoint_wanted", frozen=True):
    """Committed units fill the journal; the learner is to write a checkpoint after this step."""

    reason: Prose = ""
    """Written by the broker; the learner logs it."""


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


class WeightsReady(Message, tag="weights_ready", frozen=True):
    """The newest policy version, announced to a generator, which fetches, verifies and loads it."""

    epoch: Count
    """Copied by the broker from PublishWeights; the generator orders versions by (epoch, version)."""
    version: Version
    """Copied by the broker from PublishWeights; the generator takes a version newer than its own only."""
    manifest: FilePath
    """Copied by the broker from PublishWeights; generators on the learner's host read the version there."""
    sources: Annotated[list[Address], Meta(max_length=MAX_SOURCES)] = field(default_factory=list)
    """Written by the broker: URLs that serve the version, first of generators, last of the learner.

    A generator on a different host fetches the version from one of them.
    """
    root: Root = ""
    """Copied by the broker from PublishWeights; the generator checks by it the bytes that a source sends."""


class ActorKeys(Message, tag="actor_keys", frozen=True):
    """Public keys of the actors that the broker admits, sent to a generator that joins and on every change.

    Only a broker with encryption sends it.
    """

    public_keys: Annotated[list[PublicKey], Meta(max_length=MAX_ITEMS)]
    """Written by the broker; the generator admits actors with these keys, and no others."""


class Drain(Message, tag="drain", frozen=True):
    """Asks a peer of the broker to finish its work, send it, say Goodbye and end.

    From a generator to its actors: the generator leaves soon. An actor then prefers other generators, takes no
    task if it has no other, and says by Stay what it still needs.
    """

    reason: Prose = ""
    """Written by the broker; actors and generators log it, and the learner reports it as why it ended."""


class QueueStats(Message, tag="queue_stats", frozen=True):
    """The broker's gauges, sent to the learner about once a second."""

    gauges: Annotated[dict[Label, float], Meta(max_length=MAX_ITEMS)]
    """Written by the broker; the learner shows them in TensorBoard, and counts sampled tokens with one."""


# --- actor <-> generator ----------------------------------------------------------------------------------


class Generate(Message, tag="generate", frozen=True):
    """Sample a continuation of the tokens in the body. The actor writes all fields for the generator."""

    request_id: Name
    """Name of the request on its connection; Chunk and Abort repeat it. The generator refuses one in use."""
    max_tokens: AtLeastOne
    """Number of tokens at which the generator ends the answer."""
    temperature: float = 1.0
    """Temperature of sampling; the generator refuses a negative one."""
    top_p: float = 1.0
    """Nucleus of sampling; the generator refuses one outside (0, 1]."""
    top_k: Int32 = 0
    """Candidates of sampling, 0 for all; the generator refuses a negative number."""
    seed: Seed | None = None
    """Seed of this request. The actor gives each turn, and each continuation of a turn, a different one."""
    stop_token_ids: Annotated[list[Int32], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    """Tokens that end the answer. If the list is empty, the generator uses the end tokens of its model."""
    min_policy_version: Version = 0
    """The generator holds the request until it has this version, at most 60 s, then answers with an error."""
    arrays: ArraySpecs = field(default_factory=list)
    """Place of the array ``token_ids`` in the body: the prompt."""


class Abort(Message, tag="abort", frozen=True):
    """Stop this request; a last chunk with finish_reason "abort" follows, also for a request that is unknown."""

    request_id: Name
    """Written by the actor; the generator stops this request of the same connection."""


class Stay(Message, tag="stay", frozen=True):
    """Tells a generator how many episodes of this actor need it.

    An actor sends it over each new connection, and each second after the generator has sent Drain. A draining
    generator may leave as soon as no actor needs it; an actor that is silent for `SILENT_S` needs it no more.
    """

    episodes: Count
    """Written by the actor: its running episodes, or 0 if a different generator serves them."""


class Chunk(Message, tag="chunk", frozen=True):
    """Newly sampled tokens: arrays ``token_ids``, ``logp_behaviour``, ``policy_version`` in the body."""

    request_id: Name
    """Written by the generator; the actor finds the turn by it, and ignores chunks of requests it gave up."""
    offset: Count = 0
    """Written by the generator: tokens of this request that it sent before this chunk.

    If the actor has a different number, tokens were lost: it gives the request up and asks again.
    """
    finish_reason: Literal["", "stop", "length", "abort", "error"] = ""
    """Written by the generator; "" means that more follows.

    At "error" the request itself is at fault, and the actor fails the episode. At "abort" the actor sends the
    request to a different generator. A chunk without tokens and without a finish reason says that the request
    is still under way.
    """
    error: Prose = ""
    """Written by the generator; the actor names it in its log and in the error of a failed episode."""
    kv: KvPolicy = "recomputed"
    """Written by the generator: what weight updates do to the KV cache. The actor copies it to Segment.kv."""
    arrays: ArraySpecs = field(default_factory=list)
    """Written by the generator: places of the arrays in the body. The actor reads the tokens with it."""


AnyMessage = (
    Hello | Heartbeat | Goodbye | PutTasks | DeliveryCredit | Commit | Checkpointed | PublishWeights | TaskCredit
    | Segment | TaskRejected | Welcome | Refused | Generators | LeaseTask | CancelTask | SegmentAck | SegmentCredit
    | Held | CheckpointWanted | Deliver | Dropped | WeightsReady | ActorKeys | Drain | QueueStats | Generate | Abort
    | Stay | Chunk
)  # fmt: skip

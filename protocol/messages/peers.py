"""A peer joins the broker, tells that it lives and works, and leaves."""

from typing import Annotated

from msgspec import Meta, field

from protocol.messages.fields import (
    MAX_ITEMS,
    MAX_KEYS,
    MAX_PATIENCE_S,
    Address,
    Count,
    DeliveryUnit,
    Gauges,
    Growing,
    Label,
    Message,
    Name,
    Prose,
    PublicKey,
    Role,
    Version,
)


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


class QueueStats(Message, tag="queue_stats", frozen=True):
    """The broker's gauges, sent to the learner about once a second."""

    gauges: Annotated[dict[Label, float], Meta(max_length=MAX_ITEMS)]
    """Written by the broker; the learner shows them in TensorBoard, and counts sampled tokens with one."""


class Drain(Message, tag="drain", frozen=True):
    """Asks a peer of the broker to finish its work, send it, say Goodbye and end.

    From a generator to its actors: the generator leaves soon. An actor then prefers other generators, takes no
    task if it has no other, and says by Stay what it still needs.
    """

    reason: Prose = ""
    """Written by the broker; actors and generators log it, and the learner reports it as why it ended."""


class Goodbye(Message, tag="goodbye", frozen=True):
    """The peer leaves on purpose, so the broker returns what it held to the queues at once."""

    reason: Prose = ""
    """Written by the peer. For programs of others; nothing in Offbeat reads it."""

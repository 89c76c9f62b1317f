"""Messages of peers: they join the broker, live and leave; generators meet actors; policy versions are announced."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from protocol.messages.fields import (
    MAX_ECHO,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_PATIENCE_S,
    MAX_SOURCES,
    Address,
    ArraySpecs,
    AtLeastOne,
    Count,
    DeliveryUnit,
    FilePath,
    Gauges,
    Growing,
    Int32,
    KvPolicy,
    Label,
    Message,
    Name,
    Prose,
    PublicKey,
    Role,
    Root,
    RunEnd,
    Seed,
    Version,
)
from protocol.version_line import MAX_FORKS


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
    """Written by a generator: where it serves versions. With ``passes_on`` it may be in WeightsReady.sources."""
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
    on_host: Label = ""
    """Written by a peer under `offbeat host`, since 4.5: name of its host. `/status` groups peers by it."""
    job: Label = ""
    """Written by a peer under `offbeat host`, since 4.5: name of the job that the host's engine has given it."""
    restarts: Count = 0
    """Written by a peer under `offbeat host`, since 4.5: starts of its name before, under the same supervisor."""
    died: Prose = ""
    """Written by a peer under `offbeat host`, since 4.5: how the process before it ended. `/status` shows it."""
    digest: Label = ""
    """Written by a peer under `offbeat host`, since 4.5: digest of the run for which its ticket was made.

    The broker refuses a digest that differs from that of the run, and admits a peer without one.
    """
    evaluates: bool = False
    """Written by a generator: it answers evaluation tasks alone, and keeps the version that they ask for; since 4.5."""
    passes_on: bool = False
    """Written by a generator, since 4.6: ``weights_url`` serves the chunks of a version while it is being fetched.

    The broker sends further hosts there.
    """
    rack: Label = ""
    """Written by a generator, since 4.6: where its host stands. Hosts of one rack are sent to each other first."""


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


class SourceComplaint(Struct, frozen=True, array_like=True):
    """A source of weights that failed a generator while others were left; since 4.6."""

    url: Address
    """Written by the generator: one of WeightsReady.sources."""
    lied: bool = False
    """Written by the generator: what came did not match its hash. The broker sends its host there no more.

    A source serves no further hosts for a minute after a complaint, and none at all once it has lied to two hosts.
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

    The broker repeats WeightsReady to a generator that lacks the newest version, and passes the number on in
    GeneratorInfo. The learner writes its own version, and the broker the newest one; nothing in Offbeat reads these
    two.
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
    complaints: Annotated[list[SourceComplaint], Meta(max_length=MAX_SOURCES)] = field(default_factory=list)
    """Written by a generator, since 4.6: sources that failed for the version before the newest, or lied ever."""


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
    then: RunEnd = ""
    """Written by the broker: what becomes of the run; since 4.5.

    An actor or generator ends with code 0 if the run is "over", or if nothing is said: it is not wanted any more. It
    ends with code 75 if the run is "resumed", so that whoever started it starts it again.
    """


class Goodbye(Message, tag="goodbye", frozen=True):
    """The peer leaves on purpose, so the broker returns what it held to the queues at once."""

    reason: Prose = ""
    """Written by the peer. For programs of others; nothing in Offbeat reads it."""
    then: RunEnd = ""
    """Written by the learner: what becomes of the run; since 4.5.

    If it is "over", the broker asks all peers to end, and ends with them. If it will be "resumed", they wait.
    """


class Echo(Message, tag="echo", frozen=True):
    """A trial of the path; since 4.5. The broker sends it back as it is, also before a Hello."""

    text: Annotated[str, Meta(max_length=MAX_ECHO)] = ""
    """Written by whoever tries the path: as many bytes as it wants to see arrive."""


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
    behind: bool = False
    """True if its version has been beyond the lag bound for some seconds, while others are within it; since 4.5.

    An actor gives it no new turn while it can choose another one.
    """
    evaluates: bool = False
    """Hello.evaluates: an actor asks it for turns of evaluation tasks, and for no others; since 4.5."""


class Generators(Message, tag="generators", frozen=True):
    """The generators of an actor, sent when it joins and when they have changed.

    In a small fleet these are all healthy ones, else a subset that is stable (`broker.core.subsets`). A new policy
    version of a generator is no change. Changes that come fast leave as one list.
    """

    generators: Annotated[list[GeneratorInfo], Meta(max_length=MAX_ITEMS)]
    """Written by the broker; the actor asks these generators and no others."""


class ActorKeys(Message, tag="actor_keys", frozen=True):
    """Public keys of the actors that the broker admits, sent to a generator that joins and on every change.

    Only a broker with encryption sends it.
    """

    public_keys: Annotated[list[PublicKey], Meta(max_length=MAX_ITEMS)]
    """Written by the broker; the generator admits actors with these keys, and no others."""


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
    routes_from: Count | None = None
    """Position in the prompt of the first token whose experts the actor wants to know; since 4.4. None: of no token.

    The generator sends rows of experts from this token on, up to the last token but one of the answer, if it serves
    a mixture of experts and was told to record them.
    """


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
    """Newly sampled tokens: arrays ``token_ids``, ``logp_behaviour``, ``policy_version`` in the body.

    Since 4.4 it may have ``routed_token`` and ``routed_experts``, see `protocol.arrays`.
    """

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


class WeightsReady(Message, tag="weights_ready", frozen=True):
    """The newest policy version, announced to a generator, which fetches, verifies and loads it."""

    epoch: Count
    """Copied by the broker from PublishWeights; the generator orders versions by (epoch, version)."""
    version: Version
    """Copied by the broker from PublishWeights; the generator takes a version newer than its own only."""
    manifest: FilePath
    """Copied by the broker from PublishWeights; generators on the learner's host read the version there."""
    sources: Annotated[list[Address], Meta(max_length=MAX_SOURCES)] = field(default_factory=list)
    """Written by the broker: URLs that serve the version, first of relays, last of the learner.

    A generator on a different host fetches the version from one of them.
    """
    root: Root = ""
    """Copied by the broker from PublishWeights; the generator checks by it the bytes that a source sends."""
    ordered: bool = False
    """Written by the broker, since 4.6: the sources are to be asked in this order.

    Those before the last may be fetching the version themselves, and pass on what they have.
    """

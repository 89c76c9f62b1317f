"""Actors and generators: how the broker introduces them, and what they say to each other."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from protocol.messages.array_specs import ArraySpecs
from protocol.messages.fields import (
    MAX_ITEMS,
    Address,
    AtLeastOne,
    Count,
    Int32,
    KvPolicy,
    Message,
    Name,
    Prose,
    PublicKey,
    Seed,
    Version,
)


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

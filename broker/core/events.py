"""Events that change the broker's lasting state, one Struct each.

The journal is a series of events and segments. `broker.core.actor_side` and `broker.core.learner.learner_side` decide
who gets a task, whether a segment is accepted, and which deadline has passed. They know peers and clocks.
Each decision is an event, and `broker.core.state.BrokerState` applies it without looking at peers or clocks.
So the broker's next process reaches the same state by applying the same events in the same order. Credit,
liveness and deliveries on their way are not part of events; they begin anew.
"""

from typing import Literal

import msgspec
from msgspec import Struct

from protocol.codec import decode_payload
from protocol.messages.peers import Hello
from protocol.messages.tasks import Task


class Event(Struct, tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """Base of all events."""


class TasksPut(Event, tag="tasks_put", frozen=True):
    """The learner put new tasks; their rollout groups wait for them."""

    tasks: list[Task]


class Leased(Event, tag="leased", frozen=True):
    """A task was leased to an actor (process ``incarnation`` of that name)."""

    task_id: str
    lease_id: str
    actor: str
    incarnation: int = 0


class LeaseEnded(Event, tag="lease_ended", frozen=True):
    """An attempt ended early.

    ``fault``: it counts towards max_attempts. ``avoid``: the actor that rejected the task.
    """

    task_id: str
    fault: bool = True
    avoid: str = ""


class GroupClosed(Event, tag="group_closed", frozen=True):
    """The deadline of a rollout group has passed."""

    group_id: str


class Delivered(Event, tag="delivered", frozen=True):
    """A unit was sent to the learner of this epoch."""

    unit_id: str
    epoch: int


class UnitDropped(Event, tag="unit_dropped", frozen=True):
    """A ready unit will not be delivered."""

    unit_id: str
    outcome: Literal["stale", "poison", "damaged"]


class Committed(Event, tag="committed", frozen=True):
    """The learner committed units: ``trained`` entered the gradient of ``step``, in this order."""

    epoch: int
    step: int
    trained: list[str] = []
    dropped: list[str] = []
    replayed_tokens: int = 0
    version: int = -1
    """Version that the step updated; -1 where nothing was trained."""


class Released(Event, tag="released", frozen=True):
    """A checkpoint covers the commits up to ``step``, so the learner will not ask for these units again."""

    epoch: int
    step: int


class LearnerJoined(Event, tag="learner_joined", frozen=True):
    """A learner process took over, or wants another kind of unit than before."""

    hello: Hello


class Published(Event, tag="published", frozen=True):
    """A policy version was announced."""

    epoch: int
    version: int
    manifest: str
    url: str = ""
    root: str = ""
    line: list[tuple[int, int]] = []


AnyEvent = (
    TasksPut | Leased | LeaseEnded | GroupClosed | Delivered | UnitDropped | Committed | Released | LearnerJoined
    | Published
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)


def encode_event(event: AnyEvent) -> bytes:
    """Encode an event for the journal.

    Example:
        >>> decode_event(encode_event(GroupClosed(group_id="1g7")))
        GroupClosed(group_id='1g7')
    """
    return _encoder.encode(event)


def decode_event(payload: bytes) -> AnyEvent:
    """Decode an event of the journal.

    Raises:
        msgspec.MsgspecError: the payload is no event.
    """
    return decode_payload(_decoder, payload)

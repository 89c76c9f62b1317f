"""What changes the broker's books for good, one Struct each. The journal is a series of these and of segments.

Decisions (who gets a task, whether a segment is let in, which deadline has passed) are made by `broker.core.actor_side`
and `broker.core.learner_side`, which know peers and clocks. What was decided is an event;
`broker.core.state.BrokerState` applies it, and needs neither peers nor clock for that. So the same events, applied
in the same order by the broker's next process, give the same state. Credit, liveness and deliveries on their way are
no part of them: they begin anew.
"""

from typing import Literal

import msgspec
from msgspec import Struct

from protocol.codec import decode_payload
from protocol.messages import Hello, Task


class Event(Struct, tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """Base of all events."""


class TasksPut(Event, tag="tasks_put", frozen=True):
    """New tasks of the learner; their groups wait for them."""

    tasks: list[Task]


class Leased(Event, tag="leased", frozen=True):
    """A task went to an actor (process ``incarnation`` of that name)."""

    task_id: str
    lease_id: str
    actor: str
    incarnation: int = 0


class LeaseEnded(Event, tag="lease_ended", frozen=True):
    """An attempt is over before its end. ``fault``: it counts towards max_attempts; ``avoid``: who does not want it."""

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
    """The learner is done with units: ``trained`` entered the gradient of ``step``, in this order."""

    epoch: int
    step: int
    trained: list[str] = []
    dropped: list[str] = []
    replayed_tokens: int = 0
    version: int = -1
    """That the step updated; -1 where nothing was trained."""


class Released(Event, tag="released", frozen=True):
    """What was committed up to ``step`` will not be asked for again."""

    epoch: int
    step: int


class LearnerJoined(Event, tag="learner_joined", frozen=True):
    """A learner process took over, or wants other units than before."""

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
    """As it stands in the journal.

    Example:
        >>> decode_event(encode_event(GroupClosed(group_id="1g7")))
        GroupClosed(group_id='1g7')
    """
    return _encoder.encode(event)


def decode_event(payload: bytes) -> AnyEvent:
    """Raises msgspec.MsgspecError for what is no event."""
    return decode_payload(_decoder, payload)

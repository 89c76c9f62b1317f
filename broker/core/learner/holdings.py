"""What the broker holds of a learner that joins: tasks, and units that were delivered. Pure."""

from collections.abc import Iterable

from broker.core.state import BrokerState
from protocol import names
from protocol.codec import MAX_HEADER_BYTES
from protocol.messages.delivery import Held
from protocol.messages.fields import MAX_IDS

ID_OVERHEAD, MESSAGE_OVERHEAD = 3, 1_024
"""Bytes of a string's head in MessagePack, and bytes reserved in a Held for everything but ids."""


def held(state: BrokerState) -> list[Held]:
    """Return messages that list the tasks a learner need not put again, and the units it may be done with."""
    units = [unit.unit_id for unit in state.deliveries.units() if unit.deliveries]
    messages = [Held(task_ids=part, more=True) for part in _parts(_held_task_ids(state))]
    *others, last = _parts(units) or [[]]
    return [*messages, *(Held(unit_ids=part, more=True) for part in others), Held(unit_ids=last)]


def _held_task_ids(state: BrokerState) -> list[str]:
    """Return the training tasks that are queued, leased, or done and not committed."""
    live = [record.task.task_id for record in state.tasks.live() if record.task.purpose == "train"]
    return list(dict.fromkeys([*live, *done_task_ids(state, "train")]))


def done_task_ids(state: BrokerState, *purposes: str) -> list[str]:
    """Return the tasks that are done and whose last segment is held.

    The last window of a trajectory may be committed before others; then the task is left out.
    """
    units = [unit for unit in state.deliveries.units() if unit.purpose in purposes and not unit.context]
    done = [stored.key[0] for unit in units for stored in unit.segments]
    if "train" in purposes:
        done += [t.trajectory_id for group in state.assembly.groups.values() for t in group.here]
    return [names.task_of(trajectory) for trajectory in done]


def _parts(ids: Iterable[str]) -> list[list[str]]:
    """Split ids into lists, each as long as one message can hold."""
    parts, room = list[list[str]](), 0
    for one in ids:
        size = len(one.encode()) + ID_OVERHEAD
        if size > room or len(parts[-1]) == MAX_IDS:
            parts.append([])
            room = MAX_HEADER_BYTES - MESSAGE_OVERHEAD
        parts[-1].append(one)
        room -= size
    return parts

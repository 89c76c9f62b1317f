"""Messages that are wrong in one place: a field, a header, a frame, or what cannot be encoded at all."""

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.fuzz.engine import HOSTILE_INTS, Choices, hostile_value, mutate_value
from protocol.codec import PRELUDE

Said = tuple[str, list[bytes]]
"""A peer, and the frames that it sends."""


def mutated(choices: Choices, message: Any, ids: Sequence[str]) -> Any:
    """Return the message with one field changed.

    Args:
        ids: names that mean something to the broker, to put in place of others.
    """
    name = choices.pick(message.__struct_fields__)
    value = getattr(message, name)
    match value:
        case bool():
            other: Any = not value
        case str() if ids and choices.flag():
            other = choices.pick(ids)
        case int():
            near = value + choices.pick((-1, 1, 2))
            other = near if choices.flag() else choices.pick(HOSTILE_INTS)
        case list() if value and isinstance(value[0], msgspec.Struct) and not choices.flag(4):
            place = choices.below(len(value))
            other = [*value[:place], mutated(choices, value[place], ids), *value[place + 1 :]]
        case list() if value:
            other = value * choices.pick((0, 2, 30))
        case msgspec.Struct():
            other = mutated(choices, value, ids)
        case _:
            other = hostile_value(choices.pick, value)
    return msgspec.structs.replace(message, **{name: other})


def mutated_header(choices: Choices, header: bytes) -> bytes:
    """Return a header with one value changed, or the header itself if that cannot be encoded."""
    try:
        return msgspec.msgpack.encode(mutate_value(choices.pick, msgspec.msgpack.decode(header)))
    except (msgspec.MsgspecError, OverflowError, UnicodeDecodeError):
        return header


def damaged(choices: Choices, frames: Sequence[bytes]) -> list[bytes]:
    """Return frames of which one is missing, cut, or has a wrong byte or value."""
    out = list(frames)
    place = choices.below(len(out)) if out else 0
    match choices.below(4):
        case 0:
            out[place : place + 1] = []
        case 1:
            out[place : place + 1] = [out[place][: choices.below(max(1, len(out[place])))]] if out else []
        case 2 if out and out[place]:
            changed = bytearray(out[place])
            changed[choices.below(len(changed))] = choices.byte()
            out[place] = bytes(changed)
        case _ if len(out) > 1:
            out[1] = mutated_header(choices, out[1])
    return out


def send(name: str, message: Any) -> Said:
    """Encode a message, even one that the protocol forbids. If that fails, send the bare prelude."""
    try:
        return name, [PRELUDE, msgspec.msgpack.encode(message)]
    except (OverflowError, TypeError, UnicodeEncodeError, RecursionError, ValueError):
        return name, [PRELUDE]

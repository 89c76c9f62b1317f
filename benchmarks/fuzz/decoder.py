"""Fuzz the decoder: whatever frames arrive, the result must be a message or a ProtocolError.

An input is a sequence of frames, each after its length (2 bytes). The first byte of the input says whether
the right prelude is put before them.
"""

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.fuzz.engine import mutate_bytes, mutate_value
from benchmarks.fuzz.messages import samples
from protocol.arrays import Arrays
from protocol.codec import (
    MAX_ENCLOSED,
    PRELUDE,
    decode,
    decode_delivery,
    decode_segment,
    enclose,
    encode,
    encode_delivery,
    open_envelope,
    unpack_arrays,
)
from protocol.errors import ProtocolError
from protocol.messages.episodes import Deliver, Segment
from protocol.messages.fields import ArraySpec

MAX_SPECS = 200


def join(frames: Sequence[bytes]) -> bytes:
    """Pack frames into an input. A right prelude is left out, because the first byte stands for it.

    Example:
        >>> split(join([PRELUDE, b"header", b"body"])) == [PRELUDE, b"header", b"body"]
        True
    """
    right = bool(frames) and frames[0] == PRELUDE
    rest = frames[1:] if right else frames
    return bytes([right]) + b"".join(len(f).to_bytes(2, "little") + f for f in rest)


def split(data: bytes) -> list[bytes]:
    """Return the frames of an input. The last one may be cut."""
    frames = [PRELUDE] if data[:1] != b"\x00" else []
    at = 1
    while at < len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "little")
        frames.append(data[at + 2 : end])
        at = end
    return frames


class DecoderTarget:
    """Target for `protocol`: decode, open_envelope, decode_segment, decode_delivery, unpack_arrays."""

    name, unit = "decoder", "decoded"

    def __init__(self) -> None:
        self.done = 0
        self._seeds = [list(map(bytes, frames)) for frames in _seeds()]
        self._trees: list[Any] = [msgspec.msgpack.decode(frames[1]) for frames in self._seeds]

    def make(self, rng: random.Random) -> bytes:
        which = int(rng.random() * len(self._seeds))
        kind = rng.getrandbits(3)
        if kind == 0:
            return rng.randbytes(rng.getrandbits(6))
        if kind <= 3:
            return mutate_bytes(rng, join(self._seeds[which]))
        prelude, _, *rest = self._seeds[which]
        tree = mutate_value(rng.choice, self._trees[which])
        if kind == 4:
            tree = mutate_value(rng.choice, tree)
        try:
            header = msgspec.msgpack.encode(tree)
        except (OverflowError, RecursionError):
            return b"\x01\x02\x00\xcf\xff"
        if kind == 7 and rest:
            rest = rest[1:] if rng.getrandbits(1) else [*rest, rest[-1]]
        return join([prelude, header, *rest])

    def run(self, data: bytes) -> None:
        frames = split(data)
        for frame in frames[1:2]:
            _segment(frame)
        _envelope(frames)
        try:
            message, rest = decode(frames)
        except ProtocolError:
            return
        self.done += 1
        header = encode(message)
        again, _ = decode(header)
        assert encode(again) == header, f"{type(message).__name__} is another message after a journey"
        arrays = getattr(message, "arrays", None)
        if arrays is not None and rest:
            _arrays(arrays, rest[0])
        if isinstance(message, Deliver):
            try:
                decode_delivery(message, rest)
            except ProtocolError:
                return


def _envelope(frames: Sequence[bytes]) -> None:
    try:
        parts = open_envelope(frames)
    except ProtocolError:
        return
    assert 1 <= len(parts) <= MAX_ENCLOSED, f"{len(parts)} messages in one envelope"
    count = len(frames) - 2 if len(parts) > 1 else 0
    assert sum(len(part) - 2 for part in parts if len(parts) > 1) == count, "a frame was lost or came twice"
    for part in parts if len(parts) > 1 else ():
        with contextlib.suppress(ProtocolError):
            decode(part)


def _segment(frame: bytes) -> None:
    try:
        decode_segment(frame)
    except ProtocolError:
        return


def _arrays(specs: Sequence[ArraySpec], body: bytes | memoryview) -> Arrays:
    try:
        arrays = unpack_arrays(specs, body)
    except ProtocolError:
        return {}
    whole = np.frombuffer(body, np.uint8)
    for spec in specs[-1:]:
        view = arrays[spec.name]
        assert len(view) == spec.length, "an array is not as long as its header says"
        expected = whole[spec.offset : spec.offset + view.nbytes].tobytes()
        assert view.tobytes() == expected, "an array is not what the body has at its place"
    return arrays


def _seeds() -> list[Sequence[bytes | memoryview]]:
    found = samples()
    whole = [frames for message, frames in found if isinstance(message, Segment) and len(frames) == 3]
    segments = [(frames[1], frames[2]) for frames in whole]
    out: list[Sequence[bytes | memoryview]] = [frames for _, frames in found]
    out += enclose([frames for _, frames in found][:16])
    for n in (1, 2):
        out.append(encode_delivery(Deliver(unit_id="u", segments=n), segments[:1] * n))
    return out

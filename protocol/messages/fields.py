"""The base class of all messages, the types of their fields with bounds, and where an array lies in a body."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Role = Literal["learner", "actor", "generator"]
Purpose = Literal["train", "eval"]
TrajectoryStatus = Literal["unfinished", "finished", "truncated", "failed"]
KvPolicy = Literal["recomputed", "kept"]
DeliveryUnit = Literal["group", "trajectory", "segment"]
RunEnd = Literal["", "over", "resumed"]
"""What becomes of a run when a process of it ends; "" if that is not said."""

MAX_NAME, MAX_ID, MAX_ADDRESS, MAX_PATH, MAX_TEXT, MAX_ROOT = 256, 512, 512, 4_096, 16_384, 64
MAX_PUBLIC_KEY = 40
MAX_ITEMS, MAX_TASKS, MAX_IDS, MAX_KEYS, MAX_SOURCES, MAX_ARRAYS = 4_096, 8_192, 65_536, 1_024, 64, 64
LARGEST_COUNT, LARGEST_VERSION, LARGEST_DURATION_S = 2**63 - 1, 2**31 - 1, 1e9
MAX_PLACE, MAX_FAILURE_TEXT = 512, 1_000
MAX_STOPS = 16
MAX_ECHO = 65_536
"""Most characters of an Echo."""
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
Seconds = Annotated[float, Meta(ge=0, le=LARGEST_DURATION_S)]
"""A time that was measured, which may be 0. The bounds leave out NaN."""
Summand = Annotated[int, Meta(ge=0, le=2**40)]
"""A number that is added up. The bound keeps sums within the 64 bits of a MessagePack integer."""


class Message(Struct, tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


class ArraySpec(Struct, frozen=True, array_like=True):
    """One array of a body frame: little-endian ``dtype``, ``length`` elements, from byte ``offset`` on.

    `protocol.codec.pack_arrays` writes all fields at the sender, `unpack_arrays` reads them at the receiver.
    The broker reads them to check that the arrays of a segment are complete and fit into the body. "i2" exists since
    4.4.
    """

    name: Label
    dtype: Literal["i2", "i4", "i8", "u1", "f4", "f8"]
    length: Count
    offset: Count


ArraySpecs = Annotated[list[ArraySpec], Meta(max_length=MAX_ARRAYS)]

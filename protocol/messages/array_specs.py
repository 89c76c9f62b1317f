"""Where an array lies in a body frame."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.messages.fields import MAX_ARRAYS, Count, Label


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

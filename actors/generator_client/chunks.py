"""Chunks of an answer: their tokens, and whether they continue the tokens that came before. Pure."""

from dataclasses import replace

import numpy as np

from actors.generator_client.connection import Arrived
from actors.sampled import FinishReason, Routes, Sampled, nothing, routes_in, together
from protocol.arrays import SAMPLED_ARRAYS, TOKEN_ARRAYS
from protocol.codec import unpack_arrays
from protocol.errors import ProtocolError
from protocol.messages.generators import Chunk

FAILURES = ("error", "abort")
"""Finish reasons with which a generator ends an answer before the turn is complete: the request is at fault, or
the generator cannot go on."""


class AnswerInterrupted(Exception):
    """A generator did not complete the turn."""


def check_offset(chunk: Chunk, have: int, count: int) -> None:
    """Check that a chunk continues the tokens received so far.

    An empty chunk that reports a failure always passes.

    Raises:
        AnswerInterrupted: there is a gap or an overlap, so the tokens do not continue this text.
    """
    if chunk.offset == have or (count == 0 and chunk.finish_reason in FAILURES):
        return
    if chunk.offset > have:
        raise AnswerInterrupted(f"tokens {have}..{chunk.offset - 1} were lost on the way")
    raise AnswerInterrupted(f"a chunk begins at token {chunk.offset}, {have} are here already")


def sampled_of(arrived: Arrived, peer: str) -> Sampled:
    """Return the tokens of a chunk.

    Args:
        peer: name of the generator that sent it.

    Raises:
        AnswerInterrupted: the arrays are missing, damaged, or hold a log-probability that is not finite, or rows of
            experts are not those of consecutive tokens.
    """
    chunk = arrived.chunk
    reason = chunk.finish_reason
    finish_reason: FinishReason = reason if reason == "stop" or reason == "length" else ""
    if not chunk.arrays:
        return nothing(finish_reason=finish_reason, generator=peer)
    try:
        arrays = unpack_arrays(chunk.arrays, arrived.frames[0])
        typed = {name: arrays[name].astype(TOKEN_ARRAYS[name], copy=False) for name in SAMPLED_ARRAYS}
        sampled = Sampled(
            **typed, finish_reason=finish_reason, kv=chunk.kv, generator=peer, routes=routes_in(arrays)
        )
    except (ProtocolError, ValueError, KeyError, IndexError) as error:
        raise AnswerInterrupted(f"chunk without usable arrays: {error!r}") from None
    if not np.isfinite(sampled.logp_behaviour).all():
        raise AnswerInterrupted("chunk with a log-probability that is not finite")
    if (rows := sampled.routes) is not None and (rows.tokens[0] < 0 or (np.diff(rows.tokens) != 1).any()):
        raise AnswerInterrupted("chunk with rows of experts that are not those of consecutive tokens")
    return sampled


def with_held(sampled: Sampled, held: list[Routes]) -> Sampled:
    """Return tokens with the rows of experts that came before them, which are removed from ``held``.

    Rows that come without tokens are held, because a turn begins with its first token.
    """
    if sampled.routes is not None:
        held.append(sampled.routes)
    if not len(sampled) or not held:
        return replace(sampled, routes=None)
    routes = together(held)
    held.clear()
    return replace(sampled, routes=routes)

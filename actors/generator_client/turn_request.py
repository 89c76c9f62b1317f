"""One turn that is asked of a generator: the request, its message, and whether its answer is complete. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from actors.sampled import FinishReason, Sampled
from protocol.codec import Frames, encode_arrays
from protocol.messages.generators import Generate
from protocol.messages.tasks import Sampling

Known = TypeVar("Known", int, int | None)


@dataclass(frozen=True)
class TurnRequest:
    """One action turn: continue ``prompt`` by at most ``max_tokens`` tokens."""

    trajectory_id: str
    turn: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    min_policy_version: int = 0
    stop_token_ids: tuple[int, ...] = ()
    preferred: str = ""
    begun: int = 0
    """Tokens at the end of ``prompt`` that belong to this turn already. They change the seed."""
    routes_from: int | None = None
    """First token of ``prompt`` whose experts are not known; None: nobody wants to know them."""


def why_complete(request: TurnRequest, received: Sequence[Sampled]) -> FinishReason:
    """Return the finish reason of a turn that is complete although its last chunk was lost, else ""."""
    last = next((sampled for sampled in reversed(received) if len(sampled)), None)
    if last is not None and last.token_ids[-1] in request.stop_token_ids:
        return "stop"
    return "length" if sum(map(len, received)) >= request.max_tokens else ""


def generate_message(request_id: str, request: TurnRequest, received: Sequence[Sampled]) -> Frames:
    """Return the frames that ask a generator for the rest of a turn.

    Args:
        request_id: id of this attempt, by which its chunks are known.
        received: tokens of the turn that earlier attempts have brought. They follow the prompt.
    """
    sampling, tokens = request.sampling, sum(map(len, received))
    seed, begun = sampling.seed, request.begun + tokens
    message = Generate(
        request_id=request_id,
        max_tokens=request.max_tokens - tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        # Each turn, and each continuation of a turn, draws from a separate random stream.
        seed=None if seed is None else (seed + 1_000_003 * request.turn + 7_919 * begun) % 2**31,
        stop_token_ids=list(request.stop_token_ids),
        min_policy_version=request.min_policy_version,
        routes_from=routed(request.routes_from, received),
    )
    prompt = [np.array(request.prompt, np.int32), *(sampled.token_ids for sampled in received)]
    return encode_arrays(message, {"token_ids": np.concatenate(prompt)})


def routed(known: Known, received: Sequence[Sampled]) -> Known:
    """Return the first token of a turn's context whose experts are not known, once these tokens are here.

    Args:
        known: the same before they came; None: nobody wants to know.
    """
    for sampled in received:
        if known is not None and sampled.routes is not None:
            known = sampled.routes.reach(known)
    return known

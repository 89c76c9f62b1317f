"""Answers of a vLLM server, chunk by chunk: their tokens, log-probabilities and versions."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from actors.errors import EngineFailed, RequestRefused
from actors.generator.requests import stamp
from actors.sampled import FinishReason, Sampled


class _TokenLogp(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogp] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class AnswerChoice(msgspec.Struct):
    """The part of one chunk that belongs to the only answer of a request."""

    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: FinishReason | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    choices: list[AnswerChoice] = []
    error: dict[str, Any] | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class AnswerStream:
    """One running request: the version at its start, and the tokens whose version is not known yet."""

    version: int
    sent: int = 0
    uncertain: bool = False
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def take(self, choice: AnswerChoice) -> Sampled | None:
        """Return the tokens whose versions are known with this chunk; None if none is known yet.

        Raises:
            EngineFailed: the last chunk does not tell the versions of an answer that ran during an update.
            ValueError: the spans of versions leave out a token, or numbers of tokens and log-probabilities differ.
        """
        self.ids += choice.token_ids or []
        if choice.logprobs and choice.logprobs.content:
            self.logps += [entry.logprob for entry in choice.logprobs.content]
        finish: FinishReason = choice.finish_reason or ""
        if self.uncertain and not finish:
            return None
        starts = [(self.version, 0)]
        if self.uncertain:
            if choice.weight_versions is None:
                raise EngineFailed("generate: the last chunk tells no weight versions; is this vLLM >= 0.32?")
            starts = [(int(span.version), span.start) for span in choice.weight_versions]
        end = self.sent + len(self.ids)
        sampled = Sampled(
            np.array(self.ids, np.int32),
            np.array(self.logps, np.float32),
            stamp(starts, self.sent, end) if self.ids else np.empty(0, np.int32),
            finish,
        )
        self.sent, self.ids, self.logps = end, [], []
        return sampled


def choice_in(line: bytes) -> AnswerChoice | None:
    """Return what a chunk says of the answer; None if it says nothing.

    Args:
        line: the chunk as JSON.

    Raises:
        RequestRefused: the server says that the request is at fault.
        EngineFailed: the server says that it is at fault itself.
        MsgspecError: the chunk has a different form.
    """
    event = _decode_event(line)
    if event.error is not None:
        said = f"status {event.error.get('code')}: {event.error.get('message', event.error)}"
        raise RequestRefused(said) if 400 <= event.error.get("code", 500) < 500 else EngineFailed(said)
    if not event.choices:
        return None
    return event.choices[0]

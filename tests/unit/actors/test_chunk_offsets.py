"""The pool notices chunks that were lost, and the turn continues from the contiguous tokens."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from actors import generator_client
from actors.generator_client import GeneratorPool, TurnRequest
from protocol.codec import decode, encode_arrays
from protocol.messages.peers import Abort, Chunk, Generate, GeneratorInfo

EOS = 0


class Wire:
    """A stand-in for a socket: a generator that answers each request with the next list of chunks."""

    def __init__(self, on_frames, answers, log):
        self._on_frames, self._answers, self._log = on_frames, answers, log

    def send(self, frames):
        message, _ = decode(frames)
        self._log.append(message)
        if isinstance(message, Generate):
            for offset, tokens, reason in self._answers.pop(0):
                chunk = Chunk(request_id=message.request_id, offset=offset, finish_reason=reason)
                arrays = {
                    "token_ids": np.array(tokens, "i4"),
                    "logp_behaviour": np.full(len(tokens), -1.0, "f4"),
                    "policy_version": np.zeros(len(tokens), "i4"),
                }
                self._on_frames(encode_arrays(chunk, arrays))

    def close(self):
        pass


def sample(monkeypatch, *answers):
    """Return the tokens, the interruptions, and the messages sent to the generator."""
    log = []

    class Well:
        why, connected, connections = "", True, 1

    def connect(endpoint, name, keys, server, on_frames):
        return Wire(on_frames, list(answers), log), Well()

    monkeypatch.setattr(generator_client, "RETRY_S", 0.0)
    monkeypatch.setattr(generator_client, "connect", connect)

    async def main():
        pool = GeneratorPool("actor-0", 60.0)
        pool.update([GeneratorInfo(peer="g0", endpoint="tcp://127.0.0.1:1")])
        tokens = []
        request = TurnRequest("t.0", 0, [9], max_tokens=8, stop_token_ids=(EOS,))
        async with aclosing(pool.turn(request)) as turn:
            async for piece in turn:
                tokens += piece.token_ids.tolist()
        return tokens, pool.interruptions, log

    return asyncio.run(main())


def test_tokens_behind_a_gap_are_not_joined_to_those_before_it(monkeypatch):
    lost = [(0, [1, 2], ""), (4, [5, 6], ""), (6, [EOS], "stop")]
    tokens, interruptions, log = sample(monkeypatch, lost, [(0, [3, EOS], "stop")])
    assert (tokens, interruptions) == ([1, 2, 3, EOS], 1)
    assert [type(message) for message in log] == [Generate, Abort, Generate]
    assert log[2].arrays[0].length == 3  # the prompt and the contiguous tokens


@pytest.mark.parametrize("answer", [[(2, [], "stop")], [(0, [1], ""), (0, [1], "")]])
def test_a_lost_beginning_and_a_repeated_chunk_are_interruptions_too(monkeypatch, answer):
    kept = [token for offset, tokens, _ in answer[:1] for token in tokens if offset == 0]
    tokens, interruptions, _ = sample(monkeypatch, answer, [(0, [7, EOS], "stop")])
    assert (tokens, interruptions) == ([*kept, 7, EOS], 1)


def test_an_end_without_tokens_needs_no_offset(monkeypatch):
    tokens, interruptions, _ = sample(monkeypatch, [(0, [1], ""), (0, [], "abort")], [(0, [EOS], "stop")])
    assert (tokens, interruptions) == ([1, EOS], 1)

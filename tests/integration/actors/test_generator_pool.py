"""Test failover between generators over real sockets: which tokens are kept, when an attempt is given up."""

import asyncio
import time
from contextlib import aclosing

import numpy as np
import pytest
import zmq

from actors import generator_client as module
from actors.errors import GenerationFailed, NoGenerator, TurnRefused
from actors.generator_client import GeneratorPool, TurnRequest
from protocol.codec import encode, encode_arrays, messages_in
from protocol.messages.episodes import Sampling
from protocol.messages.peers import Abort, Chunk, Generate, GeneratorInfo
from protocol.sockets import AsyncSocket, router

EOS = 0
TURN_S = 60.0
"""Seconds without a word after which a turn is given up, where nothing else decides."""


class Server:
    """A generator with a scripted answer to each request: chunks of (tokens, finish reason)."""

    def __init__(self, name, *answers, delay_s=0.0, pause_s=0.0):
        socket = router(zmq.Context.instance())
        socket.bind("tcp://127.0.0.1:0")
        self.info = GeneratorInfo(peer=name, endpoint=socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.requests, self.aborted = [], []
        self._answers, self._delay_s, self._pause_s = list(answers), delay_s, pause_s
        self._socket = AsyncSocket(socket, self._received)

    def close(self):
        self._socket.close()

    def _received(self, frames):
        for message, _ in messages_in(frames[1:], "the pool"):
            if isinstance(message, Generate):
                self.requests.append(message)
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                self._answer(frames[0], message, answer)
            elif isinstance(message, Abort):
                self.aborted.append(message.request_id)

    def _answer(self, peer, request, answer):
        sent = 0
        for number, (tokens, reason) in enumerate(answer):
            after_s = self._delay_s + number * self._pause_s
            chunk = Chunk(
                request_id=request.request_id,
                offset=sent,
                finish_reason=reason,
                error="broken" * (reason in ("error", "abort")),
            )
            sent += len(tokens or ())
            # None stands for a chunk without its arrays.
            if tokens is None:
                self._send(after_s, [peer, *encode(chunk)])
                continue
            arrays = {
                "token_ids": np.array(tokens, "i4"),
                "logp_behaviour": np.array([np.nan if t == 99 else -1.0 for t in tokens], "f4"),
                "policy_version": np.full(len(tokens), len(self.requests), "i4"),
            }
            self._send(after_s, [peer, *encode_arrays(chunk, arrays)])

    def _send(self, after_s, frames):
        if after_s:
            asyncio.get_running_loop().call_later(after_s, self._socket.send, frames)
        else:
            self._socket.send(frames)


async def all_serve(pool, timeout_s=60.0):
    """Wait until every generator has let the actor in, so that the first one of the list is asked first."""
    async with asyncio.timeout(timeout_s):
        while not all(g.serves for g in pool._generators.values()):  # noqa: ASYNC110  (it waits for sockets)
            await asyncio.sleep(0.01)


def sample(*servers, timeout_s=30.0, **request):
    """Run one turn. Return its tokens, its finish reason, the servers, and the pool."""

    async def main():
        live = [Server(*server) if isinstance(server, tuple) else server() for server in servers]
        pool = GeneratorPool("actor-0", timeout_s)
        pool.update([server.info for server in live])
        fields = {
            "trajectory_id": "t.0",
            "turn": 0,
            "prompt": [5, 6],
            "max_tokens": 8,
            "stop_token_ids": (EOS,),
        }
        pieces = []
        try:
            await all_serve(pool)
            async with aclosing(pool.turn(TurnRequest(**(fields | request)))) as turn:
                async for piece in turn:
                    pieces.append(piece)
        finally:
            pool.close()
            for server in live:
                server.close()
        tokens = [t for p in pieces for t in p.token_ids.tolist()]
        return tokens, pieces[-1].finish_reason, live, pool

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def quick_retry(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.01)


def test_a_turn_in_chunks():
    tokens, reason, _, pool = sample(("g0", [([1, 2], ""), ([3, EOS], "stop")]))
    assert (tokens, reason, pool.interruptions) == ([1, 2, 3, EOS], "stop", 0)


def test_tokens_before_an_abort_are_kept_and_the_rest_asked_elsewhere():
    tokens, reason, (first, second), pool = sample(
        ("g0", [([1, 2], ""), ([3], "abort")]), ("g1", [([4, EOS], "stop")])
    )
    assert (tokens, reason, pool.interruptions) == ([1, 2, 3, 4, EOS], "stop", 1)
    assert first.requests[0].max_tokens == 8
    assert second.requests[0].max_tokens == 5
    assert second.requests[0].arrays[0].length == 5  # the prompt and the received tokens


@pytest.mark.parametrize("broken", [(None, ""), ([99], "")])
def test_a_chunk_that_cannot_be_used_counts_as_a_failure(broken):
    # A message that cannot be decoded is dropped, so it is the silence that counts.
    tokens, _, (first, _), _ = sample(("g0", [broken]), ("g1", [([4, EOS], "stop")]), timeout_s=2.0)
    assert tokens == [4, EOS]
    assert first.requests


def test_the_only_generator_is_asked_again():
    tokens, _, (server,), pool = sample(("g0", [([1], "abort")], [([2, EOS], "stop")]))
    assert tokens == [1, 2, EOS]
    assert (len(server.requests), pool.interruptions) == (2, 1)


def test_after_enough_attempts_every_one_is_told():
    with pytest.raises(GenerationFailed, match=r"5 attempts failed: g0: broken; .*g0: broken"):
        sample(("g0", [([], "abort")]))


def test_a_request_at_fault_is_not_sent_to_others():
    with pytest.raises(TurnRefused, match="g0 refused a request: broken"):
        sample(("g0", [([], "error")]), ("g1", [([4, EOS], "stop")]))


def test_a_turn_that_was_complete_before_the_failure_is_complete():
    tokens, reason, (server,), _ = sample(("g0", [([1, EOS], "")]), timeout_s=1.0)
    assert (tokens, reason, len(server.requests)) == ([1, EOS], "stop", 1)
    tokens, reason, _, _ = sample(("g0", [([1, 2], "")]), timeout_s=1.0, max_tokens=2)
    assert (tokens, reason) == ([1, 2], "length")


def test_a_generator_that_says_nothing_is_left():
    def late():
        return Server("g0", [([1, EOS], "stop")], delay_s=0.4)

    with pytest.raises(GenerationFailed, match=r"no word for 0\.1 s"):
        sample(late, timeout_s=0.1)


def test_a_generator_that_says_that_it_works_is_waited_for():
    def slow():
        return Server("g0", [*[([], "")] * 8, ([1, EOS], "stop")], pause_s=0.5)

    tokens, _, (server,), pool = sample(slow, timeout_s=3.0)
    assert (tokens, len(server.requests), pool.interruptions) == ([1, EOS], 1, 0)


def test_without_any_generator_the_wait_has_an_end(monkeypatch):
    monkeypatch.setattr(module, "NO_GENERATOR_S", 0.1)
    begun = time.monotonic()
    with pytest.raises(NoGenerator, match="lists no generator"):
        sample()
    assert time.monotonic() - begun < 60, "the deadline of a turn was not waited for"


def test_a_continuation_draws_from_another_random_stream():
    _, _, (server,), _ = sample(("g0", [([1], "abort")], [([2, EOS], "stop")]), sampling=Sampling(seed=3))
    seeds = [request.seed for request in server.requests]
    assert seeds[0] == 3
    assert seeds[1] not in (3, None)


def test_giving_up_a_turn_aborts_its_request():
    async def main():
        server = Server("g0", [([1], "")])
        pool = GeneratorPool("actor-0", 30.0)
        pool.update([server.info])
        request = TurnRequest("t.0", 0, [5], 8)
        async with aclosing(pool.turn(request)) as turn:
            await anext(turn)
        async with asyncio.timeout(120):
            while not server.aborted:  # noqa: ASYNC110  (the server has no event to wait for)
                await asyncio.sleep(0.01)
        assert server.aborted == [server.requests[0].request_id]
        pool.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("same_name", [False, True], ids=["another", "its-successor"])
def test_requests_of_a_generator_that_hangs_move_on_when_the_broker_drops_it(monkeypatch, same_name):
    """They need not wait out the timeout for a listed generator, and the sampled tokens are kept."""
    monkeypatch.setattr(module, "LEAVING_S", 0.2)

    async def main():
        hung = Server("g0", [([1, 2], "")])
        well = Server("g0" if same_name else "g1", [([3, EOS], "stop")])
        pool = GeneratorPool("actor-0", TURN_S)
        pool.update([hung.info])
        request = TurnRequest("t.0", 0, [5, 6], 8, stop_token_ids=(EOS,))
        tokens, began = [], 0.0
        async with aclosing(pool.turn(request)) as turn:
            async for piece in turn:
                tokens += piece.token_ids.tolist()
                if not began:
                    began = time.monotonic()
                    pool.update([well.info])
        assert tokens == [1, 2, 3, EOS]
        assert time.monotonic() - began < TURN_S / 2
        assert pool.interruptions == 1
        (continued,) = well.requests
        assert continued.max_tokens == 6
        for closing in (pool, hung, well):
            closing.close()

    asyncio.run(main())

"""Test the probe of a single generator over real sockets; a thread with a clock of its own stands in."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from launch.errors import LaunchError
from launch.plan import observations as plan_probe
from launch.plan.observations import probe
from protocol.codec import encode_arrays, messages_in
from protocol.messages.peers import Chunk, Generate, GeneratorInfo

TOKEN_S, TURN_S = 0.002, 0.02


class Paced:
    """A generator whose answers take `TURN_S`, plus `TOKEN_S` for each token, however many run at once.

    It answers once all requests of a round are there, and its clock moves only then: the machine's speed is not seen.
    """

    def __init__(self):
        self.prompts, self.lengths, self.most = set(), set(), 0
        self.now, self.awaited = 0.0, 1
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:0")
        self.info = GeneratorInfo(
            peer="generator-0", endpoint=self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        )
        self.silent, self._stop = False, threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self):
        self._stop.set()
        self._thread.join(100)
        self._socket.close(linger=0)

    def _serve(self):
        asked = []
        while not self._stop.is_set():
            while self._socket.poll(1):
                peer, *frames = self._socket.recv_multipart()
                for message, rest in messages_in(frames, "the probe"):
                    if isinstance(message, Generate) and not self.silent:
                        self.prompts.add(bytes(rest[0]))
                        self.lengths.add(message.max_tokens)
                        asked.append((peer, message))
            self.most = max(self.most, len(asked))
            if len(asked) < self.awaited:
                continue
            # All of a round are equally long.
            self.now += TURN_S + asked[0][1].max_tokens * TOKEN_S
            for peer, message in asked:
                count = message.max_tokens
                arrays = {
                    "token_ids": np.ones(count, "i4"),
                    "logp_behaviour": np.full(count, -1.0, "f4"),
                    "policy_version": np.zeros(count, "i4"),
                }
                chunk = Chunk(request_id=message.request_id, finish_reason="length")
                self._socket.send_multipart([peer, *encode_arrays(chunk, arrays)])
            asked.clear()


@pytest.fixture
def paced(monkeypatch):
    server, rate = Paced(), plan_probe._rate

    def told(pool, prompts, requests, *arguments):
        server.awaited = requests
        return rate(pool, prompts, requests, *arguments)

    monkeypatch.setattr(plan_probe, "_rate", told)
    monkeypatch.setattr(plan_probe, "time", SimpleNamespace(monotonic=lambda: server.now))
    yield server
    server.close()


def test_rates_at_several_numbers_of_requests(paced):
    prompts = [[1, 2, 3], [4, 5]]
    found = probe(paced.info, "actor-0", None, prompts, most=8, room=13, seconds=0.5)
    assert [requests for requests, _ in found.decode] == [1, 4, 8]
    assert paced.most == 8
    assert paced.lengths == {1, 10}
    assert len(paced.prompts) == 4
    # A round of n answers of 10 tokens, without what their turns cost beyond a token of the fullest round.
    turn_s = (TURN_S + TOKEN_S) / 8 - (TURN_S + 10 * TOKEN_S) / 80
    assert found.turn_seconds == pytest.approx(turn_s)
    expected = [1 / ((TURN_S + 10 * TOKEN_S) / (10 * n) - turn_s / 10) for n in (1, 4, 8)]
    assert [rate for _, rate in found.decode] == pytest.approx(expected)
    # Prompts cost nothing here.
    assert found.prompt_tokens_per_second == 0 or found.prompt_tokens_per_second > 1e6


def test_a_slow_model_is_measured_over_whole_answers(paced):
    """The time asked for is a small part of an answer, as with a model of 135 million parameters on a CPU."""
    found = probe(paced.info, "actor-0", None, [[1, 2, 3]], most=4, room=200, seconds=0.01)
    assert paced.lengths == {1, plan_probe.LEAST_ANSWER}
    whole_answer_s = TURN_S + plan_probe.LEAST_ANSWER * TOKEN_S
    for requests, rate in found.decode:
        assert 0.3 * requests / TOKEN_S < rate
        assert rate * (1 - TURN_S / whole_answer_s) < requests / TOKEN_S


def test_a_generator_that_does_not_answer_is_named(paced, monkeypatch):
    monkeypatch.setattr(plan_probe, "TIMEOUT_S", 0.05)
    paced.silent = True
    with pytest.raises(LaunchError, match="generator-0 does not answer: 5 attempts failed"):
        probe(paced.info, "actor-0", None, [[1]], most=1, room=4, seconds=0.2)

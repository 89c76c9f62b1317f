"""Experts of tokens on their way from the engine to the segments of a trajectory."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from actors.generator import serving
from actors.generator.vllm_engine.routes import RouteReader
from actors.generator_client import (
    AnswerInterrupted,
    Arrived,
    TurnRequest,
    generate_message,
    routed,
    sampled_of,
    with_held,
)
from actors.sampled import Routes, nothing, routes_in
from protocol.codec import decode, encode_arrays, unpack_arrays
from protocol.messages.peers import Chunk
from tests.unit.actors.episodes import asking
from tests.unit.actors.generator.test_generator_serving import Desk, sampled
from tests.unit.actors.test_episode import DONE, Env, Script, play, say


def rows(*positions, width=2, dtype=np.uint8):
    return Routes(np.array(positions, np.int32), np.array([[p % 7] * width for p in positions], dtype))


async def with_rows(request, pieces):
    """Yield sampled pieces with rows for all tokens from the position asked for to the last but one."""
    known, position = request.routes_from, len(request.prompt)
    async for piece in pieces:
        position += len(piece)
        routes = None
        if known is not None and known < position - 1:
            routes, known = rows(*range(known, position - 1)), position - 1
        yield replace(piece, routes=routes)


class Routed(Script):
    """A policy that sends rows of experts."""

    def turn(self, request):
        return with_rows(request, super().turn(request))


class RoutedPieces(asking.Pieces):
    """A policy that sends rows of experts, for turns that are sampled side by side."""

    def turn(self, request):
        return with_rows(request, super().turn(request))


def taken(cuts):
    """Return the experts by token of the trajectory; each token has one row."""
    found = {}
    for cut in cuts:
        if (routes := routes_in(cut.arrays)) is not None:
            for token, experts in zip(routes.tokens.tolist(), routes.experts.tolist(), strict=True):
                assert token not in found
                found[token] = experts[0]
    return found


def test_an_episode_has_the_row_of_each_token_but_the_last_and_asks_for_each_once():
    script = Routed("ab$", ["c", "d$"])
    cuts, _ = play(Env(say("go", r=0.5), DONE), script, routes=True)
    tokens = sum(cut.segment.tokens for cut in cuts)
    assert taken(cuts) == {token: token % 7 for token in range(tokens - 1)}
    first, second = script.requests
    assert (first.routes_from, second.routes_from) == (0, len(first.prompt) + 3 - 1)


def test_nobody_asks_if_the_task_does_not():
    script = Routed("ab$")
    cuts, _ = play(Env(DONE), script)
    assert script.requests[0].routes_from is None
    assert not taken(cuts)


@pytest.mark.parametrize("answer", [["a.", "bc$"], ["a.bcdefghijkl$"], ["a", "b.cdefghijkl$"]])
@pytest.mark.parametrize("said", ["go", "g" * 30])
def test_rows_of_tokens_behind_a_stop_string_are_left_out(answer, said):
    """The next turn asks for the row of the last token that is left, and of those that follow it."""
    script = Routed(answer, "x$")
    cuts, _ = play(Env(say(said), DONE), script, routes=True, stop=["."])
    tokens = sum(cut.segment.tokens for cut in cuts)
    assert taken(cuts) == {token: token % 7 for token in range(tokens - 1)}
    second = script.requests[1]
    left = len(second.prompt) - len(said) - 2
    assert second.routes_from in (left - 1, left)


def test_requests_ask_from_the_end_of_an_answer_that_a_stop_string_cut(monkeypatch):
    monkeypatch.setattr(asking, "Pieces", RoutedPieces)

    async def work(ask):
        number, _ = await ask("A:")
        await ask("B", number)

    async def drive(policy, env):
        await policy.asked(1)
        policy.give(0, "a.bcdefghij")
        await policy.asked(2)
        policy.give(1, "z$")

    cuts, *_, policy = asking.play(work, drive, routes=True, stop=["."])
    assert [request.routes_from for request in policy.requests] == [0, 4]
    assert taken(cuts) == {token: token % 7 for token in range(sum(cut.segment.tokens for cut in cuts) - 1)}


def test_a_turn_that_goes_on_elsewhere_asks_for_the_rows_that_are_missing():
    request = TurnRequest("t.0", 0, [9] * 5, max_tokens=8, routes_from=2)
    some = sampled([1, 2, 3], -1.0, 0)
    had = type(some)(some.token_ids, some.logp_behaviour, some.policy_version, routes=rows(2, 3, 4, 5))
    message, _ = decode(generate_message("r", request, [had]))
    assert message.routes_from == 6
    # A gap is asked for again, and a generator without rows changes nothing.
    assert routed(2, [had, type(had)(*[some.token_ids] * 3, routes=rows(8, 9))]) == 6
    assert routed(2, [some]) == 2
    assert routed(None, [had]) is None


def test_rows_without_tokens_come_with_the_next_tokens():
    held = []
    empty = nothing()
    with_rows = type(empty)(empty.token_ids, empty.logp_behaviour, empty.policy_version, routes=rows(0, 1))
    assert with_held(with_rows, held).routes is None
    some = sampled([1], -1.0, 0)
    both = with_held(type(some)(*[some.token_ids] * 3, routes=rows(2)), held)
    assert both.routes.tokens.tolist() == [0, 1, 2]
    assert with_held(some, held).routes is None


def test_chunks_have_room_for_their_rows(monkeypatch):
    monkeypatch.setattr(serving, "MAX_ROUTE_BYTES", 2 * (4 + 3))

    async def main():
        desk = Desk()

        async def generate(request):
            one = sampled([5, 6], -0.5, 0, "stop")
            routes = rows(*range(request.routes_from, 5), width=3)
            yield type(one)(one.token_ids, one.logp_behaviour, one.policy_version, "stop", routes=routes)

        desk.engine.generate = generate
        desk.ask("r", routes_from=0)
        desk.ask("too far", routes_from=4)
        await desk.settle()
        return desk

    desk = asyncio.run(main())
    assert [(ids, reason) for _, reason, ids, *_ in desk.chunks("r")] == [
        ([], ""),
        ([], ""),
        ([5, 6], "stop"),
    ]
    sent = [unpack_arrays(decode(frames)[0].arrays, decode(frames)[1][0]) for _, *frames in desk.sent]
    tokens = [arrays["routed_token"].tolist() for arrays in sent if "routed_token" in arrays]
    assert tokens == [[0, 1], [2, 3], [4]]
    ((*_, error),) = desk.chunks("too far")
    assert "routes_from 4 is behind the prompt of 3 tokens" in error


def test_the_reader_keeps_rows_of_tokens_that_are_not_handed_out_yet():
    reader = RouteReader(1, prompt=3)
    engine = [np.arange(8, dtype=np.uint8).reshape(4, 2, 1)]
    reader.add(engine)
    # vLLM is one token ahead: rows of tokens 1 to 4, and the actor gets token 3 only.
    assert reader.take_new_rows(1).tokens.tolist() == [1, 2, 3]
    reader.add(engine)
    assert reader.take_new_rows(1) is None
    engine.append(np.array([[[8], [9]]], np.uint16))
    reader.add_last(np.concatenate(engine))
    last = reader.take_new_rows(3)
    assert (last.tokens.tolist(), last.experts.tolist(), last.experts.dtype) == (
        [4, 5],
        [[6, 7], [8, 9]],
        np.int16,
    )
    assert RouteReader(0, prompt=3).take_new_rows(2) is None


def test_the_reader_looks_at_each_row_once(monkeypatch):
    """A chunk has 16 tokens. vLLM returns a row for each token, and all rows once more with its last output."""
    joined, concatenate = [], np.concatenate
    monkeypatch.setattr(
        np, "concatenate", lambda arrays: joined.append(len(whole := concatenate(arrays))) or whole
    )
    reader, prompt, answer = RouteReader(0, prompt=64), 64, 1024
    engine, got = [np.zeros((prompt, 2, 1), np.uint8)], []
    for tokens in range(1, answer + 1):
        if tokens > 1:
            engine.append(np.full((1, 2, 1), tokens % 251, np.uint8))
        if tokens % 16 == 0:
            if tokens == answer:
                reader.add_last(np.vstack(engine))
            else:
                reader.add(engine)
            got += reader.take_new_rows(tokens).tokens.tolist()
    assert got == list(range(prompt + answer - 1))
    assert sum(joined) <= 2 * (prompt + answer)


@pytest.mark.parametrize(
    ("positions", "usable"),
    [((3, 4), True), ((4, 3), False), ((3, 3), False), ((-1, 0), False), ((3, 5), False)],
)
def test_rows_of_tokens_that_are_not_consecutive_end_the_answer_here(positions, usable):
    some = sampled([1, 2], -1.0, 0)
    chunk, frames = decode(
        encode_arrays(Chunk(request_id="r", offset=0), some.arrays | rows(*positions).arrays)
    )
    arrived = Arrived(chunk, frames)
    if usable:
        assert sampled_of(arrived, "generator-0").routes.tokens.tolist() == list(positions)
    else:
        with pytest.raises(
            AnswerInterrupted, match="rows of experts that are not those of consecutive tokens"
        ):
            sampled_of(arrived, "generator-0")


def test_damaged_rows_are_refused():
    """Seven numbers are no two rows."""
    bad = {"routed_token": np.zeros(2, "i4"), "routed_experts": np.zeros(7, "u1")}
    with pytest.raises(ValueError, match="reshape"):
        routes_in(bad)
    with pytest.raises(ValueError, match="must be u1 or i2"):
        routes_in({**bad, "routed_experts": np.zeros(8, "f4")})
    assert routes_in({}) is None

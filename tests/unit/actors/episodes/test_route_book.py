"""Rows of experts leave a trajectory's book once, for the token that has the position in the turn's context."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors import segments
from actors.sampled import Routes, Sampled
from actors.segments import Closing, SegmentCutter
from protocol.codec import encode_arrays
from protocol.messages.episodes import SegmentAck, Task
from tests.broker_driver import Driver

TASK = Task(task_id="t", env="e", group_id="g", group_size=1)


def sampled(tokens, rows, width):
    """Return sampled tokens with rows of experts, each of which names the position in the context."""
    experts = np.repeat(np.array(rows, np.int32)[:, None] % 251, width, axis=1).astype(np.uint8)
    routes = Routes(np.array(rows, np.int32), experts) if rows else None
    numbers = np.ones(tokens, np.int32)
    return Sampled(numbers, -numbers.astype(np.float32), numbers, routes=routes)


@st.composite
def turns(draw):
    """Return pairs (tokens of the prompt, turn that it continues, lengths of the answer's pieces)."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        after = draw(st.sampled_from([-1, *[2 * earlier + 1 for earlier in range(number)]]))
        pieces = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
        found.append((draw(st.integers(1, 9)), after, pieces))
    return found


@given(turns(), st.integers(1, 8), st.integers(1, 12), st.integers(1, 3), st.booleans())
def test_each_row_leaves_once_with_its_token(found, limit, rows_of_message, width, again):
    """``again``: a turn asks for all rows of its context anew, so that tokens have several."""
    before = segments.MAX_ROUTE_BYTES
    segments.MAX_ROUTE_BYTES = rows_of_message * (4 + width)
    try:
        cuts, expected, context = [], [], {-1: []}
        cutter = SegmentCutter(TASK, "t.0", limit)
        for number, (prompt, after, pieces) in enumerate(found):
            cuts += cutter.observe([1] * prompt, after)
            own = [*context[after], *range(cutter.tokens - prompt, cutter.tokens)]
            known = 0 if again else max(0, len(context[after]) - 1)
            for piece in pieces:
                own += range(cutter.tokens, cutter.tokens + piece)
                rows = list(range(known, len(own) - 1))
                known = len(own) - 1
                expected += [(own[row], row % 251) for row in rows]
                cuts += cutter.act(sampled(piece, rows, width))
            context[2 * number + 1] = own
            last = number == len(found) - 1
            cuts += cutter.close_turn({}, "stop", Closing("finished") if last else None)
    finally:
        segments.MAX_ROUTE_BYTES = before
    got, total = [], cutter.tokens
    for cut in cuts:
        if "routed_token" in cut.arrays:
            tokens, experts = cut.arrays["routed_token"], cut.arrays["routed_experts"].reshape(-1, width)
            assert len(tokens) <= rows_of_message
            assert (tokens < cut.segment.offset + cut.segment.tokens).all()
            got += zip(tokens.tolist(), experts[:, 0].tolist(), strict=True)
    assert sorted(got) == sorted(expected)
    # Of several rows of a token, the first that came is the first that leaves.
    assert dict(reversed(got)) == dict(reversed(expected))
    assert sum(cut.segment.tokens for cut in cuts) == total
    assert [cut.segment.status for cut in cuts][-1] == "finished"


def test_the_broker_takes_segments_with_rows_and_those_that_have_nothing_else():
    driver = Driver(heartbeat_s=1000.0)
    driver.learner()
    driver.put(TASK)
    driver.actor()
    (lease,) = driver.leases()
    cutter = SegmentCutter(TASK, f"t.{lease.attempt}", 4)
    before = segments.MAX_ROUTE_BYTES
    segments.MAX_ROUTE_BYTES = 3 * 8
    try:
        cuts = cutter.observe([1] * 9)
        cuts += cutter.act(sampled(2, list(range(10)), 4))
        cuts += cutter.close_turn({}, "stop", Closing("finished"))
    finally:
        segments.MAX_ROUTE_BYTES = before
    assert [cut.segment.tokens for cut in cuts].count(0) > 0
    for cut in cuts:
        answers = driver.say_frames("actor", encode_arrays(*cut))
        assert [ack.status for ack in answers if isinstance(ack, SegmentAck)] == ["stored"]

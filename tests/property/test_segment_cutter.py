"""Whatever the episode does, its segments put together are the trajectory."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from protocol.messages.episodes import Task

turns = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=6
)


def play(turns, limit):
    """Return an episode's segments, its trajectory as (token, mask, logp, version), and its rewards."""
    cutter = SegmentCutter(Task(task_id="t", env="e", group_id="g", group_size=1), "t.0", limit)
    cuts, fed, rewards = [], [], []
    counter = iter(range(10_000))
    for number, (observed, pieces) in enumerate(turns):
        ids = [next(counter) for _ in range(observed)]
        fed += [(i, 0, 0.0, -1) for i in ids]
        cuts += cutter.observe(ids)
        for n in pieces:
            ids = np.array([next(counter) for _ in range(n)], "i4")
            cuts += cutter.act(Sampled(ids, -ids.astype("f4"), ids % 7))
            fed += [(int(i), 1, float(-i), int(i) % 7) for i in ids]
        closing = Closing("finished") if number == len(turns) - 1 else None
        rewards.append((2 * number + 1, float(number)))
        cuts += cutter.close_turn({"r": float(number)}, closing=closing)
    return cuts, fed, rewards


@given(turns, st.integers(1, 12))
def test_segments_put_together_are_the_trajectory(turns, limit):
    cuts, fed, rewards = play(turns, limit)
    names = ("token_ids", "action_mask", "logp_behaviour", "policy_version")
    columns = [np.concatenate([cut.arrays[name] for cut in cuts]).tolist() for name in names]
    assert list(zip(*columns, strict=True)) == fed
    assert [(r.turn, r.value) for cut in cuts for r in cut.segment.rewards] == rewards


@given(turns, st.integers(1, 12))
def test_headers_describe_their_arrays(turns, limit):
    cuts, _, _ = play(turns, limit)
    offset = 0
    for index, cut in enumerate(cuts):
        segment, arrays = cut.segment, cut.arrays
        assert (segment.index, segment.offset) == (index, offset)
        assert 1 <= segment.tokens <= limit
        assert {len(a) for a in arrays.values()} == {segment.tokens}
        assert segment.action_tokens == int(arrays["action_mask"].sum())
        assert segment.status == ("finished" if index == len(cuts) - 1 else "unfinished")
        covered = [(t.start, t.end) for t in segment.turns]
        assert covered[0][0] == offset
        assert covered[-1][1] == offset + segment.tokens
        assert all(a[1] == b[0] for a, b in pairwise(covered))
        for turn in segment.turns:
            inside = arrays["action_mask"][turn.start - offset : turn.end - offset]
            assert set(inside.tolist()) == {int(turn.action)}
        offset += segment.tokens


@given(turns, st.integers(1, 12))
def test_a_turn_keeps_its_number_across_segments(turns, limit):
    cuts, _, _ = play(turns, limit)
    pieces = [turn for cut in cuts for turn in cut.segment.turns]
    ends = {}
    for piece in pieces:
        assert piece.start == ends.get(piece.index, piece.start)
        ends[piece.index] = piece.end
    assert sorted(ends) == list(range(2 * len(turns)))

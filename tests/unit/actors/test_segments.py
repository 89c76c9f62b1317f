"""Test how a trajectory is cut into segments."""

import numpy as np
import pytest

from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from protocol.messages.episodes import Reward, Task, Turn


def cutter(limit=4):
    return SegmentCutter(Task(task_id="t", env="e", group_id="g", group_size=2), "t.0", limit)


def sampled(n, version=3, **more):
    return Sampled(np.arange(n, dtype="i4") + 100, np.full(n, -0.5, "f4"), np.full(n, version, "i4"), **more)


def test_a_long_turn_streams_but_its_last_piece_waits_for_the_rewards():
    c = cutter()
    assert c.observe([1, 2, 3]) == []
    cuts = c.act(sampled(6))
    assert [(cut.segment.offset, cut.segment.tokens) for cut in cuts] == [(0, 4), (4, 4)]
    assert all(not cut.segment.rewards for cut in cuts)
    (last,) = c.close_turn({"score": 0.5}, "stop")
    assert (last.segment.offset, last.segment.tokens) == (8, 1)
    assert last.segment.rewards == [Reward("score", 1, 0.5)]
    assert last.segment.status == "unfinished"


def test_a_turn_that_ends_at_the_limit_is_not_cut_before_its_rewards():
    c = cutter(limit=4)
    c.observe([1, 2])
    assert c.act(sampled(2)) == []
    (cut,) = c.close_turn({"score": 1.0}, "stop", Closing("finished", "stop", extra={"correct": True}))
    assert (cut.segment.tokens, cut.segment.status, cut.segment.extra) == (4, "finished", {"correct": True})


def test_turn_numbers_and_borders():
    c = cutter(limit=100)
    c.observe([1, 2])
    c.act(sampled(1))
    c.act(sampled(2))
    (first,) = c.close_turn({})
    c.observe([7])
    c.act(sampled(1))
    (second,) = c.close_turn({}, closing=Closing("finished"))
    assert first.segment.turns == [Turn(0, 0, 2, False), Turn(1, 2, 5, True)]
    assert second.segment.turns == [Turn(2, 5, 6, False), Turn(3, 6, 7, True)]
    assert second.segment.offset == 5


def test_a_turn_cut_by_a_border_is_in_both_segments():
    c = cutter(limit=3)
    c.observe([1, 2])
    (cut,) = c.act(sampled(2))
    (last,) = c.close_turn({})
    assert cut.segment.turns == [Turn(0, 0, 2, False), Turn(1, 2, 3, True)]
    assert last.segment.turns == [Turn(1, 3, 4, True)]


def test_versions_logp_and_mask_of_observations():
    c = cutter(limit=100)
    c.observe([1, 2])
    c.act(sampled(1, version=4, generator="g0"))
    c.act(sampled(1, version=6, kv="kept", generator="g1"))
    (cut,) = c.close_turn({})
    assert cut.arrays["policy_version"].tolist() == [-1, -1, 4, 6]
    assert cut.arrays["action_mask"].tolist() == [0, 0, 1, 1]
    assert cut.arrays["logp_behaviour"].tolist() == [0, 0, -0.5, -0.5]
    segment = cut.segment
    assert (segment.version_min, segment.version_max, segment.action_tokens) == (4, 6, 2)
    assert (segment.kv, segment.generator) == ("kept", "g1")


def test_an_abandoned_trajectory_is_recorded_even_without_tokens():
    c = cutter()
    (cut,) = c.abandon(Closing("failed", error="reset raised"))
    assert (cut.segment.tokens, cut.segment.status, cut.segment.error) == (0, "failed", "reset raised")
    assert cut.segment.version_min == -1
    assert c.closed
    with pytest.raises(AssertionError, match="closed"):
        c.observe([1])


def test_unequal_arrays_are_refused_with_the_generator_named():
    with pytest.raises(ValueError, match="'g7': 2 tokens, 1 log-prob"):
        Sampled(np.zeros(2, "i4"), np.zeros(1, "f4"), np.zeros(2, "i4"), generator="g7")

"""However turns that are sampled at a time alternate, each token is in the trajectory once, behind its own context."""

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from actors.play_requests import TurnOrder
from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from learner.intake.trajectories import assemble
from protocol.messages.episodes import Task

TASK = Task(task_id="t", env="e", group_id="g", group_size=1)


class Walk(RuleBasedStateMachine):
    """Turns begin, are sampled and end in any order. Every token is a number of its own."""

    def __init__(self):
        super().__init__()
        self.line, self.cuts, self.count = None, [], 0
        self.parents, self.prompts, self.answers = {}, {}, {}
        self.live, self.ended, self.left = set(), set(), set()

    def take(self, count):
        self.count += count
        return list(range(self.count - count, self.count))

    @precondition(lambda self: self.line is None)
    @rule(limit=st.integers(1, 9))
    def open(self, limit):
        self.line = TurnOrder(SegmentCutter(TASK, "t.0", limit))

    @precondition(lambda self: self.line is not None)
    @rule(data=st.data(), size=st.integers(1, 5))
    def begin(self, data, size):
        number = len(self.parents)
        self.parents[number] = data.draw(st.sampled_from([-1, *sorted(self.ended - self.left)]))
        self.prompts[number], self.answers[number] = self.take(size), []
        self.line.add_request(number, list(self.prompts[number]), after=self.parents[number])
        self.live.add(number)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), size=st.integers(0, 6))
    def act(self, data, size):
        number = data.draw(st.sampled_from(sorted(self.live)))
        ids = np.array(self.take(size), "i4")
        self.answers[number] += ids.tolist()
        self.cuts += self.line.add_tokens(number, Sampled(ids, -ids.astype("f4"), ids % 7))

    @precondition(lambda self: any(self.answers[number] for number in self.live))
    @rule(data=st.data())
    def end(self, data):
        number = data.draw(st.sampled_from(sorted(n for n in self.live if self.answers[n])))
        self.live.remove(number)
        self.ended.add(number)
        self.cuts += self.line.end_answer(number, f"reason {number}")

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data):
        number = data.draw(st.sampled_from(sorted(self.live)))
        self.live.remove(number)
        self.left.add(number)
        self.cuts += self.line.abandon_answer(number)

    def context(self, number):
        if number < 0:
            return []
        return [*self.context(self.parents[number]), *self.prompts[number], *self.answers[number]]

    def teardown(self):
        if self.line is None:
            return
        for number in sorted(self.live):
            self.left.add(number)
            self.cuts += self.line.abandon_answer(number)
        sampled = {number for number, tokens in self.answers.items() if tokens}
        numbers, indices = self.line.numbers, self.line.indices
        assert set(numbers) == sampled
        assert set(self.line.abandoned) == self.left & sampled
        if not sampled:
            return
        self.cuts += self.line.close_trajectory({"score": 1.0}, Closing("finished", self.line.last_reason))
        trajectory = assemble(self.cuts)
        turns = {turn.index: turn for turn in trajectory.turns}
        assert [turn.index for turn in trajectory.turns if turn.action] == indices
        assert trajectory.action_tokens == sum(map(len, self.answers.values()))
        owned = np.concatenate([branch.places[branch.own] for branch in trajectory.branches()])
        assert sorted(owned.tolist()) == list(range(len(trajectory)))
        for number, index in zip(numbers, indices, strict=True):
            way, at = [], turns[index]
            while True:
                way = [*trajectory.token_ids[at.start : at.end].tolist(), *way]
                if not at.back or not at.index:
                    break
                at = turns[at.index - at.back]
            assert way == self.context(number)
        actions = trajectory.action_mask
        assert trajectory.logp_behaviour[actions].tolist() == (-trajectory.token_ids[actions]).tolist()
        assert trajectory.policy_version[actions].tolist() == (trajectory.token_ids[actions] % 7).tolist()
        assert [(r.turn, r.value) for r in trajectory.rewards] == [(indices[-1], 1.0)]


TestWalk = Walk.TestCase

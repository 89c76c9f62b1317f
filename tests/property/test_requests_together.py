"""Whatever an agent asks at a time, and however answers come, each sampled token is recorded once, in its place."""

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.environments import EnvironmentRunner
from actors.episode import Bounds, Episode
from actors.play_requests import way_of_playing
from actors.sampled import Sampled
from learner.intake.trajectories import assemble
from protocol.messages.episodes import LeaseTask, Sampling, Task
from tests.unit.actors.episodes.asking import LIMIT_S, Asking, Declined
from tests.unit.actors.test_episode import EOS, Letters

FIRST = 1_000
"""Smallest token of an answer. Each is a number of its own, but for the end token."""
conversations = st.lists(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)
"""Conversations at a time, the turns of each, and the pieces of a turn by their number of tokens."""


class Counting:
    """Samples the pieces that a prompt asks for. A piece comes after as many steps of the loop as it has tokens."""

    def __init__(self, talks):
        self.talks, self.count, self.prompts, self.sampled = talks, FIRST, [], []

    async def turn(self, request):
        text = "".join(chr(i) for i in request.prompt)
        talk, turn = text.rpartition("<")[2].split(".")
        tokens = []
        self.prompts.append(list(request.prompt))
        self.sampled.append(tokens)
        left = request.max_tokens
        sizes = self.talks[int(talk)][int(turn)]
        for number, size in enumerate(sizes):
            for _ in range(size):
                await asyncio.sleep(0)
            last = number == len(sizes) - 1
            ids = [*range(self.count, self.count + size), *([EOS] if last else [])][:left]
            self.count += size
            left -= len(ids)
            tokens += ids
            reason = "stop" if EOS in ids else "" if left else "length"
            arrays = np.array(ids, "i4"), np.full(len(ids), -1, "f4"), np.full(len(ids), number, "i4")
            yield Sampled(*arrays, reason)
            if reason:
                return


def play(talks, ends_after, bounds, sampling, wait_s, wanted_no_more):
    """Play an agent that has conversations at a time. It withdraws requests, each after some steps of the loop."""
    answers, withdrawn = [], set()

    async def work(ask):
        async def talk(number, turns):
            before = -1
            for turn in range(turns):
                try:
                    before, answer = await ask(f"<{number}.{turn}", before)
                except Declined:
                    return
                answers.append(answer)
                if len(answers) == ends_after:
                    over.set()

        async def withdraw():
            for after, place in wanted_no_more:
                for _ in range(after):
                    await asyncio.sleep(0)
                if open_ := ask.open:
                    number = open_[place % len(open_)]
                    withdrawn.add(number)
                    ask.withdraw(number)
                    ask.decline(number, "withdrawn", False)

        over, withdrawing = asyncio.Event(), asyncio.create_task(withdraw())
        at_a_time = asyncio.gather(*(talk(n, len(turns)) for n, turns in enumerate(talks)))
        ending = asyncio.create_task(over.wait())
        await asyncio.wait({at_a_time, ending}, return_when=asyncio.FIRST_COMPLETED)
        for task in (ending, at_a_time, withdrawing):
            task.cancel()

    cuts, env, policy = [], Asking(work), Counting(talks)

    class Suite:
        def episode(self):
            return env

    async def emit(new):
        # Others go on meanwhile, as when the outbox is full.
        cuts.extend(new)
        await asyncio.sleep(wait_s)

    async def main():
        runner = EnvironmentRunner(calls=2)
        task = Task(task_id="t", env="e", group_id="g", group_size=1, sampling=Sampling(**sampling))
        lease = LeaseTask(lease_id="l", attempt=0, task=task)
        episode = Episode(lease, Suite(), Letters(), policy, bounds, emit, runner, way_of_playing)
        try:
            async with asyncio.timeout(LIMIT_S):
                await episode.run()
        finally:
            runner.close()

    asyncio.run(main())
    return cuts, policy, answers, set(env.given), withdrawn


def context_of(trajectory, turn):
    turns, tokens = {t.index: t for t in trajectory.turns}, []
    while turn.back and turn.index:
        turn = turns[turn.index - turn.back]
        tokens = [*trajectory.token_ids[turn.start : turn.end].tolist(), *tokens]
    return tokens


@given(
    conversations,
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 9),
    st.tuples(st.integers(2, 9), st.integers(16, 120)),
    st.sampled_from([0.0, 0.003]),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=3),
)
def test_every_sampled_token_is_recorded_once(
    talks, ends_after, max_turns, segment_tokens, room, wait_s, wanted_no_more
):
    bounds = Bounds(segment_tokens=segment_tokens, max_turns=max_turns)
    sampling = {"max_turn_tokens": room[0], "max_trajectory_tokens": room[1]}
    cuts, policy, answers, had, withdrawn = play(talks, ends_after, bounds, sampling, wait_s, wanted_no_more)
    if withdrawn and not any(policy.sampled):
        assert "no answer was sampled" in cuts[-1].segment.error
        return
    trajectory = assemble(cuts)
    assert trajectory.status in ("finished", "truncated"), trajectory.error
    assert len(trajectory) <= room[1]
    recorded = [turn for turn in trajectory.turns if turn.action]
    by_answer = {tuple(trajectory.token_ids[t.start : t.end].tolist()): t for t in recorded}
    began = [(p, s) for p, s in zip(policy.prompts, policy.sampled, strict=True) if s]
    assert len(recorded) == len(began) <= max_turns
    assert sum(t.end - t.start for t in recorded) == sum(len(sampled) for _, sampled in began)
    texts = []
    for prompt, sampled in began:
        turn = by_answer.get(tuple(sampled)) if any(sampled) else None
        if turn is not None:
            assert context_of(trajectory, turn) == prompt
            texts.append("".join(map(chr, sampled)).rstrip(chr(EOS)))
    whole = [turn for turn in recorded if turn.index not in trajectory.auxiliary]
    # A request may be answered while word that it is withdrawn is on its way.
    assert len(had - withdrawn) <= len(whole) <= len(had)
    assert {answer for answer in answers if answer} <= set(texts)
    owned = np.concatenate([branch.places[branch.own] for branch in trajectory.branches()])
    assert sorted(owned.tolist()) == list(range(len(trajectory)))

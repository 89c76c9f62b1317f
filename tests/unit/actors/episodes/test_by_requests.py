"""Requests of one environment are sampled at a time, and their episode is one trajectory as any other."""

import asyncio
import threading
from contextlib import aclosing

import pytest

from actors.episode import Bounds, SegmentStream
from actors.errors import GenerationFailed, Infrastructure, TurnRefused
from learner.intake.trajectories import assemble
from tests.unit.actors.episodes.asking import LIMIT_S, Declined, Pieces, play
from tests.unit.actors.test_episode import text_of, turns_of


def backs(cuts):
    joined = {index: back for index, _, _, _, back in turns_of(cuts)}
    return [joined[index] for index in sorted(joined)]


async def two(ask):
    await asyncio.gather(ask("A:"), ask("B:"))


async def leave_the_first(ask):
    left = asyncio.create_task(ask("A:"))
    await asyncio.sleep(0)
    await ask("B:")
    left.cancel()


async def answer_half_and_whole(policy, env):
    await policy.asked(2)
    policy.give(0, "aa")
    policy.give(1, "b$")


async def follow_the_second(ask):
    async def child():
        number, _ = await ask("B:")
        await ask("more", number)

    await asyncio.gather(ask("A:"), child())


async def no_answer(policy, env):
    pass


async def answer_in_turn(policy, env):
    await policy.asked(1)
    policy.give(0, "a$")
    await policy.asked(2)
    policy.give(1, "b$")


async def withdraw_the_first(ask):
    left = asyncio.create_task(ask("A:"))
    await asyncio.sleep(0)
    await ask("B:")
    ask.withdraw(0)
    await ask("C:")
    left.cancel()


def test_two_requests_are_at_the_generator_at_a_time_and_the_first_token_decides_on_their_order():
    async def drive(policy, env):
        await policy.asked(2)
        policy.give(1, "b", version=1)
        policy.give(0, "a", version=2)
        policy.give(1, "b$", version=3)
        policy.give(0, "a$", version=4)

    cuts, episode, env, _ = play(two, drive)
    assert (episode.status, text_of(cuts)) == ("finished", "B:bb$A:aa$")
    assert backs(cuts) == [1, 1, 0, 1]
    assert assemble(cuts).policy_version.tolist() == [-1, -1, 1, 3, 3, -1, -1, 2, 4, 4]
    assert {number: action for number, (action, _) in env.given.items()} == {0: "aa", 1: "bb"}
    assert [(r.turn, r.value) for c in cuts for r in c.segment.rewards] == [(3, 1.0)]


def test_a_branch_goes_on_while_an_earlier_one_is_still_sampled():
    async def drive(policy, env):
        await policy.asked(2)
        policy.give(0, "a")
        policy.give(1, "b$")
        await policy.asked(3)
        assert policy.prompt(2) == "B:b$|more"
        assert [r.preferred for r in policy.requests] == ["", "", "generator-1"], (
            "its context is cached there"
        )
        policy.give(2, "c$")
        policy.give(0, "a$")

    cuts, _, env, _ = play(follow_the_second, drive)
    assert text_of(cuts) == "A:aa$B:b$|morec$"
    assert backs(cuts) == [1, 1, 0, 1, 1, 1]
    assert env.given[2][1].prompt_tokens == len("B:b$|more")


def test_a_request_waits_only_if_the_room_may_not_suffice_for_all():
    """The first may take 16 of 30 tokens, so the second waits, and then has what is left, as in turn."""

    cuts, _, _, policy = play(two, answer_in_turn, max_trajectory_tokens=30)
    assert [request.max_tokens for request in policy.requests] == [16, 16]
    assert text_of(cuts) == "A:a$B:b$"
    _, _, _, policy = play(two, answer_in_turn, max_trajectory_tokens=20)
    assert [request.max_tokens for request in policy.requests] == [16, 14]


def test_what_an_agent_bounds_needs_no_more_room_than_that():
    async def work(ask):
        await asyncio.gather(ask("A:", limit=4), ask("B:", limit=4))

    async def drive(policy, env):
        await policy.asked(2)
        policy.give(0, "a$")
        policy.give(1, "b$")

    _, _, _, policy = play(work, drive, max_trajectory_tokens=12)
    assert [request.max_tokens for request in policy.requests] == [4, 4]


def test_the_turn_limit_truncates_once_nothing_is_sampled_any_more():
    async def work(ask):
        await asyncio.gather(ask("A:"), ask("B:"), ask("C:"))

    async def drive(policy, env):
        await policy.asked(2)
        policy.give(1, "b$")
        policy.give(0, "a$")

    cuts, _, env, policy = play(work, drive, Bounds(max_turns=2))
    last = cuts[-1].segment
    assert (last.status, last.stop_reason, len(policy.requests)) == ("truncated", "max_turns", 2)
    assert text_of(cuts) == "B:b$A:a$"
    assert (sorted(env.given), env.closed) == ([0, 1], 1)


def test_what_is_left_behind_is_recorded_and_not_trained():
    cuts, episode, _, policy = play(leave_the_first, answer_half_and_whole)
    assert (episode.status, policy.ended) == ("finished", [0])
    assert text_of(cuts) == "A:aaB:b$"
    assert cuts[-1].segment.auxiliary == [1]


def test_an_answer_that_could_not_be_handed_over_is_not_trained(monkeypatch):
    """The outbox is full when the answer has ended, and then the environment ends."""
    sends, blocked, got = SegmentStream.send, threading.Event(), threading.Event()

    async def send(stream, cuts):
        await sends(stream, cuts)
        if cuts and not blocked.is_set():
            blocked.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(SegmentStream, "send", send)

    async def work(ask):
        left = asyncio.create_task(ask("A:"))
        await asyncio.sleep(0)
        await ask("B:")
        got.set()
        assert await asyncio.to_thread(blocked.wait, LIMIT_S)
        left.cancel()

    async def drive(policy, env):
        await policy.asked(2)
        policy.give(0, "a")
        policy.give(1, "b$")
        assert await asyncio.to_thread(got.wait, LIMIT_S)
        policy.give(0, "a$")

    cuts, episode, env, _ = play(work, drive)
    assert (episode.status, text_of(cuts)) == ("finished", "A:aa$B:b$")
    assert (sorted(env.given), cuts[-1].segment.auxiliary) == ([1], [1])


def test_a_request_that_is_withdrawn_ends_its_sampling_and_the_episode_goes_on():
    async def drive(policy, env):
        await policy.asked(2)
        policy.give(0, "aa")
        policy.give(1, "b$")
        await policy.until(lambda: policy.ended == [0])
        await policy.asked(3)
        policy.give(2, "c$")

    cuts, episode, env, _ = play(withdraw_the_first, drive)
    assert (episode.status, text_of(cuts)) == ("finished", "A:aaB:b$C:c$")
    assert cuts[-1].segment.auxiliary == [1]
    assert sorted(env.given) == [1, 2]


def test_a_request_that_is_withdrawn_before_its_first_token_is_no_turn_of_the_limit():
    async def drive(policy, env):
        await policy.asked(2)
        policy.give(1, "b$")
        await policy.until(lambda: policy.ended == [0])
        await policy.asked(3)
        policy.give(2, "c$")

    cuts, episode, _, _ = play(withdraw_the_first, drive, Bounds(max_turns=2))
    assert (episode.status, text_of(cuts)) == ("finished", "B:b$C:c$")


def test_a_deadline_within_the_end_of_an_answer_loses_nothing(monkeypatch):
    turns = Pieces.turn

    async def turn(policy, request):
        try:
            async with aclosing(turns(policy, request)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if len(policy.ended):
                await asyncio.sleep(3.0)

    monkeypatch.setattr(Pieces, "turn", turn)

    cuts, episode, _, _ = play(leave_the_first, answer_half_and_whole, deadline_s=1.5)
    assert (episode.status, text_of(cuts)) == ("failed", "A:aaB:b$")


def test_a_withdrawn_request_that_was_waiting_never_reaches_the_generator():
    async def work(ask):
        asks = [asyncio.create_task(ask(f"{name}:")) for name in "ABC"]
        await asyncio.sleep(0)
        ask.withdraw(1)
        ask.withdraw(2)
        await asks[0]

    async def drive(policy, env):
        await policy.asked(1)
        policy.give(0, "a$")

    cuts, episode, _, policy = play(work, drive, max_trajectory_tokens=20)
    assert (episode.status, len(policy.requests), text_of(cuts)) == ("finished", 1, "A:a$")


def test_a_request_that_the_generator_refuses_fails_the_episode_and_all_that_was_sampled_is_recorded():
    async def drive(policy, env):
        await policy.asked(2)
        policy.give(0, "aa")
        policy.give(1, "b", TurnRefused("bad request"))

    cuts, _, env, policy = play(two, drive)
    last = cuts[-1].segment
    assert (last.status, "bad request" in last.error, env.closed) == ("failed", True, 1)
    assert text_of(cuts) == "A:aaB:b"
    assert policy.ended == [0]


def test_answers_behind_one_that_fails_are_recorded_too():
    async def drive(policy, env):
        await policy.asked(2)
        policy.give(0, "aa")
        policy.give(1, "b$")
        await policy.asked(3)
        policy.give(2, "c")
        policy.give(0, TurnRefused("bad request"))

    cuts, episode, _, _ = play(follow_the_second, drive)
    assert (episode.status, text_of(cuts)) == ("failed", "A:aaB:b$|morec")


def test_an_episode_that_lost_its_generators_is_given_back():
    async def drive(policy, env):
        await policy.asked(2)
        policy.give(0, "a")
        policy.give(1, GenerationFailed("5 attempts failed"))

    closed = []

    async def work(ask):
        closed.append(ask)
        await two(ask)

    with pytest.raises(Infrastructure, match="5 attempts failed"):
        play(work, drive)
    assert (closed[0].gave_up, closed[0].closed) == (1, 1)


def test_a_cancellation_ends_all_that_is_sampled():
    async def drive(policy, env):
        await policy.asked(2)
        policy.give(0, "a")

    cuts, episode, env, policy = play(two, drive, cancel=True)
    assert (cuts, sorted(policy.ended), env.gave_up, env.closed) == ([], [0, 1], 1, 1)
    assert episode.status == "unfinished"


def test_an_error_of_the_environment_fails_the_episode_while_answers_are_sampled():
    async def work(ask):
        left = asyncio.create_task(ask("A:"))
        await asyncio.sleep(0)
        await ask("B:")
        left.cancel()
        raise ValueError("boom")

    cuts, episode, _, policy = play(work, answer_half_and_whole)
    assert (episode.status, policy.ended) == ("failed", [0])
    assert "ValueError: boom" in cuts[-1].segment.error
    assert text_of(cuts) == "A:aaB:b$"


def test_prompts_that_cannot_be_answered_are_declined_and_the_episode_goes_on():
    """The first one is too long for a branch, and the second is no text."""

    async def work(ask):
        for text in ("a long prompt", "x\ud800"):
            with pytest.raises(Declined):
                await ask(text)
        await ask("C:")

    async def drive(policy, env):
        await policy.asked(1)
        policy.give(0, "c$")

    cuts, episode, env, _ = play(work, drive, max_context_tokens=12, max_trajectory_tokens=40)
    assert (episode.status, text_of(cuts)) == ("finished", "C:c$")
    assert [(number, too_long) for number, _, too_long in env.declined] == [(0, True), (1, False)]
    assert env.declined[0][1] == "a branch has at most 12 tokens"
    assert "half of a surrogate pair" in env.declined[1][1]


def test_a_first_prompt_without_room_fails_where_no_bound_of_a_branch_is_set():
    cuts, _, _, _ = play(two, no_answer, max_trajectory_tokens=2)
    assert "first prompt of 2 tokens" in cuts[-1].segment.error


def test_an_environment_may_be_silent_while_it_waits_for_answers_and_not_longer():
    async def work(ask):
        await ask("A:")
        await asyncio.Event().wait()

    async def drive(policy, env):
        await policy.asked(1)
        await asyncio.sleep(1.0)
        policy.give(0, "a$")

    cuts, _, _, _ = play(work, drive, Bounds(env_timeout_s=0.4))
    assert "next_requests took longer than env_timeout_s = 0.4 s" in cuts[-1].segment.error
    assert text_of(cuts) == "A:a$"


def test_the_deadline_stands_while_all_wait_for_a_first_token_and_runs_while_one_is_sampled():
    async def slow(policy, env):
        await policy.asked(2)
        await asyncio.sleep(1.3)
        policy.give(0, "a$")
        policy.give(1, "b$")

    assert play(two, slow, deadline_s=1.0)[1].status == "finished"

    async def stuck(policy, env):
        await policy.asked(2)
        policy.give(0, "a")

    cuts, _, _, _ = play(two, stuck, deadline_s=1.0)
    assert "deadline of 1 s" in cuts[-1].segment.error
    assert text_of(cuts) == "A:a"


def test_in_lockstep_requests_are_answered_one_after_the_other():
    cuts, episode, _, policy = play(two, answer_in_turn, Bounds(in_step=True, segment_tokens=8))
    assert (episode.status, text_of(cuts)) == ("finished", "A:a$B:b$")
    assert [r.min_policy_version for r in policy.requests] == [0, 1]


def test_a_request_behind_one_that_has_no_answer_is_named():
    async def work(ask):
        await asyncio.gather(ask("A:"), ask("B:", 0))

    cuts, _, _, _ = play(work, no_answer)
    assert "request 1 follows 0, which has no answer" in cuts[-1].segment.error


@pytest.mark.parametrize("limit", [0, True, "9"])
def test_a_bound_that_is_none_fails_the_episode(limit):
    async def work(ask):
        await ask("A:", limit=limit)

    cuts, _, _, _ = play(work, no_answer)
    assert "it has to be a whole number of at least 1" in cuts[-1].segment.error

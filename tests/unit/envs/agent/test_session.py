"""A session joins repeated requests, forgets what was answered, and takes rewards for answers that it has given."""

import asyncio
import json

import pytest

from envs.agent.chat import make_reply, parse_request
from envs.agent.session import AgentCounts, AgentSession, SessionGivenUp, SessionOver, TurnDeclined
from envs.base import TurnFacts
from envs.errors import EnvError

FACTS = TurnFacts(5, 3, cut=False)


def body(text):
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


def asking(session, text, *, again=False, alive=lambda: True):
    return asyncio.create_task(session.ask(body(text), parse_request(body(text)), alive, again=again))


async def taken(session):
    """Wait for a request, and return it."""
    async with asyncio.timeout(10.0):
        await session.news.wait()
    session.news.clear()
    [asked] = session.take()
    return asked


async def answered(session, text):
    task = asking(session, text)
    asked = await taken(session)
    asked.settle(make_reply(f"to {text}", asked.request, asked.number, FACTS))
    return await task


def test_messages_of_answered_requests_are_not_kept():
    async def main():
        session = AgentSession("1", AgentCounts())
        for number in range(3):
            asked = await answered(session, f"{number}")
            asked.delivered = True
        kept = [asked for same in session._asked.values() for asked in same]
        return kept, await asking(session, "1", again=True), session._counts.repeats

    kept, again, repeats = asyncio.run(main())
    assert [asked.request.messages for asked in kept] == [[], [], []]
    assert (again.answer.result().message["content"], repeats) == ("to 1", 1)


@pytest.mark.parametrize("why", [None, SessionGivenUp("nobody is at fault")])
def test_what_waits_at_the_end_gets_its_reason(why):
    async def main():
        session = AgentSession("1", AgentCounts())
        task = asking(session, "a")
        await taken(session)
        session.end(why)
        with pytest.raises(SessionOver, match="nobody is at fault" if why else "limit of turns or tokens"):
            await task
        with pytest.raises(SessionOver):
            await asking(session, "b")

    asyncio.run(main())


def test_rewards_belong_to_the_episode_or_to_one_answer():
    async def main():
        session = AgentSession("7", AgentCounts())
        await answered(session, "a")
        asking(session, "b")
        await taken(session)
        session.report({"value": 1})
        for reward in ({"rewards": {"tidy": 0.5}}, {"value": 2}):
            session.report({**reward, "turn": "chatcmpl-7-0"})
        for turn in ("chatcmpl-7-1", "chatcmpl-8-0", "7-0-", "", 3, "resp-7-x"):
            with pytest.raises(EnvError, match="no answer of this id"):
                session.report({"value": 1, "turn": turn})
        session.end()
        return session

    session = asyncio.run(main())
    assert session.rewards == {"reward": 1.0}
    assert session.turn_rewards == {0: {"tidy": 0.5, "reward": 2.0}}


def test_a_request_that_nobody_waits_for_is_withdrawn_and_comes_back_as_a_new_one(monkeypatch):
    there = {"a": True, "b": True}

    async def main():
        session = AgentSession("1", AgentCounts())
        waiting = {}
        for name in there:
            waiting[name] = asking(session, name, alive=lambda name=name: there[name])
            await taken(session)
        there.update(a=False, b=False)
        assert session.withdraw() == [], "a client may come again"
        there["b"] = True
        monkeypatch.setattr("envs.agent.session.MISSED_S", 0.0)
        gone = session.withdraw()
        assert [asked.number for asked in gone] == [0]
        with pytest.raises(TurnDeclined, match="nobody has waited"):
            await waiting["a"]
        again = asking(session, "a", again=True)
        asked = await taken(session)
        assert (asked.number, session._counts.repeats) == (2, 0)
        session.end()
        await asyncio.gather(again, waiting["b"], return_exceptions=True)

    asyncio.run(main())

"""Requests of one session are at the generator at the same time: a policy that answers only when both have come."""

import asyncio
import time

import pytest

import actors.play_requests as by_requests
import envs.agent.session as session
from tests.integration.envs.agent_play import played

WAIT_S = 60.0
AGENTS = '''
import asyncio, json
from pathlib import Path
import aiohttp
from openai import AsyncOpenAI

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


async def chat(row, base_url, api_key):
    """Two sub-agents of two turns each, then the parent."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async def ask(messages):
            answer = await client.chat.completions.create(model="any", messages=messages)
            return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]

        async def child(name):
            talk = await ask([{"role": "user", "content": f"1 {name}"}])
            return await ask([*talk, {"role": "user", "content": f"2 {name}"}])

        talks = await asyncio.gather(child("left"), child("right"))
        await ask([{"role": "user", "content": "parent"}])
        return float([talk[-1]["content"] for talk in talks] == ["2 left", "2 right"])


async def responses(row, base_url, api_key):
    """Two equal requests without a header that says so: each gets an answer of its own."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async def ask():
            made = await client.responses.create(model="any", input="same", tools=[ADD])
            return made.id

        return float(len(set(await asyncio.gather(ask(), ask()))) == 2)


async def hangs_up(row, base_url, api_key):
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        async def ask(text, **more):
            body = {"messages": [{"role": "user", "content": text}]}
            async with client.post(f"{base_url}/chat/completions", json=body, **more) as answer:
                return (await answer.json())["choices"][0]["message"]["content"]

        try:
            await ask("lost", timeout=aiohttp.ClientTimeout(total=0.3))
        except TimeoutError:
            pass
        assert await ask("kept") == "kept"
        # Whoever sends the same bytes so late asks anew.
        return float(await ask("lost") == "lost")


async def asks(client, base_url, text, name="agent"):
    body = {"messages": [{"role": "system", "content": name}, {"role": "user", "content": text}]}
    async with client.post(f"{base_url}/chat/completions", json=body) as answer:
        return answer.status


async def posts(client, base_url, name, **body):
    async with client.post(f"{base_url.removesuffix('/v1')}/{name}", json=body) as answer:
        assert answer.status == 200


async def loses(row, base_url, client):
    """Asks twice, and gets one answer. Returns the request that waits."""
    lost = asyncio.create_task(asks(client, base_url, "lost"))
    while not Path(row["sampled"]).exists():
        await asyncio.sleep(0.01)
    assert await asks(client, base_url, "kept") == 200
    await posts(client, base_url, "reward", value=1.0)
    return lost


async def ends(row, base_url, api_key):
    """Ends its session while an answer is sampled, and goes on for a while."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        lost = await loses(row, base_url, client)
        await posts(client, base_url, "end")
        assert await lost == 400
        Path(row["refused"]).touch()
        await asyncio.sleep(60.0)


async def late(row, base_url, api_key):
    """Takes longer than it may while an answer is sampled, and ends slowly."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        lost = await loses(row, base_url, client)
        try:
            await asyncio.sleep(60.0)
        finally:
            assert await lost == 400
            Path(row["refused"]).touch()
            await asyncio.sleep(1.5)


async def leaves(row, base_url, api_key):
    """Hangs up while an answer is sampled, and does not ask for it again."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        lost = await loses(row, base_url, client)
        lost.cancel()
        await asyncio.sleep(0.5)
        Path(row["refused"]).touch()
        await asks(client, base_url, "last")


async def too_long(row, base_url, api_key):
    """One sub-agent hears that its conversation is too long; another one, or it itself, goes on. Then it raises."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        await posts(client, base_url, "reward", value=1.0)
        assert await asks(client, base_url, "long " * 60, "left") == 400
        assert await asks(client, base_url, "short", row["next"]) == 200
        assert await asks(client, base_url, "short", "others") == 200
        raise ValueError("context_length_exceeded")
'''


@pytest.fixture
def play(tmp_path):
    (tmp_path / "agents.py").write_text(AGENTS)

    def run(agent, behind, **more):
        return played(tmp_path, f"{tmp_path}/agents.py:{agent}", echo, behind=behind, **more)

    return run


def echo(prompt):
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def wait_for(path):
    until = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


class Meeting:
    """Lets the first answers of a policy come only when all of them are asked for."""

    def __init__(self, count):
        self.count, self.there, self.all = count, 0, asyncio.Event()

    async def __call__(self, number):
        self.there += 1
        if self.there >= self.count:
            self.all.set()
        await asyncio.wait_for(self.all.wait(), WAIT_S)


def test_sub_agents_are_sampled_at_a_time_and_every_token_is_trained_once(play):
    meeting = Meeting(2)
    done = play("chat", meeting)
    assert done.last.status == "finished", done.last.error
    assert meeting.all.is_set()
    assert done.trajectory.return_ == 1.0
    assert done.branches_trained_once() == 3
    assert sorted(turn.back for turn in done.trajectory.turns if turn.index and not turn.action)[:2] == [0, 0]
    assert done.gauges["agent_requests_total"] == 5
    assert len(done.policy.requests) == 5
    meant = {
        tuple(ids): [2 * n] * (len(ids) // 2) + [2 * n + 1] * (len(ids) - len(ids) // 2)
        for n, ids in enumerate(done.policy.sampled)
    }
    for turn in done.trajectory.turns:
        if turn.action:
            here = slice(turn.start, turn.end)
            ids = tuple(done.trajectory.token_ids[here].tolist())
            assert done.trajectory.policy_version[here].tolist() == meant.pop(ids)
    assert not meant


def test_equal_requests_over_responses_are_two_answers(play):
    done = play("responses", Meeting(2))
    assert (done.last.status, done.trajectory.return_) == ("finished", 1.0)
    assert done.branches_trained_once() == 2


def test_a_request_whose_client_does_not_come_again_ends_its_sampling(play, monkeypatch):
    monkeypatch.setattr(session, "MISSED_S", 0.2)
    monkeypatch.setattr(by_requests, "LOOK_S", 0.1)
    ended = asyncio.Event()

    async def behind(number):
        if number == 0:
            try:
                await asyncio.wait_for(asyncio.Event().wait(), WAIT_S)
            finally:
                ended.set()
        elif number == 1:
            await asyncio.wait_for(ended.wait(), WAIT_S)

    done = play("hangs_up", behind)
    assert (done.last.status, done.trajectory.return_) == ("finished", 1.0)
    assert done.gauges["agent_withdrawn_total"] == 1
    assert done.gauges["agent_requests_total"] == 2
    assert len(done.policy.requests) == 3
    assert done.branches_trained_once() == 2


@pytest.mark.parametrize(
    ("agent", "params"), [("ends", {}), ("late", {"timeout_s": 4.0, "at_timeout": "score"}), ("leaves", {})]
)
def test_an_answer_that_comes_when_nobody_waits_for_it_is_not_trained(play, tmp_path, agent, params):
    sampled, refused, gone = tmp_path / "sampled", tmp_path / "refused", asyncio.Event()

    async def behind(number):
        if number == 0:
            sampled.touch()
            await asyncio.to_thread(wait_for, refused)
            gone.set()
        elif number == 2:
            await asyncio.wait_for(gone.wait(), WAIT_S)

    rows = [{"sampled": str(sampled), "refused": str(refused)}]
    done = play(agent, behind, rows=rows, **params)
    assert (done.last.status, done.trajectory.return_) == ("finished", 1.0), done.last.error
    assert done.branches_trained_once() == len(done.policy.sampled) == (3 if agent == "leaves" else 2)
    assert done.last.auxiliary == [3], "the turn of the answer that came too late"
    assert done.gauges["agent_requests_total"] == (3 if agent == "leaves" else 1)


@pytest.mark.parametrize(("following", "status"), [("right", "finished"), ("left", "failed")])
def test_a_conversation_that_is_too_long_stays_so_whatever_other_sub_agents_ask(play, following, status):
    rows, bounds = [{"next": following}], {"max_context_tokens": 200, "max_turn_tokens": 16}
    done = play("too_long", None, rows=rows, sampling=bounds)
    assert done.last.status == status, done.last.error
    assert [(name, value) for name, _, value in done.rewards] == (
        [("reward", 1.0)] if status == "finished" else []
    )

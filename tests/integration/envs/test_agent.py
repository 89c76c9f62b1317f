"""Agents on OpenAI's own client speak to the endpoint over real sockets, and their conversations are episodes."""

import asyncio
import contextlib
import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from actors.environments import EnvironmentRunner, SuiteCaller
from actors.errors import EnvironmentFailed, EnvironmentStuck
from envs.agent.chat import make_reply
from envs.base import HasTools, HasTurnFacts, StepResult, TurnFacts
from envs.registry import make_suite
from tests.e2e.process_tree import descendants

ROWS = [{"question": f"{a} + {a}?", "answer": str(2 * a)} for a in range(1, 9)]
CALL = '<tool_call>\n{{"name": "add", "arguments": {{"b":{0},  "a": {0}}}}}\n</tool_call>'

AGENTS = '''
import asyncio, json, time, urllib.request
from openai import AsyncOpenAI, OpenAI

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}}}}


async def loop(row, base_url, api_key):
    """A loop with one tool, as the documentation of the client has it."""
    messages = [{"role": "user", "content": row["question"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                assert answer.usage.total_tokens == 8
                return {"exact": float(message.content.strip() == row["answer"])}
            for call in message.tool_calls:
                given = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})


def plain(row, base_url, api_key):
    """An agent without async, which streams."""
    messages = [{"role": "user", "content": row["question"]}]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        stream = client.chat.completions.create(model="any", messages=messages, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in stream)
    return text == row["answer"]


async def items(row, base_url, api_key, stream=False):
    """A loop with one tool on the route of responses, which sends the items of the answers back."""
    tool = {"type": "function", "name": "add", "parameters": ADD["function"]["parameters"], "strict": True}
    talk = [{"role": "user", "content": [{"type": "input_text", "text": row["question"]}]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            ask = {"model": "any", "instructions": "Add.", "input": talk, "tools": [tool], "store": False}
            if stream:
                events = [event async for event in await client.responses.create(stream=True, **ask)]
                answer = events[-1].response
                assert events[0].type == "response.created" and events[-1].type == "response.completed"
                text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
                assert text == answer.output_text
            else:
                answer = await client.responses.create(**ask)
            talk += [item.model_dump() for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                assert answer.usage.total_tokens == 8
                return {"exact": float(answer.output_text.strip() == row["answer"])}
            for call in calls:
                given = json.loads(call.arguments)
                total = str(given["a"] + given["b"])
                talk.append({"type": "function_call_output", "call_id": call.call_id, "output": total})


async def streamed_items(row, base_url, api_key):
    return await items(row, base_url, api_key, stream=True)


def posts(row, base_url, api_key):
    """An agent that reports its reward over HTTP."""
    plain(row, base_url, api_key)
    url = base_url.removesuffix("/v1") + "/reward"
    body = json.dumps({"rewards": {"brief": 0.5}}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, {"Authorization": f"Bearer {api_key}"}), timeout=30)


def last_line(row, output):
    """Score a program's output."""
    with open(__file__.replace("agents.py", "outputs"), "a") as file:
        file.write(output)
    return output.strip().splitlines()[-1] == row["answer"]


def wrapped(row, base_url, api_key):
    """A plain function that returns a coroutine, as many decorators make."""
    return loop(row, base_url, api_key)


async def blocks(row, base_url, api_key):
    await loop(row, base_url, api_key)
    time.sleep(4)
    return 1.0


async def silent(row, base_url, api_key):
    return 1.0


async def no_reward(row, base_url, api_key):
    await loop(row, base_url, api_key)


async def fails(row, base_url, api_key):
    await loop(row, base_url, api_key)
    raise KeyError("score")


async def team(row, base_url, api_key):
    """Asks for a title, then has two sub-agents work at a time, and ends with a window of its own conversation."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async def ask(messages, tools=(ADD,)):
            more = {"tools": list(tools)} if tools else {}
            answer = await client.chat.completions.create(model="any", messages=messages, **more)
            return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

        async def child(name):
            talk = await ask([{"role": "user", "content": f"1 {name}"}])
            return await ask([*talk, {"role": "user", "content": f"2 {name}"}])

        await ask([{"role": "user", "content": "0 title"}], tools=())
        talk = await ask([{"role": "user", "content": "3 parent"}])
        await asyncio.gather(child("left"), child("right"))
        talk = await ask([*talk, {"role": "user", "content": "4 parent"}])
        await ask([*talk[2:], {"role": "user", "content": "5 parent"}])
        return 1.0
'''


PROGRAM = """
import json, os, subprocess, sys, urllib.request

row = json.load(sys.stdin)
for new in (False, True):
    # The second one leaves the process group, and holds the output open.
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=new)
    print("left", left.pid, flush=True)
if "fails" in sys.argv:
    sys.exit("no such row")
body = json.dumps({"messages": [{"role": "user", "content": row["question"]}]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, head), timeout=60) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"], flush=True)
"""


def gone(pid):
    """Wait until a process has ended, and return whether it has."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def in_loop(test):
    """Run an asynchronous test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    return run


@pytest.fixture
def suite_of(tmp_path):
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    (tmp_path / "program.py").write_text(PROGRAM)

    def make(agent: str, **more):
        params = {
            "run": f"{tmp_path}/agents.py:{agent}",
            "train": str(tmp_path / "rows.jsonl"),
            "heldout": 0.0,
        }
        if agent.startswith("program"):
            params["run"] = [sys.executable, str(tmp_path / "program.py"), *agent.split()[1:]]
        return make_suite("agent", params | more)

    return make


async def taken(session):
    """Wait for requests of a session, and return the first."""
    while not (asked := session.take()):
        await session.news.wait()
        session.news.clear()
    return asked[0]


class Played:
    """Plays episodes of a suite as an actor does, with an answer function in place of the policy."""

    def __init__(self, suite):
        self.suite, self.runner, self.timeout_s = suite, EnvironmentRunner(calls=8), 60.0
        self.caller = SuiteCaller(self.runner, self.runner.loops_left)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        # An agent that blocked took its event loop along, and with it perhaps the end of a request.
        with contextlib.suppress(EnvironmentStuck):
            await self.ask(self.suite.close)
        self.runner.close()

    async def ask(self, function, *arguments, on_loop=False):
        return await self.caller.call(
            function, *arguments, what="test", timeout_s=self.timeout_s, on_loop=on_loop
        )

    async def episode(self, index, answer) -> tuple[StepResult, list]:
        env = await self.ask(self.suite.episode, on_loop=True)
        try:
            talk = await self.ask(env.reset, {"index": index, "split": "train"})
            assert isinstance(env, HasTools)
            assert isinstance(env, HasTurnFacts)
            while True:
                text = answer(talk)
                await self.ask(env.turn_facts, TurnFacts(5, 3, cut=False), on_loop=True)
                result = await self.ask(env.step, text)
                talk = [*talk, text, *result.messages()]
                if result.done:
                    return result, talk
        finally:
            await self.ask(env.close)


def calculates(talk):
    """Answer as a policy would that calls the tool once."""
    if talk[-1]["role"] == "user":
        return "<think>I can add.</think>I add.\n" + CALL.format(talk[-1]["content"].split()[0])
    return talk[-1]["content"]


def right(talk):
    return str(2 * int(talk[0]["content"].split()[0]))


@pytest.mark.parametrize("agent", ["loop", "wrapped"])
@in_loop
async def test_an_agent_with_a_tool_is_an_episode(suite_of, agent):
    async with Played(suite_of(agent)) as played:
        results = await asyncio.gather(*(played.episode(i, calculates) for i in range(8)))
    for result, talk in results:
        assert result.rewards == {"exact": 1.0}
        assert result.correct is True
        assert talk[2]["role"] == "tool"
        assert talk[2]["content"] == talk[3]
    assert len({talk[0]["content"] for _, talk in results}) == 8


@in_loop
async def test_titles_sub_agents_and_windows_are_branches(suite_of):
    """Each sample is one answer of one conversation, and only the title is not trained."""
    async with Played(suite_of("team")) as played:
        env = await played.ask(played.suite.episode, on_loop=True)
        [first] = await played.ask(env.reset, {"index": 0, "split": "train"})
        asked, behind, result = [first["content"]], [-1], None
        while True:
            tools = await played.ask(env.tool_schemas, on_loop=True)
            assert bool(tools) == (not asked[-1].endswith("title"))
            result = await played.ask(env.step, f"answer to {asked[-1]}")
            if result.done:
                break
            asked.append(result.messages()[-1]["content"])
            behind.append(result.after)
        await played.ask(env.close)
    assert sorted(asked) == sorted(
        ["0 title", "3 parent", "1 left", "2 left", "1 right", "2 right", "4 parent", "5 parent"]
    )
    for text, after in zip(asked, behind, strict=True):
        number, name = text.split()
        before = {"2": f"1 {name}", "4": "3 parent"}.get(number)
        assert after == (asked.index(before) if before else -1), text
    assert list(result.auxiliary) == [0]
    assert len(result.messages()) == 0


@in_loop
async def test_an_agent_that_blocks_fails_its_own_step_and_is_named(suite_of):
    async with Played(suite_of("blocks")) as played:
        played.timeout_s = 3.0
        with pytest.raises(
            EnvironmentFailed, match=r"took longer .* it stands in .*agents.py:[0-9]+ in blocks"
        ):
            await played.episode(0, right)


@in_loop
async def test_what_the_endpoint_cannot_read_is_the_requests_fault(suite_of):
    """Clients repeat a request that gets a status of 500."""
    async with Played(suite_of("loop")) as played, aiohttp.ClientSession() as client:
        session = await played.ask(played.suite._endpoint.open)
        url, head = played.suite._endpoint.url(session), {"Authorization": f"bearer {session.key}"}
        talk = {"messages": [{"role": "user", "content": "Hi"}]}
        calls = {"messages": [{"role": "assistant", "content": "Hi", "tool_calls": 5}]}
        items = {"input": [{"type": "function_call", "arguments": 5}, 7]}
        for route, body in [
            ("chat/completions", []),
            ("chat/completions", {**talk, "tools": 5}),
            ("chat/completions", calls),
            ("responses", []),
            ("responses", {"input": "Hi", "tools": 5}),
            ("responses", items),
        ]:
            async with client.post(f"{url}/{route}", json=body, headers=head) as answer:
                assert answer.status == 400, await answer.text()
        async with client.post(
            f"{url.removesuffix('/v1')}/reward", data="[" * 10_000, headers=head
        ) as answer:
            assert answer.status == 400


@pytest.mark.parametrize("agent", ["items", "streamed_items"])
@in_loop
async def test_an_agent_on_the_route_of_responses_is_an_episode(suite_of, agent):
    async with Played(suite_of(agent)) as played:
        result, talk = await played.episode(0, calculates)
    assert result.rewards == {"exact": 1.0}
    assert [message["role"] for message in talk if isinstance(message, dict)] == ["system", "user", "tool"]


@in_loop
async def test_a_plain_agent_that_streams_is_an_episode(suite_of):
    async with Played(suite_of("plain")) as played:
        assert (await played.episode(0, right))[0].rewards == {"reward": 1.0}
        wrong, _ = await played.episode(1, lambda talk: "no")
        assert wrong.rewards == {"reward": 0.0}
        assert wrong.correct is False


@in_loop
async def test_a_reward_may_come_over_http(suite_of):
    async with Played(suite_of("posts")) as played:
        result, _ = await played.episode(0, right)
    assert result.rewards == {"brief": 0.5}


@in_loop
async def test_a_program_is_an_agent_and_leaves_nothing_behind(suite_of, tmp_path):
    async with Played(suite_of("program", score=f"{tmp_path}/agents.py:last_line")) as played:
        result, _ = await played.episode(0, right)
        wrong, _ = await played.episode(1, lambda talk: "no")
    assert (result.rewards, wrong.rewards) == ({"reward": 1.0}, {"reward": 0.0})
    left = [
        int(line.split()[1]) for line in (tmp_path / "outputs").read_text().splitlines() if "left" in line
    ]
    assert len(left) == 4
    assert all(gone(pid) for pid in left)


@in_loop
async def test_a_program_that_fails_is_named_with_its_last_lines(suite_of):
    async with Played(suite_of("program fails")) as played:
        with pytest.raises(RuntimeError, match=r"ended with status 1: no such row .before it: left .*"):
            await played.episode(0, right)


def test_a_program_ends_with_its_actor_even_if_that_is_killed(suite_of, tmp_path):
    """The test kills a process that runs an episode, whose agent waits for its answer."""
    suite_of("program")
    code = f"""
import asyncio
from envs.errors import EnvError
from envs.registry import make_suite
from tests.e2e.process_tree import descendants

async def main():
    run = [{sys.executable!r}, "{tmp_path}/program.py"]
    env = make_suite("agent", {{"run": run, "train": "{tmp_path}/rows.jsonl", "heldout": 0.0}})
    episode = env.episode()
    await episode.reset({{"index": 0, "split": "train"}})
    print("asked", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    actor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert actor.stdout.readline() == "asked\n"
    family = descendants(actor.pid)
    assert len(family) >= 4, "guard, program, and what the program has started"
    actor.kill()
    actor.communicate(timeout=30)
    assert all(gone(pid) for pid in family)


FAILURES = {
    "silent": "ended without asking the model",
    "no_reward": "returned no reward, and posted none; name a `score`",
    "fails": "score",
}


@pytest.mark.parametrize(("agent", "why"), FAILURES.items())
@in_loop
async def test_what_goes_wrong_is_named(suite_of, agent, why):
    async with Played(suite_of(agent)) as played:
        with pytest.raises(Exception, match=why) as raised:
            await played.episode(0, lambda talk: "2")
    assert not isinstance(raised.value, EnvironmentFailed | TimeoutError)


@in_loop
async def test_an_episode_that_ends_early_ends_its_agent(suite_of):
    """The actor closes an episode at its limits: the request that waits gets an error, and later ones 410."""
    async with Played(suite_of("loop")) as played:
        env = await played.ask(played.suite.episode, on_loop=True)
        await played.ask(env.reset, {"index": 0, "split": "train"})
        session, agent = env._session, env._agent
        url, key = played.suite._endpoint.url(session), session.key
        await played.ask(env.close)
        assert agent.work.exception().code == "context_length_exceeded"
        async with aiohttp.ClientSession() as client:
            head = {"Authorization": f"Bearer {key}"}
            async with client.post(f"{url}/chat/completions", json={"messages": []}, headers=head) as answer:
                assert answer.status == 410


@in_loop
async def test_keys_and_repeated_requests(suite_of):
    """A request that a client repeats gets the answer of the first; a wrong key gets nothing."""
    async with Played(suite_of("loop")) as played, aiohttp.ClientSession() as client:
        session = await played.ask(played.suite._endpoint.open)
        url = played.suite._endpoint.url(session)
        head = {"Authorization": f"Bearer {session.key}"}

        async def post(**headers):
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            async with client.post(f"{url}/chat/completions", json=body, headers=head | headers) as answer:
                return (await answer.json())["choices"][0]["message"]["content"]

        async def give(asked, text):
            asked.answer.set_result(make_reply(text, asked.request, 0, TurnFacts(5, 3, cut=False)))

        async with client.get(f"{url}/models", headers={"Authorization": "Bearer no"}) as answer:
            assert answer.status == 401
        async with client.get(f"{url}/models", headers=head) as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["policy"]
        first = asyncio.create_task(post())
        asked = await played.ask(taken, session)
        again = asyncio.create_task(post(**{"x-stainless-retry-count": "1"}))
        # Equal bytes without a word on it are another request: two sub-agents may ask the same.
        other = asyncio.create_task(post())
        await played.ask(give, await played.ask(taken, session), "Another")
        assert await other == "Another"
        await played.ask(give, asked, "Hello")
        assert [await first, await again] == ["Hello", "Hello"]
        assert not session.take(), "nothing was asked twice"


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_client_that_hung_up_gets_its_answer_when_it_comes_again(suite_of, caplog, stream):
    async with Played(suite_of("loop")) as played, aiohttp.ClientSession() as client:
        session = await played.ask(played.suite._endpoint.open)
        url = f"{played.suite._endpoint.url(session)}/chat/completions"
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        head = {"Authorization": f"Bearer {session.key}"}
        with pytest.raises(TimeoutError):
            await client.post(url, json=body, headers=head, timeout=aiohttp.ClientTimeout(total=0.5))
        asked = await played.ask(taken, session)

        async def give():
            # The server has heard of the end of the connection once nobody waits.
            while not asked.missed:  # noqa: ASYNC110 (the server tells nobody)
                await asyncio.sleep(0)
            asked.answer.set_result(make_reply("Hello", asked.request, 0, TurnFacts(5, 3, cut=False)))

        await played.ask(give)
        async with client.post(url, json=body, headers=head) as answer:
            assert '"Hello"' in await answer.text()
        assert not session.take(), "nothing was asked twice"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]

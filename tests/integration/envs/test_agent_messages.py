"""Agents on Anthropic's own client speak to the endpoint over real sockets, and their conversations are episodes."""

import asyncio
import json
import sys

import aiohttp
import anthropic
import pytest

from envs.agent.chat import make_reply
from envs.base import TurnFacts
from envs.registry import make_suite
from tests.integration.envs.test_agent import PROGRAM, ROWS, Played, calculates, in_loop, taken

AGENTS = '''
import anthropic

ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}}}


async def loop(row, base_url, api_key, stream=False):
    """A loop with one tool, as the documentation of the client has it."""
    talk = [{"role": "user", "content": row["question"]}]
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
        while True:
            ask = {"model": "any", "max_tokens": 64, "system": "Add.", "messages": talk, "tools": [ADD]}
            if stream:
                async with client.messages.stream(**ask) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**ask)
            talk.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            assert (answer.stop_reason == "tool_use") == bool(calls)
            if not calls:
                assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 3)
                return {"exact": float(answer.content[0].text.strip() == row["answer"])}
            talk.append({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
                for call in calls]})


async def without_version(row, base_url, api_key):
    """The client adds the version itself."""
    return await loop(row, base_url.removesuffix("/v1"), api_key)


async def streamed(row, base_url, api_key):
    return await loop(row, base_url, api_key, stream=True)


async def wrong_key(row, base_url, api_key):
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="wrong") as client:
        await client.messages.create(model="any", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
'''

PROGRAM_OF_MESSAGES = (
    PROGRAM.replace('"messages": [', '"max_tokens": 9, "messages": [')
    .replace(
        '{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}',
        '{"x-api-key": os.environ["ANTHROPIC_API_KEY"]}',
    )
    .replace(
        'os.environ["OPENAI_BASE_URL"] + "/chat/completions"',
        'os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"',
    )
)


@pytest.fixture
def suite_of(tmp_path):
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def make(agent):
        train = str(tmp_path / "rows.jsonl")
        return make_suite("agent", {"run": f"{tmp_path}/agents.py:{agent}", "train": train, "heldout": 0.0})

    return make


@pytest.mark.parametrize("agent", ["loop", "without_version", "streamed"])
@in_loop
async def test_an_agent_on_anthropics_client_is_an_episode(suite_of, agent):
    async with Played(suite_of(agent)) as played:
        result, talk = await played.episode(0, calculates)
    assert result.rewards == {"exact": 1.0}
    assert [message["role"] for message in talk if isinstance(message, dict)] == ["system", "user", "tool"]


@in_loop
async def test_a_wrong_key_is_an_error_that_the_client_knows(suite_of):
    async with Played(suite_of("wrong_key")) as played:
        with pytest.raises(anthropic.AuthenticationError, match="the API key is not that of this session"):
            await played.episode(0, calculates)


@in_loop
async def test_requests_without_a_client(suite_of):
    """The key may come in either header, and errors have the form of this API."""
    async with Played(suite_of("loop")) as played, aiohttp.ClientSession() as client:
        session = await played.ask(played.suite._endpoint.open)
        url = played.suite._endpoint.url(session) + "/messages?beta=true"
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}

        async def post(content, **headers):
            head = {name.replace("_", "-"): value for name, value in headers.items()}
            async with client.post(url, json=content, headers=head) as answer:
                return answer.status, await answer.json()

        status, error = await post({"messages": []}, x_api_key=session.key, x_odd="é")
        assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        for key in ("no", "é", ""):
            status, error = await post(body, x_api_key=key)
            assert (status, error["error"]["type"]) == (401, "authentication_error")

        async def answer(text):
            asked = await taken(session)
            asked.answer.set_result(make_reply(text, asked.request, asked.number, TurnFacts(5, 3, cut=False)))

        for number, head in enumerate(
            ({"x_api_key": session.key}, {"Authorization": f"Bearer {session.key}", "x_api_key": "other"})
        ):
            (status, made), _ = await asyncio.gather(post(body, **head), played.ask(answer, "Hello"))
            assert (status, made["id"]) == (200, f"msg-{session.name}-{number}")
            assert made["content"] == [{"type": "text", "text": "Hello"}]
        waiting = asyncio.create_task(post(body, x_api_key=session.key))
        await played.ask(taken, session)

        async def close():
            played.suite._endpoint.close_session(session)

        await played.ask(close)
        status, error = await waiting
        assert (status, error["error"]["message"].partition(": ")[0]) == (400, "prompt is too long")
        status, error = await post(body, x_api_key=session.key)
        assert (status, error["type"]) == (410, "error")


@in_loop
async def test_a_program_finds_address_and_key_of_this_api(suite_of, tmp_path):
    (tmp_path / "program.py").write_text(
        PROGRAM_OF_MESSAGES.replace('["choices"][0]["message"]["content"]', '["content"][0]["text"]')
    )
    (tmp_path / "score.py").write_text(
        "def last(row, output):\n    return output.split()[-1] == row['answer']\n"
    )
    params = {
        "run": [sys.executable, str(tmp_path / "program.py")],
        "train": str(tmp_path / "rows.jsonl"),
        "heldout": 0.0,
        "score": f"{tmp_path}/score.py:last",
    }
    suite_of("loop")
    async with Played(make_suite("agent", params)) as played:
        result, _ = await played.episode(0, lambda talk: str(2 * int(talk[0]["content"].split()[0])))
    assert result.rewards == {"reward": 1.0}

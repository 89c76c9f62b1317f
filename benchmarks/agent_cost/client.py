"""The agent of `benchmarks.agent_cost`, a program of its own: a loop over chat completions on a bare HTTP client.

    python -m benchmarks.agent_cost.client < JOBS

Each line of the standard input is a job: a prompt, an address and a key. It is a conversation of `TURNS` requests, with
two tools. A call is answered with a result, and a text with "Go on."
"""

import asyncio
import json
import sys
from typing import Any

import aiohttp

TURNS = 3
TIMEOUT_S = 300.0
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} two numbers.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "integer", "description": f"{key} number"} for key in "ab"},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("add", "subtract")
]
Message = dict[str, Any]


def body_of(messages: list[Message], job: dict[str, Any]) -> bytes:
    """Return the body of a request."""
    content = {
        "model": "policy",
        "messages": messages,
        "tools": TOOLS,
        "stream": False,
        **job.get("more", {}),
    }
    return json.dumps(content).encode()


def following(message: Message) -> list[Message]:
    """Return what the agent says to an answer of the model.

    Example:
        >>> following({"role": "assistant", "content": "4"})
        [{'role': 'user', 'content': 'Go on.'}]
    """
    calls = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "19"} for call in calls]
    return results or [{"role": "user", "content": "Go on."}]


async def converse(job: dict[str, Any], client: aiohttp.ClientSession) -> dict[str, Any]:
    """Have a conversation. Return the number of sampled tokens, and the bodies of the answers if the job asks."""
    messages: list[Message] = [{"role": "user", "content": job["prompt"]}]
    headers = {"Authorization": f"Bearer {job['api_key']}", "Content-Type": "application/json"}
    tokens, bodies = 0, []
    for _ in range(TURNS):
        url = f"{job['base_url']}/chat/completions"
        async with client.post(url, data=body_of(messages, job), headers=headers) as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {text[:500]}")
        answer = json.loads(text)
        message = answer["choices"][0]["message"]
        tokens += answer["usage"]["completion_tokens"]
        bodies.append(text)
        messages += [message, *following(message)]
    return {"tokens": tokens, "bodies": bodies if job.get("keep") else []}


async def work(job: dict[str, Any], client: aiohttp.ClientSession) -> None:
    """Do one job, and write its line."""
    try:
        result = await converse(job, client)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps({**result, "number": job["number"]}) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Do all jobs of the standard input, each as soon as it comes."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        running = set()
        while line := await asyncio.to_thread(sys.stdin.readline):
            task = asyncio.create_task(work(json.loads(line), client))
            running.add(task)
            task.add_done_callback(running.discard)


if __name__ == "__main__":
    asyncio.run(main())

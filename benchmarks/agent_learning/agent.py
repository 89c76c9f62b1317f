"""A langgraph agent with three tools, as its documentation has it. Runs in a virtual environment that has langgraph.

    python agent.py < JOBS

Each line of the standard input is a job in JSON: `number`, `question`, `base_url`, `api_key`. For each, the agent's
last message or its error is a line of the standard output. Nothing here knows of Offbeat.
"""

import asyncio
import json
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract the second number from the first."""
    return a - b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def answer(job: dict[str, Any], clients: dict[str, Any]) -> dict[str, Any]:
    """Return the last message of an agent that was asked the question."""
    model = ChatOpenAI(model="policy", base_url=job["base_url"], api_key=job["api_key"], **clients)
    agent = create_agent(model, [add, subtract, multiply])
    state = await agent.ainvoke({"messages": [("user", job["question"])]})
    return {"answer": str(state["messages"][-1].text)}


async def work(job: dict[str, Any], clients: dict[str, Any]) -> None:
    """Do one job, and write its line."""
    result: dict[str, Any] = {"number": job["number"]}
    try:
        result |= await answer(job, clients)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Do all jobs of the standard input, each as soon as it comes."""
    # The certificates are read once, not for each agent.
    async with DefaultAsyncHttpxClient() as client:
        clients = {"http_client": DefaultHttpxClient(), "http_async_client": client}
        running = set()
        while line := await asyncio.to_thread(sys.stdin.readline):
            task = asyncio.create_task(work(json.loads(line), clients))
            running.add(task)
            task.add_done_callback(running.discard)


if __name__ == "__main__":
    asyncio.run(main())

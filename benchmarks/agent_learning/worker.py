"""Hands rows to a langgraph agent in its own virtual environment, and rewards the answers.

Suite `agent` calls `run`. One process of the library serves all episodes of an actor, because its import takes seconds.
"""

from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.agent_process import AgentProcess
from benchmarks.report import ROOT

PYTHON = ROOT / "build" / "harnesses" / "langgraph" / "bin" / "python"
"""Python of langgraph's virtual environment, which `tests.campaigns.harnesses.program` makes."""
AGENT = Path(__file__).with_name("agent.py")


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Let the agent answer a row. Return 1 if its last message is the answer, else 0.

    Raises:
        RuntimeError: the agent raised an error, or its process has ended.
    """
    result = await agents().ask({"question": row["question"], "base_url": base_url, "api_key": api_key})
    return float(result["answer"] == row["answer"])


@cache
def agents() -> AgentProcess:
    """Return the process of the agents, which is started with the first call."""
    return AgentProcess([str(PYTHON), str(AGENT)])

"""Agents on harnesses of others, each as its documentation has it. Run in a virtual environment that has the harness.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python programs.py NAME < row.json

Each asks 12 + 7, then two more sums, and prints its answer. Nothing in them knows of Offbeat.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

BASE_URL, KEY = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")
STEPS = 8


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def langgraph(question: str, *, responses: bool = False, stream: bool = False) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="policy", base_url=BASE_URL, api_key=KEY, use_responses_api=responses, streaming=stream
    )
    agent = create_agent(model, [add], system_prompt="Use the tool.")
    return str(agent.invoke({"messages": [("user", question)]})["messages"][-1].text)


def _openai_agents(question: str, *, responses: bool, stream: bool = False, team: bool = False) -> str:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY)
    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    model = kind(model="policy", openai_client=client)
    worker = Agent(name="worker", instructions="Use the tool.", model=model, tools=[function_tool(add)])
    agent = worker
    if team:
        as_tool = worker.as_tool(tool_name="ask_worker", tool_description="Ask a worker for sums.")
        agent = Agent(name="head", instructions="Ask the workers.", model=model, tools=[as_tool])

    async def run() -> str:
        if not stream:
            return str((await Runner.run(agent, question, max_turns=STEPS)).final_output)
        streamed = Runner.run_streamed(agent, question, max_turns=STEPS)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)

    return asyncio.run(run())


def smolagents(question: str, *, code: bool = False) -> str:
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id="policy", api_base=BASE_URL, api_key=KEY)
    kind = CodeAgent if code else ToolCallingAgent
    return str(kind(tools=[tool(add)], model=model, max_steps=STEPS, verbosity_level=0).run(question))


def strands(question: str, *, window: int = 0) -> str:
    from strands import Agent, tool
    from strands.agent.conversation_manager import SlidingWindowConversationManager
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": BASE_URL, "api_key": KEY}, model_id="policy")
    more: dict[str, Any] = {}
    if window:
        more["conversation_manager"] = SlidingWindowConversationManager(window_size=window)
    agent = Agent(
        model=model, tools=[tool(add)], system_prompt="Use the tool.", callback_handler=None, **more
    )
    answer = ""
    for text in [question] * (3 if window else 1):
        answer = str(agent(text))
    return answer


def inspect_ai(question: str, *, responses: bool = False) -> str:
    from inspect_ai import Task
    from inspect_ai import eval as evaluate
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.solver import generate, system_message, use_tools
    from inspect_ai.tool import tool

    def adder() -> Callable[[int, int], Awaitable[int]]:
        async def execute(a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: first number
                b: second number
            """
            return add(a, b)

        return execute

    model = get_model("openai/policy", base_url=BASE_URL, api_key=KEY, responses_api=responses)
    solver = [system_message("Use the tool."), use_tools(tool(name="add")(adder)()), generate()]
    task = Task(dataset=[Sample(question)], solver=solver)
    with tempfile.TemporaryDirectory() as folder:
        logs = evaluate(task, model=model, log_dir=folder, display="none", message_limit=4 * STEPS)
        samples = logs[0].samples
        assert samples, logs[0].error
        return str(samples[0].output.completion)


def verifiers(question: str) -> str:
    # Its tool server is a module, and its harness is a script, which uv starts.
    here, programs = Path(__file__).parent, Path(sys.executable).parent
    os.environ.update(PYTHONPATH=str(here), PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")

    import verifiers.v1 as vf
    from verifiers_sums import SumTask

    client = vf.EvalClientConfig(base_url=BASE_URL, api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(
        harness={"id": "null"}, runtime=vf.SubprocessConfig(), model="policy", client=client, max_turns=STEPS
    )
    task = SumTask(vf.TaskData(idx=0, prompt=question, system_prompt="Use the tool."))
    trace = asyncio.run(vf.make_agent(config).run(task))
    return f"{trace.last_reply} {trace.rewards} {trace.errors}"


AGENTS: dict[str, Callable[[str], str]] = {
    "langgraph": langgraph,
    "langgraph, streamed": lambda question: langgraph(question, stream=True),
    "langgraph, responses": lambda question: langgraph(question, responses=True),
    "openai-agents": lambda question: _openai_agents(question, responses=True),
    "openai-agents, streamed": lambda question: _openai_agents(question, responses=True, stream=True),
    "openai-agents, chat": lambda question: _openai_agents(question, responses=False),
    "openai-agents, sub-agents": lambda question: _openai_agents(question, responses=True, team=True),
    "smolagents, tool calls": smolagents,
    "smolagents, code": lambda question: smolagents(question, code=True),
    "strands": strands,
    "strands, window": lambda question: strands(question, window=4),
    "verifiers": verifiers,
    "inspect-ai": inspect_ai,
    "inspect-ai, responses": lambda question: inspect_ai(question, responses=True),
}

if __name__ == "__main__":
    print(AGENTS[sys.argv[1]](json.load(sys.stdin)["question"]))

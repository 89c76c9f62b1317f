"""Keeps the requests of an agent, in a form that tests of `envs.agent.message_tree` read."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, cast

from envs.agent.episode import AgentEpisode
from envs.agent.suite import AgentSuite
from envs.base import ChatMessage, Env, Split, StepResult, ToolSchema, TurnFacts

SHOWN = 300
"""Characters of a message that are kept. Longer ones are instructions of the harness, equal in all requests."""
_FOLDER = re.compile(re.escape(tempfile.gettempdir()) + r"/[\w.-]+")


class RecordedSuite:
    """A suite of agents. ``records`` has a line for each request: its messages, its tools, and the answer."""

    def __init__(self, suite: AgentSuite) -> None:
        self._suite = suite
        self.records: list[dict[str, Any]] = []

    def episode(self) -> Env:
        return cast(Env, _RecordedEpisode(cast(AgentEpisode, self._suite.episode()), self.records))

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        return self._suite.demonstration(index, split)

    def gauges(self) -> Mapping[str, float]:
        return self._suite.gauges()

    async def close(self) -> None:
        await self._suite.close()


class _RecordedEpisode:
    def __init__(self, episode: AgentEpisode, records: list[dict[str, Any]]) -> None:
        self._episode, self._records = episode, records

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        messages = await self._episode.reset(data)
        self._note(-1)
        return messages

    def tool_schemas(self) -> Sequence[ToolSchema]:
        return self._episode.tool_schemas()

    def turn_facts(self, facts: TurnFacts) -> None:
        self._episode.turn_facts(facts)

    async def step(self, action: str) -> StepResult:
        result = await self._episode.step(action)
        self._records[-1]["answer"] = action
        if not result.done:
            self._note(-1 if result.after is None else result.after)
        return result

    async def close(self) -> None:
        await self._episode.close()

    def _note(self, after: int) -> None:
        request = self._episode.request
        assert request is not None
        messages = [{**m, "content": _FOLDER.sub("/folder", m["content"])[:SHOWN]} for m in request.messages]
        tools = [tool["function"]["name"] for tool in request.tools]
        self._records.append(
            {"messages": messages, "tools": tools, "stop": list(request.stop), "after": after}
        )

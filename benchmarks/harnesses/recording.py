"""Keeps the requests of an agent, in a form that tests of `envs.agent.message_tree` read."""

import re
import tempfile
from collections.abc import Mapping
from typing import Any, cast

from envs.agent.episode import AgentEpisode
from envs.agent.suite import AgentSuite
from envs.base import ChatMessage, Env, PolicyRequest, RequestNews, Split, StepResult, TurnFacts

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

    async def begin(self, data: dict[str, Any]) -> None:
        await self._episode.begin(data)

    async def next_requests(self, wait_s: float | None) -> RequestNews:
        news = await self._episode.next_requests(wait_s)
        for request in news.new:
            self._note(request)
        return news

    def answer(self, number: int, action: str, facts: TurnFacts) -> None:
        self._episode.answer(number, action, facts)
        self._records[number]["answer"] = action

    def decline(self, number: int, why: str, too_long: bool) -> None:
        self._episode.decline(number, why, too_long)

    async def outcome(self, cut: bool) -> StepResult:
        return await self._episode.outcome(cut)

    async def close(self) -> None:
        await self._episode.close()

    def _note(self, placed: PolicyRequest) -> None:
        request = self._episode.open_request(placed.number)
        messages = [{**m, "content": _FOLDER.sub("/folder", m["content"])[:SHOWN]} for m in request.messages]
        tools = [tool["function"]["name"] for tool in request.tools]
        self._records.append(
            {"messages": messages, "tools": tools, "stop": list(request.stop), "after": placed.after}
        )

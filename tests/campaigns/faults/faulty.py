"""A suite for `tests.campaigns.faults` that misbehaves on command."""

import asyncio
import time
from pathlib import Path
from typing import Any

from envs.base import ChatMessage, Env, Split, StepResult, Suite
from envs.registry import make_suite

BLOCKED_S = 2.0


class FaultySuite:
    """A wrapper around another suite, whose steps misbehave as a file says: ``nan``, ``raise``, ``hang`` or
    ``block``.

    Args:
        inner: name of the wrapped suite.
        params: parameters of the wrapped suite.
        flag: path of the file. Without the file the steps behave normally.
    """

    def __init__(self, inner: str, params: dict[str, Any], flag: str) -> None:
        self._inner: Suite = make_suite(inner, params)
        self._flag = Path(flag)

    def episode(self) -> Env:
        return _FaultyEnv(self._inner.episode(), self._flag)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        return self._inner.demonstration(index, split)

    async def close(self) -> None:
        await self._inner.close()


class _FaultyEnv:
    def __init__(self, inner: Env, flag: Path) -> None:
        self._inner, self._flag = inner, flag

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        return await self._inner.reset(data)

    async def step(self, action: str) -> StepResult:
        result = await self._inner.step(action)
        match self._flag.read_text() if self._flag.exists() else "":
            case "nan":
                return StepResult(rewards={"score": float("nan")}, done=True, correct=False)
            case "raise":
                raise RuntimeError("told to")
            case "hang":
                await asyncio.sleep(3600)
            case "block":
                # On purpose: code that blocks the event loop in which it runs.
                time.sleep(BLOCKED_S)  # noqa: ASYNC251
        return result

    async def close(self) -> None:
        await self._inner.close()

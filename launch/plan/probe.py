"""Measures the speed of a generator that nobody else uses: of decoding, of single turns and of prompts."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from actors.errors import ActorError
from actors.generator_client import GeneratorPool, TurnRequest
from launch.errors import LaunchError
from protocol.messages import GeneratorInfo, Sampling

NO_STOP = (2_000_000_000,)
"""A token past every vocabulary, so that answers end by their length alone."""
SETTLE_S = 0.4
"""Seconds between the first request and the begin of the measurement, for each number of requests."""
TIMEOUT_S = 20.0


@dataclass
class Probe:
    """Measured speed of a generator."""

    decode: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of the requests at a time and the tokens per second."""
    turn_seconds: float = 0.0
    """Engine time that a turn costs in addition to its tokens and its prompt."""
    prompt_tokens_per_second: float = 0.0
    """Speed of reading the run's prompts, repeated as in its groups. 0: too fast to be measured."""


@dataclass
class _Counts:
    tokens: int = 0
    turns: int = 0


def concurrencies(most: int) -> list[int]:
    """Return the numbers of requests at a time to try.

    Example:
        >>> concurrencies(96), concurrencies(1)
        ([1, 4, 16, 48, 96], [1])
    """
    steps = {1, 4, 16, most // 2, most}
    return sorted(n for n in steps if 1 <= n <= most)


def probe(
    info: GeneratorInfo,
    actor: str,
    keys: Path | None,
    prompts: Sequence[Sequence[int]],
    *,
    most: int,
    room: int,
    seconds: float,
) -> Probe:
    """Measure a generator that nobody else uses.

    Args:
        actor: name under which to ask; with keys, a name that they admit.
        prompts: prompts of the requests, used in turn.
        most: largest number of requests at a time.
        room: longest prompt plus answer, in tokens.
        seconds: duration of each measurement.

    Raises:
        LaunchError: the generator does not answer.
    """
    try:
        return asyncio.run(_probe(info, actor, keys, prompts, most, room, seconds))
    except ExceptionGroup as errors:
        failed = errors.subgroup(ActorError)
        if failed is None:
            raise
        raise LaunchError(f"calibration: {info.peer} does not answer: {failed.exceptions[0]}") from None


async def _probe(
    info: GeneratorInfo,
    actor: str,
    keys: Path | None,
    prompts: Sequence[Sequence[int]],
    most: int,
    room: int,
    seconds: float,
) -> Probe:
    pool = GeneratorPool(actor, TIMEOUT_S, keys=keys)
    pool.update([info])
    source = itertools.cycle(prompts)
    answer = max(1, room - max(map(len, prompts)))
    found, begins = Probe(), itertools.cycle([prompt[:1] for prompt in prompts])
    try:
        # Measure answers of one token: first to the first token of each prompt, then to the whole prompt.
        bare, whole = [(await _measure(pool, asked, most, 1, seconds)).turns for asked in (begins, source)]
        rates = [
            (n, (await _measure(pool, source, n, answer, seconds)).tokens / seconds)
            for n in concurrencies(most)
        ]
    finally:
        pool.close()
    bare_s, whole_s = seconds / max(1, bare), seconds / max(1, whole)
    # A turn of one token also takes its share of a decode step, which is no cost of the turn itself.
    found.turn_seconds = max(0.0, min(bare_s, whole_s) - 1 / rates[-1][1])
    if whole_s > bare_s:
        more = sum(len(prompt) - 1 for prompt in prompts) / len(prompts)
        found.prompt_tokens_per_second = more / (whole_s - bare_s)
    for n, rate in rates:
        seconds_per_token = max(0.2 / rate, 1 / rate - max(0.0, whole_s - 1 / rates[-1][1]) / answer)
        found.decode.append((n, 1 / seconds_per_token))
    return found


async def _measure(
    pool: GeneratorPool, prompts: "itertools.cycle[Sequence[int]]", requests: int, answer: int, seconds: float
) -> _Counts:
    """Keep this many requests under way, a new one for each that ends.

    Return the tokens and turns counted.
    """
    counts = _Counts()
    begin = time.monotonic() + SETTLE_S
    end = begin + seconds
    async with asyncio.TaskGroup() as group:
        for n in range(requests):
            group.create_task(_client(pool, prompts, f"probe-{n}", answer, counts, begin, end))
    return counts


async def _client(
    pool: GeneratorPool,
    prompts: "itertools.cycle[Sequence[int]]",
    name: str,
    answer: int,
    counts: _Counts,
    begin: float,
    end: float,
) -> None:
    while time.monotonic() < end:
        request = TurnRequest(
            trajectory_id=name,
            turn=0,
            prompt=tuple(next(prompts)),
            max_tokens=answer,
            sampling=Sampling(temperature=1.0),
            stop_token_ids=NO_STOP,
        )
        async with aclosing(pool.turn(request)) as stream:
            async for sampled in stream:
                now = time.monotonic()
                if begin <= now < end:
                    counts.tokens += len(sampled)
                    counts.turns += sampled.finish_reason != ""
                if now >= end:
                    break

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
from protocol.messages.episodes import Sampling
from protocol.messages.peers import GeneratorInfo

NO_STOP = (2_000_000_000,)
"""A token past every vocabulary, so that answers end by their length alone."""
LEAST_ANSWER = 32
"""Tokens of the shortest answers that decoding is measured with. Where one request writes more in the time of a
measurement, answers are that long."""
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
        seconds: least duration of each measurement.

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
    longest = max(1, room - max(map(len, prompts)))
    found, begins = Probe(), itertools.cycle([prompt[:1] for prompt in prompts])
    try:
        # Measure answers of one token: first to the first token of each prompt, then to the whole prompt.
        bare_s, whole_s = [1 / await _rate(pool, asked, most, 1, seconds) for asked in (begins, source)]
        short = min(longest, LEAST_ANSWER)
        alone = await _rate(pool, source, 1, short, 0.0)
        answer = min(longest, max(short, round(alone * seconds)))
        rates = [(n, await _rate(pool, source, n, answer, seconds)) for n in concurrencies(most)]
    finally:
        pool.close()
    # A turn of one token also takes its share of a decode step, which is no cost of the turn itself.
    found.turn_seconds = max(0.0, min(bare_s, whole_s) - 1 / rates[-1][1])
    if whole_s > bare_s:
        more = sum(len(prompt) - 1 for prompt in prompts) / len(prompts)
        found.prompt_tokens_per_second = more / (whole_s - bare_s)
    for n, rate in rates:
        seconds_per_token = max(0.2 / rate, 1 / rate - max(0.0, whole_s - 1 / rates[-1][1]) / answer)
        found.decode.append((n, 1 / seconds_per_token))
    return found


async def _rate(
    pool: GeneratorPool, prompts: "itertools.cycle[Sequence[int]]", requests: int, answer: int, seconds: float
) -> float:
    """Return the tokens per second of rounds of this many requests at a time, with answers of equal length.

    A round counts from its first request to its last token, and the rounds last for at least ``seconds``. So a
    model of which no answer ends in that time is measured, too, and as many prompts are read as answers are written.
    """
    begin, tokens = time.monotonic(), 0
    while tokens == 0 or time.monotonic() - begin < seconds:
        async with asyncio.TaskGroup() as group:
            for n in range(requests):
                group.create_task(_ask(pool, tuple(next(prompts)), f"probe-{n}", answer))
        tokens += requests * answer
    return tokens / (time.monotonic() - begin)


async def _ask(pool: GeneratorPool, prompt: tuple[int, ...], name: str, answer: int) -> None:
    request = TurnRequest(
        trajectory_id=name,
        turn=0,
        prompt=prompt,
        max_tokens=answer,
        sampling=Sampling(temperature=1.0),
        stop_token_ids=NO_STOP,
    )
    async with aclosing(pool.turn(request)) as stream:
        async for _ in stream:
            pass

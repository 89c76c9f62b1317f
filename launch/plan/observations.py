"""Observations of a real run, and the rates that follow from them.

A generator is probed, a calibration is read, or the metrics of an earlier run are.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.errors import ActorError
from actors.generator_client import GeneratorPool, TurnRequest
from launch.errors import LaunchError
from launch.plan.parts import Setting
from launch.plan.rates import SETTING, Law, Measured, MeasuredRates, SharingRates, check_rates
from launch.run_folder import run_name
from launch.supervise.summary import read_metrics
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


QUANTILES = 40
MOST_SLOWDOWN = 4.0


@dataclass
class Observations:
    """Observations of the real system over some time."""

    seconds: float
    lines: list[dict[str, Any]]
    """Lines of metrics.jsonl for the learner steps of this time."""
    before: dict[str, Any]
    """The line of metrics.jsonl before `lines`."""
    sampled: float
    """Action tokens that the broker stored in this time."""
    stored_before: float = 0.0
    """Action tokens that the broker had stored before this time."""
    generators: list[list[Mapping[str, float]]] = field(default_factory=list)
    """Gauges of the generators, at each look."""
    actors: list[list[Mapping[str, float]]] = field(default_factory=list)
    """Gauges of the actors, at each look."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """Episodes of this time, in the form that `offbeat journal export` writes."""
    starts: dict[str, float] = field(default_factory=dict)
    """Seconds until the first generator and the first actor had joined, by role."""
    cores: int = 1
    """Cores of the machine."""


def read(seen: Observations, probe: Probe, setting: Setting, *, run: str, machine: str) -> MeasuredRates:
    """Derive the rates of a run."""
    episode = episode_rates(seen, setting)
    generator = generator_rates(seen, probe)
    measured = measured_run(seen, setting, run=run, machine=machine)
    turn_tokens = statistics.fmean(t for e in seen.episodes for t in turn_lengths(e))
    episode["between_seconds"] = between_seconds(
        seen, measured, turn_tokens, episode["tool_seconds"]["fixed"]
    )
    together = learner_times(seen)
    sharing, slower = SharingRates(cores=seen.cores), 1.0
    if not setting.sync:
        alone = alone_rate(generator, measured, episode_read=mean_read(seen), turn_tokens=turn_tokens)
        sharing = SharingRates(
            slowdown=round(solve_slowdown(alone, measured, seen.cores), 3), cores=seen.cores
        )
        slower = learner_slowdown(sharing, measured)
    learner = {name: float(f"{value / slower:.6g}") for name, value in together.items()}
    # Generators also pause while the learner works, so the sharing slowed their pauses down as well.
    generator["pause_seconds"] = round(generator["pause_seconds"] / slower, 5)
    data = {
        "generator": generator,
        "learner": learner,
        "episode": episode,
        "actor": {"start_seconds": round(seen.starts.get("actor", 0.0), 2)},
        "sharing": sharing.model_dump(),
        "measured": measured.model_dump(),
    }
    return check_rates(data, "calibration")


# --- episodes -----------------------------------------------------------------------------------------------


def turn_lengths(episode: Mapping[str, Any]) -> list[int]:
    """Return the tokens sampled in each turn."""
    return [turn["end"] - turn["start"] for turn in episode["turns"] if turn["action"]]


def read_lengths(episode: Mapping[str, Any]) -> list[int]:
    """Return the tokens read before each sampled turn: the prompt, then observations."""
    lengths, at = [], 0
    for turn in episode["turns"]:
        if turn["action"]:
            lengths.append(turn["start"] - at)
            at = turn["end"]
    return lengths


def mean_read(seen: Observations) -> float:
    """Return the mean number of tokens read per turn."""
    return statistics.fmean(n for episode in seen.episodes for n in read_lengths(episode))


def quantiles(values: Sequence[float]) -> Law:
    """Return a law with the distribution of these values, and nearly their mean.

    Example:
        >>> quantiles([3, 3, 3]).fixed, quantiles([1, 2]).values
        (3.0, (1.0, 2.0))
    """
    ordered = sorted(map(float, values))
    if ordered[0] == ordered[-1]:
        return Law(fixed=ordered[0])
    if len(ordered) <= QUANTILES:
        return Law(values=tuple(ordered))
    chunks = [
        ordered[n * len(ordered) // QUANTILES : (n + 1) * len(ordered) // QUANTILES] for n in range(QUANTILES)
    ]
    return Law(values=tuple(round(statistics.fmean(chunk), 2) for chunk in chunks))


def episode_rates(seen: Observations, setting: Setting) -> dict[str, Any]:
    """Return the laws of turns and lengths. For the environment only the mean duration is measured."""
    turns = [turn_lengths(episode) for episode in seen.episodes]
    reads = [read_lengths(episode) for episode in seen.episodes]
    laws = {
        "turns": quantiles([len(lengths) for lengths in turns]),
        "prompt_tokens": quantiles([lengths[0] for lengths in reads]),
        "turn_tokens": quantiles([n for lengths in turns for n in lengths]),
        "observation_tokens": quantiles([n for lengths in reads for n in lengths[1:]] or [0]),
    }
    data: dict[str, Any] = {name: law.model_dump(exclude_none=True) for name, law in laws.items()}
    in_env = [gauges["env_seconds"] for look in seen.actors for gauges in look if "env_seconds" in gauges]
    per_turn = statistics.fmean(in_env or [0.0]) / statistics.fmean(map(len, turns))
    data["tool_seconds"] = {"fixed": round(per_turn, 5)}
    uniform = _grown(seen, "rollout/uniform_trajectories")
    trained = len(seen.lines) * setting.batch_groups * (setting.members - setting.baselines)
    data["filtered_groups"] = round(uniform / max(1e-9, uniform + trained), 4)
    return data


def between_seconds(seen: Observations, measured: Measured, turn_tokens: float, tool_seconds: float) -> float:
    """Return the time of a turn that is neither generation nor environment, by Little's law."""
    running = statistics.fmean(sum(g.get("episodes_running", 0.0) for g in look) for look in seen.actors)
    sampling = measured.running_mean * measured.generators
    turns_per_second = measured.sampled_tokens_per_second / turn_tokens
    return float(round(max(0.0, (running - sampling) / turns_per_second - tool_seconds), 4))


# --- the learner --------------------------------------------------------------------------------------------


def learner_times(seen: Observations) -> dict[str, float]:
    """Return the durations of the parts of a step, measured while generators worked."""
    steps = len(seen.lines)
    tokens = [line["learner/trained_tokens"] for line in seen.lines]
    seconds = [line["learner/step_seconds"] for line in seen.lines]
    constant, slope = fit(tokens, seconds)
    publish = statistics.fmean(line["learner/publish_seconds"] for line in seen.lines)
    waited = sum(line["learner/wait_seconds"] for line in seen.lines)
    after = (seen.seconds - waited - sum(seconds)) / steps - publish
    return {
        "step_seconds": constant,
        "seconds_per_token": slope,
        "publish_seconds": publish,
        "after_seconds": max(0.0, after),
    }


def fit(tokens: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return constant and slope of the seconds by tokens; the constant is 0 if the batches are too similar.

    Example:
        >>> fit([100, 200, 300, 400, 500, 600, 700, 800], [2, 3, 4, 5, 6, 7, 8, 9])
        (1.0, 0.01)
        >>> fit([100, 100, 100], [1, 2, 3])
        (0.0, 0.02)
    """
    mean = statistics.fmean(tokens)
    proportional = statistics.fmean(seconds) / max(1e-9, mean)
    if len(tokens) < 8 or statistics.pstdev(tokens) < 0.1 * mean:
        return 0.0, proportional
    slope, constant = statistics.linear_regression(tokens, seconds)
    if slope <= 0:
        return statistics.fmean(seconds), 0.0
    if constant < 0:
        return 0.0, proportional
    return round(constant, 6), round(slope, 9)


# --- generators ---------------------------------------------------------------------------------------------


def generator_rates(seen: Observations, probe: Probe) -> dict[str, Any]:
    """Return the rates that the probe found, and the duration of updates in the run."""
    pauses = [
        g["update_pause_seconds"] for look in seen.generators for g in look if g.get("updates_applied_total")
    ]
    return {
        "decode": [{"sequences": float(n), "tokens_per_second": round(rate, 2)} for n, rate in probe.decode],
        "prompt_tokens_per_second": round(probe.prompt_tokens_per_second, 2),
        "turn_seconds": round(probe.turn_seconds, 6),
        "pause_seconds": round(statistics.fmean(pauses or [0.0]), 5),
        "start_seconds": round(seen.starts.get("generator", 0.0), 2),
    }


def alone_rate(
    generator: Mapping[str, Any], measured: Measured, *, episode_read: float, turn_tokens: float
) -> float:
    """Return the tokens per second that one generator alone on its cores reaches under the run's load."""
    rates = check_rates(
        {"generator": generator, "learner": {"seconds_per_token": 0.0}, "episode": {"turn_tokens": 1.0}},
        "probe",
    ).generator
    running = max(1.0, measured.running_mean / max(0.01, 1 - measured.generator_idle_share))
    per_token = rates.step_seconds(round(running)) / round(running)
    per_token += rates.turn_seconds / turn_tokens
    if rates.prompt_tokens_per_second:
        per_token += episode_read / turn_tokens / rates.prompt_tokens_per_second
    paused = measured.steps_per_second / (measured.publish_every or 1) * rates.pause_seconds
    return max(0.05, 1 - paused) / per_token


def solve_slowdown(alone: float, measured: Measured, cores: int) -> float:
    """Return the slowdown that explains the measured speed of the generators, from 1 to `MOST_SLOWDOWN`."""
    active = max(0.01, 1 - measured.generator_idle_share)
    seen = measured.sampled_tokens_per_second / measured.generators / active
    busy = 1 - measured.learner_idle_share

    def rate(slowdown: float) -> float:
        sharing, n = SharingRates(slowdown=slowdown, cores=cores), measured.generators
        return alone * ((1 - busy) / sharing.slow(n) + busy / sharing.slow(n + 1))

    low, high = 1.0, MOST_SLOWDOWN
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > seen else (low, middle)
    return low


def learner_slowdown(sharing: SharingRates, measured: Measured) -> float:
    """Return how many times slower the learner was in the run than alone."""
    active = 1 - measured.generator_idle_share
    return active * sharing.slow(measured.generators + 1) + 1 - active


# --- the measured run ---------------------------------------------------------------------------------------


def measured_run(seen: Observations, setting: Setting, *, run: str, machine: str) -> Measured:
    """Return the run's settings and the numbers that a plan predicts."""
    trained = sum(line["learner/trained_tokens"] for line in seen.lines)
    lags = sum(
        line.get("learner/policy_lag_mean_versions", 0.0) * line["learner/trained_tokens"]
        for line in seen.lines
    )
    waited = sum(line["learner/wait_seconds"] for line in seen.lines)
    first, last = seen.generators[0], seen.generators[-1]
    idle, served = (
        sum(g[name] for g in last) - sum(g[name] for g in first)
        for name in ("idle_seconds_total", "serving_seconds_total")
    )
    running = statistics.fmean(g["running_requests"] for look in seen.generators for g in look)
    numbers = {
        "seconds": seen.seconds,
        "trained_tokens_per_second": trained / seen.seconds,
        "sampled_tokens_per_second": seen.sampled / seen.seconds,
        "steps_per_second": len(seen.lines) / seen.seconds,
        "lag_mean_versions": lags / max(1e-9, trained),
        "learner_idle_share": min(1.0, waited / seen.seconds),
        "generator_idle_share": min(1.0, max(0.0, idle / served)) if served > 0 else 0.0,
        "running_mean": running,
    }
    return Measured(
        run=run,
        machine=machine,
        mode="sync" if setting.sync else "async",
        steps=len(seen.lines),
        **{name: getattr(setting, name) for name in SETTING},
        **{name: round(value, 4) for name, value in numbers.items()},
    )


def _grown(seen: Observations, name: str) -> float:
    return float(seen.lines[-1].get(name, 0.0) - seen.before.get(name, 0.0))


LEAST_STEPS = 8
"""Steps that a run must have for its means to say something."""
WARM_UP_STEPS = 2
"""First steps, which are left out: they include the start."""

Line = Mapping[str, Any]


def last_run(runs: Path, name: str) -> Path | None:
    """Return the newest run folder of this run that has enough steps, or None."""
    folders = sorted(runs.glob(f"{name}*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((p for p in folders if run_name(p) == name and len(steps_of(p)) >= LEAST_STEPS), None)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the learner steps behind the warm-up; empty if the metrics cannot be read."""
    try:
        lines = read_metrics(folder)
    except (OSError, ValueError):
        return []
    return [line for line in lines if "learner/step_seconds" in line and "learner/policy_version" in line][
        WARM_UP_STEPS:
    ]


def rates_data(lines: Sequence[Line], *, generators: int, members: int) -> dict[str, Any]:
    """Return the content of a rates file, from means over the steps of a run.

    The roles shared the machine while they were measured, so nothing is added for that.

    Args:
        generators: generators of the run.
        members: trajectories that a step trains.

    Example:
        >>> line = {"generator/tokens_per_second": 300.0, "generator/running_requests": 60.0,
        ...     "generator/idle_share": 0.25, "learner/trained_tokens": 800.0, "learner/step_seconds": 2.0,
        ...     "learner/publish_seconds": 0.1, "rollout/turns_mean": 2.0, "rollout/length_mean_tokens": 8.0,
        ...     "actor/env_seconds": 0.2, "rollout/uniform_trajectories": 64.0}
        >>> data = rates_data([line] * 8, generators=1, members=32)
        >>> data["generator"]["decode"], data["learner"]["seconds_per_token"]
        ([{'sequences': 60.0, 'tokens_per_second': 400.0}], 0.0025)
        >>> data["episode"]["turn_tokens"], data["episode"]["filtered_groups"]
        (4.0, 0.2)
    """
    rate, running = _mean(lines, "generator/tokens_per_second"), _mean(lines, "generator/running_requests")
    active = max(0.05, 1.0 - _mean(lines, "generator/idle_share"))
    turns = max(1.0, _mean(lines, "rollout/turns_mean"))
    constant, slope = fit(
        [line["learner/trained_tokens"] for line in lines], [line["learner/step_seconds"] for line in lines]
    )
    uniform = max(line.get("rollout/uniform_trajectories", 0.0) for line in lines)
    point = {
        "sequences": max(1.0, round(running / generators, 2)),
        "tokens_per_second": max(0.01, round(rate / generators / active, 2)),
    }
    return {
        "generator": {
            "decode": [point],
            "pause_seconds": round(_mean(lines, "generator/update_pause_seconds"), 5),
        },
        "learner": {
            "step_seconds": constant,
            "seconds_per_token": slope,
            "publish_seconds": round(_mean(lines, "learner/publish_seconds"), 5),
        },
        "episode": {
            "turns": turns,
            "turn_tokens": max(1.0, round(_mean(lines, "rollout/length_mean_tokens") / turns, 2)),
            "tool_seconds": round(_mean(lines, "actor/env_seconds") / turns, 5),
            "filtered_groups": round(uniform / max(1.0, uniform + len(lines) * members), 4),
        },
    }


def _mean(lines: Sequence[Line], name: str) -> float:
    return statistics.fmean([float(line[name]) for line in lines if name in line] or [0.0])

"""Measured rates that `offbeat plan` works with, and the laws that lengths are drawn from.

docs/run/capacity.md explains every field.
"""

import random
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from protocol.section import Section

Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Law(Section):
    """What a length or a duration is drawn from: one of these forms. A bare number is `fixed`."""

    fixed: float | None = Field(None, ge=0)
    uniform: tuple[float, float] | None = Field(None, strict=False)
    """Least and most."""
    log_uniform: tuple[float, float] | None = Field(None, strict=False)
    """Least and most, both above 0."""
    log_normal: tuple[float, float] | None = Field(None, strict=False)
    """Median, and standard deviation of the logarithm."""
    values: tuple[float, ...] | None = Field(None, strict=False, min_length=1)
    """One of these, each as likely as the others: what was measured, or its quantiles."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(f"a law has one form, this one has {given or 'none'}; use one of {list(FORMS)}")
        for name in ("uniform", "log_uniform"):
            bounds = getattr(self, name)
            if bounds and not (0 if name == "uniform" else 1e-12) <= bounds[0] <= bounds[1]:
                raise ValueError(f"{name} is {list(bounds)}; write [least, most], not below 0")
        if self.log_normal and (self.log_normal[0] <= 0 or self.log_normal[1] < 0):
            raise ValueError(f"log_normal is {list(self.log_normal)}; write [median, deviation], median > 0")
        if self.values and min(self.values) < 0:
            raise ValueError(f"values has {min(self.values)}; none may be below 0")
        return self

    def draw(self, rng: random.Random) -> float:
        """One value."""
        if self.fixed is not None:
            return self.fixed
        if self.values is not None:
            return rng.choice(self.values)
        if self.uniform is not None:
            return rng.uniform(*self.uniform)
        if self.log_uniform is not None:
            low, high = self.log_uniform
            return float(low * (high / low) ** rng.random())
        assert self.log_normal is not None
        median, deviation = self.log_normal
        return median * rng.lognormvariate(0.0, deviation)

    def draw_count(self, rng: random.Random, least: int) -> int:
        """One value as a whole number that has the same mean, not below ``least``."""
        value = self.draw(rng)
        whole = int(value)
        return max(least, whole + (rng.random() < value - whole))


FORMS = tuple(Law.model_fields)
AnyLaw = Annotated[Law, BeforeValidator(lambda v: {"fixed": float(v)} if type(v) in (int, float) else v)]


class DecodePoint(Section):
    """`[[generator.decode]]`: the rate of one generator, measured alone, with so many sequences at a time."""

    sequences: float = Field(ge=1)
    tokens_per_second: float = Field(gt=0)


class GeneratorRates(Section):
    """`[generator]`."""

    decode: tuple[DecodePoint, ...] = Field(strict=False, min_length=1)
    prompt_tokens_per_second: float = Field(0.0, ge=0)
    """Prompt tokens taken in, decoding nothing meanwhile; 0: they cost nothing beside what `decode` has."""
    turn_seconds: Seconds = 0.0
    """What each request costs beside its tokens, decoding nothing meanwhile."""
    update_seconds: Seconds = 0.0
    """From the announcement of a version until generation stops for it: fetching, verifying."""
    pause_seconds: Seconds = 0.0
    """Generation stands still for a version."""
    start_seconds: Seconds = 0.0
    """From its start until it serves."""

    def step_seconds(self, sequences: int) -> float:
        """Seconds in which each of so many sequences gets its next token.

        Between two points the time of a step is interpolated. Below the first it is that of the first. Above the
        last the rate is that of the last: nothing is gained that was not measured.

        Example:
            >>> points = [{"sequences": 1, "tokens_per_second": 10}, {"sequences": 5, "tokens_per_second": 25}]
            >>> rates = GeneratorRates.model_validate({"decode": points})
            >>> [round(rates.step_seconds(n), 6) for n in (1, 3, 5, 10)]
            [0.1, 0.15, 0.2, 0.4]
        """
        points = self._points()
        if sequences <= points[0][0]:
            return points[0][1]
        for (low, fast), (high, slow) in pairwise(points):
            if sequences <= high:
                return fast + (slow - fast) * (sequences - low) / (high - low)
        last, slowest = points[-1]
        return slowest * sequences / last

    def _points(self) -> list[tuple[float, float]]:
        """Sequences and seconds per step, ascending; measured noise does not make a step faster with more."""
        slowest, points = 0.0, []
        for point in sorted(self.decode, key=lambda point: point.sequences):
            slowest = max(slowest, point.sequences / point.tokens_per_second)
            points.append((point.sequences, slowest))
        return points


class LearnerRates(Section):
    """`[learner]`: a step takes step_seconds + tokens * seconds_per_token + publish_seconds, alone on its cores."""

    step_seconds: Seconds = 0.0
    """What every step takes, whatever its batch."""
    seconds_per_token: Seconds
    """For each action token trained."""
    publish_seconds: Seconds = 0.0
    """Until the new version is announced."""
    after_seconds: Seconds = 0.0
    """After that, until it waits for the next batch: committing, reporting, its share of a checkpoint."""


class EpisodeRates(Section):
    """`[episode]`: what trajectories are made of; laws, or bare numbers."""

    turns: AnyLaw = Law(fixed=1.0)
    prompt_tokens: AnyLaw = Law(fixed=0.0)
    """Of the first turn."""
    turn_tokens: AnyLaw
    """Sampled in a turn."""
    observation_tokens: AnyLaw = Law(fixed=0.0)
    """Between two turns."""
    tool_seconds: AnyLaw = Law(fixed=0.0)
    """The environment's answer to a turn."""
    between_seconds: Seconds = 0.0
    """The same for actor and network, at each turn."""
    filtered_groups: Share = 0.0
    """Share of groups that the learner drops because all returns are equal."""


class SharingRates(Section):
    """`[sharing]`: what happens where roles share cores."""

    slowdown: float = Field(1.0, ge=1.0)
    """How many times slower learner and generator each are while both work; 1: they do not disturb each other."""
    cores: int | None = Field(None, ge=1)
    """Cores that all processes share; with more processes at work than cores, each is slower still. Absent: enough."""

    def slow(self, at_work: int) -> float:
        """How many times slower each of so many processes is than alone.

        Example:
            >>> [SharingRates(slowdown=1.4, cores=2).slow(n) for n in (1, 2, 4)], SharingRates().slow(4)
            ([1.0, 1.4, 2.8], 1.0)
        """
        if at_work < 2:
            return 1.0
        return self.slowdown * max(1.0, at_work / max(2, self.cores) if self.cores else 1.0)


class ActorRates(Section):
    """`[actor]`."""

    start_seconds: Seconds = 0.0
    """From its start until it runs episodes."""


class Measured(Section):
    """`[measured]`: the run that was measured; the plan is compared with it. Written by `--calibrate`."""

    run: str = ""
    machine: str = ""
    mode: str = ""
    seconds: Seconds = 0.0
    steps: int = 0
    generators: int = 1
    actors: int = 1
    concurrent_episodes: int = 1
    max_num_seqs: int | None = None
    """This and the next as the run had them; None: as in the plan."""
    members: int | None = None
    baselines: int | None = None
    batch_groups: int | None = None
    max_policy_lag: int | None = None
    publish_every: int | None = None
    recomputes: bool | None = None
    trained_tokens_per_second: Seconds = 0.0
    sampled_tokens_per_second: Seconds = 0.0
    steps_per_second: Seconds = 0.0
    lag_mean_versions: Seconds = 0.0
    learner_idle_share: Seconds = 0.0
    generator_idle_share: Seconds = 0.0
    running_mean: Seconds = 0.0
    """Sequences a generator had under way."""


SETTING = (
    "generators", "actors", "concurrent_episodes", "max_num_seqs", "members", "baselines", "batch_groups",
    "max_policy_lag", "publish_every", "recomputes",
)  # fmt: skip
"""Of what was measured, what the run was set to; names are those of a plan's settings."""


class MeasuredRates(Section):
    """A rates file."""

    generator: GeneratorRates
    learner: LearnerRates
    episode: EpisodeRates
    actor: ActorRates = ActorRates()
    sharing: SharingRates = SharingRates()
    measured: Measured | None = None

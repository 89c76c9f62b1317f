"""Measured rates that `offbeat plan` uses, the laws from which it draws lengths and durations, and their file.

docs/run/capacity.md explains every field.
"""

import math
import random
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from launch.errors import ConfigError
from protocol.section import Section

Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Law(Section):
    """Distribution of a length or a duration, in one of these forms. A bare number means `fixed`."""

    fixed: float | None = Field(None, ge=0)
    uniform: tuple[float, float] | None = Field(None, strict=False)
    """Least and greatest value."""
    log_uniform: tuple[float, float] | None = Field(None, strict=False)
    """Least and greatest value, both above 0."""
    log_normal: tuple[float, float] | None = Field(None, strict=False)
    """Median, and standard deviation of the logarithm."""
    values: tuple[float, ...] | None = Field(None, strict=False, min_length=1)
    """Values that are drawn with equal probability: measured values, or their quantiles."""

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
        """Draw one value."""
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

    def mean(self) -> float:
        """Return the mean of many values.

        Example:
            >>> Law(uniform=(2.0, 6.0)).mean(), Law(values=(1.0, 2.0)).mean(), Law(fixed=3.0).mean()
            (4.0, 1.5, 3.0)
        """
        if self.fixed is not None:
            return self.fixed
        if self.values is not None:
            return sum(self.values) / len(self.values)
        if self.uniform is not None:
            return sum(self.uniform) / 2
        if self.log_uniform is not None:
            low, high = self.log_uniform
            return (high - low) / math.log(high / low) if high > low else low
        assert self.log_normal is not None
        median, deviation = self.log_normal
        return median * math.exp(deviation**2 / 2)

    def draw_count(self, rng: random.Random, least: int) -> int:
        """Draw a whole number, rounded at random so that the mean stays, and not below ``least``."""
        value = self.draw(rng)
        whole = int(value)
        return max(least, whole + (rng.random() < value - whole))


FORMS = tuple(Law.model_fields)
AnyLaw = Annotated[Law, BeforeValidator(lambda v: {"fixed": float(v)} if type(v) in (int, float) else v)]


class DecodePoint(Section):
    """`[[generator.decode]]`: rate of one generator, measured alone, with this many sequences at a time."""

    sequences: float = Field(ge=1)
    tokens_per_second: float = Field(gt=0)


class GeneratorRates(Section):
    """`[generator]`: speed of one generator, alone on its hardware."""

    decode: tuple[DecodePoint, ...] = Field(strict=False, min_length=1)
    prompt_tokens_per_second: float = Field(0.0, ge=0)
    """Prompt tokens read per second, while nothing is decoded. 0: reading costs nothing beyond `decode`."""
    turn_seconds: Seconds = 0.0
    """Seconds that each request costs in addition to its tokens. Nothing is decoded meanwhile."""
    update_seconds: Seconds = 0.0
    """Seconds from the announcement of a version until generation stops for it: fetching, verifying."""
    version_bytes: float = Field(0.0, ge=0)
    """Size of a version that a generator fetches. 0: fetching takes no time beyond `update_seconds`."""
    bytes_per_second: float = Field(0.0, ge=0)
    """Rate at which one generator fetches. Needed with `version_bytes`."""
    pause_seconds: Seconds = 0.0
    """Seconds for which generation stops to load a version."""
    start_seconds: Seconds = 0.0
    """Seconds from the generator's start until it serves."""

    @model_validator(mode="after")
    def _rate_of_fetching(self) -> Self:
        if bool(self.version_bytes) != bool(self.bytes_per_second):
            raise ValueError(
                f"version_bytes is {self.version_bytes:g} and bytes_per_second {self.bytes_per_second:g}; give both"
            )
        return self

    @property
    def fetch_seconds(self) -> float:
        """Seconds in which the bytes of a version arrive.

        Example:
            >>> points = [{"sequences": 1, "tokens_per_second": 10}]
            >>> rates = {"decode": points, "version_bytes": 14e9, "bytes_per_second": 0.5e9}
            >>> GeneratorRates.model_validate(rates).fetch_seconds
            28.0
        """
        return self.version_bytes / self.bytes_per_second if self.bytes_per_second else 0.0

    def step_seconds(self, sequences: int) -> float:
        """Return the seconds in which each of ``sequences`` sequences gets its next token.

        Between two points the time of a step is interpolated. Below the first point it is constant. Above the
        last point the rate is constant, because a higher rate was not measured.

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
        """Return sequences and seconds per step, ascending.

        Noise never makes a step faster with more sequences.
        """
        slowest, points = 0.0, []
        for point in sorted(self.decode, key=lambda point: point.sequences):
            slowest = max(slowest, point.sequences / point.tokens_per_second)
            points.append((point.sequences, slowest))
        return points


class LearnerRates(Section):
    """`[learner]`: alone, a step takes step_seconds + tokens * seconds_per_token + publish_seconds."""

    step_seconds: Seconds = 0.0
    """Seconds that every step takes, whatever its batch."""
    seconds_per_token: Seconds
    """Seconds for each action token that is trained."""
    publish_seconds: Seconds = 0.0
    """Seconds from the update until the weights of the new version are copied; the learner stands meanwhile."""
    after_seconds: Seconds = 0.0
    """Seconds from then until the learner waits for a batch: commit, report, its share of a checkpoint."""


class EpisodeRates(Section):
    """`[episode]`: lengths and durations of trajectories. Each is a law, or a bare number."""

    turns: AnyLaw = Law(fixed=1.0)
    prompt_tokens: AnyLaw = Law(fixed=0.0)
    """Prompt tokens of the first turn."""
    turn_tokens: AnyLaw
    """Tokens sampled in a turn."""
    observation_tokens: AnyLaw = Law(fixed=0.0)
    """Tokens read between two turns."""
    tool_seconds: AnyLaw = Law(fixed=0.0)
    """Seconds until the environment answers a turn."""
    between_seconds: Seconds = 0.0
    """Seconds that actor and network add to each turn."""
    filtered_groups: Share = 0.0
    """Share of groups that the learner drops because all returns are equal."""


class SharingRates(Section):
    """`[sharing]`: how much roles that share cores slow each other down."""

    slowdown: float = Field(1.0, ge=1.0)
    """Factor by which learner and generator are each slower while both work. 1: neither slows the other."""
    cores: int | None = Field(None, ge=1)
    """Cores that all processes share. With more processes at work than cores, each is slower still. Absent:
    there are enough cores."""

    def slow(self, at_work: int) -> float:
        """Return how many times slower each of ``at_work`` processes is than alone.

        Example:
            >>> [SharingRates(slowdown=1.4, cores=2).slow(n) for n in (1, 2, 4)], SharingRates().slow(4)
            ([1.0, 1.4, 2.8], 1.0)
        """
        if at_work < 2:
            return 1.0
        return self.slowdown * max(1.0, at_work / max(2, self.cores) if self.cores else 1.0)


UNMEASURED_SEGMENTS = 7_500.0


class BrokerRates(Section):
    """`[broker]`: what one broker takes."""

    segments_per_second: float = Field(UNMEASURED_SEGMENTS, gt=0)
    """Segments that one broker stores in a second. The default was measured with encryption and a synced journal, on
    one core; `python -m benchmarks.broker` measures another machine."""


class LeavingRates(Section):
    """`[leaving]`: how generators are lost, and come back. Nothing is lost where nothing is set."""

    mean_seconds: Seconds = 0.0
    """Mean time until one generator is lost, independent of all others (exponential). 0: none is."""
    storm_seconds: Seconds = 0.0
    """Mean time between losses of many generators at once (exponential). 0: there are none."""
    storm_share: Share = 0.0
    """Share of the generators that such a loss takes."""
    back_seconds: Seconds = 0.0
    """Time until another generator begins to start in the place of a lost one; `generator.start_seconds` come on
    top."""

    @model_validator(mode="after")
    def _storms_take_some(self) -> Self:
        if bool(self.storm_seconds) != bool(self.storm_share):
            raise ValueError(
                f"storm_seconds is {self.storm_seconds:g} and storm_share {self.storm_share:g}; give both"
            )
        return self


class ActorRates(Section):
    """`[actor]`: start of an actor."""

    start_seconds: Seconds = 0.0
    """Seconds from the actor's start until it runs episodes."""


class Measured(Section):
    """`[measured]`: the run in which `--calibrate` measured the rates.

    The plan predicts it for comparison.
    """

    run: str = ""
    machine: str = ""
    mode: str = ""
    seconds: Seconds = 0.0
    steps: int = 0
    generators: int = 1
    actors: int = 1
    concurrent_episodes: int = 1
    max_num_seqs: int | None = None
    """Settings of the run, from here to `recomputes`. None: the setting of the plan is used."""
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
    """Mean number of sequences that a generator had under way."""


SETTING = (
    "generators", "actors", "concurrent_episodes", "max_num_seqs", "members", "baselines", "batch_groups",
    "max_policy_lag", "publish_every", "recomputes",
)  # fmt: skip
"""Fields of `Measured` that are settings of the run, with the names they have in a plan's `Setting`."""


class MeasuredRates(Section):
    """Content of a rates file."""

    generator: GeneratorRates
    learner: LearnerRates
    episode: EpisodeRates
    actor: ActorRates = ActorRates()
    broker: BrokerRates = BrokerRates()
    leaving: LeavingRates = LeavingRates()
    sharing: SharingRates = SharingRates()
    measured: Measured | None = None


def load_rates(path: Path, overrides: Sequence[str] = ()) -> MeasuredRates:
    """Read a rates file and apply overrides such as `learner.step_seconds=0.5`.

    Raises:
        ConfigError: something is wrong; one line per mistake, with place, value seen and cure.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        cure = (
            "train for 10 steps first, whose metrics then serve, measure one with `offbeat plan RUN_FILE "
            "--calibrate 30`, or write one as docs/run/capacity.md shows"
        )
        raise ConfigError(f"--rates {path}: cannot be read ({error.strerror}); {cure}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rates {path}: not valid TOML: {error}") from None
    return rates_from(data, overrides, str(path))


def rates_from(data: dict[str, Any], overrides: Sequence[str], source: str) -> MeasuredRates:
    """Apply overrides to the content of a rates file, and validate it; see `load_rates`."""
    for override in overrides:
        _set(data, override)
    return check_rates(data, source)


def check_overrides(overrides: Sequence[str]) -> None:
    """Check the form of the overrides. `load_rates` checks their values.

    Raises:
        ConfigError: an override is not of the form section.field=value.
    """
    for override in overrides:
        _set({}, override)


def check_rates(data: dict[str, Any], source: str) -> MeasuredRates:
    """Validate the content of a rates file; see `load_rates`."""
    try:
        return MeasuredRates.model_validate(data)
    except ValidationError as error:
        lines = [_explain(e, source) for e in error.errors()]
    raise ConfigError("\n".join(lines))


def _set(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *parents, last = key.split(".")
    if not (equals and parents and last):
        raise ConfigError(
            f"--rate {override!r}: write it as section.field=value, for example learner.step_seconds=2"
        )
    table: Any = data
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--rate {override!r}: {parent} is {table!r}, not a section")
    try:
        table[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"--rate {override!r}: {text!r} is no TOML value; write a number or a law"
        ) from None


def _explain(error: Any, source: str) -> str:
    place = ".".join(str(part) for part in error["loc"]) or "(top level)"
    match error["type"]:
        case "extra_forbidden":
            section: Any = MeasuredRates
            for part in error["loc"][:-1]:
                field = section.model_fields.get(part) if hasattr(section, "model_fields") else None
                section = getattr(field, "annotation", None) if field else None
            known = (
                f"known here: {', '.join(section.model_fields)}"
                if hasattr(section, "model_fields")
                else "remove it"
            )
            return f"{source}: {place}: unknown key (value {error['input']!r}); {known}"
        case "missing":
            return f"{source}: {place}: missing; measure it with --calibrate, or write it as docs/run/capacity.md shows"
        case _:
            return f"{source}: {place}: {error['msg'].removeprefix('Value error, ')}, got {error['input']!r}"


def format_rates(rates: MeasuredRates, heading: Sequence[str] = ()) -> str:
    """Return the rates as a TOML file that `load_rates` reads.

    Example:
        >>> data = {"generator": {"decode": [{"sequences": 1, "tokens_per_second": 9.5}]},
        ...         "learner": {"seconds_per_token": 0.001}, "episode": {"turn_tokens": {"uniform": [1, 8]}}}
        >>> rates = check_rates(data, "doc")
        >>> check_rates(tomllib.loads(format_rates(rates)), "again") == rates
        True
    """
    lines = [f"# {line}" for line in heading]
    for name, section in rates.model_dump(exclude_none=True).items():
        lines += ["", f"[{name}]"]
        points = section.pop("decode", ())
        lines += [f"{key} = {_toml(value)}" for key, value in section.items()]
        for point in points:
            lines += ["", f"[[{name}.decode]]", *(f"{key} = {_toml(value)}" for key, value in point.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)

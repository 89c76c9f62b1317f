"""The run file: one TOML for all roles, dotted overrides, strict types, and the rules between roles."""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError

from actors.config import ActorConfig, GeneratorConfig
from broker.config import BrokerConfig
from envs.config import EnvConfig
from launch.errors import ConfigError
from launch.rules import contradictions
from launch.security import SecurityConfig
from launch.weights_role import WeightsSection
from learner.config import LearnerConfig
from protocol.section import Section

FORM_NAMED_BY = {"env": "name"}
"""Key that says what else a table may hold, where it is not `kind`: another environment has other params."""


class RunSection(Section):
    """`[run]`."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder."""
    dir: Path = Field(Path("runs"), strict=False)
    """Folder of run folders."""
    seed: int = Field(0, ge=0)
    mode: Literal["async", "sync"] = "async"
    """"sync" runs the same roles in lockstep: generate a batch, train on it, update, repeat."""
    max_minutes: float = Field(60.0, gt=0)
    """Training ends after so long, whatever step it has reached."""


class WarmStart(Section):
    """`[model.tiny.warm_start]`: supervised steps on solutions that the task library gives."""

    steps: int = Field(300, ge=0)
    """At most so many optimizer steps."""
    stop_at: float = Field(1.0, gt=0, le=1)
    """Stop as soon as this share of unseen training tasks is solved, so that the rest is left to RL."""
    batch: int = Field(64, ge=1)
    lr: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(20, ge=0)
    demonstrations: int = Field(2000, ge=1)
    """Solved training tasks to learn from."""


class TinyModel(Section):
    """`[model.tiny]`: a small Qwen3 that is made on the spot, with its own tokenizer."""

    hidden_size: int = Field(128, ge=8)
    intermediate_size: int = Field(384, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    head_dim: Literal[32, 64, 80, 96, 112, 128] = 32
    """Sizes that vLLM's attention on CPU takes."""
    rope_theta: float = Field(500.0, gt=1)
    """Base of the rotary positions. Small: tiny models see short texts."""
    tie_embeddings: bool = False
    seed: int = 0
    warm_start: WarmStart = WarmStart()


class ModelSection(Section):
    """`[model]`: a Hugging Face name or folder, or a tiny model that is made here."""

    path: str = ""
    """Hugging Face name or folder of a causal language model; takes the place of a tiny one."""
    tiny: TinyModel | None = None
    cache: Path = Field(Path("runs/models"), strict=False)
    """Where made models are kept."""

    @property
    def local(self) -> bool:
        """Whether it is a folder, or is made here: no hub is asked for it."""
        return not self.path or Path(self.path).is_dir()


class SupervisorSection(Section):
    """`[supervisor]`: how `offbeat train` keeps its processes alive."""

    max_restarts: int = Field(5, ge=0)
    """Restarts of one process in a row, after ever longer delays; then the run stops with the end of its log."""
    settled_s: float = Field(60.0, gt=0)
    """A process that has lived for so long begins a new row."""
    silence_s: float = Field(7.0, gt=0)
    """A process that the broker has not heard for so long, or that is stopped, is killed and started again; so is a
    broker whose `/status` does not answer."""
    computing_silence_s: float = Field(60.0, gt=0)
    """The same for a process that uses the processor meanwhile, as with an environment that blocks its actor."""
    start_timeout_s: float = Field(600.0, gt=0)
    """A process that has not joined the broker by then is started again."""
    learner_stall_s: float = Field(600.0, gt=0)
    """A learner that works for so long without finishing a step or taking in data is started again."""


class RecipeSection(Section):
    """`[recipe]`: what a shipped run file is; no role reads it."""

    title: str = Field(min_length=1)
    source: str = Field("", pattern=r"^(\d{4}\.\d{5}(, \d{4}\.\d{5})*)?$")
    """arXiv ids; empty: of our own making."""


class RunConfig(Section):
    """The whole run file."""

    recipe: RecipeSection | None = None
    run: RunSection = RunSection()
    model: ModelSection
    env: EnvConfig
    broker: BrokerConfig = BrokerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    actor: ActorConfig = ActorConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsSection = WeightsSection()
    supervisor: SupervisorSection = SupervisorSection()
    security: SecurityConfig = SecurityConfig()

    @property
    def max_policy_lag(self) -> int:
        """The lag bound in force: in lockstep only what is forced."""
        return self.learner.forced_lag if self.run.mode == "sync" else self.learner.max_policy_lag

    @property
    def windows_in_step(self) -> bool:
        """Lockstep in which trajectories stand still at the end of each window until it is trained."""
        return self.run.mode == "sync" and self.learner.train_on == "windows"


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file with all that it extends, apply ``key.path=value`` overrides, check types and the rules
    between roles.

    Raises:
        ConfigError: with one line per mistake: field, value seen, cure.
    """
    data = read(path)
    return check(merge(data, _overlay(data, overrides)), str(path))


def read(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Content of a run file, merged over that of the file it extends, which may extend another.

    Raises:
        ConfigError: a file cannot be read or is not TOML; files extend each other in a circle.
    """
    content = read_own(path)
    base = content.pop("extends", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends is {base!r}; write the name of one file, as a string")
    file, chain = path.parent / base, (*extended_by, path.resolve())
    if not file.is_file():
        raise ConfigError(f"{path}: extends {base!r}: there is no file {file}; name it relative to {path}")
    if file.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, file.resolve()))
        raise ConfigError(f"{path}: extends {base!r} makes a circle: {names}; take one extends out")
    return merge(read(file, chain), content)


def read_own(path: Path) -> dict[str, Any]:
    """Content of this file alone.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a run file, for example one of recipes/"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key, anything else is replaced; a table of another ``kind``, or of another
    environment, replaces the whole.

    Example:
        >>> merge({"a": {"kind": "x", "low": 1}, "b": [1, 2], "c": {"d": 1}}, {"a": {"kind": "y"}, "c": {"e": 2}})
        {'a': {'kind': 'y'}, 'b': [1, 2], 'c': {'d': 1, 'e': 2}}
        >>> merge({"env": {"name": "x", "params": {"low": 1}}}, {"env": {"name": "y"}})
        {'env': {'name': 'y'}}
    """
    merged = dict(base)
    for key, value in over.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and _same_form(key, below, value):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def _same_form(key: str, base: dict[str, Any], over: dict[str, Any]) -> bool:
    form = FORM_NAMED_BY.get(key, "kind")
    return bool(over.get(form, base.get(form)) == base.get(form))


def check(data: dict[str, Any], source: str) -> RunConfig:
    """Validate a run file's content; see `load`."""
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, source) for e in error.errors())) from None
    if problems := list(contradictions(config)):
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return config


def _overlay(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as a table that is to be merged over the file's ``data``, whatever their order."""
    overlay: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"override {override!r}: write it as section.field=value, for example learner.steps=20"
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *parents, last = key.split(".")
        table: Any = overlay
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
        table[last] = value
    for override in overrides:
        _check_parents(overlay, data, override)
    return overlay


def _check_parents(overlay: dict[str, Any], data: dict[str, Any], override: str) -> None:
    """A value of the file becomes a section only where the overrides give it a kind."""
    over: Any = overlay
    below: Any = data
    for parent in override.partition("=")[0].split(".")[:-1]:
        over, below = over[parent], below.get(parent, {})
        if not isinstance(below, dict):
            if "kind" in over:
                return
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")


def _explain(error: Any, source: str) -> str:
    names, sections = _locate(error["loc"])
    place = ".".join(names) or "(top level)"
    match error["type"]:
        case "extra_forbidden":
            names, sections = _locate(error["loc"][:-1])
            known = sorted({name for section in sections for name in section.model_fields})
            near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            return f"{source}: {place}: unknown key (value {error['input']!r}); {cure}"
        case "missing":
            return f"{source}: {place}: missing; add it"
        case "union_tag_not_found":
            kinds = ", ".join(sorted(kind_of(section) for section in sections))
            return f"{source}: {place}: the form is not said; add {place}.kind, one of {kinds}"
        case "union_tag_invalid":
            kinds = ", ".join(sorted(kind_of(section) for section in sections))
            return f"{source}: {place}.kind: unknown kind {error['ctx']['tag']!r}; use one of {kinds}"
        case _:
            return f"{source}: {place}: {error['msg']}, got {error['input']!r}"


def _locate(location: tuple[Any, ...]) -> tuple[list[str], list[type[BaseModel]]]:
    """Names of keys on the way to a place in the run file, and the sections that may stand there."""
    names: list[str] = []
    sections: list[type[BaseModel]] = [RunConfig]
    for part in location:
        if not isinstance(part, int):
            forms = [s for s in sections if part in (kind_of(s), s.__name__)]
            if forms or "[" in part:  # which of several forms was tried: not a key of the file
                sections = forms or sections
                continue
            fields = [s.model_fields[part] for s in sections if part in s.model_fields]
            sections = [s for field in fields for s in sections_in(field.annotation)]
        names.append(str(part))
    return names, sections


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Sections in a field's type: several, where it has several forms."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def kind_of(section: type[BaseModel]) -> str:
    """What `kind` says of this form of a section; empty where there is only one."""
    kind = section.model_fields.get("kind")
    return str(kind.default) if kind is not None else ""

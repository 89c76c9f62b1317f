"""Formulas of the user's own: finds the function that a run file names, checks its settings, and calls it.

`[learner.algorithm.surrogate]`, `advantage`, `corrections` and `[learner.reward.own]` may have
``kind = "my_loss.py:soft_gate"``. The function takes one view, and its settings as a second argument if it has some. A
view of tokens is `learner.update.objective.View`; those of trajectories are `Rollouts` and `Members` here. No torch.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from learner.errors import FormulaError
from learner.settings.formulas import OwnFormula, own_formulas
from learner.settings.learner import LearnerConfig
from learner.trajectory import Trajectory
from protocol.arrays import Float64s, Int64s
from protocol.messages.episodes import Reward
from protocol.section import Section

__all__ = ["Formula", "Members", "Reward", "Rollouts", "Section", "file_of", "hash_of", "load_formula"]


@dataclass(frozen=True, eq=False)
class Rollouts:
    """What an advantage is formed from: the trajectories of a batch, all of them, on rank 0.

    S trajectories have T tokens together, laid one behind the other. There are no log-probabilities of the current or
    the proximal policy yet: advantages come before the first forward pass.
    """

    trajectories: Sequence[Trajectory]
    """The trajectories themselves, for what is not below: rewards by name, marks, turns."""
    current_version: int = 0
    """Policy version that the step updates."""

    @cached_property
    def returns(self) -> Float64s:
        """Return of each trajectory, [S]."""
        return np.array([t.return_ for t in self.trajectories], dtype=np.float64)

    @cached_property
    def group(self) -> Int64s:
        """Number of each trajectory's rollout group, [S]; equal for members of one group."""
        names = [t.group_id for t in self.trajectories]
        return np.unique(names, return_inverse=True)[1].astype(np.int64).reshape(len(names))

    @cached_property
    def length(self) -> Int64s:
        """Number of tokens of each trajectory that the policy is trained on, [S]; 0 is possible."""
        return np.array([int(t.learned_mask.sum()) for t in self.trajectories], dtype=np.int64)

    @cached_property
    def sequence(self) -> Int64s:
        """Number of each token's trajectory, [T]."""
        return np.repeat(np.arange(len(self.trajectories)), [len(t) for t in self.trajectories])

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """Tokens that the policy sampled and is trained on, [T]."""
        return np.concatenate([np.zeros(0, dtype=np.bool_), *(t.learned_mask for t in self.trajectories)])

    @cached_property
    def logp_behaviour(self) -> Float64s:
        """Log-probability of each token under the policy that sampled it, [T]; without meaning off the mask."""
        rows = [t.logp_behaviour.astype(np.float64) for t in self.trajectories]
        return np.concatenate([np.zeros(0), *rows])

    @cached_property
    def version(self) -> Int64s:
        """Policy version that sampled each token, [T]; without meaning off the mask."""
        rows = [t.policy_version.astype(np.int64) for t in self.trajectories]
        return np.concatenate([np.zeros(0, dtype=np.int64), *rows])

    @cached_property
    def lag(self) -> Int64s:
        """Policy lag of each token, in versions, [T]; 0 off the mask."""
        return np.where(self.mask, self.current_version - self.version, 0)

    @cached_property
    def turn(self) -> Int64s:
        """Index of each token's turn in its trajectory, [T]; without meaning off the mask."""
        rows = [t.action_turn_index().astype(np.int64) for t in self.trajectories]
        return np.concatenate([np.zeros(0, dtype=np.int64), *rows])

    @cached_property
    def reward(self) -> Float64s:
        """Reward at each token, [T]; those of a trajectory add up to its return."""
        return np.concatenate([np.zeros(0), *(t.reward_per_token() for t in self.trajectories)])

    def per_trajectory(self, tokens: Float64s) -> Float64s:
        """Return the sum of numbers of tokens over the mask of each trajectory, [S]."""
        counted = np.where(self.mask, tokens, 0.0)
        sums: Float64s = np.bincount(self.sequence, weights=counted, minlength=len(self.trajectories)).astype(
            np.float64
        )
        return sums


@dataclass(frozen=True, eq=False)
class Members:
    """What rewards are composed of: trajectories with the rewards that they have so far."""

    trajectories: Sequence[Trajectory]
    """Members of a rollout group, failed ones left out; `rewards` are those after gates and weights."""
    group: bool
    """Whether they are the whole group; False in evaluations, and where trajectories are trained one by one."""
    updates: int
    """Published updates before the newest token, to change rewards during training."""


@dataclass(frozen=True, eq=False)
class Formula:
    """A function of the user's, with its settings."""

    place: str
    """Section of the run file that names it."""
    kind: str
    function: Callable[..., Any]
    settings: BaseModel | None
    digest: str
    """Hash of its file; "" if a module has none."""

    def __call__(self, view: Any) -> Any:
        """Return what the function returns.

        Raises:
            FormulaError: the function raised an exception; the text has the line of the user's file.
        """
        arguments = (view,) if self.settings is None else (view, self.settings)
        try:
            return self.function(*arguments)
        except FormulaError:
            raise
        except BdbQuit:
            # A person at the debugger wants to end.
            raise
        except Exception as error:
            raise self.refused(f"raised {told(error)}") from error

    def refused(self, why: str) -> FormulaError:
        """Return the error that says what is wrong with the formula."""
        return FormulaError(f"{self.place}: {self.kind} {why}")


def load_formula(config: OwnFormula, place: str) -> Formula:
    """Return the function that a section names, with its settings checked.

    A file is read once in a process, so that all steps are computed with one formula.

    Args:
        place: name of the section in the run file, for errors.

    Raises:
        FormulaError: there is no such file or function, its settings are not those of the section, or the file has
            changed since the run was started.
    """
    path, _, name = config.kind.rpartition(":")
    try:
        module, digest = _module(path)
    except FormulaError as error:
        raise FormulaError(f"{place}.kind is {config.kind!r}: {error}") from error.__cause__
    if config.content and digest and digest != config.content:
        raise FormulaError(
            f"{place}: {path} has changed since the run was started, and what was trained so far had the former one; "
            "put it back, or stop the run and go on with --resume"
        )
    function = getattr(module, name, None)
    if not callable(function):
        there = [
            n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__
        ]
        raise FormulaError(
            f"{place}.kind is {config.kind!r}: {path} has no function {name!r} "
            f"(functions: {', '.join(sorted(there)) or 'none'})"
        )
    return Formula(place, config.kind, function, _settings(config, place, function), digest)


def hashes(config: LearnerConfig) -> dict[str, str]:
    """Load all formulas of the user's own. Return the hashes of their files, by the sections that name them.

    Raises:
        FormulaError: one of them cannot be loaded.
    """
    return {place: load_formula(own, place).digest for place, own in own_formulas(config, "learner")}


def _settings(config: OwnFormula, place: str, function: Callable[..., Any]) -> BaseModel | None:
    """Return the settings of a formula; None if its function takes none.

    Raises:
        FormulaError: the function does not say the type of its settings, or they are not of this type.
    """
    given, kind = config.own_settings, config.kind
    parameters = list(inspect.signature(function).parameters.values())
    if not 1 <= len(parameters) <= 2:
        raise FormulaError(
            f"{place}: {kind} takes {len(parameters)} parameters; a formula takes its view, and its settings if it has "
            "some"
        )
    if len(parameters) == 1:
        if given:
            raise FormulaError(
                f"{place}.{next(iter(given))}: unknown key; {kind} takes no settings. Give it a second parameter with "
                "the type of its settings, or take the key out"
            )
        return None
    try:
        kind_of_settings = get_type_hints(function).get(parameters[1].name)
    except Exception as error:
        raise FormulaError(f"{place}: the types of {kind} cannot be read: {told(error)}") from error
    if not (isinstance(kind_of_settings, type) and issubclass(kind_of_settings, BaseModel)):
        raise FormulaError(
            f"{place}: {kind} does not say what its settings are; write the type behind its second parameter, as "
            f"{parameters[1].name}: Settings, with class Settings(Section)"
        )
    known = list(kind_of_settings.model_fields)
    if unknown := [key for key in given if key not in known]:
        raise FormulaError(
            f"{place}.{unknown[0]}: unknown key (value {given[unknown[0]]!r}); settings of {kind}: "
            f"{', '.join(known) or 'none'}"
        )
    try:
        return kind_of_settings.model_validate(given)
    except ValidationError as error:
        lines = [
            f"{'.'.join([place, *map(str, e['loc'])])}: {e['msg']}, got {e['input']!r}"
            for e in error.errors()
        ]
        raise FormulaError("\n".join(lines)) from None


def file_of(kind: str) -> Path | None:
    """Return the file of the user's own formula; None if there is none that can be read.

    Example:
        >>> file_of("no_such_file.py:loss"), file_of("learner.formulas:loss").name
        (None, 'formulas.py')
    """
    path = kind.rpartition(":")[0]
    if path.endswith(".py"):
        return Path(path) if Path(path).is_file() else None
    _search_here()
    try:
        spec = importlib.util.find_spec(path)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def hash_of(kind: str) -> str:
    """Return a hash of the file of a formula; "" if there is none. What the file imports is not looked at."""
    file = file_of(kind)
    return "" if file is None else _hash(file.read_bytes())


def _hash(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()


def told(error: BaseException) -> str:
    """Return place, type and text of an exception in a user's file, on one line."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    own = Path(__file__).resolve().parents[1]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not frame.filename.startswith("<")
        and not Path(frame.filename).resolve().is_relative_to(own / "learner")
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


@cache
def _module(path: str) -> tuple[ModuleType, str]:
    """Return the module of a path ``my_loss.py`` or ``my.module``, and the hash of the file that it was made of.

    Raises:
        FormulaError: there is none, or it raised an exception when it was imported.
    """
    return _file_module(Path(path)) if path.endswith(".py") else _named_module(path)


def _file_module(path: Path) -> tuple[ModuleType, str]:
    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise FormulaError(f"there is no file {path} (files there: {', '.join(there) or 'none'})")
    digest = _hash(path.read_bytes())
    name = f"offbeat_formula_{path.stem}_{_hash(str(path.resolve()).encode())}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise FormulaError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # Pydantic and dataclasses look up the types of a module by its name.
    sys.modules[name] = module
    # Neighbours of the file are importable, as for a script that Python runs.
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise FormulaError(f"{path} cannot be imported: {told(error)}") from error
    return module, digest


def _named_module(path: str) -> tuple[ModuleType, str]:
    _search_here()
    try:
        module = importlib.import_module(path)
    except Exception as error:
        raise FormulaError(f"module {path} cannot be imported: {told(error)}") from error
    file = getattr(module, "__file__", None)
    return module, _hash(Path(file).read_bytes()) if file else ""


def _search_here() -> None:
    # Roles do not search the working folder first, lest a file there take the place of a library. Here it is the last.
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)

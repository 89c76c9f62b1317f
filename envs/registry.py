"""Finds and makes the suite that the run file names."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.base import Suite
from envs.errors import EnvError, UnknownEnv

BUILT_IN = {
    "reasoning_gym": "envs.reasoning_gym_suite:ReasoningGymSuite",
    "calculator": "envs.calculator:CalculatorSuite",
}


def make_suite(name: str, params: dict[str, Any]) -> Suite:
    """Make the suite called ``name``: a built-in, ``module:attribute`` or ``path/to/file.py:attribute``.

    Raises:
        UnknownEnv: there is no suite of this name; the message names the nearest one.
        EnvError: the suite does not take these ``params``.

    Example:
        >>> make_suite("calculatr", {})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        envs.errors.UnknownEnv: no environment 'calculatr'; did you mean 'calculator'? (built in: ...)
    """
    factory = find_factory(name)
    try:
        return factory(**params)
    except TypeError as error:
        raise EnvError(f"environment {name!r} does not take params {params}: {error}") from error


def find_factory(name: str) -> Callable[..., Suite]:
    """Return the callable that makes the suite of a name; see `make_suite`.

    Raises:
        UnknownEnv: there is no such module, file or callable.
    """
    path, colon, attribute = BUILT_IN.get(name, name).rpartition(":")
    if not colon:
        raise UnknownEnv(
            f"no environment {name!r}{_nearest(name, sorted(BUILT_IN))} (built in: {', '.join(BUILT_IN)}; "
            "your own: module:attribute or path/to/file.py:attribute)"
        )
    module = _load_file(Path(path)) if path.endswith(".py") else _load_module(path, name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        names = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        near = _nearest(attribute, names)
        raise UnknownEnv(f"environment {name!r}: {path} has no callable {attribute!r}{near}")
    found: Callable[..., Suite] = factory
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UnknownEnv(f"environment file {path} does not exist{_nearest(path.name, siblings)}")
    name = f"offbeat_env_{path.resolve().stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownEnv(f"environment file {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickling look the module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            # The module exists, but a module that it imports does not.
            raise
        raise UnknownEnv(f"environment {name!r}: no module {error.name!r}; is it on PYTHONPATH?") from None


def _nearest(word: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""

"""Finds and makes the suite that the run file names."""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.base import Suite
from envs.blame import in_one_line
from envs.errors import EnvError, UnknownEnv

BUILT_IN = {
    "reasoning_gym": "envs.reasoning_gym_suite:ReasoningGymSuite",
    "calculator": "envs.calculator:CalculatorSuite",
}


def make_suite(name: str, params: dict[str, Any]) -> Suite:
    """Make the suite called ``name``: a built-in, ``module:attribute`` or ``path/to/file.py:attribute``.

    Raises:
        UnknownEnv: there is no suite of this name; the message names the nearest one.
        EnvError: the suite does not take these ``params``, or its file or constructor raised an exception.

    Example:
        >>> make_suite("calculatr", {})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        envs.errors.UnknownEnv: no environment 'calculatr'; did you mean 'calculator'? (built in: ...)
    """
    factory = find_factory(name)
    _check_params(name, factory, params)
    try:
        return factory(**params)
    except EnvError:
        raise
    except Exception as error:
        raise EnvError(in_one_line(error, params)) from error


def _check_params(name: str, factory: Callable[..., Suite], params: dict[str, Any]) -> None:
    """Check the names of the parameters against the factory's signature, if it has one.

    Raises:
        EnvError: a parameter is unknown or missing.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    takes = signature.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        for key in params:
            if key not in takes:
                cure = _nearest(key, list(takes)) or f"; it takes {', '.join(takes) or 'no parameters'}"
                raise EnvError(f"environment {name!r} does not take params.{key}{cure}")
    for key, parameter in takes.items():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if needed and key not in params:
            raise EnvError(f"environment {name!r} needs params.{key}; add it to [env.params]")


def find_factory(name: str) -> Callable[..., Suite]:
    """Return the callable that makes the suite of a name; see `make_suite`.

    Raises:
        UnknownEnv: there is no such module, file or callable.
        EnvError: the module or file raised an exception when it was imported.
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
    # Neighbours of the file are importable, as for a script that Python runs.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise EnvError(in_one_line(error)) from error
    return module


def _load_module(path: str, name: str) -> ModuleType:
    # Roles do not search the working folder first, lest a file there take the place of a library. Here it is the last.
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(path)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (path == missing or path.startswith(missing + ".")):
            raise UnknownEnv(f"environment {name!r}: no module {missing!r}; is it on PYTHONPATH?") from None
        raise EnvError(in_one_line(error)) from error


def _nearest(word: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""

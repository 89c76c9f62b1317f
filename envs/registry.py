"""Settings of the environment, and the suite that they name."""

import ast
import inspect
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import Field

from envs.base import Suite
from envs.errors import EnvError, UnknownEnv
from envs.user_code import code_beside_run_file, code_file, in_one_line, load_callable, nearest
from protocol.section import Section


class EnvConfig(Section):
    """Section `[env]` of the run file."""

    name: str
    """Environment: `rows`, `tools`, `agent`, `gymnasium`, `minigrid`, `skyrl_gym`, `textworld`, `openenv`, `remote`,
    `reasoning_gym`, `calculator`, `planted_mistakes`, or your own as `module:attribute` or
    `path/to/file.py:attribute`. Your own is a callable that takes `params` as keyword arguments and returns an
    `envs.base.Suite`. A file is looked for in the working folder, then in the run file's folder. Several environments
    are several tables `[[env]]`, each with `name`, `params`, `weight` and `label`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the suite."""
    content: str = ""
    """Hash of the files that a built-in suite reads. Offbeat fills it in when a run starts, so that an actor that is
    started later refuses changed files."""


BUILT_IN = {
    "reasoning_gym": "envs.reasoning_gym_suite:ReasoningGymSuite",
    "calculator": "envs.calculator:CalculatorSuite",
    "planted_mistakes": "envs.planted:PlantedSuite",
    "several": "envs.several:SeveralSuite",
    "rows": "envs.rows.suite:RowsSuite",
    "tools": "envs.tools.suite:ToolsSuite",
    "agent": "envs.agent.suite:AgentSuite",
    "gymnasium": "envs.gym.suite:GymnasiumSuite",
    "skyrl_gym": "envs.gym.skyrl:SkyrlGymSuite",
    "textworld": "envs.gym.textworld:TextWorldSuite",
    "minigrid": "envs.gym.minigrid:MiniGridSuite",
    "openenv": "envs.openenv:OpenEnvSuite",
    "remote": "envs.remote.suite:RemoteSuite",
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


def beside(name: str, params: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """Return name and params of an environment with the paths by which every role finds its files.

    A file that is not in the working folder is looked for in the run file's folder; see `beside_run_file`.

    Args:
        name: `env.name` of the run file.
        params: `env.params` of the run file.
        folder: folder of the run file.
    """
    if name not in BUILT_IN:
        return code_beside_run_file(name, folder), params
    # A built-in suite knows which of its params are files.
    find_files = getattr(find_factory(name), "find_files", None)
    return name, params if find_files is None else find_files(params, folder)


def fingerprint(name: str, params: dict[str, Any]) -> str:
    """Return a hash of the files that a suite makes its tasks from; "" if it has none.

    A suite in a file of the user's is made from this file. What the file imports is not looked at.
    """
    if (file := Path(code_file(name))).is_file():
        return blake2b(file.read_bytes(), digest_size=8).hexdigest()
    of_files = getattr(find_factory(name), "fingerprint", None) if name in BUILT_IN else None
    return "" if of_files is None else str(of_files(params))


def code_of_solutions(name: str) -> str:
    """Return a hash of the code with which a built-in suite writes its solutions; "" for other suites.

    What the suite's module imports is not looked at.
    """
    if name not in BUILT_IN:
        return ""
    factory = find_factory(name)
    source = Path(inspect.getfile(factory)).read_text(encoding="utf-8")
    return blake2b(solving_code(source, factory.__name__).encode(), digest_size=8).hexdigest()


class _Bare(ast.NodeTransformer):
    """Takes docstrings out of a syntax tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        bare = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if bare else node


def solving_code(source: str, suite: str) -> str:
    """Return what decides the solutions in a module: `demonstration` and `__init__` of a suite, and all that they name.

    Comments, docstrings and line breaks are left out, and so is other code.

    Args:
        source: text of the module.
        suite: name of the suite's class.
    """
    known: dict[str, list[ast.stmt]] = {}
    wanted = ["__init__", "demonstration"]
    nodes = list(_Bare().visit(ast.parse(source)).body)
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name == suite:
            wanted += [base.id for base in node.bases if isinstance(base, ast.Name)]
            # Its methods one by one: as a whole it would be all of them.
            nodes += node.body
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]:
            if name := getattr(target, "name", getattr(target, "id", "")):
                known.setdefault(name, []).append(node)
    code: dict[str, str] = {}
    while wanted:
        name = wanted.pop()
        if name in code or name not in known:
            continue
        code[name] = " ".join(map(ast.dump, known[name]))
        for part in (part for node in known[name] for part in ast.walk(node)):
            if isinstance(part, ast.Name | ast.Attribute):
                wanted.append(part.id if isinstance(part, ast.Name) else part.attr)
    return "\n".join(code[name] for name in sorted(code))


def files_of(name: str, params: dict[str, Any]) -> list[str]:
    """Return the files that a built-in suite makes its tasks and rewards from."""
    files = getattr(find_factory(name), "files", None) if name in BUILT_IN else None
    return [] if files is None else list(files(params))


def content_hash(name: str, params: dict[str, Any]) -> str:
    """Return a hash of the content of these files; "" if there are none.

    Actors whose files differ would give the members of one group different tasks.
    """
    whole = blake2b(digest_size=8)
    paths = [path for path in map(Path, files_of(name, params)) if path.is_file()]
    for path in paths:
        whole.update(blake2b(path.read_bytes()).digest())
    return whole.hexdigest() if paths else ""


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
                cure = nearest(key, list(takes)) or f"; it takes {', '.join(takes) or 'no parameters'}"
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
    place = BUILT_IN.get(name, name)
    if ":" not in place:
        raise UnknownEnv(
            f"no environment {name!r}{nearest(name, sorted(BUILT_IN))} (built in: {', '.join(BUILT_IN)}; "
            "your own: module:attribute or path/to/file.py:attribute)"
        )
    factory: Callable[..., Suite] = load_callable(place, "environment")
    return factory

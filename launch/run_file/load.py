"""Reads a run file: merges it over the files it extends, applies overrides, checks types and rules."""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from actors.config import GeneratorConfig
from envs.errors import EnvError
from envs.registry import beside
from launch.errors import ConfigError
from launch.run_file.described import fitted
from launch.run_file.method import method_file, method_settings, of_method_file, without_method
from launch.run_file.rules import contradictions
from launch.run_file.sections import RunConfig
from launch.run_file.shipped import located

FORM_NAMED_BY = {"env": "name"}
"""Keys that name a table's form in place of `kind`: a different environment has different params."""


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file, or a shipped recipe by name, and all that it extends. Apply overrides, check types and rules.

    An override is ``key.path=value``. The override ``method=NAME`` replaces the method of the file.

    Raises:
        ConfigError: something is wrong; one line per mistake, with field, value seen and cure.
    """
    data, overlay = read(path), _overlay(overrides)
    if "method" in overlay:
        data = with_method(data, overlay.pop("method"), Path("command line"))
    for override in overrides:
        _check_parents(overlay, data, override)
    content = fitted(merge(data, overlay), GeneratorConfig().max_model_len)
    return with_files(check(content, str(path)), located(path).parent)


def with_files(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration with paths by which every role finds the files of the environment.

    Args:
        folder: folder of the run file, in which a file is looked for that is not in the working folder.

    Raises:
        ConfigError: there is no environment of this name.
    """
    try:
        name, params = beside(config.env.name, config.env.params, folder)
    except EnvError as error:
        raise ConfigError(f"env: {error}") from None
    return config.model_copy(update={"env": config.env.model_copy(update={"name": name, "params": params})})


def read(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the content of a run file, merged over its method, and that over the file it extends.

    The file it extends may extend a further file, and have a method of its own. Files may be named as shipped
    recipes, without folder and ending; see `launch.run_file.shipped`.

    Raises:
        ConfigError: a file cannot be read or is not TOML; files extend each other in a circle; there is no such
            method.
    """
    path = located(path)
    own = read_own(path)
    base = _base(path, own.pop("extends", None), extended_by)
    if "method" in own:
        return merge(with_method(base, own.pop("method"), path), own)
    content, demo = of_method_file(path, own)
    return merge(merge(base, content), demo)


def with_method(settings: dict[str, Any], name: Any, source: Path) -> dict[str, Any]:
    """Return settings with a method in place of the one they have; see `launch.run_file.method`.

    Raises:
        ConfigError: there is no such method, or its file sets more than a method.
    """
    path = method_file(name, source)
    return merge(without_method(settings), method_settings(path, read_own(path), source))


def _base(path: Path, base: Any, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    """Return the content of the file that ``path`` extends; empty if it extends none."""
    if base is None:
        return {}
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends is {base!r}; write the name of one file, as a string")
    file, chain = path.parent / base, (*extended_by, path.resolve())
    file = file if file.is_file() else located(Path(base))
    if not file.is_file():
        raise ConfigError(
            f"{path}: extends {base!r}: there is no file {path.parent / base}, and `offbeat recipes` lists no "
            f"such recipe; name a file relative to {path}, or a recipe"
        )
    if file.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, file.resolve()))
        raise ConfigError(f"{path}: extends {base!r} makes a circle: {names}; take one extends out")
    return read(file, chain)


def read_own(path: Path) -> dict[str, Any]:
    """Return the content of this file alone.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a run file, or one of `offbeat recipes`"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` merged into it.

    Tables are merged key by key; anything else is replaced. A table of a different ``kind``, or of a
    different environment, replaces the whole table.

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
    if isinstance(data.get("env"), list):
        data = {**data, "env": {"name": "several", "params": {"environments": data["env"]}}}
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, source) for e in error.errors())) from None
    if problems := list(contradictions(config)):
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return config


def _overlay(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the overrides as one table, to be merged over the file's content."""
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
    return overlay


def _check_parents(overlay: dict[str, Any], data: dict[str, Any], override: str) -> None:
    """Reject overrides that turn a value of the file into a section, unless they give a `kind`."""
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
    """Return the keys on the way to a place in the run file, and the sections that may stand there."""
    names: list[str] = []
    sections: list[type[BaseModel]] = [RunConfig]
    fields: list[FieldInfo] = []
    named = False
    for part in location:
        if not isinstance(part, int):
            forms = [s for s in sections if part in (kind_of(s), s.__name__)]
            # This part names the form that pydantic tried; it is not a key of the file.
            if forms or "[" in part:
                sections = forms or sections
                continue
            # A value has no keys, so this part names the type that pydantic tried.
            if not sections and not named:
                continue
            if not named:
                fields = [s.model_fields[part] for s in sections if part in s.model_fields]
                sections = [s for field in fields for s in sections_in(field.annotation)]
            # In a table of named sections the next part is a name.
            named = not named and any(get_origin(field.annotation) is dict for field in fields)
        names.append(str(part))
    return names, sections


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections in a field's type; several, where the field has several forms."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def kind_of(section: type[BaseModel]) -> str:
    """Return the `kind` of this form of a section, or "" where there is only one form."""
    kind = section.model_fields.get("kind")
    return str(kind.default) if kind is not None else ""

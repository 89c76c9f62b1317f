"""The rates file of `offbeat plan`: reads it, explains its mistakes, and writes it."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launch.errors import ConfigError
from launch.plan.rates import MeasuredRates


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

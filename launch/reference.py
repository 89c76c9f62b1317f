"""Writes docs/configuration.md: every field of the run file, from the configuration classes themselves."""

import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from launch.config import RunConfig

HEAD = """# The run file

One TOML file configures all roles. Any field can be overridden on the command line: `learner.steps=20`.
Unknown keys, wrong types and impossible combinations are refused before anything starts.
This page is generated from the code by `make docs`.
"""


def reference() -> str:
    """The page as Markdown."""
    lines = [HEAD]
    _section(RunConfig, "", lines)
    return "\n".join(lines).rstrip() + "\n"


def _section(model: type[BaseModel], path: str, lines: list[str]) -> None:
    if path:
        lines += [f"## `[{path}]`", "", (model.__doc__ or "").strip().split("\n\n")[0].replace("\n", " "), ""]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    nested: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        nested += [(m, f"{path}.{name}".strip(".")) for m in inner]
        if inner or not path:
            continue
        default = "required" if field.default is PydanticUndefined and not field.default_factory else ""
        if not default:
            value = field.get_default(call_default_factory=True)
            default = f"`{value}`" if value != "" else "empty"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {_type_name(field.annotation)} | {default} | {meaning} |")
    lines.append("")
    for inner_model, inner_path in nested:
        kind = inner_model.model_fields.get("kind")
        if kind is not None:
            inner_path += f'` with `kind = "{kind.default}"'
        _section(inner_model, inner_path, lines)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in typing.get_args(annotation) for m in _models(argument)]


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{a!r}`" for a in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join(_type_name(a) for a in typing.get_args(annotation))
    return (
        getattr(annotation, "__name__", str(annotation))
        if not typing.get_args(annotation)
        else str(annotation)
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")

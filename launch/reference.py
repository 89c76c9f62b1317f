"""Pages of docs/ that are generated from the code: ``python -m launch.reference docs`` writes them.

docs/run/configuration.md is made of the sections of a run file, and the tables of docs/run/metrics.md of the gauges
that the code declares.
"""

import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from broker.status import BROKER, FLEET, HOSTS
from envs.agent.session import GAUGES as AGENT
from envs.gym.suite import GAUGES as GYMNASIUM
from envs.remote.suite import GAUGES as REMOTE
from envs.rows.suite import GAUGES as ROWS
from envs.scoring.scorer import GAUGES as SCORER
from envs.tools.suite import GAUGES as TOOLS
from launch.run_file.load import kind_of, sections_in
from launch.run_file.sections import RunConfig
from learner.gauges import (
    CRITIC,
    ENTROPY,
    EVALUATION,
    EVALUATION_SETS,
    FAMILY,
    HISTOGRAMS,
    METHODS,
    REPLAY,
    ROLLOUT,
    SELECTION,
    UPDATE,
)
from protocol.gauges import ACTOR, ENV, GENERATOR, Gauge

HEAD = """# The run file

One TOML file configures all roles. With `method = "bapo"` at its top it takes a shipped method: the algorithm and what
belongs to it, and nothing else. With `extends` at its top it takes a whole file as base: `"other.toml"` is relative to
this file, and a name without folder and ending, as `"spell_backward"`, is a shipped run file. The file's own settings
win over those of its method, and these over those of its base. Tables are merged key by key, and arrays are replaced.
A table with a different `kind` replaces the whole table, and so does `[env]` with a different `name`. Any field can
be overridden on the command line, by equal rules: `learner.steps=20`, `method=cispo`. Unknown keys, wrong types and
impossible combinations are refused before anything starts (`offbeat check`). Where a
section has several forms, `kind` says which, and each form has its own fields; a table without `kind` has the kind of
the default. [Recipes](../recipes/README.md) are
settings that belong together.
This page is generated from the code by `make docs`.
"""
TABLE = ["| field | type | default | meaning |", "|---|---|---|---|"]


def configuration_page() -> str:
    """Return the page as Markdown."""
    lines = [HEAD]
    forms_seen: dict[tuple[type[BaseModel], ...], str] = {}
    for name, field in RunConfig.model_fields.items():
        # `method` is a line at the top of the file, which the head explains.
        if sections_in(field.annotation):
            _field_section(field, name, lines, forms_seen)
    return "\n".join(lines).rstrip() + "\n"


def _field_section(
    field: FieldInfo,
    path: str,
    lines: list[str],
    seen: dict[tuple[type[BaseModel], ...], str],
    *,
    owner: type[BaseModel] | None = None,
) -> None:
    """Append to ``lines`` the part about a field whose type is a section, or one of several sections."""
    forms = tuple(sections_in(field.annotation))
    if typing.get_origin(field.annotation) is dict:
        path += ".NAME"
    brackets = ("[[", "]]") if _is_array(field.annotation) else ("[", "]")
    lines += [f"## `{brackets[0]}{path}{brackets[1]}`", ""]
    if not kind_of(forms[0]):
        absent = " Absent unless given." if field.default is None else ""
        lines += [_doc(forms[0]) + absent, ""]
        _fields(forms[0], path, lines, seen)
        return
    lines += [
        " ".join(text for text in (_text(field.description), _default_form(field, path, owner)) if text),
        "",
    ]
    if forms in seen:
        lines += [f"The forms of `{seen[forms]}` stand here, too.", ""]
        return
    seen[forms] = f"[{path}]"
    for form in forms:
        lines += [f'### `kind = "{kind_of(form)}"`', "", _doc(form), ""]
        _fields(form, path, lines, seen)


def _fields(
    section: type[BaseModel], path: str, lines: list[str], seen: dict[tuple[type[BaseModel], ...], str]
) -> None:
    """Append to ``lines`` the table of a section's fields, then the sections in it."""
    # What a form has in common with others comes last.
    ordered = sorted(section.model_fields.items(), key=lambda item: item[0] not in section.__annotations__)
    inner = {name: field for name, field in ordered if sections_in(field.annotation)}
    rows = [
        f"| `{name}` | {_type_name(field.annotation)} | {_default(field)} | {_text(field.description)} |"
        for name, field in ordered
        if name != "kind" and _type_name(field.annotation)
    ]
    if rows:
        lines += [*TABLE, *rows, ""]
    for name, field in inner.items():
        _field_section(field, f"{path}.{name}", lines, seen, owner=section)


def _default_form(field: FieldInfo, path: str, owner: type[BaseModel] | None) -> str:
    """Return which form applies where the run file gives none."""
    if field.is_required():
        return "Required."
    default = field.default
    if owner is not None and not any(other.is_required() for other in owner.model_fields.values()):
        # A section may choose the form of a field by others of its fields.
        default = getattr(owner(), path.rpartition(".")[2])
    match default:
        case None | ():
            return "Absent unless given."
        case BaseModel() as form:
            return f'Default: kind "{kind_of(type(form))}".'
        case tuple() as entries:
            kinds = ", ".join(f'"{kind_of(type(entry))}"' for entry in entries)
            return f"An array of tables. Default: one of kind {kinds}."
        case other:
            return f"Default: `{json.dumps(other)}`, no table."


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    match value:
        case None:
            return "absent"
        case "":
            return "empty"
        case Path():
            return f"`{json.dumps(str(value))}`"
        case _:
            return f"`{json.dumps(value)}`"


def _type_name(annotation: Any) -> str:
    """Return a type's name for the table, without sections, which have their own headings."""
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{json.dumps(a)}`" for a in typing.get_args(annotation))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        names = [_type_name(a) for a in typing.get_args(annotation) if a is not types.NoneType]
        return " or ".join(name for name in names if name)
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if sections_in(annotation):
        return ""
    arguments: Sequence[Any] = [a for a in typing.get_args(annotation) if a is not Ellipsis]
    inside = ", ".join(_type_name(a) for a in arguments)
    name = str(getattr(annotation, "__name__", annotation))
    return f"{name} of {inside}" if inside else name


def _is_array(annotation: Any) -> bool:
    return typing.get_origin(annotation) is tuple


def _doc(section: type[BaseModel]) -> str:
    return _text(section.__doc__)


def _text(words: str | None) -> str:
    """Return the text on one line, escaped for a table cell."""
    return " ".join((words or "").split()).replace("|", "\\|")


SECTIONS: dict[str, tuple[str, Mapping[str, Gauge]]] = {
    "rollout": ("", ROLLOUT),
    "update": ("", UPDATE),
    "methods": ("", METHODS),
    "entropy": ("", ENTROPY),
    "critic": ("", CRITIC),
    "replay": ("", REPLAY),
    "family": ("", FAMILY),
    "selection": ("", SELECTION),
    "generator": ("generator/", GENERATOR),
    "actor": ("actor/", ACTOR),
    "env": (ENV, {**ROWS, **TOOLS, **AGENT, **GYMNASIUM, **REMOTE, **SCORER}),
    "broker": ("broker/", BROKER),
    "fleet": ("fleet/", FLEET),
    "hosts": ("hosts/", HOSTS),
    "evaluation": ("", EVALUATION),
    "evaluation_sets": ("", EVALUATION_SETS),
    "histograms": ("histogram/", HISTOGRAMS),
}
"""Sections of the page, each with the prefix of its tags and its gauges."""
_PLACE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def tags() -> list[str]:
    """Return every tag that TensorBoard may show, except the tags of a user's own environments."""
    return [prefix + name for prefix, gauges in SECTIONS.values() for name in gauges]


def fill_tables(page: str) -> str:
    """Return the page with new tables between each ``<!-- table: SECTION -->`` and ``<!-- end -->``.

    Raises:
        KeyError: the page names a section that does not exist.
    """
    return _PLACE.sub(lambda match: _table(match[1]), page)


def _table(section: str) -> str:
    prefix, gauges = SECTIONS[section]
    rows = [f"| `{prefix}{gauge.name}` | {gauge.unit} | {gauge.meaning} |" for gauge in gauges.values()]
    return "\n".join(
        [f"<!-- table: {section} -->", "| tag | unit | meaning |", "|---|---|---|", *rows, "<!-- end -->"]
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "run" / "configuration.md").write_text(configuration_page(), encoding="utf-8")
    metrics = folder / "run" / "metrics.md"
    metrics.write_text(fill_tables(metrics.read_text(encoding="utf-8")), encoding="utf-8")

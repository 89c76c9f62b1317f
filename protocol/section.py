"""The base class of all sections of a run file."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

OWN = "file.py:function"
"""How a formula of the user's own is named, in pages and in errors."""
SHIPPED = "[shipped]"
"""Tag of the forms that Offbeat ships. Its brackets keep it out of errors, which name keys of the run file only."""


def form_of(section: Any) -> str:
    """Return whether the section of a form, or its content, is a shipped one or the user's own.

    Example:
        >>> form_of({"kind": "clip"}), form_of({"kind": "my_loss.py:soft_gate"}), form_of({})
        ('[shipped]', 'file.py:function', '[shipped]')
    """
    kind = section.get("kind") if isinstance(section, dict) else getattr(section, "kind", None)
    return OWN if isinstance(kind, str) and ":" in kind else SHIPPED


class Section(BaseModel):
    """Base of a section. It is strict: unknown keys, wrong types, NaN and infinity are errors.

    Where a table inside a section has several forms, `kind` names the form. A table without `kind` has the
    kind of the field's default.

    Example:
        >>> from typing import Annotated, Literal
        >>> from pydantic import Field
        >>> class Clip(Section):
        ...     kind: Literal["clip"] = "clip"
        ...     high: float = 0.2
        >>> class Lag(Section):
        ...     kind: Literal["lag"] = "lag"
        >>> class Objective(Section):
        ...     surrogate: Annotated[Clip | Lag, Field(discriminator="kind")] = Clip()
        >>> Objective.model_validate({"surrogate": {"high": 0.5}}).surrogate
        Clip(kind='clip', high=0.5)
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _default_kinds(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        for name, field in cls.model_fields.items():
            kind = getattr(field.default, "kind", None)
            if kind is not None and isinstance(data.get(name), dict):
                filled[name] = {"kind": kind, **data[name]}
        return filled

    def contradictions(self, field: str) -> Iterator[str]:
        """Yield a line for each value of this section that another value of it forbids: field, value seen, cure.

        A section with such rules has its own form of this method. The rule stands beside the fields, and unlike a
        validator it sees all of them, and is told under which name they stand in the run file.

        Args:
            field: name of the section in the run file, for example "learner.algorithm.surrogate".
        """
        del field
        return iter(())

    def all_contradictions(self, field: str = "") -> Iterator[str]:
        """Yield the `contradictions` of this section and of all sections in it. The whole run file has no name.

        Example:
            >>> class Interval(Section):
            ...     low: float = 0.5
            ...     high: float = 2.0
            ...     def contradictions(self, field):
            ...         if self.low >= self.high:
            ...             yield f"{field}.low is {self.low:g}, not below high {self.high:g}; lower low"
            >>> class Objective(Section):
            ...     corrections: tuple[Interval, ...] = ()
            >>> list(Objective(corrections=(Interval(), Interval(low=3.0))).all_contradictions("objective"))
            ['objective.corrections.1.low is 3, not below high 2; lower low']
        """
        for place, section in self.all_sections(field):
            yield from section.contradictions(place)

    def all_sections(self, field: str) -> Iterator[tuple[str, "Section"]]:
        """Yield this section and all sections in it, each with its name in the run file.

        Args:
            field: name of this section; the whole run file has none.
        """
        yield field, self
        for name in type(self).model_fields:
            yield from _of_value(getattr(self, name), f"{field}.{name}" if field else name)

    def with_sections(self, change: Callable[["Section"], "Section"]) -> Self:
        """Return this section with every section in it, and itself, replaced by what a function returns for it.

        Tables of named sections stay as they are.
        """
        found = {name: getattr(self, name) for name in type(self).model_fields}
        update = {name: _changed(value, change) for name, value in found.items()}
        changed = {name: value for name, value in update.items() if value != found[name]}
        return change(self.model_copy(update=changed) if changed else self)  # type: ignore[return-value]


def _of_value(value: Any, field: str) -> Iterator[tuple[str, Section]]:
    """Yield the sections in a value, which may hold several of them."""
    if isinstance(value, Section):
        yield from value.all_sections(field)
        return
    parts = (
        value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, tuple) else {}
    )
    for key, part in parts.items():
        yield from _of_value(part, f"{field}.{key}")


def _changed(value: Any, change: Callable[[Section], Section]) -> Any:
    if isinstance(value, tuple):
        return tuple(_changed(part, change) for part in value)
    return value.with_sections(change) if isinstance(value, Section) else value

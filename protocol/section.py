"""The base class of all sections of a run file."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


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

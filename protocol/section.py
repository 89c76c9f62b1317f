"""The base class of all sections of a run file."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of a section. It is strict: unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

"""What every section of a run file has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Strict: unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

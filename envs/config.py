"""Settings of the task."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class EnvConfig(BaseModel):
    """`[env]` of the run file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    name: str
    """`reasoning_gym`, `calculator`, or your own as `module:attribute` or `path/to/file.py:attribute`: a
    callable that takes `params` as keyword arguments and returns a `envs.base.Suite`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the suite."""

"""Settings of the task."""

from typing import Any

from pydantic import Field

from protocol.section import Section


class EnvConfig(Section):
    """`[env]` of the run file."""

    name: str
    """`reasoning_gym`, `calculator`, or your own as `module:attribute` or `path/to/file.py:attribute`: a
    callable that takes `params` as keyword arguments and returns a `envs.base.Suite`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the suite."""

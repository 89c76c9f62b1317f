"""Settings of the environment."""

from typing import Any

from pydantic import Field

from protocol.section import Section


class EnvConfig(Section):
    """Section `[env]` of the run file."""

    name: str
    """Environment: `rows`, `tools`, `agent`, `gymnasium`, `minigrid`, `skyrl_gym`, `textworld`, `openenv`, `remote`,
    `reasoning_gym`, `calculator`, or your own as `module:attribute` or `path/to/file.py:attribute`. Your own is a
    callable that takes `params` as keyword arguments and returns an `envs.base.Suite`. A file is looked for in the
    working folder, then in the run file's folder. Several environments are several tables `[[env]]`, each with `name`,
    `params`, `weight` and `label`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the suite."""
    content: str = ""
    """Hash of the files that a built-in suite reads. Offbeat fills it in when a run starts, so that an actor that is
    started later refuses changed files."""

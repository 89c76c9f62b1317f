"""What is launched: a run file with its overrides, and what engines without a shared file system have to carry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launch.run_file.sections import RunConfig

GENERATORS, ACTORS = "generators", "actors"


@dataclass(frozen=True)
class Job:
    """What is launched."""

    run_file: str
    """The run file, as each command line names it."""
    overrides: tuple[str, ...]
    config: RunConfig
    content: Mapping[str, str] = field(default_factory=dict)
    """Text of the merged run file and of the files beside it, by name, for engines that carry them."""
    shared: tuple[int, int] = (0, 0)
    """Bytes of shared memory of the head, and of a host with a generator; for engines that set it."""

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def run_folder(self) -> str:
        """Folder of the run, if no earlier one has its name."""
        return str(self.config.run.dir / self.config.run.name)


def launch_folder(config: RunConfig) -> Path:
    """Return the folder of scripts, tickets and logs of a launched run. It is beside the run folder, which comes later.

    Example:
        >>> from launch.run_file.load import check
        >>> launch_folder(check({"model": {"path": "m"}, "env": {"name": "calculator"}}, "a test")).as_posix()
        'runs/run.launch'
    """
    return folder_beside(config.run.dir / config.run.name)


def folder_beside(run: Path) -> Path:
    """Return the launch folder of a run folder."""
    return run.parent / f"{run.name}.launch"

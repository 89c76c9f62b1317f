"""The site file: a short TOML file that says where an engine is to run a fleet. Each engine has a section."""

import difflib
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from launch.errors import ConfigError
from protocol.section import Section

MAX_HOSTS = 1_000
WORD = r"^[A-Za-z0-9][A-Za-z0-9@._:/,=+-]*$"
"""Values that become options of an engine: one word, so that nothing else can be in it."""
OPTIONAL_WORD = r"^$|" + WORD
SshName = Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""What `offbeat ticket --host` takes, behind USER@."""


class SlurmSite(Section):
    """`[slurm]`: a cluster that Slurm schedules."""

    partition: str = Field("", pattern=OPTIONAL_WORD)
    """Partition of generators and actors, which may preempt them. Empty: the cluster's default."""
    head_partition: str = Field("", pattern=OPTIONAL_WORD)
    """Partition of the head. Empty: that of generators and actors."""
    account: str = Field("", pattern=OPTIONAL_WORD)
    """Account that the jobs are charged to. Empty: the user's default."""
    gres: str = Field("", pattern=OPTIONAL_WORD)
    """GPUs of each generator, for example gpu:1. Empty: none."""
    head_gres: str = Field("", pattern=OPTIONAL_WORD)
    """GPUs of the head. Empty: none."""
    time: str = Field("", pattern=OPTIONAL_WORD)
    """Time limit of each job, for example 12:00:00. Empty: the partition's."""
    cpus: int = Field(1, ge=1)
    """Cores of each generator and of each task of actors."""
    head_cpus: int = Field(2, ge=1)
    """Cores of the head."""
    setup: str = ""
    """Shell lines that each job runs first, for example "module load cuda"."""
    generators: int = Field(1, ge=0, le=MAX_HOSTS)
    """Generators at the start. Each is a task of its array."""
    actors: int = Field(1, ge=0, le=MAX_HOSTS)
    """Tasks of actors at the start."""
    actors_per_task: int = Field(2, ge=1)
    """Actors in each task."""
    largest: int = Field(64, ge=1, le=MAX_HOSTS)
    """Most generators, and most tasks of actors, that `offbeat scale` may ask for."""
    grace_s: float = Field(60.0, ge=1)
    """Longest drain of a preempted task. It has to fit into the partition's GraceTime."""
    port: int = Field(5755, ge=1024, le=65_000)
    """Port of the broker on the head's node. The next two are those of `/status` and of the weights."""


class SshSite(Section):
    """`[ssh]`: hosts that are reached by ssh. The head is the machine where `offbeat launch` runs."""

    hosts: tuple[SshName, ...] = Field((), strict=False)
    """Names that ssh knows, with USER@ if needed, each a host of its own. A port belongs into ssh's configuration."""
    folder: str = Field("offbeat", pattern=r"^[A-Za-z0-9~._/-]+$")
    """Folder on each host in which `offbeat host` runs."""
    setup: str = ""
    """Shell lines that each host runs first, for example ". venv/bin/activate"."""
    address: str = Field("", pattern=OPTIONAL_WORD)
    """Name or address by which hosts reach the head. Empty: the head's name."""
    grace_s: float = Field(90.0, ge=1)
    """Longest drain of a host."""
    port: int = Field(5755, ge=1024, le=65_000)
    """Port of the broker on the head. The next two are those of `/status` and of the weights."""


class SystemdSite(Section):
    """`[systemd]`: units for a head and for hosts that systemd starts."""

    user: str = Field("", pattern=OPTIONAL_WORD)
    """User of the services. Empty: the units are for a user's own systemd."""
    folder: str = Field("/var/lib/offbeat", pattern=r"^/[A-Za-z0-9._/-]+$")
    """Working folder, which has the run file and the tickets."""
    program: str = Field("/usr/local/bin/offbeat", pattern=r"^/[A-Za-z0-9._/-]+$")
    """The command `offbeat`."""
    grace_s: float = Field(90.0, ge=1)
    """Longest drain of a host."""
    address: str = Field("", pattern=OPTIONAL_WORD)
    """Name or address by which hosts reach the head. Empty: the head's name."""
    port: int = Field(5755, ge=1024, le=65_000)
    """Port of the broker on the head. The next two are those of `/status` and of the weights."""


class Site(Section):
    """The whole site file."""

    slurm: SlurmSite = SlurmSite()
    ssh: SshSite = SshSite()
    systemd: SystemdSite = SystemdSite()


def read_site(path: Path | None) -> Site:
    """Read a site file; None: all defaults.

    Raises:
        ConfigError: it cannot be read, or a field is unknown or wrong; one line each.
    """
    if path is None:
        return Site()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--site {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--site {path}: not valid TOML: {error}") from None
    try:
        return Site.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(one, path) for one in error.errors())) from None


def _explain(error: object, path: Path) -> str:
    assert isinstance(error, dict)
    *above, last = (str(part) for part in error["loc"])
    place = ".".join([*above, last])
    if error["type"] != "extra_forbidden":
        return f"--site {path}: {place}: {error['msg']}, got {error['input']!r}"
    sections: dict[str, type[Section]] = {"slurm": SlurmSite, "ssh": SshSite, "systemd": SystemdSite}
    section = sections.get(above[0]) if above else Site
    known = sorted(section.model_fields if section is not None else sections)
    near = difflib.get_close_matches(last, known, n=1)
    cure = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
    return f"--site {path}: {place}: unknown field; {cure}"

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


QUANTITY = r"^([0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?)?$"
"""What Kubernetes takes for cores and bytes."""
LABEL = r"^([A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?)?$"
Label = Annotated[str, Field(pattern=LABEL)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]*[A-Za-z0-9_-]$")]


class KubernetesSite(Section):
    """`[kubernetes]`: a cluster that `kubectl` reaches."""

    image: str = Field("", pattern=OPTIONAL_WORD)
    """Image with Offbeat, as `make image` builds it. Required."""
    pull_secret: str = Field("", pattern=LABEL)
    """Secret with which the image is pulled. Empty: none."""
    context: str = Field("", pattern=OPTIONAL_WORD)
    """Context of kubectl. Empty: its current one."""
    namespace: str = Field("", pattern=LABEL)
    """Namespace of all objects. Empty: that of the context."""
    generators: int = Field(1, ge=0, le=MAX_HOSTS)
    """Pods with a generator at the start."""
    actors: int = Field(1, ge=0, le=MAX_HOSTS)
    """Pods with actors at the start."""
    actors_per_pod: int = Field(2, ge=1)
    """Actors in each pod of actors."""
    gpus: int = Field(0, ge=0)
    """GPUs of each generator's pod."""
    head_gpus: int = Field(0, ge=0)
    """GPUs of the head."""
    gpu_resource: str = Field("nvidia.com/gpu", pattern=WORD)
    """Resource that GPUs are counted by."""
    cpus: str = Field("", pattern=QUANTITY)
    """Cores of a generator's pod, for example "4". Empty: no request."""
    memory: str = Field("", pattern=QUANTITY)
    """Memory of a generator's pod, request and limit, for example "32Gi". It includes its shared memory."""
    head_cpus: str = Field("", pattern=QUANTITY)
    """Cores of the head."""
    head_memory: str = Field("", pattern=QUANTITY)
    """Memory of the head, request and limit. It includes its shared memory."""
    actor_cpus: str = Field("", pattern=QUANTITY)
    """Cores of a pod of actors."""
    actor_memory: str = Field("", pattern=QUANTITY)
    """Memory of a pod of actors, request and limit."""
    shm: str = Field("", pattern=QUANTITY)
    """Shared memory of a generator's pod. Empty: computed from the model."""
    head_shm: str = Field("", pattern=QUANTITY)
    """Shared memory of the head. Empty: computed from the model and `learner.keep_versions`."""
    volume: str = Field("20Gi", pattern=QUANTITY, min_length=1)
    """Size of the head's volume, with the run folder and the caches."""
    storage_class: str = Field("", pattern=LABEL)
    """Storage class of that volume. Empty: the cluster's default."""
    data_claim: str = Field("", pattern=LABEL)
    """Claim of a volume with models and data, mounted at /data in all pods, for reading. Empty: none."""
    files: tuple[FileName, ...] = Field((), strict=False)
    """Files beside the run file that it names, such as "rewards.py". They are carried in a ConfigMap, 1 MB in all."""
    env_secret: str = Field("", pattern=LABEL)
    """Secret whose entries become variables of all pods, for example HF_TOKEN. Empty: none."""
    node_selector: dict[Label, Label] = Field(default_factory=dict)
    """Labels of nodes for generators and actors."""
    head_node_selector: dict[Label, Label] = Field(default_factory=dict)
    """Labels of nodes for the head."""
    tolerations: tuple[Label, ...] = Field((), strict=False)
    """Keys of taints that generators and actors tolerate, for example those of preemptible nodes."""
    head_tolerations: tuple[Label, ...] = Field((), strict=False)
    """Keys of taints that the head tolerates."""
    monitor: bool = False
    """Whether to make a ServiceMonitor, for clusters with the Prometheus operator."""
    grace_s: int = Field(90, ge=1)
    """Longest drain of a host."""
    port: int = Field(5755, ge=1024, le=65_000)
    """Port of the broker. The next two are those of `/status` and of the weights."""


class RaySite(Section):
    """`[ray]`: a cluster of Ray. The head is the machine where `offbeat launch` runs, a node of the cluster or not."""

    cluster: str = Field("auto", pattern=WORD)
    """Address of the cluster, for example 10.0.0.5:6379. "auto": the one of this machine."""
    hosts: int = Field(1, ge=0, le=MAX_HOSTS)
    """Hosts at the start. Each is an actor of Ray."""
    generators_per_host: int = Field(1, ge=0)
    """Generators of each host."""
    actors_per_host: int = Field(2, ge=0)
    """Actors of each host."""
    cpus: float = Field(1.0, ge=0)
    """Cores that Ray counts for each host."""
    gpus: float = Field(0.0, ge=0)
    """GPUs of each host. Ray shows them to it."""
    resources: dict[Label, float] = Field(default_factory=dict)
    """Resources of your own that a node has to have, for example {gpu_host = 1}."""
    folder: str = Field("offbeat", pattern=r"^[A-Za-z0-9~._/-]+$")
    """Folder on each node in which hosts run."""
    setup: str = ""
    """Shell lines that each host runs first, for example ". venv/bin/activate"."""
    address: str = Field("", pattern=OPTIONAL_WORD)
    """Name or address by which hosts reach the head. Empty: the head's name."""
    grace_s: float = Field(90.0, ge=1)
    """Longest drain of a host."""
    port: int = Field(5755, ge=1024, le=65_000)
    """Port of the broker on the head. The next two are those of `/status` and of the weights."""


class Site(Section):
    """The whole site file."""

    slurm: SlurmSite = SlurmSite()
    ssh: SshSite = SshSite()
    systemd: SystemdSite = SystemdSite()
    kubernetes: KubernetesSite = KubernetesSite()
    ray: RaySite = RaySite()


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
    sections: dict[str, type[Section]] = {name: type(section) for name, section in Site()}
    section = sections.get(above[0]) if above else Site
    known = sorted(section.model_fields if section is not None else sections)
    near = difflib.get_close_matches(last, known, n=1)
    cure = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
    return f"--site {path}: {place}: unknown field; {cure}"

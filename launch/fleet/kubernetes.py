r"""The objects of a run on Kubernetes: a StatefulSet for the head, a Deployment each for generators and actors. Pure.

``objects(job, site) -> {file: [object, ...]}``; the chart in launch/kubernetes makes the same ones. Tickets are Secrets
that the client makes once the head runs; objects only name them. Kubernetes starts every container of these workloads
again, whatever its exit code. That is what a head or host with 75 asks for. One with 0 or 65 is done, so its container
stays and does nothing, until a launch brings another run file or ticket, or the workload is scaled or deleted.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.errors import COME_BACK, DONE, FINAL, ConfigError
from launch.fleet.job import ACTORS, GENERATORS, Job
from launch.fleet.probe import OVER
from launch.fleet.site import KubernetesSite
from launch.preflight.memory import SHARED_MARGIN, in_mebibytes
from protocol.security.http import SERVER_NAME

Object = dict[str, Any]

RUN_FILE = "run.toml"
CONFIG_FOLDER, WORK_FOLDER, TICKET_FOLDER, DATA_FOLDER = "/config", "/work", "/run/offbeat", "/data"
TICKET = f"{TICKET_FOLDER}/ticket"
VALUES = "values.yaml"
"""Values of the Helm chart; no object."""
HOME = f"{WORK_FOLDER}/home"
LABELS = {GENERATORS: "g", ACTORS: "a"}
"""Labels of tickets, with which the names of hosts begin."""
USER = 10_001
"""User and group of all processes, and owner of the volumes."""
HEAD_GRACE_S = 300
"""Time for the learner's last checkpoint."""
MARGIN_S = 10
"""Time between the end of a host's grace and its kill."""
LOOK_S = 15
"""Time between two looks of a container that is done for what a new launch has brought."""
PROBE_S, PROBE_TIMEOUT_S, PROBE_FAILURES = 20, 15, 3
LOST_NODE_S = 30
"""Time after which pods of generators and actors leave a node that does not answer; Kubernetes' own is 300 s."""
SECRET_MODE = 0o440
"""A Secret's file is of root, and its group is that of the pod."""
RUN_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,25}[a-z0-9])?")
"""Names of runs that names of pods can be made of."""
CONFIG_MAP_BYTES = 1_000_000
"""Longest content of a ConfigMap, a little below Kubernetes' own limit."""


def name_of(job: Job, part: str = "") -> str:
    """Return the name of an object of a run.

    Raises:
        ConfigError: Kubernetes cannot have the name.
    """
    if not RUN_NAME.fullmatch(job.name):
        raise ConfigError(
            f"run.name is {job.name!r}, and Kubernetes names its objects by it; write at most 27 lower-case letters, "
            "digits and dashes, with a letter or digit at both ends"
        )
    return "-".join(["offbeat", job.name, *([part] if part else [])])


def labels_of(run: str, part: str = "") -> dict[str, str]:
    """Return the labels by which the objects of a run are found.

    Example:
        >>> labels_of("r", "head")["app.kubernetes.io/component"]
        'head'
    """
    labels = {"app.kubernetes.io/name": "offbeat", "app.kubernetes.io/instance": run}
    return labels | ({"app.kubernetes.io/component": part} if part else {})


def objects(job: Job, site: KubernetesSite) -> dict[str, list[Object]]:
    """Return the objects of a run, by file, in the order in which they are applied.

    Raises:
        ConfigError: a name or a file does not fit into Kubernetes, or the site names no image.
    """
    if not site.image:
        raise ConfigError(
            "kubernetes.image is empty; name the image of `make image` in your registry, for example "
            '"registry.example/offbeat:1"'
        )
    too_long = sum(len(text.encode()) for text in job.content.values())
    if too_long > CONFIG_MAP_BYTES:
        raise ConfigError(
            f"the run file and kubernetes.files have {too_long:,} bytes, and a ConfigMap holds {CONFIG_MAP_BYTES:,}; "
            "put large files on a volume, and name it in kubernetes.data_claim"
        )
    files = {
        "run.yaml": [_account(job), _config_map(job)],
        "head.yaml": [_service(job, site), _head(job, site)],
        "hosts.yaml": [
            made
            for role, count in ((GENERATORS, site.generators), (ACTORS, site.actors))
            for made in (_hosts(job, site, role, count), _budget(job, role))
        ],
    }
    if site.monitor:
        files["monitor.yaml"] = [_monitor(job)]
    return files


def _object(job: Job, api: str, kind: str, name: str, part: str = "", **content: Any) -> Object:
    metadata = {"name": name, "labels": labels_of(job.name, part)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _account(job: Job) -> Object:
    return _object(job, "v1", "ServiceAccount", name_of(job), automountServiceAccountToken=False)


def _config_map(job: Job) -> Object:
    return _object(job, "v1", "ConfigMap", name_of(job, "run"), data=dict(job.content))


def _service(job: Job, site: KubernetesSite) -> Object:
    names = {"broker": site.port, "status": site.port + 1, "weights": site.port + 2}
    return _object(
        job,
        "v1",
        "Service",
        name_of(job),
        "head",
        spec={
            "selector": labels_of(job.name, "head"),
            # Hosts that wait for the head, and the probe, need it before it is ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": name, "port": port, "targetPort": port} for name, port in names.items()],
        },
    )


def _head(job: Job, site: KubernetesSite) -> Object:
    part = "head"
    container = {
        "command": ["tini", "--", "/bin/sh", "-c", _head_script(job), part],
        "args": _head_words(job, site),
        "ports": [
            {"name": name, "containerPort": site.port + number}
            for number, name in enumerate(("broker", "status", "weights"))
        ],
        "readinessProbe": _probe(job, ["head", f"{WORK_FOLDER}/runs/{job.name}"]),
        "resources": _resources(site, site.head_cpus, site.head_memory, site.head_gpus),
    }
    claim = {
        "metadata": {"name": "work", "labels": labels_of(job.name, part)},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            **({"storageClassName": site.storage_class} if site.storage_class else {}),
            "resources": {"requests": {"storage": site.volume}},
        },
    }
    shared = site.head_shm or in_mebibytes(job.shared[0])
    return _object(
        job,
        "apps/v1",
        "StatefulSet",
        name_of(job, part),
        part,
        spec={
            "serviceName": name_of(job),
            "replicas": 1,
            "selector": {"matchLabels": labels_of(job.name, part)},
            "template": _pod(job, site, part, container, shared, HEAD_GRACE_S, site.head_node_selector),
            "volumeClaimTemplates": [claim],
        },
    )


def _head_script(job: Job) -> str:
    over = "copy what you need, then end all pods with offbeat launch --stop, or launch a changed run file"
    return f"""result={WORK_FOLDER}/runs/{job.name}/result.json
{_looks_at(f"{CONFIG_FOLDER}/{RUN_FILE}")}
# A run that is over stays so until a new launch.
if ! grep -Eq '"run": *"over"' "$result" 2>/dev/null || [ {CONFIG_FOLDER}/{RUN_FILE} -nt "$result" ]; then
offbeat train {CONFIG_FOLDER}/{RUN_FILE} "$@" --again &
{WAITS}
fi
{_stays(over)}
"""


def _host_script() -> str:
    over = "this pod waits for another ticket, which a new launch makes; offbeat launch --stop ends it"
    return f"""{_looks_at(TICKET)}
offbeat host "$@" &
{WAITS}
{_stays(over)}
"""


def _looks_at(file: str) -> str:
    """Return the lines with which a script begins: they note what a file holds, for `_stays`."""
    return f"""mkdir -p "$HOME"
rm -f "$HOME/{OVER}"
file={file} rc={DONE}
before=$(cksum <"$file")
# The process drains at SIGTERM, so the shell hands it on, and waits.
trap 'kill -TERM $! 2>/dev/null || exit {COME_BACK}' TERM"""


WAITS = "while kill -0 $! 2>/dev/null; do wait $!; rc=$?; done"
"""Line of a script that waits for the process in the background. A signal interrupts `wait`."""


def _stays(over: str) -> str:
    """Return the lines of a script that end as the process has, or stay until the file of `_looks_at` is another one.

    Args:
        over: what to do, in words.
    """
    return f"""case $rc in {DONE} | {FINAL}) ;; *) exit $rc ;; esac
# Kubernetes would start this container again, whatever its exit code, and load all of it.
trap - TERM
echo "nothing is left to do (code $rc): {over}" >"$HOME/{OVER}"
cat "$HOME/{OVER}"
while [ "$(cksum <"$file")" = "$before" ]; do sleep {LOOK_S}; done
exit {COME_BACK}"""


def _head_words(job: Job, site: KubernetesSite) -> list[str]:
    """Return the overrides of the head's command: the user's own, and what pods need."""
    # Kubernetes would replace $(NAME) by a variable.
    own = [word.replace("$(", "$$(") for word in job.overrides]
    return [
        *own, f"run.name={job.name}", f"run.dir={WORK_FOLDER}/runs", f"broker.endpoint=tcp://0.0.0.0:{site.port}",
        f"broker.http=0.0.0.0:{site.port + 1}", f"weights.http=0.0.0.0:{site.port + 2}",
        f"weights.advertised_host={name_of(job)}", "generator.count=0", "actor.count=0",
    ]  # fmt: skip


def _hosts(job: Job, site: KubernetesSite, role: str, count: int) -> Object:
    generators = role == GENERATORS
    counts = ["--generators", "1", "--actors", "0"]
    if not generators:
        counts = ["--generators", "0", "--actors", str(site.actors_per_pod)]
    container = {
        "command": ["tini", "--", "/bin/sh", "-c", _host_script(), "host"],
        "args": [
            *counts, "--grace", f"{site.grace_s:g}", f"run.dir={WORK_FOLDER}/runs",
            "generator.advertised_host=$(POD_IP)",
        ],
        "readinessProbe": _probe(job, ["host", f"{WORK_FOLDER}/runs/{job.name}"]),
        "resources": _resources(
            site,
            site.cpus if generators else site.actor_cpus,
            site.memory if generators else site.actor_memory,
            site.gpus if generators else 0,
        ),
    }  # fmt: skip
    # Actors share no weights.
    shared = (site.shm or in_mebibytes(job.shared[1])) if generators else in_mebibytes(SHARED_MARGIN)
    grace_s = int(site.grace_s) + MARGIN_S
    return _object(
        job,
        "apps/v1",
        "Deployment",
        name_of(job, role),
        role,
        spec={
            "replicas": count,
            "selector": {"matchLabels": labels_of(job.name, role)},
            # A further pod would wait for a GPU that the old one has.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": _pod(job, site, role, container, shared, grace_s, site.node_selector),
        },
    )


def _budget(job: Job, role: str) -> Object:
    return _object(
        job,
        "policy/v1",
        "PodDisruptionBudget",
        name_of(job, role),
        role,
        spec={
            "maxUnavailable": 1,
            # A pod that is not ready, because its host is done, must not keep a node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels_of(job.name, role)},
        },
    )


def _pod(
    job: Job,
    site: KubernetesSite,
    part: str,
    container: Object,
    shared: str,
    grace_s: int,
    nodes: Mapping[str, str],
) -> Object:
    host = part != "head"
    volumes, mounts = _volumes(job, site, part, shared)
    whole = {
        "name": "offbeat",
        "image": site.image,
        "workingDir": WORK_FOLDER,
        "env": _environment(host=host),
        **({"envFrom": [{"secretRef": {"name": site.env_secret}}]} if site.env_secret else {}),
        **container,
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The reason of a host that ended is in its last lines.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    specification: Object = {
        "serviceAccountName": name_of(job),
        "automountServiceAccountToken": False,
        # Variables of services would look like settings of Offbeat.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [whole],
        "volumes": volumes,
    }
    if tolerations := _tolerations(site.tolerations if host else site.head_tolerations, host=host):
        specification["tolerations"] = tolerations
    if nodes:
        specification["nodeSelector"] = dict(nodes)
    if site.pull_secret:
        specification["imagePullSecrets"] = [{"name": site.pull_secret}]
    return {"metadata": {"labels": labels_of(job.name, part)}, "spec": specification}


def _volumes(job: Job, site: KubernetesSite, part: str, shared: str) -> tuple[list[Object], list[Object]]:
    """Return the volumes of a pod, and where its container has them."""
    own: dict[str, tuple[Object, str]] = {
        "config": ({"configMap": {"name": name_of(job, "run")}}, CONFIG_FOLDER),
        "shared-memory": ({"emptyDir": {"medium": "Memory", "sizeLimit": shared}}, "/dev/shm"),
        "temporary": ({"emptyDir": {}}, "/tmp"),
        # The head's is the claim of its StatefulSet.
        "work": ({} if part == "head" else {"emptyDir": {}}, WORK_FOLDER),
    }
    if part != "head":
        secret = {"secretName": name_of(job, f"{part}-ticket"), "defaultMode": SECRET_MODE}
        own["ticket"] = ({"secret": secret}, TICKET_FOLDER)
    if site.data_claim:
        claim = {"claimName": site.data_claim, "readOnly": True}
        own["data"] = ({"persistentVolumeClaim": claim}, DATA_FOLDER)
    volumes = [{"name": name, **source} for name, (source, _) in own.items() if source]
    mounts = [
        {"name": name, "mountPath": path, **({"readOnly": True} if name in TO_READ else {})}
        for name, (_, path) in own.items()
    ]
    return volumes, mounts


TO_READ = ("config", "ticket", "data")
"""Volumes that a container cannot write."""


def _environment(*, host: bool) -> list[Object]:
    home = [{"name": "HOME", "value": HOME}]
    if not host:
        return home
    return [
        *home,
        {"name": "OFFBEAT_TICKET", "value": TICKET},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]


def _tolerations(keys: Sequence[str], *, host: bool) -> list[Object]:
    """Return the taints of nodes that a pod tolerates. Hosts do not wait long for a node that does not answer."""
    troubles = ("not-ready", "unreachable") if host else ()
    soon = {"effect": "NoExecute", "tolerationSeconds": LOST_NODE_S}
    return [{"key": key, "operator": "Exists"} for key in keys] + [
        {"key": f"node.kubernetes.io/{trouble}", "operator": "Exists", **soon} for trouble in troubles
    ]


def _probe(job: Job, arguments: list[str]) -> Object:
    """Return a probe by the broker's `/status`. It needs the token, so kubelet cannot ask for itself.

    There is no probe that restarts: the supervisors in the pods start again what dies or hangs.
    """
    return {
        "exec": {"command": ["python", "-m", "launch.fleet.probe", *arguments]},
        "periodSeconds": PROBE_S,
        "timeoutSeconds": PROBE_TIMEOUT_S,
        "failureThreshold": PROBE_FAILURES,
    }


def _resources(site: KubernetesSite, cpus: str, memory: str, gpus: int) -> Object:
    wanted = {name: value for name, value in (("cpu", cpus), ("memory", memory)) if value}
    limits = {"memory": memory} if memory else {}
    if gpus:
        limits[site.gpu_resource] = str(gpus)
    return {key: value for key, value in (("requests", wanted), ("limits", limits)) if value}


def _monitor(job: Job) -> Object:
    secret = name_of(job, "metrics")
    return _object(
        job,
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        name_of(job),
        "head",
        spec={
            "selector": {"matchLabels": labels_of(job.name, "head")},
            "endpoints": [
                {
                    "port": "status",
                    "path": "/metrics",
                    "scheme": "https",
                    "interval": "15s",
                    "authorization": {"credentials": {"name": secret, "key": "token"}},
                    "tlsConfig": {
                        "ca": {"secret": {"name": secret, "key": "ca.crt"}},
                        "serverName": SERVER_NAME,
                    },
                }
            ],
        },
    )


def chart_values(job: Job, site: KubernetesSite) -> Object:
    """Return the values with which the Helm chart makes the same objects: the site's, and what is of the run."""
    left_out = {"context", "namespace", "files"}
    fields = {name: value for name, value in site.model_dump(mode="json").items() if name not in left_out}
    head, host = map(in_mebibytes, job.shared)
    return fields | {
        "run": job.name,
        "content": dict(job.content),
        "overrides": list(job.overrides),
        "shm": site.shm or host,
        "head_shm": site.head_shm or head,
    }


# --- text -------------------------------------------------------------------------------------------------


def to_yaml(documents: list[Object]) -> str:
    """Return objects as a file of YAML documents.

    Example:
        >>> print(to_yaml([{"a": [{"b": "x: y", "c": {}}, 1], "d": "line\\n"}]), end="")
        a:
          - b: "x: y"
            c: {}
          - 1
        d: |
          line
    """
    return "---\n".join("".join(f"{line}\n" for line in _lines(one)) for one in documents)


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/._-]*")
_WORDS_OF_YAML = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
_BLOCK = re.compile(r"(?![ \n])[\x20-\x7e\n\u00a0-\u2027\u202a-\ud7ff]*[\x21-\x7e]\n")
"""Texts that may stand as a block: printable, of whole lines, without an indented first one."""


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _entry(f"{_scalar(key)}:", inner)
    elif isinstance(value, list) and value:
        for inner in value:
            if isinstance(inner, dict | list) and inner:
                first, *rest = _lines(inner)
                yield f"- {first}"
                yield from (f"  {line}" if line else "" for line in rest)
            else:
                yield from _entry("-", inner)
    else:
        yield _scalar(value)


def _entry(head: str, value: Any) -> Iterator[str]:
    if isinstance(value, str) and _BLOCK.fullmatch(value):
        yield f"{head} |"
        yield from (f"  {line}" if line else "" for line in value.removesuffix("\n").split("\n"))
    elif isinstance(value, dict | list) and value:
        yield head
        yield from (f"  {line}" if line else "" for line in _lines(value))
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
        return value
    # Characters that YAML takes only when they are escaped, and JSON would not escape.
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]",
        lambda found: f"\\u{ord(found[0]):04x}",
        json.dumps(value, ensure_ascii=False),
    )

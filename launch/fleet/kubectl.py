"""The client of Kubernetes: `kubectl`. It applies the objects, carries the tickets, scales, drains and deletes."""

import base64
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.errors import ConfigError
from launch.fleet.engines import EngineFailed, Launched, Say, client, record, write_files
from launch.fleet.job import Job, launch_folder
from launch.fleet.kubernetes import (
    DATA_FOLDER,
    HOME,
    LABELS,
    RUN_FILE,
    VALUES,
    WORK_FOLDER,
    labels_of,
    name_of,
)
from launch.fleet.probe import OVER
from launch.fleet.site import KubernetesSite
from launch.fleet.ticket import name_of_host
from launch.fleet.wanted import target
from launch.run_file.load import located, read
from launch.run_file.recipes import to_toml

HEAD_S = 900.0
"""Longest time until the head answers: its image is pulled, its model is fetched."""
TICKET_TRIES, TICKET_WAIT_S = 60, 5.0
LOOK_S = 15.0
STOP_S = 400.0
"""Longest time until all pods are gone. The head's grace is 300 s."""
KINDS = "deployment,poddisruptionbudget,statefulset,service,secret,configmap,serviceaccount"
"""What `offbeat launch --stop` deletes. The claim of the head's volume, with the run folder, stays."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation by which a Deployment that shrinks chooses its pods: the lowest first."""


def carried(run_file: Path, site: KubernetesSite) -> dict[str, str]:
    """Return what the ConfigMap of a run carries: the merged run file, and the files of the site beside it.

    Raises:
        ConfigError: a file cannot be read, or two would have one name.
    """
    content, folder = {RUN_FILE: to_toml(read(run_file))}, located(run_file).parent
    for name in site.files:
        path = folder / name
        if path.name in content:
            raise ConfigError(f"kubernetes.files: {name}: there is a file {path.name} already; rename one")
        try:
            content[path.name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"kubernetes.files: {path}: {error}; only files of text are carried") from None
    return content


def refuse_local_model(path: str) -> None:
    """Refuse a model that pods do not have.

    Raises:
        ConfigError: the model is a folder or a file of this machine.
    """
    if path and Path(path).exists() and not path.startswith(f"{DATA_FOLDER}/"):
        raise ConfigError(
            f"model.path = {path!r} is of this machine, and pods do not have it; write a name of the hub, or put the "
            f'model on a volume, name its claim in kubernetes.data_claim, and set model.path = "{DATA_FOLDER}/NAME"'
        )


def apply(job: Job, site: KubernetesSite, files: dict[str, str], say: Say) -> Launched:
    """Start the head, wait until it answers, make the tickets, and start the hosts.

    All of it may be done again: what is there already is changed.

    Raises:
        EngineFailed: Kubernetes refuses, or the head does not answer.
    """
    folder = launch_folder(job.config)
    write_files(files, folder)
    options = tuple(
        f"--{name}={value}"
        for name, value in (("context", site.context), ("namespace", site.namespace))
        if value
    )
    head = f"statefulset/{name_of(job, 'head')}"
    jobs = {"head": head} | {role: f"deployment/{name_of(job, role)}" for role in LABELS}
    launched = Launched("kubernetes", jobs, actors_per_task=site.actors_per_pod, options=options)
    record(folder, launched)
    call = _call(launched)
    first = [f"--filename={folder}/{name}" for name in files if name not in ("hosts.yaml", VALUES)]
    client([*call, "apply", *first], say)
    try:
        client([*call, "rollout", "status", head, f"--timeout={HEAD_S:g}s"], say, timeout_s=HEAD_S + 30)
    except EngineFailed as error:
        pod = f"{name_of(job, 'head')}-0"
        raise EngineFailed(
            f"{error}; look at `kubectl describe pod {pod}` and `kubectl logs {pod}`, then launch again"
        ) from None
    _carry_secrets(job, site, call, say)
    client([*call, "apply", f"--filename={folder}/hosts.yaml"], say)
    return launched


def _carry_secrets(job: Job, site: KubernetesSite, call: Sequence[str], say: Say) -> None:
    """Make the tickets on the head, and a Secret of each. They go through pipes alone, and are never shown."""
    run = f"{WORK_FOLDER}/runs/{job.name}"
    inside = [*call, "exec", f"{name_of(job, 'head')}-0", "--", "/bin/sh", "-c"]
    for role, label in LABELS.items():
        script = (
            f"umask 077; offbeat ticket {run} --any {label} --address {name_of(job)} --out /tmp/{role}.ticket >&2 && "
            f"cat /tmp/{role}.ticket; code=$?; rm -f /tmp/{role}.ticket; exit $code"
        )
        _make_secret(job, call, f"{role}-ticket", {"ticket": _when_made([*inside, script], say)}, say)
    if site.monitor:
        files = {"token": "http.token", "ca.crt": "http.crt"}
        found = {
            key: client([*inside, f"cat {run}/keys/{file}"], say, secret=True) for key, file in files.items()
        }
        _make_secret(job, call, "metrics", found, say)


def _when_made(words: Sequence[str], say: Say) -> str:
    """Return a ticket, as soon as the head has made what it is made of.

    Raises:
        EngineFailed: the head has not done so within five minutes.
    """
    for left in reversed(range(TICKET_TRIES)):
        try:
            return client(words, say, secret=True)
        except EngineFailed:
            if not left:
                raise
            time.sleep(TICKET_WAIT_S)
    raise AssertionError


def _make_secret(job: Job, call: Sequence[str], part: str, content: dict[str, str], say: Say) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name_of(job, part), "labels": labels_of(job.name)},
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in content.items()},
    }
    # On the server, because `kubectl apply` would note the whole content in an annotation otherwise.
    words = [*call, "apply", "--server-side", "--force-conflicts", "--filename=-"]
    client(words, say, given=json.dumps(secret))


# --- while the run goes on --------------------------------------------------------------------------------


def scale(launched: Launched, changes: dict[str, tuple[str, int]], say: Say) -> None:
    """Change the number of pods by the Scale subresource. Kubernetes ends the youngest, by SIGTERM, and they drain.

    Args:
        changes: by role, as `launch.fleet.wanted.read_changes` returns them.
    """
    for role, change in changes.items():
        each = launched.actors_per_task if role == "actor" else 1
        before = _replicas(launched, f"{role}s", say)
        after = -(-target(change, before * each) // each)
        say(f"{role}s: {before * each} in {before} pods now, {after * each} in {after} pods wanted")
        if after < before:
            _mark(launched, youngest(_pods(launched, f"{role}s", say))[: before - after], say)
        client(
            [*_call(launched), "scale", launched.jobs[f"{role}s"], f"--replicas={after}"],
            say,
        )


def drain(launched: Launched, name: str, wait_s: float, say: Say) -> int:
    """Let one host end its work and stay away: its Deployment has one pod less. Return 0, or 1 if it is still there.

    Args:
        name: pod, host, or process of a host.

    Raises:
        ConfigError: there is no such pod.
    """
    there = []
    for role, label in LABELS.items():
        for pod in _pods(launched, role, say):
            named = pod["metadata"]["name"]
            host = name_of_host(label, named)
            there.append(host)
            if name not in (named, host) and not name.startswith((f"generator-{host}-", f"actor-{host}-")):
                continue
            _mark(launched, [pod], say)
            left = _replicas(launched, role, say) - 1
            client([*_call(launched), "scale", launched.jobs[role], f"--replicas={left}"], say)
            words = ["wait", "--for=delete", f"pod/{named}", f"--timeout={wait_s:g}s"]
            try:
                client([*_call(launched), *words], say, timeout_s=wait_s + 30)
            except EngineFailed:
                say(f"{named} is still there after {wait_s:g} s")
                return 1
            return 0
    raise ConfigError(f"{name!r} is no host of this run; hosts are {', '.join(sorted(there)) or 'not there'}")


def release(launched: Launched, say: Say) -> None:
    """Wait until the run is over, then end the pods of all hosts, which would hold their GPUs. The head stays."""
    pod = launched.jobs["head"].removeprefix("statefulset/") + "-0"
    while True:
        with contextlib.suppress(EngineFailed):
            client([*_call(launched), "exec", pod, "--", "test", "-e", f"{HOME}/{OVER}"], say, secret=True)
            break
        time.sleep(LOOK_S)
    hosts = [launched.jobs[role] for role in LABELS]
    client([*_call(launched), "scale", *hosts, "--replicas=0"], say)


def stop(launched: Launched, run: str, say: Say) -> None:
    """Delete all objects of a run but the claim of the head's volume, and wait until the pods are gone."""
    words = [*_call(launched), "delete", KINDS, _selector(run), f"--timeout={STOP_S:g}s"]
    client(words, say, timeout_s=STOP_S + 30)
    say(
        f"the run folder is on the claim work-offbeat-{run}-head-0, and `offbeat launch` goes on from it; delete the "
        "claim if you need neither"
    )


def youngest(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pods in the order in which they leave: those that do not run first, then the youngest.

    Example:
        >>> pods = [{"metadata": {"creationTimestamp": t}, "status": {"phase": p}} for t, p in (
        ...     ("09:00", "Running"), ("09:09", "Running"), ("09:01", "Pending"))]
        >>> [pod["metadata"]["creationTimestamp"] for pod in youngest(pods)]
        ['09:01', '09:09', '09:00']
    """
    by_age = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    return sorted(by_age, key=lambda pod: bool(pod["status"]["phase"] == "Running"))


def _call(launched: Launched) -> list[str]:
    return ["kubectl", *launched.options]


def _selector(run: str, part: str = "") -> str:
    return "--selector=" + ",".join(f"{key}={value}" for key, value in labels_of(run, part).items())


def _replicas(launched: Launched, role: str, say: Say) -> int:
    words = [*_call(launched), "get", launched.jobs[role], "--output=json"]
    return int(json.loads(client(words, say, secret=True))["spec"]["replicas"])


def _pods(launched: Launched, role: str, say: Say) -> list[dict[str, Any]]:
    """Return the pods of a role that are not leaving already."""
    run = launched.jobs["head"].removeprefix("statefulset/offbeat-").removesuffix("-head")
    words = [*_call(launched), "get", "pods", _selector(run, role), "--output=json"]
    found = json.loads(client(words, say, secret=True))["items"]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def _mark(launched: Launched, pods: Sequence[dict[str, Any]], say: Say) -> None:
    for number, pod in enumerate(pods):
        cost = f"{DELETION_COST}={number - len(pods)}"
        client([*_call(launched), "annotate", "--overwrite", f"pod/{pod['metadata']['name']}", cost], say)

"""Hosts on a Ray cluster: the head runs here, and each host is an actor of Ray, an extra that is imported here only.

`Course` says which hosts are started and which drain; it is pure. `hold_by_ray` carries that out until the head ends.
"""

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launch.errors import DONE, FINAL, ConfigError
from launch.fleet.engines import LOOK_S, Say, new_tickets, start_head, write_files
from launch.fleet.job import Job, launch_folder
from launch.fleet.ray_actor import HostActor
from launch.fleet.site import RaySite, Site
from launch.fleet.wanted import target
from protocol.files import write_whole

LABEL = "r"
"""Label of the ticket that all hosts share."""
WISH = "hosts.json"
"""File in the launch folder: options of the actors, and the number of hosts that is wanted."""
RETRY_S = 10.0
"""Time between the end of a host and its next start."""
CLOSE_S = 30.0
"""Time beyond the grace that hosts get at the end."""


class Hosts(Protocol):
    """What `keep` needs of a cluster."""

    def start(self, number: int) -> None:
        """Start a host."""

    def drain(self, number: int) -> None:
        """Ask a host to end its work."""

    def ended(self) -> Mapping[int, int | str]:
        """Return the exit codes of hosts that have ended since the last call, or what Ray says of their ends."""


@dataclass
class Course:
    """Which hosts run, which drain, and which stay away.

    Example:
        >>> course = Course()
        >>> course.look(2, now=0.0), course.look(1, now=1.0)
        (([0, 1], []), ([], [1]))
        >>> course.ended(1, 75, now=2.0); course.ended(0, 75, now=2.0)
        >>> course.look(1, now=3.0), course.look(1, now=30.0)
        (([], []), ([0], []))
        >>> course.ended(0, 0, now=40.0)  # drained by command, or the run is over
        >>> course.look(1, now=90.0), course.look(2, now=90.0)
        (([], []), ([1], []))
    """

    running: set[int] = field(default_factory=set)
    draining: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)
    """Hosts that have ended with 0 or 65."""
    waits: dict[int, float] = field(default_factory=dict)
    """Times before which a host is not started again."""

    def look(self, count: int, now: float) -> tuple[list[int], list[int]]:
        """Return the hosts to start, and those to drain, the youngest first.

        Args:
            count: number of hosts that is wanted. Hosts that stay away count.
        """
        start = [
            n
            for n in range(count)
            if n not in self.running and n not in self.away and self.waits.get(n, now) <= now
        ]
        drain = sorted((n for n in self.running - self.draining if n >= count), reverse=True)
        self.running |= set(start)
        self.draining |= set(drain)
        return start, drain

    def ended(self, number: int, code: int | str, now: float) -> None:
        """Note that a host has ended, with its exit code or with what Ray says."""
        wanted_less = number in self.draining
        self.running.discard(number)
        self.draining.discard(number)
        if code in (DONE, FINAL) and not wanted_less:
            self.away.add(number)
        self.waits[number] = now + RETRY_S


def keep(hosts: Hosts, course: Course, count: int, now: float, say: Say) -> None:
    """Start, drain and note once, so that `count` hosts run."""
    for number, code in hosts.ended().items():
        say(f"host {number} has ended: {code if isinstance(code, str) else f'code {code}'}")
        course.ended(number, code, now)
    start, drain = course.look(count, now)
    for number in start:
        say(f"host {number}: asked Ray for an actor")
        hosts.start(number)
    for number in drain:
        say(f"host {number}: asked to end its work")
        hosts.drain(number)


def options_of(site: RaySite) -> dict[str, Any]:
    """Return the options of each actor."""
    resources = {"resources": dict(site.resources)} if site.resources else {}
    return {
        "num_cpus": site.cpus,
        "num_gpus": site.gpus,
        **resources,
        "max_restarts": -1,
        "max_task_retries": -1,
        # `run` takes one thread for as long as the host lives, `drain` the other.
        "max_concurrency": 2,
    }


def command_of(site: RaySite) -> str:
    """Return the shell script of a host.

    Ray kills the children of a worker that it ends. The host is a child of this script, so it gets SIGTERM, and drains.
    """
    counts = f"--generators {site.generators_per_host} --actors {site.actors_per_host}"
    lines = ["set -e", *(line for line in site.setup.split("\n") if line.strip()), "set +e"]
    return "\n".join(
        [
            *lines,
            # A shell gives what it runs in the background no standard input.
            "exec 3<&0",
            f"setpriv --pdeathsig TERM offbeat host --ticket - {counts} --grace {site.grace_s:g} <&3 3<&- &",
            "host=$! rc=1",
            "trap 'kill -TERM $host' TERM",
            "while kill -0 $host 2>/dev/null; do wait $host; rc=$?; done",
            "exit $rc",
        ]
    )


def wish(site: RaySite) -> str:
    """Return the text of the file with the actors' options and the number of hosts that is wanted."""
    content = {"hosts": site.hosts, "command": command_of(site), "options": options_of(site)}
    return json.dumps(content, indent=1) + "\n"


def wanted_hosts(folder: Path) -> int:
    """Return the number of hosts that is wanted now."""
    return int(json.loads((folder / WISH).read_text(encoding="utf-8"))["hosts"])


def scale(folder: Path, changes: dict[str, tuple[str, int]], say: Say) -> None:
    """Write how many hosts are wanted. The process of `offbeat launch` reads it.

    Args:
        folder: launch folder of the run.
        changes: by role, as `launch.fleet.wanted.read_changes` returns them.

    Raises:
        ConfigError: actors are to be changed alone.
    """
    if "actor" in changes:
        raise ConfigError(
            "under Ray each host has its generators and its actors; scale generators, or set ray.actors_per_host in "
            "the site file"
        )
    content = json.loads((folder / WISH).read_text(encoding="utf-8"))
    before = int(content["hosts"])
    content["hosts"] = target(changes["generator"], before)
    write_whole(folder / WISH, json.dumps(content, indent=1) + "\n")
    say(f"hosts: {before} wanted before, {content['hosts']} now; Ray starts and drains them")


# --- Ray --------------------------------------------------------------------------------------------------


class RayHosts:
    """Hosts as actors of a Ray cluster.

    Args:
        ticket: content of the ticket.
    """

    def __init__(self, site: RaySite, ticket: str) -> None:
        import ray

        self._ray, self._site, self._ticket = ray, site, ticket
        self._kind = ray.remote(HostActor)
        self._runs: dict[Any, int] = {}
        self._actors: dict[int, Any] = {}

    def start(self, number: int) -> None:
        """Ask Ray for an actor. It waits where no node has room."""
        actor = self._kind.options(**options_of(self._site)).remote()
        folder = f"{self._site.folder}/{number}"
        run = actor.run.remote(self._ticket, command_of(self._site), folder, number)
        self._actors[number], self._runs[run] = actor, number

    def drain(self, number: int) -> None:
        """Ask a host to end its work."""
        self._actors[number].drain.remote()

    def ended(self) -> dict[int, int | str]:
        """Return what has ended since the last call, and give its place in the cluster back."""
        found: dict[int, int | str] = {}
        done, _ = (
            self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0)
            if self._runs
            else ([], [])
        )
        for run in done:
            number = self._runs.pop(run)
            try:
                found[number] = self._ray.get(run)
            except self._ray.exceptions.RayError as error:
                found[number] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self._ray.kill(self._actors.pop(number))
        return found

    def close(self, wait_s: float) -> None:
        """Drain what runs, wait for it, and leave the cluster."""
        for number in self._actors:
            self.drain(number)
        if self._runs:
            self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=wait_s)
        self._ray.shutdown()


def connect(site: RaySite) -> None:
    """Connect to the cluster.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("--on ray: Ray is not installed; do `pip install 'offbeat[ray]'`") from None
    try:
        ray.init(address=site.cluster, log_to_driver=False, namespace="offbeat")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--on ray: no cluster at {site.cluster!r}: {error}; start one with `ray start --head`, or set ray.cluster"
        ) from None


def hold_by_ray(
    job: Job,
    site: Site,
    files: dict[str, str],
    say: Say,
    hosts_of: Callable[[RaySite, str], RayHosts] = RayHosts,
) -> int:
    """Start the head here, and hold the actors of its hosts until it has ended. Return the exit code of the head."""
    connect(site.ray)
    folder = launch_folder(job.config)
    write_files(files, folder)
    head = start_head(folder, "ray", say)
    course, hosts = Course(), None
    try:
        while head.poll() is None:
            if hosts is None and (
                found := new_tickets(job, folder, {LABEL: {"label": LABEL}}, site.ray.address)
            ):
                hosts = hosts_of(site.ray, found[LABEL].read_text(encoding="utf-8"))
            if hosts is not None:
                keep(hosts, course, wanted_hosts(folder), time.monotonic(), say)
            with suppress(subprocess.TimeoutExpired):
                head.wait(LOOK_S)
    finally:
        if hosts is not None:
            hosts.close(site.ray.grace_s + CLOSE_S)
    return head.returncode

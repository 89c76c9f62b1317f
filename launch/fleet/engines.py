"""The clients of engines: submit, scale and stop a fleet by the engine's own programs. No scheduler of our own."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import ConfigError, LaunchError
from launch.fleet.job import ACTORS, GENERATORS, Job, folder_beside, launch_folder
from launch.fleet.site import Site
from launch.fleet.ticket import make_ticket, write_ticket
from launch.run_folder import CONFIG
from protocol.files import write_whole
from protocol.weights.format import BOOT_ID

RECORD = "launch.json"
HEAD = "head.sh"
CLIENT_S = 60.0
"""Longest time that a client may take to answer."""
LOOK_S = 2.0
STOP_S = 180.0
"""Longest time that a head gets to write its checkpoint and to end."""

Say = Callable[[str], None]


class EngineFailed(LaunchError):
    """A program of the engine is missing, or has refused what was asked; the text has its answer."""


def client(
    words: Sequence[str], say: Say, *, given: str = "", secret: bool = False, timeout_s: float = CLIENT_S
) -> str:
    """Run a program of an engine, show its answer, and return it.

    Args:
        given: standard input of the program.
        secret: whether the answer is a secret, or too long to be read. Its errors are shown all the same.
        timeout_s: longest time that it may take to answer.

    Raises:
        EngineFailed: it is missing, does not answer, or ends with an error.
    """
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise EngineFailed(
            f"{words[0]}: there is no such program here; run this where the engine is"
        ) from None
    except subprocess.TimeoutExpired:
        raise EngineFailed(f"{words[0]} has not answered for {timeout_s:g} s") from None
    answer = (done.stderr if secret else done.stdout + done.stderr).strip()
    if not secret:
        say(f"{' '.join(words)}: {answer or 'done'}")
    if done.returncode:
        raise EngineFailed(f"{' '.join(words)} ended with code {done.returncode}: {answer}")
    return done.stdout.strip()


def write_files(files: dict[str, str], folder: Path) -> None:
    """Write rendered files. Scripts may be executed.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(folder / name, text, mode=0o755 if text.startswith("#!") else 0o644)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; name a folder that you may write in") from None


@dataclass(frozen=True)
class Launched:
    """What `offbeat launch` has started."""

    engine: str
    jobs: dict[str, str]
    """Ids of the engine's jobs by role."""
    pid: int = 0
    """Process of the head that was started for ssh; 0 for other engines."""
    started: str = ""
    """What tells that process from a later one with its id, see `_start_of`."""
    actors_per_task: int = 1
    options: tuple[str, ...] = ()
    """Options that every call of the engine's client needs."""


def record(folder: Path, launched: Launched) -> None:
    """Write what was started, so that `offbeat scale` and `offbeat launch --stop` find it."""
    write_whole(folder / RECORD, json.dumps(vars(launched), indent=1))


def launched_of(run: Path) -> Launched | None:
    """Return what was launched for a run folder; None if it was started otherwise."""
    try:
        content: dict[str, Any] = json.loads(_record_of(run).read_text(encoding="utf-8"))
        return Launched(**content | {"options": tuple(content.get("options", ()))})
    except (OSError, ValueError, TypeError):
        return None


def _record_of(run: Path) -> Path:
    return folder_beside(run) / RECORD


# --- Slurm ------------------------------------------------------------------------------------------------


def submit(job: Job, site: Site, files: dict[str, str], say: Say) -> None:
    """Submit the head and the arrays to Slurm."""
    folder = launch_folder(job.config)
    write_files(files, folder)
    # Tasks that start before the head would take the tickets of an earlier launch, or read that its head has ended.
    for left in (folder / "tickets").glob("*"):
        left.unlink()
    jobs = {}
    counts = {"head": 1, GENERATORS: site.slurm.generators, ACTORS: site.slurm.actors}
    try:
        for role, count in counts.items():
            if count:
                jobs[role] = client(["sbatch", "--parsable", f"{folder}/{role}.sbatch"], say).partition(";")[
                    0
                ]
    finally:
        if jobs:
            record(folder, Launched("slurm", jobs, actors_per_task=site.slurm.actors_per_task))


def throttle(launched: Launched, role: str, count: int, say: Say) -> None:
    """Let Slurm run so many tasks of an array at a time. It starts new ones by itself, and ends none.

    Args:
        role: "generator" or "actor".
        count: generators, or actors.

    Raises:
        EngineFailed: there is no such array, or Slurm refuses.
    """
    tasks, job = count, launched.jobs.get(f"{role}s")
    if role == "actor":
        tasks = -(-count // launched.actors_per_task)
    if job is None:
        raise EngineFailed(
            f"no array of {role}s was submitted; set slurm.{role}s in the site file to at least 1"
        )
    # Slurm takes 0 for "no limit".
    client(["scontrol", "update", f"JobId={job}", f"ArrayTaskThrottle={max(1, tasks)}"], say)


# --- ssh --------------------------------------------------------------------------------------------------


def hold_by_ssh(job: Job, site: Site, files: dict[str, str], say: Say) -> int:
    """Start the head here and a host on each machine of the site; hold the connections until the head has ended.

    Return the exit code of the head.
    """
    folder = launch_folder(job.config)
    write_files(files, folder)
    head = start_head(folder, "ssh", say)
    hosts: dict[str, subprocess.Popen[bytes]] = {}
    names = {name: {"host": name.rpartition("@")[2]} for name in site.ssh.hosts}
    try:
        while head.poll() is None:
            if not hosts and (found := new_tickets(job, folder, names, site.ssh.address)):
                for name, path in found.items():
                    with open(folder / f"{path.stem}.log", "ab") as log:
                        hosts[name] = subprocess.Popen(
                            ["bash", str(folder / "host.sh"), name, str(path)],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                            env=os.environ | {"OFFBEAT_LAUNCHER": str(os.getpid())},
                        )
                say(f"hosts: {', '.join(hosts)}; their output is in {folder}")
            with suppress(subprocess.TimeoutExpired):
                head.wait(LOOK_S)
    except KeyboardInterrupt:
        # The terminal has sent the signal to the head, too.
        with suppress(subprocess.TimeoutExpired):
            head.wait(STOP_S)
    finally:
        for process in hosts.values():
            with suppress(subprocess.TimeoutExpired):
                # The broker has asked the hosts to end.
                process.wait(site.ssh.grace_s if head.poll() == 0 else LOOK_S)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
    return head.returncode if head.returncode is not None else 1


def start_head(folder: Path, engine: str, say: Say) -> "subprocess.Popen[bytes]":
    """Start the head here, record it, and hand it the signals that would end this process."""
    head = subprocess.Popen(["bash", str(folder / HEAD)])
    record(folder, Launched(engine, {}, pid=head.pid, started=_start_of(head.pid)))
    say(f"head: process {head.pid}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: head.terminate())
    return head


def new_tickets(job: Job, folder: Path, names: Mapping[str, dict[str, str]], address: str) -> dict[str, Path]:
    """Write the tickets once the run has begun, and return their files; return nothing before.

    The folder of a run that is resumed has settings of its earlier start until the head has written new ones.

    Args:
        names: by key of what is returned, the host or the label of each ticket.
        address: name or address of the head; "": its own name.
    """
    run, written = Path(job.run_folder), dict[str, Path]()
    try:
        if (run / CONFIG).stat().st_mtime_ns < (folder / HEAD).stat().st_mtime_ns:
            return {}
    except FileNotFoundError:
        return {}
    for key, name in names.items():
        path = folder / f"{''.join(name.values())}.ticket"
        try:
            write_ticket(make_ticket(run, **name, address=address), path)
        except ConfigError:
            return {}
        written[key] = path
    return written


# --- stop -------------------------------------------------------------------------------------------------


def stop(run: Path, say: Say) -> None:
    """End what `offbeat launch` has started for a run.

    Raises:
        ConfigError: nothing was launched for this run folder.
        EngineFailed: the engine refuses.
    """
    launched = launched_of(run)
    if launched is None:
        raise ConfigError(
            f"{_record_of(run)}: nothing was launched for this run; for units of systemd use `systemctl stop`"
        )
    if launched.engine == "slurm":
        client(["scancel", *launched.jobs.values()], say)
        return
    if launched.engine == "kubernetes":
        from launch.fleet import kubectl

        kubectl.stop(launched, run.name, say)
        return
    if not launched.pid or _start_of(launched.pid) != launched.started:
        say(f"process {launched.pid} has ended already")
        return
    try:
        os.kill(launched.pid, signal.SIGTERM)
    except ProcessLookupError:
        say(f"process {launched.pid} has ended already")
        return
    except PermissionError:
        raise EngineFailed(f"process {launched.pid} is of another user, who has to end it") from None
    say(f"process {launched.pid} was asked to end: the learner writes a checkpoint")
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline and _start_of(launched.pid) == launched.started:
        time.sleep(LOOK_S)


def _start_of(pid: int) -> str:
    """Return the boot of this machine and the time in it at which a process began; "" if there is no such process.

    A process id is given again, on this machine and on others that see the folder.
    """
    try:
        content = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *rest = content.rpartition(")")[2].split()
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{boot} {rest[18]}"

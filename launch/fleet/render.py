r"""Writes the files of an engine for a run and a site. Pure: it reads nothing, starts nothing, and knows no secret.

``render(job, site, engine) -> {name: text}``. All scripts and units run the same two commands, `offbeat train` with no
generators and actors on the head, and `offbeat host --ticket FILE` on each host. They are written to the exit codes of
a host: 0 stay away, 75 come back, 65 do not try again.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence

from launch.errors import COME_BACK, DONE, FINAL
from launch.fleet.job import ACTORS, GENERATORS, Job, launch_folder
from launch.fleet.kubernetes import VALUES, chart_values, objects, to_yaml
from launch.fleet.ray_hosts import WISH, wish
from launch.fleet.site import Site, SlurmSite, SshSite, SystemdSite
from protocol.security.addresses import is_loopback, split_endpoint

ENGINES = ("ssh", "slurm", "systemd", "kubernetes", "ray")
AGAIN_AND_AGAIN = "--again"
"""Last word of a head's command: it goes on in the folder that tickets name, or starts there, and nowhere else."""
WAIT_TRIES, WAIT_S = 120, 5
"""How often, and how many seconds apart, a task looks for the ticket that the head's job writes.

Then it is requeued, as tasks that waited for long would keep the head's job from the nodes that they hold.
"""
NO_MORE = "over"
"""File beside the tickets, which says that the head has ended for good."""
REQUEUED_S = 60
"""Time that a script waits for the requeue that it has asked for."""
RETRY_S = 10
"""Time between two tries to start a head or a host that has ended by a fault, or was told to come back."""


def render(job: Job, site: Site, engine: str) -> dict[str, str]:
    """Return the files of an engine, by name.

    Args:
        engine: one of `ENGINES`.
    """
    match engine:
        case "slurm":
            return _slurm(job, site.slurm)
        case "ssh":
            return _ssh(job, site.ssh)
        case "ray":
            return {"head.sh": _head_script(job, site.ray.port, site.ray.address), WISH: wish(site.ray)}
        case "kubernetes":
            made = objects(job, site.kubernetes) | {VALUES: [chart_values(job, site.kubernetes)]}
            return {name: to_yaml(documents) for name, documents in made.items()}
        case _:
            return _systemd(job, site.systemd)


def head_command(job: Job, port: int, *, address: str = "") -> list[str]:
    """Return the words of the head's command. Addresses that the run file leaves on loopback are opened for hosts.

    Args:
        port: port of the broker.
        address: name or address of the head; "": its own name.
    """
    config, opened = job.config, list[str]()
    host = split_endpoint(config.broker.endpoint)[0]
    if not host or is_loopback(host):
        opened.append(f"broker.endpoint=tcp://0.0.0.0:{port}")
    if is_loopback(config.broker.http.rpartition(":")[0]):
        opened.append(f"broker.http=0.0.0.0:{port + 1}")
    if not config.weights.http or is_loopback(config.weights.http.rpartition(":")[0]):
        opened.append(f"weights.http=0.0.0.0:{port + 2}")
    if address and not config.weights.advertised_host:
        opened.append(f"weights.advertised_host={address}")
    counts = ["generator.count=0", "actor.count=0"]
    return ["train", job.run_file, *job.overrides, *opened, *counts, AGAIN_AND_AGAIN]


def _words(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


# --- Slurm ------------------------------------------------------------------------------------------------


def _slurm(job: Job, site: SlurmSite) -> dict[str, str]:
    arrays = {
        GENERATORS: (site.generators, site.gres, "--generators 1 --actors 0"),
        ACTORS: (site.actors, "", f"--generators 0 --actors {site.actors_per_task}"),
    }
    files = {"head.sbatch": _head_job(job, site)}
    for role, (count, gres, counts) in arrays.items():
        files[f"{role}.sbatch"] = _array(job, site, role, count, gres, counts)
    return files


def _options(job: Job, site: SlurmSite, role: str, partition: str, gres: str, cpus: int) -> list[str]:
    wanted = {
        "job-name": slurm_name(job.name, role),
        "partition": partition,
        "account": site.account,
        "gres": gres,
        "time": site.time,
        "cpus-per-task": str(cpus),
        "ntasks": "1",
        "open-mode": "append",
    }
    return [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value]


def slurm_name(run: str, role: str) -> str:
    """Return the name of a job."""
    return f"offbeat-{run}-{role}"


def _head_job(job: Job, site: SlurmSite) -> str:
    folder, run = launch_folder(job.config), job.run_folder
    partition = site.head_partition or site.partition
    others = f"{slurm_name(job.name, GENERATORS)},{slurm_name(job.name, ACTORS)}"
    command = _words(["offbeat", *head_command(job, site.port)])
    return _script(
        [
            *_options(job, site, "head", partition, site.head_gres, site.head_cpus),
            f"#SBATCH --output={folder}/head-%j.log",
            "#SBATCH --requeue",
        ],
        f"""
{site.setup}
run={shlex.quote(run)}
tickets={shlex.quote(f"{folder}/tickets")}
mkdir -p "$tickets" && chmod 700 "$tickets"
rm -f "$tickets"/*
touch "$tickets/began"
# No trap: `scancel` ends this script at once, so that nothing is requeued. A preemption signals the step alone.
srun --overlap -n1 {command} weights.advertised_host="$(hostname)" "$@" &
train=$!
# The tickets have the address of this node. Tasks of the arrays wait for them.
while kill -0 $train 2>/dev/null; do
    if [ "$run/config.json" -nt "$tickets/began" ] &&
        offbeat ticket "$run" --any g --out "$tickets/{GENERATORS}.partial" >/dev/null 2>&1 &&
        offbeat ticket "$run" --any a --out "$tickets/{ACTORS}.partial" >/dev/null 2>&1; then
        mv "$tickets/{GENERATORS}.partial" "$tickets/{GENERATORS}.ticket"
        mv "$tickets/{ACTORS}.partial" "$tickets/{ACTORS}.ticket"
        break
    fi
    sleep {WAIT_S}
done
wait $train
rc=$?
if [ "$rc" = 0 ] || [ "$rc" = {FINAL} ]; then
    # Tasks that have not begun, or wait for a ticket, would wait for a head that is done.
    rm -f "$tickets"/*.ticket
    touch "$tickets/{NO_MORE}"
    scancel --me --state=PENDING --name={others}
elif [ "$rc" = {COME_BACK} ]; then
    # The learner has written a checkpoint, and goes on elsewhere.
    scontrol requeue "$SLURM_JOB_ID"
    sleep {REQUEUED_S}
fi
exit "$rc"
""",
    )


def _array(job: Job, site: SlurmSite, role: str, count: int, gres: str, counts: str) -> str:
    folder = launch_folder(job.config)
    hours = job.config.fleet.no_head_hours
    bound = f"""
elif [ -n "$(find "$tickets/awaited" -mmin +{math.ceil(hours * 60)})" ]; then
    echo "no head has written $ticket for fleet.no_head_hours ({hours:g}): submit it and this array again"
    rc={FINAL}
"""
    # An array of no tasks is none; one task that is cancelled at once would stand for it.
    throttle = max(1, count)
    return _script(
        [
            *_options(job, site, role, site.partition, gres, site.cpus),
            f"#SBATCH --output={folder}/{role}-%A_%a.log",
            f"#SBATCH --array=0-{site.largest - 1}%{throttle}",
            "#SBATCH --requeue",
        ],
        f"""
{site.setup}
tickets={shlex.quote(f"{folder}/tickets")}
ticket="$tickets/{role}.ticket"
mkdir -p "$tickets" && chmod 700 "$tickets"
for _ in $(seq {WAIT_TRIES}); do
    if [ -e "$tickets/{NO_MORE}" ]; then
        echo "the head of this run has ended: nothing is left to do"
        exit {DONE}
    fi
    [ -s "$ticket" ] && break
    # Since when there has been no head; its start removes this file.
    [ -e "$tickets/awaited" ] || touch "$tickets/awaited"
    sleep {WAIT_S}
done
if [ -s "$ticket" ]; then
    # srun, not exec: with exec, the SIGTERM of a preemption comes at the end of the grace time.
    srun --overlap -n1 offbeat host --ticket "$ticket" {counts} --grace {site.grace_s:g}
    rc=$?
{bound if hours else ""}
else
    echo "the head has written no ticket yet: this task gives its node back, and is queued again"
    rc={COME_BACK}
fi
# A step that drains and ends with 0 completes the job, so a task that is to come back asks for it.
if [ $rc = {COME_BACK} ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
    sleep {REQUEUED_S}
fi
exit $rc
""",
    )


def _script(options: Sequence[str], body: str) -> str:
    lines = [line for line in body.strip("\n").split("\n") if line.strip()]
    return "\n".join(["#!/bin/bash", *options, *lines]) + "\n"


# --- ssh --------------------------------------------------------------------------------------------------


def _ssh(job: Job, site: SshSite) -> dict[str, str]:
    there = [f"mkdir -p {site.folder}", f"cd {site.folder}", *site.setup.strip("\n").split("\n")]
    there.append(f"exec offbeat host --ticket - --grace {site.grace_s:g}")
    remote = " && ".join(line for line in there if line.strip())
    host = f"""
# Usage: host.sh HOST TICKET. The ticket goes through standard input, and so is never part of a command line.
# `offbeat launch` names itself in OFFBEAT_LAUNCHER: where it was killed, nobody would end this loop.
while [ -z "${{OFFBEAT_LAUNCHER:-}}" ] || kill -0 "$OFFBEAT_LAUNCHER" 2>/dev/null; do
    ssh -o BatchMode=yes -o ServerAliveInterval=15 "$1" {shlex.quote(remote)} <"$2"
    rc=$?
    case $rc in
    0 | 65) exit $rc ;;
    esac
    sleep {RETRY_S}
done
exit {COME_BACK}
"""
    return {"head.sh": _head_script(job, site.port, site.address), "host.sh": _script([], host)}


def _head_script(job: Job, port: int, address: str) -> str:
    """Return the script of a head that runs where `offbeat launch` does."""
    command = _words(["offbeat", *head_command(job, port, address=address)])
    return _script([], f'exec {command} "$@"')


# --- systemd ----------------------------------------------------------------------------------------------


def _systemd(job: Job, site: SystemdSite) -> dict[str, str]:
    user = [f"User={site.user}"] if site.user else []
    target = "multi-user.target" if site.user else "default.target"
    command = [site.program, *head_command(job, site.port, address=site.address)]
    result = shlex.quote(f"{job.run_folder}/result.json")
    over = f"""grep -Eqs '"run": *"over"' {result}"""
    new = f"[ {shlex.quote(job.run_file)} -nt {result} ]"
    head = _unit(
        {
            "Unit": [
                f"Description=Head of the Offbeat run {job.name} (instance %i)",
                "After=network-online.target",
                "Wants=network-online.target",
                # A head that fails again and again is left alone: it would train the same steps for ever.
                "StartLimitIntervalSec=3600",
                "StartLimitBurst=10",
            ],
            "Service": [
                "Type=exec",
                *user,
                f"WorkingDirectory={site.folder}",
                # At a reboot, a run that is over stays so, until its run file is written anew.
                f"ExecCondition={_shell(f'if {over}', f'then {new}', 'fi')}",
                f"ExecStart={_units(command)}",
                "KillMode=mixed",
                "TimeoutStopSec=300",
                *AGAIN,
            ],
            "Install": [f"WantedBy={target}"],
        }
    )
    host = _unit(
        {
            "Unit": [
                "Description=Offbeat host %i",
                "After=network-online.target",
                "Wants=network-online.target",
                "StartLimitIntervalSec=0",
            ],
            "Service": [
                "Type=exec",
                *user,
                f"WorkingDirectory={site.folder}",
                # The ticket is read from $CREDENTIALS_DIRECTORY, and is no argument.
                f"LoadCredential=offbeat-ticket:{site.folder}/%i.ticket",
                f"ExecStart={_units([site.program, 'host', '--grace', f'{site.grace_s:g}'])}",
                "KillMode=mixed",
                f"TimeoutStopSec={site.grace_s + 30:g}",
                *AGAIN,
            ],
            "Install": [f"WantedBy={target}"],
        }
    )
    return {"offbeat-head@.service": head, "offbeat-host@.service": host}


AGAIN = (
    "Restart=on-failure",
    f"RestartSec={RETRY_S}",
    # Stopped by a signal it ends with 75, which is no failure. If nobody stopped it, it is started again.
    f"SuccessExitStatus={COME_BACK}",
    f"RestartForceExitStatus={COME_BACK}",
    f"RestartPreventExitStatus={FINAL}",
)
"""Lines of a service by the exit codes of heads and hosts."""


def _shell(*lines: str) -> str:
    """Return the command of a unit that runs lines of a shell script."""
    return _units(["/bin/sh", "-c", "; ".join(lines)])


def _unit(sections: Mapping[str, Sequence[str]]) -> str:
    return "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items()) + "\n"


def _units(words: Sequence[str]) -> str:
    """Return a command line as systemd reads it: quoted, and without its specifiers and variables."""
    escaped = (
        word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$") for word in words
    )
    return " ".join(word if PLAIN.fullmatch(word) else f'"{word}"' for word in escaped)


PLAIN = re.compile(r"[A-Za-z0-9@._:/,=+%-]+")
"""Words that systemd reads as they are."""

"""`offbeat ticket`, `host`, `scale` and `drain`: let further hosts join a run, change its size, and take hosts out."""

import argparse
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

TICKET_TEXT = (
    "write the one file that a further host needs to join a run, and print the command for that host"
)
SCALE_TEXT = "change the number of generators or actors of a run while it goes on"
DRAIN_TEXT = "let a host, or one generator or actor of a host, end its work and leave a run"
DRAINED_S = 180.0
"""Default of the longest wait of `offbeat drain`."""
HOST_TEXT = (
    "run generators and actors of a run on this host, until the run is over or the host is told to leave"
)


def add_ticket(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat ticket`."""
    command = commands.add_parser("ticket", help=TICKET_TEXT, description=TICKET_TEXT)
    command.add_argument("run", type=Path, help="run folder of the head, for example runs/NAME")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--host", default="", metavar="NAME", help="name of the host; default: h1, h2, ...")
    which.add_argument(
        "--any",
        default="",
        metavar="LABEL",
        help="for many hosts, whose names are LABEL and what tells them apart",
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="default: NAME.ticket in this folder")
    command.add_argument(
        "--address", default="", metavar="HOST", help="name or address by which hosts reach this one"
    )


def add_host(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat host`."""
    command = commands.add_parser("host", help=HOST_TEXT, description=HOST_TEXT)
    command.add_argument(
        "--ticket",
        default="",
        metavar="FILE",
        help="the ticket, - for standard input; default: the path in OFFBEAT_TICKET, or a credential of systemd",
    )
    command.add_argument("--generators", type=int, metavar="N", help="default: one per GPU, 1 on a CPU")
    command.add_argument("--actors", type=int, metavar="N", help="default: in the ratio of the run file")
    command.add_argument(
        "--grace",
        type=float,
        default=None,
        metavar="SECONDS",
        help="longest drain after a SIGTERM; default: 90",
    )
    command.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="settings that are of this host alone"
    )


def add_scale(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat scale`."""
    command = commands.add_parser("scale", help=SCALE_TEXT, description=SCALE_TEXT)
    command.add_argument("run", type=Path, help="run folder of the head, for example runs/NAME")
    command.add_argument(
        "changes", nargs="+", metavar="ROLES=N", help="generators=6 actors=+2; the youngest leave first"
    )


def add_drain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat drain`."""
    command = commands.add_parser("drain", help=DRAIN_TEXT, description=DRAIN_TEXT)
    command.add_argument("run", type=Path, help="run folder of the head, for example runs/NAME")
    command.add_argument("name", help="name of a host, or of a generator or actor of one")
    command.add_argument(
        "--wait",
        type=float,
        default=DRAINED_S,
        metavar="SECONDS",
        help=f"longest wait until it has left; default: {DRAINED_S:g}",
    )


def run(args: argparse.Namespace) -> int:
    """Run one of these commands. Return the exit code."""
    return {"ticket": write, "host": host, "scale": scale, "drain": drain}[args.command](args)


def scale(args: argparse.Namespace) -> int:
    """Write how many generators and actors are wanted, and print before, after, and who does it."""
    from launch.commands.status import find_run, supervised_now
    from launch.fleet import engines, wanted
    from launch.supervise.broker_status import fetch
    from launch.supervise.crew import read_state

    changes = wanted.read_changes(args.changes)
    launched = engines.launched_of(args.run)
    if launched is not None and launched.engine == "kubernetes":
        from launch.fleet import kubectl

        kubectl.scale(launched, changes, _say)
        return 0
    if launched is not None and launched.engine == "ray":
        from launch.fleet import ray_hosts
        from launch.fleet.job import folder_beside

        ray_hosts.scale(folder_beside(args.run), changes, _say)
        return 0
    folder, http, keys = _run_of(args.run, find_run)
    peers = fetch(http, keys=keys)["peers"]
    started = read_state(folder).get("processes", {})
    plans = wanted.plan_all(folder, changes, peers, started, supervised=supervised_now(folder))
    for one in plans:
        sys.stdout.write(f"{one.sentence()}\n")
    wanted.carry_out(folder, plans, _say)
    return 0


def drain(args: argparse.Namespace) -> int:
    """Ask a host or peer to leave, and wait until it has. Return 0, or 1 if it is still there."""
    from launch.commands.status import find_run
    from launch.fleet import engines, wanted
    from launch.supervise.broker_status import fetch

    launched = engines.launched_of(args.run)
    if launched is not None and launched.engine == "kubernetes":
        from launch.fleet import kubectl

        return kubectl.drain(launched, args.name, args.wait, _say)
    folder, http, keys = _run_of(args.run, find_run)
    names = wanted.members(args.name, fetch(http, keys=keys)["peers"])
    wanted.write(folder, [], [args.name])
    sys.stdout.write(f"{args.name}: {', '.join(names)} asked to end their work\n")
    began = time.monotonic()
    while time.monotonic() - began < args.wait:
        there = {peer["name"] for peer in fetch(http, keys=keys)["peers"]}
        left = [name for name in names if name in there]
        if not left:
            sys.stdout.write(f"{args.name} has left after {time.monotonic() - began:.0f} s\n")
            return 0
        time.sleep(POLL_S)
    sys.stderr.write(
        f"{', '.join(left)} is still there after {args.wait:g} s; `offbeat status` shows what it does\n"
    )
    return 1


POLL_S = 0.5


def _run_of(
    given: Path, find_run: Callable[[str], tuple[Path | None, str, Path | None]]
) -> tuple[Path, str, Path | None]:
    """Return folder, address and keys of a run that goes on.

    Raises:
        ConfigError: there is no run folder of this name.
    """
    from launch.errors import ConfigError

    folder, http, keys = find_run(str(given))
    if folder is None:
        raise ConfigError(f"{given}: name the run folder on the head, for example runs/NAME")
    return folder, http, keys


def write(args: argparse.Namespace) -> int:
    """Write a ticket, and print the command of the host as the only line of standard output."""
    from launch.fleet.ticket import fresh_label, keys_of_run, make_ticket, write_ticket
    from launch.logs import libraries_to_stderr
    from protocol.security.addresses import is_loopback, split_endpoint

    name = args.host or args.any or fresh_label(keys_of_run(args.run))
    # It may make the model.
    with libraries_to_stderr():
        ticket = make_ticket(args.run, host="" if args.any else name, label=args.any, address=args.address)
    out = args.out or Path(f"{name}.ticket")
    write_ticket(ticket, out)
    endpoint = ticket.config.broker.endpoint
    if is_loopback(split_endpoint(endpoint)[0]):
        sys.stderr.write(
            f"the broker listens at {endpoint}, so this ticket is for this machine alone; for other hosts set "
            'broker.endpoint = "tcp://0.0.0.0:5755"\n'
        )
    sys.stderr.write(f"{out} is a secret: copy it to the host with its mode, for example with `scp -p`\n")
    sys.stdout.write(f"offbeat host --ticket {out}\n")
    return 0


def host(args: argparse.Namespace) -> int:
    """Read the ticket and run the host. Return its exit code."""
    from launch import logs
    from launch.fleet.ticket import read_ticket
    from launch.supervise.host import DEFAULT_GRACE_S, HostOptions, run_host

    ticket = read_ticket(args.ticket, os.environ)
    logs.configure("host")
    options = HostOptions(
        generators=args.generators,
        actors=args.actors,
        grace_s=DEFAULT_GRACE_S if args.grace is None else args.grace,
        overrides=tuple(args.overrides),
    )
    return run_host(ticket, options, os.environ, socket.gethostname(), _say)


def _say(text: str) -> None:
    from launch.logs import plain

    # A host outlives the terminal or the connection that it was started from.
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{plain(text)}\n")
        sys.stdout.flush()

"""`offbeat ticket` and `offbeat host`: let a further host join a run, and run its generators and actors."""

import argparse
import os
import socket
import sys
from pathlib import Path

TICKET_TEXT = (
    "write the one file that a further host needs to join a run, and print the command for that host"
)
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


def run(args: argparse.Namespace) -> int:
    """Run `offbeat ticket` or `offbeat host`. Return the exit code."""
    return write(args) if args.command == "ticket" else host(args)


def write(args: argparse.Namespace) -> int:
    """Write a ticket, and print the command of the host as the only line of standard output."""
    from launch.fleet.ticket import fresh_label, make_ticket, write_ticket
    from protocol.security.addresses import is_loopback, split_endpoint

    name = args.host or args.any or fresh_label(args.run / "keys")
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

    sys.stdout.write(f"{plain(text)}\n")
    sys.stdout.flush()

"""How the worker of a scorer is confined: bubblewrap, or a plain process with fewer rights."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from envs.errors import EnvError, RefusedFamily
from envs.scoring.family import ACCEPTS_JUNK, Family

Sandbox = Literal["auto", "bwrap", "process"]

HELP_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Wrap:
    """One way to start a worker.

    Attributes:
        name: "bwrap", "bwrap-userns" or "process".
        program: absolute path of bubblewrap; empty for a plain process.
    """

    name: Literal["bwrap", "bwrap-userns", "process"]
    program: str = ""


PROCESS = Wrap("process")


def ways_to_start(family: Family, sandbox: Sandbox) -> list[Wrap]:
    """Return the ways to start the worker, strongest first. A plain process comes last, if it is allowed.

    Raises:
        EnvError: there is no such sandbox, or the settings of a composite name no families.
        RefusedFamily: the family's scorer accepts junk. Or bubblewrap is not installed although ``sandbox``
            asks for it, or not used although the scorer runs answers as Python.

    Example:
        >>> ways_to_start(Family("coin_flip"), "process")
        Traceback (most recent call last):
        ...
        envs.errors.RefusedFamily: reasoning_gym family 'coin_flip': its scorer accepts junk; use another
    """
    if sandbox not in get_args(Sandbox):
        raise EnvError(f"sandbox = {sandbox!r}: use one of {', '.join(get_args(Sandbox))}")
    for member in sorted(family.members & ACCEPTS_JUNK):
        raise RefusedFamily(f"reasoning_gym family {member!r}: its scorer accepts junk; use another")
    program = shutil.which("bwrap") if sandbox != "process" else None
    if program is None and family.runs_answers:
        raise RefusedFamily(
            f"reasoning_gym family {family.name!r}: its scorer runs the answer as Python code; "
            'install bubblewrap and set sandbox = "bwrap"'
        )
    if program is None and sandbox == "bwrap":
        raise RefusedFamily('sandbox = "bwrap", but there is no bwrap on PATH; install bubblewrap')
    if program is None:
        return [PROCESS]
    # The worker is started in a different folder and with a different PATH.
    program = os.path.abspath(program)
    ways = [Wrap("bwrap", program)] if os.geteuid() == 0 else []
    ways.append(Wrap("bwrap-userns", program))
    return [*ways, PROCESS] if sandbox == "auto" and not family.runs_answers else ways


def bubblewrap_command(wrap: Wrap, command: list[str]) -> list[str]:
    """Wrap a command in bubblewrap: it sees only the system, Python and this package, all read-only.

    It has no network, its own processes and an empty /tmp. The command is the first of its processes, so it
    sees no process of bubblewrap. Without a user namespace ("bwrap") the caller has to be root, and the worker
    changes to an unprivileged user itself. That needs two capabilities and is stronger, because limits on
    processes do not hold for root. Any other user needs a user namespace ("bwrap-userns").

    Raises:
        OSError: bubblewrap cannot be started.
    """
    roots = [Path(p) for p in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")]
    python = {Path(p) for p in (sys.prefix, sys.base_prefix, *sys.path) if p and Path(p).is_dir()}
    package = Path(__file__).resolve().parents[1]
    python -= {package.parent, Path.cwd(), Path("/")}
    binds = [*roots, *sorted(python), package]
    words = [wrap.program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--as-pid-1"]
    words += ["--unshare-cgroup-try"]
    if wrap.name == "bwrap-userns":
        words += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        if can_disable_namespaces(wrap.program):
            words += ["--disable-userns"]
    words += ["--cap-drop", "ALL"]
    if wrap.name == "bwrap":
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    words += ["--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev"]
    words += ["--size", str(16 << 20), "--tmpfs", "/tmp"]
    # bubblewrap makes missing folders above a bound one with mode 700, of root. Some imports come later, when
    # the worker is an unprivileged user.
    for above in sorted({above for path in binds for above in path.parents} - {Path("/")}):
        words += ["--perms", "0755", "--dir", str(above)]
    for path in binds:
        words += ["--ro-bind-try", str(path), str(path)]
    return [*words, "--chdir", "/", "--", *command]


def can_disable_namespaces(program: str) -> bool:
    """Return whether this bubblewrap has ``--disable-userns``, which version 0.8 brought.

    Raises:
        OSError: bubblewrap cannot be started.
    """
    try:
        said = subprocess.run(
            [program, "--help"], capture_output=True, text=True, timeout=HELP_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return "--disable-userns" in said.stdout + said.stderr

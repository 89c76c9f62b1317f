"""`offbeat keys`: make, show, replace, revoke and hand out the keys of a run."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launch.errors import ConfigError

if TYPE_CHECKING:
    from protocol.security.key_files import Listed

COMMANDS = {
    "make": "make what is missing: a pair for each role (or for the names given), token and certificate of HTTP",
    "show": "list the keys of a folder; secrets are not printed",
    "rotate": "replace the pair of a role or name, the token (name: http), or the certificate of HTTP (name: tls)",
    "revoke": "admit a key no longer: a name with all its keys, or one earlier key, as actor@1",
    "bundle": "copy what a host of this role or name needs, and nothing more, to a new folder",
    "header": "print the header that /status and the other HTTP servers of the run ask for",
}
DAY_S = 86_400.0


def add_keys(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat keys`."""
    text = "make, show, replace, revoke and hand out the keys of a run; see docs/run/security.md"
    group = commands.add_parser("keys", help=text, description=text)
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in COMMANDS.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("folder", type=Path, help="keys folder, as RUN_FOLDER/keys")
        if name == "make":
            action.add_argument(
                "names", nargs="*", metavar="NAME", help="as actor, or actor-gpu7 for one host"
            )
        if name in ("rotate", "revoke", "bundle"):
            action.add_argument("name", metavar="NAME")
        if name == "rotate":
            action.add_argument(
                "--keep-old", action="store_true", help="let those who have the key before in as well"
            )
        if name == "bundle":
            action.add_argument("out", type=Path, help="folder that does not exist yet")


def run(args: argparse.Namespace) -> int:
    """Run one action and return the exit code.

    Raises:
        ConfigError: the action failed; the text has the cause.
    """
    from protocol.errors import KeysUnusable

    try:
        sys.stdout.write("".join(f"{line}\n" for line in _do(args)))
    except KeysUnusable as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{error.filename or args.folder}: {error.strerror}") from None
    return 0


def _do(args: argparse.Namespace) -> list[str]:
    from protocol.security import key_files
    from protocol.security.http import authorization_header
    from protocol.security.keys import ROLES

    folder, name = args.folder, getattr(args, "name", "")
    match args.action:
        case "make":
            made = key_files.make(folder, args.names or ROLES)
            return [f"{folder}: made {', '.join(made)}" if made else f"{folder}: nothing was missing"]
        case "show":
            return _table(key_files.listing(folder))
        case "rotate":
            key_files.rotate(folder, name, keep_earlier=args.keep_old)
            return [f"{folder}: {name} replaced", _after_rotation(folder, name, keep_earlier=args.keep_old)]
        case "revoke":
            gone = key_files.revoke(folder, name)
            return [
                f"{folder}: removed {', '.join(gone)}",
                "the broker that uses this folder refuses it within two seconds, and tells all generators; "
                "nothing is to do on other hosts",
            ]
        case "bundle":
            copied = key_files.bundle(folder, name, args.out)
            return [
                f"{args.out}: {', '.join(copied)}",
                f"copy it to the host, for example with `scp -rp {args.out} HOST:`, and set security.keys there",
            ]
        case _:
            return [f"{key}: {value}" for key, value in authorization_header(folder).items()]


def _after_rotation(folder: Path, name: str, *, keep_earlier: bool) -> str:
    if name == "broker":
        return "all roles have to be started again, those on other hosts with the broker.pub of this folder"
    if name == "http":
        left = (
            "until then they send the one before, which is taken as well"
            if keep_earlier
            else "until then they get 401"
        )
        return f"bring http.token to the other hosts of broker, learner and generators; {left}"
    if name == "tls":
        return "servers here show it within a second; bring http.crt to other hosts, and http.key to relays there"
    if not keep_earlier:
        return "bring it to the other hosts of this role; until then they are refused"
    return (
        f"bring it to the other hosts of this role, then end what is still admitted with `offbeat keys revoke {folder} "
        f"{name}@N` (`offbeat keys show` lists them)"
    )


def _table(keys: "list[Listed]") -> list[str]:
    rows = [("name", "begins with", "secret here", "age")]
    rows += [
        (key.name, key.fingerprint, "yes" if key.secret else "no", f"{key.age_s / DAY_S:.1f} days")
        for key in keys
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]

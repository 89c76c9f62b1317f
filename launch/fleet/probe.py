"""The readiness probe of a container: whether the broker answers, and whether it knows the host of this container.

``python -m launch.fleet.probe head RUN_FOLDER`` or ``host RUN_FOLDER``. It ends with 0 or 1, and says why. kubelet
cannot ask for itself, because `/status` wants the token of the run. A probe every few seconds has to be cheap, so this
reads the settings as JSON and imports nothing large.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.errors import NoAnswer
from launch.supervise.broker_status import fetch

OVER = "over"
"""File in the home folder of a container that does nothing any more; its text says why."""
TIMEOUT_S = 10.0


def ready(status: Mapping[str, Any], host: str) -> bool:
    """Return whether a host takes part in the run; the head does if its broker answers.

    Args:
        status: answer of `/status`.
        host: name of the host; "": the head.

    Example:
        >>> status = {"hosts": [{"name": "g-pod", "generators": 1, "actors": 0}]}
        >>> ready(status, "g-pod"), ready(status, "g-other"), ready({}, "")
        (True, False, True)
    """
    if not host:
        return True
    found = next((one for one in status.get("hosts", ()) if one["name"] == host), None)
    return found is not None and found["generators"] + found["actors"] > 0


def settings(kind: str, run: Path) -> tuple[str, Path | None, str]:
    """Return address and keys folder of the broker, and the name of the host that runs here, "" for the head.

    Args:
        kind: "head" or "host".
        run: run folder. On a host it has nothing but the folder of the host.

    Raises:
        FileNotFoundError: nothing was started here yet.
    """
    folder = run
    if kind == "host":
        started = [path.parent for path in run.glob("hosts/*/config.json")]
        if not started:
            raise FileNotFoundError(f"{run}/hosts: no host has started here yet")
        folder = max(started, key=lambda path: path.stat().st_mtime)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    security = config["security"]
    keys = Path(security["keys"]) if security["keys"] else folder / "keys"
    return config["broker"]["http"], keys if security["encrypt"] else None, folder.name * (kind == "host")


def main(arguments: list[str]) -> int:
    """Ask once. Return 0 if the container is ready, else 1."""
    kind, run = arguments
    try:
        sys.stdout.write(f"not ready: {(Path.home() / OVER).read_text(encoding='utf-8')}")
        return 1
    except OSError:
        # It goes on, as nearly always.
        pass
    try:
        http, keys, host = settings(kind, Path(run))
        status = fetch(http, TIMEOUT_S, keys=keys)
    except (OSError, NoAnswer, ValueError, KeyError) as error:
        sys.stdout.write(f"not ready: {error}\n")
        return 1
    if not ready(status, host):
        sys.stdout.write(f"not ready: the broker knows no process of host {host} yet\n")
        return 1
    sys.stdout.write("ready\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

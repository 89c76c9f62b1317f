"""A stand-in for a role process under a supervisor; its broker serves nothing but `/status`.

Usage: ``python fake_role.py ROLE FOLDER [--name NAME] ...``. A peer beats by writing ``FOLDER/beats/NAME``,
and the broker lists the peers that have beaten within five seconds. The learner is done once
``FOLDER/enough`` exists. A file ``FOLDER/NAME.end`` makes a process end with the exit code in it. A file
``FOLDER/NAME.stall`` makes a process busy without progress, ``FOLDER/NAME.mute`` lets it not join, and
``FOLDER/NAME.deaf`` (or ``FOLDER/deaf``, for all) lets it ignore SIGTERM.
"""

import http.server
import json
import signal
import sys
import threading
import time
from pathlib import Path

from launch.run_folder import load_config
from protocol.security.http import server_context

BEAT_S = 0.2


def serve(folder: Path) -> None:
    host, port = load_config(folder / "config.json").broker.http.split(":")

    class Status(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"peers": peers(folder)}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer((host, int(port)), Status)
    server.socket = server_context(folder / "keys").wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def peers(folder: Path) -> list[dict]:
    now, found = time.time(), []
    for path in (folder / "beats").glob("*"):
        try:
            joined, busy_since = map(float, path.read_text().split())
            silent = now - path.stat().st_mtime
        except (OSError, ValueError):
            continue
        if silent < 5:
            stalled = now - busy_since if busy_since else 0.0
            entry = {"name": path.name, "silent_s": silent, "connected_s": now - joined}
            found.append(entry | {"busy": bool(busy_since), "stalled_s": stalled})
    return found


def main() -> None:
    role, folder = sys.argv[1], Path(sys.argv[2])
    name = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else role
    with open(folder / "starts", "a") as starts:
        starts.write(" ".join([name, *sys.argv[3:]]) + "\n")
    deaf = (folder / "deaf", folder / f"{name}.deaf")
    signal.signal(signal.SIGTERM, lambda *_: any(path.exists() for path in deaf) or sys.exit(0))
    if role == "broker":
        serve(folder)
    (folder / "beats").mkdir(exist_ok=True)
    joined, busy_since = time.time(), 0.0
    while True:
        if (code := folder / f"{name}.end").exists():
            number = int(code.read_text())
            sys.exit(number)
        if role not in ("broker", "weights") and not (folder / f"{name}.mute").exists():
            busy_since = (busy_since or time.time()) if (folder / f"{name}.stall").exists() else 0.0
            partial = folder / f"{name}.beat"
            partial.write_text(f"{joined} {busy_since}")
            partial.rename(folder / "beats" / name)
        if role == "learner" and (folder / "enough").exists():
            (folder / "result.json").write_text("{}")
            sys.exit(0)
        time.sleep(BEAT_S)


if __name__ == "__main__":
    main()

"""Test that killing the viewer at any moment changes no byte of the run folder."""

import http.client
import http.cookiejar
import random
import subprocess
import sys
import threading
import time
import urllib.request

from tests.view_runs import small_run


def contents(folder):
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def ask_much(base, secret, stop):
    """Log in and ask one question after the other until the server is gone."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    login = urllib.request.Request(f"{base}/api/login", headers={"Authorization": f"Bearer {secret}"})
    questions = [
        "overview",
        "ledger",
        "table",
        "trajectory?id=1g5.0.0",
        "batch",
        "staleness",
        "logs",
        "samples",
    ]
    try:
        opener.open(login, timeout=60).read()
        while not stop.is_set():
            for question in questions:
                opener.open(f"{base}/api/{question}", timeout=60).read()
    except (OSError, http.client.HTTPException):
        # An answer may have been cut off in its middle.
        return


def test_a_viewer_killed_at_any_moment_changes_no_byte(tmp_path):
    folder = small_run(tmp_path / "run")
    (folder / "lock").touch()
    before, draw = contents(folder), random.Random(4)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "view", str(folder), "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        base, _, secret = process.stdout.readline().strip().partition("/login#")
        stop = threading.Event()
        asking = threading.Thread(target=ask_much, args=(base, secret, stop))
        asking.start()
        # The moment is what is drawn; nothing waits for anything here.
        time.sleep(draw.uniform(0.0, 0.4))
        process.kill()
        process.wait(60)
        stop.set()
        asking.join(60)
        process.stdout.close()
        assert contents(folder) == before

"""Start each role by its own script, as docs/run/by-hand.md says."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from launch.processes import free_ports

pytestmark = pytest.mark.timeout(600)

ROLES = (
    ("learner", ()), ("actor", ("--name", "actor-0")), ("generator", ("--name", "generator-0")),
    ("actor", ("--name", "actor-1")), ("broker", ()), ("weights", ()),
)  # fmt: skip
END_S = 40.0
"""`actor.drain_timeout_s` and 30 s."""


def test_roles_started_by_hand_in_any_order_find_each_other(root, tmp_path):
    offbeat = tmp_path / "offbeat"
    offbeat.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m launch.cli "$@"\n')
    offbeat.chmod(0o755)
    port, http_port, weights_port = free_ports(3)
    env = {
        **os.environ,
        "OFFBEAT": str(offbeat),
        "OFFBEAT_BROKER": f"tcp://127.0.0.1:{port}",
        "OFFBEAT_HTTP": f"127.0.0.1:{http_port}",
    }
    settings = ["learner.steps=2", "learner.evaluation_tasks=8", f"run.dir={tmp_path}", "run.name=run"]
    settings += [f"model.cache={root / 'runs' / 'models'}", f"weights.http=127.0.0.1:{weights_port}"]
    fixed = [f"broker.endpoint={env['OFFBEAT_BROKER']}", f"broker.http={env['OFFBEAT_HTTP']}"]
    started = {}
    try:
        for role, arguments in ROLES:
            script = root / "launch" / "scripts" / f"{role}.sh"
            starts = ["sh", str(script)] if script.exists() else [str(offbeat), role]
            command = [*starts, str(root / "recipes" / "spell_backward.toml"), *arguments, *settings]
            command += [] if script.exists() else fixed
            name = "-".join([role, *arguments[1:]])
            with open(tmp_path / f"{name}.log", "wb") as log:
                started[name] = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        code = started["learner"].wait(timeout=400)
        assert code == 0, (tmp_path / "learner.log").read_text()[-3000:]
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert result["steps"] == 2
        assert [e["tag"] for e in result["evaluations"]] == ["before", "after"]
        # Nobody signals the others: the learner's last message ends them.
        deadline = time.monotonic() + END_S
        codes = {
            name: process.wait(max(0.1, deadline - time.monotonic())) for name, process in started.items()
        }
        assert codes == dict.fromkeys(codes, 0)
    finally:
        for process in started.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(30)

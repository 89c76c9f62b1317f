"""Generators and actors without a learner, or without a broker, end with a code that says to start them again."""

import os
import subprocess
import sys

import pytest
import zmq

from launch.errors import COME_BACK, read_reason
from launch.processes import free_ports
from launch.run_file.load import check
from launch.run_folder import CONFIG, save_config
from launch.supervise.broker_status import fetch
from protocol.messages.peers import Hello
from protocol.sockets import ThreadLink, router
from tests.integration.actors.actor_harness import ENV_FILE
from tests.integration.hosts.hosts_harness import PATIENCE_S, ROOT, model_of_test
from tests.integration.protocol.encrypted_harness import until

ORPHAN_S = 3.0
PEERS = ("generator-0", "actor-0")


class Run:
    """A run folder, and roles as `offbeat train` would start them, with the counting engine."""

    def __init__(self, folder):
        self.folder = folder / "run"
        self.folder.mkdir()
        (folder / "counting.py").write_text(ENV_FILE)
        port, http = free_ports(2)
        self.http = f"127.0.0.1:{http}"
        self.endpoint = f"tcp://127.0.0.1:{port}"
        settings = {
            "run": {"name": "run", "dir": str(folder)},
            "model": {"path": str(model_of_test(folder / "model"))},
            "env": {"name": f"{folder / 'counting.py'}:Counting"},
            "broker": {"endpoint": self.endpoint, "http": self.http},
            "generator": {"max_model_len": 256},
            "security": {"encrypt": False},
            "fleet": {"orphan_minutes": ORPHAN_S / 60},
        }
        save_config(check(settings, "a test"), self.folder / CONFIG)
        self.processes = {}

    def start(self, name):
        role = name.rsplit("-", 1)[0]
        module = "launch.role" if role == "broker" else "tests.integration.hosts.counting_role"
        named = [] if role == "broker" else ["--name", name]
        (self.folder / f"{name}.exit").unlink(missing_ok=True)
        with open(self.folder / f"{name}.log", "ab") as out:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, role, str(self.folder), *named],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stderr=out,
            )

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def peers(self):
        return {peer["name"] for peer in fetch(self.http, 5.0)["peers"]}

    def codes(self):
        return {name: self.processes[name].wait(PATIENCE_S) for name in PEERS}

    def close(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(PATIENCE_S)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()


@pytest.mark.timeout(180)
def test_without_a_learner_and_without_a_broker_they_end_with_75_and_say_why(run):
    for name in ("broker", *PEERS):
        run.start(name)
    assert run.codes() == dict.fromkeys(PEERS, COME_BACK), run.log("generator-0")
    for name in PEERS:
        assert "no learner has been there for" in read_reason(run.folder, name)
        # One line, and no traceback.
        assert "Traceback" not in run.log(name)
    assert run.processes["broker"].poll() is None, "it holds the state of the run"

    hello = Hello(role="learner", peer="learner", incarnation=1, epoch=1)
    learner = ThreadLink(run.endpoint, hello)
    for name in PEERS:
        run.start(name)
    until(lambda: run.peers() == {"learner", *PEERS}, "both have joined again", PATIENCE_S)
    run.processes["broker"].kill()
    assert run.codes() == dict.fromkeys(PEERS, COME_BACK), run.log("generator-0")
    for name in PEERS:
        assert "the broker has not been heard for" in read_reason(run.folder, name)
        assert "fleet.orphan_minutes" in read_reason(run.folder, name)
    learner.close()


@pytest.mark.timeout(300)
def test_a_signal_to_a_generator_that_waits_for_its_welcome_ends_it_without_a_fault(run):
    """It would else wait until its join fails, with code 1, and the grace of its host would be over."""
    silent = router(zmq.Context.instance())
    silent.bind(run.endpoint)
    try:
        run.start("generator-0")
        assert silent.poll(PATIENCE_S * 1_000), run.log("generator-0")
        run.processes["generator-0"].terminate()
        assert run.processes["generator-0"].wait(PATIENCE_S) == 0, run.log("generator-0")
        assert "serves actors" not in run.log("generator-0")
    finally:
        silent.close(linger=0)

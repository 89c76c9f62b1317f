"""A broker process with keys, and peers that send what a test tells them to."""

import json
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import zmq

from launch.processes import free_ports
from launch.supervise.broker_status import fetch
from protocol.codec import encode
from protocol.messages.peers import Hello, Welcome
from protocol.security.client import ClientKeys
from protocol.sockets import dealer
from tests.hearing import heard

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0
PROGRAM = """
import json, logging, sys
from pathlib import Path

import zmq
logging.basicConfig(level="INFO")
from broker.config import BrokerConfig
from broker.service import serve
settings, keys, journal = json.loads(sys.argv[1]), *(Path(path) if path else None for path in sys.argv[2:])
serve(BrokerConfig(**settings), run="run", max_policy_lag=4, journal=journal, keys=keys, http_keys=keys)
"""


def until(condition, what, timeout_s=PATIENCE_S):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)
    return found


class Broker:
    """A broker process, without encryption if ``keys`` is None, and without a journal if ``folder`` is."""

    def __init__(self, keys, log, *, endpoint="", folder=None, address="127.0.0.1", **settings):
        port, http_port = free_ports(2)
        self.endpoint = endpoint or f"tcp://{address}:{port}"
        self.http, self.keys, self.log = f"{address}:{http_port}", keys, log
        settings = {"endpoint": self.endpoint, "http": self.http, "heartbeat_s": 1.0} | settings
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(settings), str(keys or ""), str(folder or "")],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stderr=out,
            )
        until(self._answers, "the broker answers")

    def _answers(self):
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.status()
        except (OSError, ConnectionError):
            return None

    def status(self):
        return fetch(self.http, 5.0, keys=self.keys)

    def peers(self):
        return {peer["name"] for peer in self.status()["peers"]}

    def refused(self):
        return self.status()["ledger"]["refused"]

    def resident_mb(self):
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024

    def stop(self):
        if self.process.poll() is None:
            # At SIGTERM, the broker would wait for peers that do not say Goodbye.
            self.process.kill()
            self.process.wait(PATIENCE_S)


class Peer:
    """A DEALER socket with given keys that sends what a test tells it to."""

    def __init__(self, context, broker, keys, role, name, *, key="", route=b""):
        own = None
        if keys is not None:
            own = ClientKeys.read(keys, key or role, name, "broker")
        self.socket = dealer(context, name, own)
        if route:
            self.socket.setsockopt(zmq.ROUTING_ID, route)
        self.socket.connect(broker.endpoint)
        self.hello = Hello(role=role, peer=name, incarnation=1)
        self.unread = deque()

    def say(self, message):
        self.socket.send_multipart(encode(message))

    def hear(self, kind, timeout_s=PATIENCE_S):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            while self.unread:
                message = self.unread.popleft()
                if isinstance(message, kind):
                    return message
            if self.socket.poll(100):
                self.unread += heard(self.socket.recv_multipart())[0]
        raise AssertionError(f"{self.hello.peer} hears no {kind.__name__}")

    def hears_nothing(self, seconds=1.0):
        return not self.unread and not self.socket.poll(int(1000 * seconds))

    def join(self):
        self.say(self.hello)
        return self.hear(Welcome)

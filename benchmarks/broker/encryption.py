"""Measure the cost of encryption in the broker: processor time per message, plain and with CURVE.

    python benchmarks/broker/encryption.py [--messages 20000] [--kilobytes 16] [--rounds 5]

One peer sends heartbeats that carry a body, and gets an answer to each. It keeps 64 messages under way. The
processor time is measured for the whole broker process, ZeroMQ's own thread included. The lowest value of all
rounds counts.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import zmq

from broker.config import BrokerConfig
from broker.service import serve
from launch.processes import free_port
from protocol.codec import encode
from protocol.messages.peers import Heartbeat, Hello
from protocol.security import key_files
from protocol.security.client import ClientKeys
from protocol.sockets import dealer

WINDOW = 64
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def run_broker(endpoint: str, keys: Path | None) -> None:
    config = BrokerConfig(endpoint=endpoint, http="127.0.0.1:0", heartbeat_s=60.0)
    serve(config, run="r", max_policy_lag=4, keys=keys)


class Side:
    """A broker, and a peer that talks to it."""

    def __init__(self, keys: Path | None) -> None:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.process = multiprocessing.get_context("spawn").Process(target=run_broker, args=(endpoint, keys))
        self.process.start()
        own = None if keys is None else ClientKeys.read(keys, "actor", "actor-0", "broker")
        self.socket = dealer(zmq.Context.instance(), "actor-0", own)
        self.socket.connect(endpoint)
        self.socket.send_multipart(encode(Hello(role="actor", peer="actor-0", incarnation=1)))
        self.socket.recv_multipart()

    def round(self, messages: int, nbytes: int) -> tuple[float, float]:
        """Exchange all messages. Return the broker's processor time and the wall time in us per message."""
        frames = [*encode(Heartbeat()), bytes(nbytes)]
        assert self.process.pid is not None
        cpu, wall, under_way, sent, heard = cpu_s(self.process.pid), time.perf_counter(), 0, 0, 0
        while heard < messages:
            while under_way < WINDOW and sent < messages:
                self.socket.send_multipart(frames, copy=False)
                under_way, sent = under_way + 1, sent + 1
            self.socket.recv_multipart()
            under_way, heard = under_way - 1, heard + 1
        took = time.perf_counter() - wall
        return (cpu_s(self.process.pid) - cpu) / messages * 1e6, took / messages * 1e6

    def close(self) -> None:
        self.socket.close(linger=0)
        self.process.terminate()
        self.process.join(20.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--kilobytes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key_files.make(Path(folder) / "keys")
        sides = {"plain": Side(None), "CURVE": Side(Path(folder) / "keys")}
        best: dict[str, tuple[float, float]] = {}
        try:
            for _ in range(args.rounds):
                for name, side in sides.items():
                    best[name] = min(
                        best.get(name, (1e9, 1e9)), side.round(args.messages, args.kilobytes * 1024)
                    )
        finally:
            for side in sides.values():
                side.close()
    for name, (cpu, wall) in best.items():
        sys.stdout.write(
            f"{name}: {cpu:.1f} us of processor time a message of {args.kilobytes} KB, {wall:.1f} us in all\n"
        )
    sys.stdout.write(f"ratio {best['CURVE'][0] / best['plain'][0]:.2f}\n")


if __name__ == "__main__":
    main()

"""Eight hosts behind lines of one rate get a version from each other, while a single server would take eight times."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from protocol.messages.peers import PublishWeights
from protocol.weights.files import write_version
from protocol.weights.format import read_manifest
from tests.e2e.namespaces import Host, why_not
from tests.integration.hosts.hosts_harness import PATIENCE_S, ROOT, Hosts
from tests.integration.protocol.encrypted_harness import until

HOSTS, LINE, MIB, LINE_MIB_S = 8, "tbf rate 32mbit burst 64kb latency 300ms", 12, 32e6 / 8 / 2**20
HEAD, LEARNER, BRIDGE = "10.80.0.1", "10.80.0.2", "offbeat-tree"
SERVER = """
import asyncio, json, sys
from pathlib import Path
from protocol.weights.format import version_folder
from protocol.weights.server import WeightsServer, serving
a = json.loads(sys.argv[1])

async def main():
    versions = Path(a["versions"])
    server = WeightsServer("run", lambda _, version: version_folder(versions, version), versions, Path(a["keys"]))
    async with serving(server, a["host"], a["port"]):
        await asyncio.Event().wait()

asyncio.run(main())
"""
GENERATOR = """
import contextlib, json, logging, sys
from pathlib import Path
logging.basicConfig(level="INFO", format="%(created).3f %(message)s")
from actors.config import GeneratorConfig
from actors.generator import generator as process
from tests.integration.hosts.counting_engine import CountingEngine
a = json.loads(sys.argv[1])

@contextlib.asynccontextmanager
async def engine(config, *, model, seed):
    yield CountingEngine(Path(model))

process.engine_of = engine
config = GeneratorConfig(endpoint="tcp://0.0.0.0:0", weights_http=a["weights_http"])
process.serve_generator(config, name=a["name"], broker=a["broker"], model=a["model"], run="run", seed=0,
                        keys=Path(a["keys"]))
"""
IN_SERVICE = "policy version {} in service"
WHY_NOT = why_not()
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no namespaces: {WHY_NOT}"),
]


class Lines:
    """A switch with the learner's host and eight others, each behind a line of one rate both ways."""

    def __init__(self, folder):
        self.hosts = []
        self._ip("link", "del", BRIDGE, check=False)
        self._ip("link", "add", BRIDGE, "type", "bridge")
        self._ip("addr", "add", f"{HEAD}/24", "dev", BRIDGE)
        self._ip("link", "set", BRIDGE, "up")
        for number in range(HOSTS + 1):
            name = f"h{number}" if number else "learner"
            host = Host(name, f"10.80.0.{2 + number}", folder / name, folder)
            self.hosts.append(host)
            host.plug_in(BRIDGE, f"offbeat-t{number}")
            host.run(f"tc qdisc add dev eth0 root {LINE}")
            subprocess.run(
                ["tc", "qdisc", "add", "dev", f"offbeat-t{number}", "root", *LINE.split()], check=True
            )

    def close(self):
        for host in self.hosts:
            host.close()
        self._ip("link", "del", BRIDGE, check=False)

    def _ip(self, *words, check=True):
        subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture
def lines(tmp_path):
    lines = Lines(tmp_path)
    yield lines
    lines.close()


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    run = Hosts(folder, address=HEAD)
    save_file({"a": np.zeros(MIB * 2**18, "f4")}, run.model / "model.safetensors")
    yield run
    run.close()


def start(run, inside, name, program, /, **arguments):
    arguments |= {"keys": str(run.keys)}
    with open(run.folder / f"{name}.log", "ab") as out:
        run.processes[name] = subprocess.Popen(
            [*inside.command('exec "$0" "$@"'), sys.executable, "-c", program, json.dumps(arguments)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stderr=out,
        )


def publish(run, versions, version):
    """Publish a version of random numbers, and return the seconds after which each host had it in service."""
    array = np.random.default_rng(version).normal(size=MIB * 2**18).astype("<f4")
    manifest = write_version(
        versions,
        run="run",
        epoch=1,
        version=version,
        shapes={"a": ("F32", array.shape)},
        tensors=[("a", memoryview(array).cast("B"))],
    )
    names = [name for name in run.processes if name.startswith("generator")]
    began = time.time()
    url, root = f"https://{LEARNER}:5757", read_manifest(manifest).root
    run.learner.send(PublishWeights(epoch=1, version=version, manifest=str(manifest), url=url, root=root))
    said = IN_SERVICE.format(version)

    def all_have_it():
        assert all(run.processes[name].poll() is None for name in names)
        return all(said in run.log(name) for name in names)

    until(all_have_it, "all hosts have the version", PATIENCE_S)
    lines = [next(line for line in run.log(name).splitlines() if said in line) for name in names]
    return sorted(float(line.split()[0]) - began for line in lines)


@pytest.mark.parametrize("relays", [True, False])
def test_the_last_of_eight_hosts_is_nearly_as_early_as_the_first(lines, run, tmp_path, relays):
    versions = tmp_path / "versions"
    versions.mkdir()
    learner, *others = lines.hosts
    start(run, learner, "server", SERVER, versions=str(versions), host=LEARNER, port=5757)
    for number, host in enumerate(others):
        start(
            run, host, f"generator-{number}", GENERATOR, name=f"generator-{number}", model=str(run.model),
            broker=run.broker.endpoint, weights_http="0.0.0.0:0" if relays else "",
        )  # fmt: skip
    until(lambda: len(run.broker.status()["peers"]) == HOSTS + 1, "all generators join", PATIENCE_S)
    alone = MIB / LINE_MIB_S
    for version in (1, 2):
        seconds = publish(run, versions, version)
        print(
            f"relays {relays}: {MIB} MiB, {alone:.1f} s for one host alone; first {seconds[0]:.1f} s, "
            f"last {seconds[-1]:.1f} s, ratio {seconds[-1] / seconds[0]:.2f}"
        )
        if relays:
            assert seconds[-1] <= 2 * seconds[0]
            assert seconds[-1] < 0.6 * HOSTS * alone
        else:
            assert seconds[-1] > 0.9 * HOSTS * alone
    assert not any("could not be fetched" in run.log(f"generator-{number}") for number in range(HOSTS))

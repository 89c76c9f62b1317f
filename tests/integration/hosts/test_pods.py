"""What the pods of Kubernetes would run, is run here: commands, ticket, probe, SIGTERM. There is no kubelet."""

import os
import signal
import subprocess
import sys

import pytest

from launch.fleet import kubernetes
from launch.fleet.job import Job
from launch.fleet.site import KubernetesSite
from protocol.messages.peers import Goodbye
from tests.integration.hosts.fleet_harness import OFFBEAT, Fleet
from tests.integration.hosts.hosts_harness import PATIENCE_S, ROOT
from tests.integration.hosts.test_fleet import gauge
from tests.integration.protocol.encrypted_harness import until

pytestmark = pytest.mark.timeout(600)
SITE = KubernetesSite(image="offbeat", actors_per_pod=1, grace_s=30)


class Pod:
    """A container of a Deployment, whose paths lie in a folder."""

    def __init__(self, folder, deployment, ticket):
        self.folder = folder
        (self.container,) = deployment["spec"]["template"]["spec"]["containers"]
        (folder / "work").mkdir(parents=True)
        (folder / "ticket").write_bytes(ticket.read_bytes())
        # As the file of a Secret, whose group is that of the pod.
        (folder / "ticket").chmod(kubernetes.SECRET_MODE)
        values = {one["name"]: one.get("value", "127.0.0.1") for one in self.container["env"]}
        self.environment = {
            **os.environ,
            **{name: self.here(value) for name, value in values.items()},
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        tini, end, *command = self.container["command"]
        assert (tini, end) == ("tini", "--")
        words = [word.replace("$(POD_IP)", values["POD_IP"]) for word in [*command, *self.container["args"]]]
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                list(map(self.here, words)),
                env=self.environment,
                cwd=folder / "work",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def here(self, text):
        """Return a text with the paths of the container in the pod's folder."""
        return text.replace(kubernetes.TICKET, f"{self.folder}/ticket").replace(
            kubernetes.WORK_FOLDER, f"{self.folder}/work"
        )

    def ready(self):
        assert self.process.poll() is None, self.log()
        command = self.container["readinessProbe"]["exec"]["command"]
        assert command[0] == "python"
        words = [sys.executable, *map(self.here, command[1:])]
        return (
            subprocess.run(
                words, env=self.environment, capture_output=True, timeout=60, check=False
            ).returncode
            == 0
        )

    def log(self):
        return (self.folder / "log").read_text()


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "offbeat"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{OFFBEAT}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    fleet = Fleet(tmp_path / "fleet")
    yield fleet
    fleet.close()


def test_pods_join_are_ready_drain_at_sigterm_and_stay_when_the_run_is_over(fleet, tmp_path):
    job = Job("run.toml", (), fleet.config, {"run.toml": ""}, (1, 1))
    made = kubernetes.objects(job, SITE)["hosts.yaml"]
    pods = []
    try:
        for deployment in made[::2]:
            role = deployment["metadata"]["labels"]["app.kubernetes.io/component"]
            label = kubernetes.LABELS[role]
            fleet.ticket("--any", label)
            pods.append(Pod(tmp_path / role, deployment, fleet.home / "tickets" / f"{label}.ticket"))
        for pod in pods:
            until(pod.ready, f"the probe says ready: {pod.log()}", PATIENCE_S)
        hosts = {one["name"][0]: one for one in fleet.broker.status()["hosts"]}
        assert {label: (one["generators"], one["actors"]) for label, one in hosts.items()} == {
            "g": (1, 0),
            "a": (0, 1),
        }
        assert hosts["g"]["job"].startswith("pod ")
        # The actor's pod reaches the generator's by the address that Kubernetes gives it.
        assert len(fleet.sampled_by("t0", "t1")) == 1
        generators, actors = pods
        actors.process.send_signal(signal.SIGTERM)
        assert actors.process.wait(PATIENCE_S) == 75, actors.log()
        assert gauge(fleet, "leases_lost_total") == 0

        # The host ends, and its container does not, as kubelet would start it again.
        fleet.learner.send(Goodbye(reason="all steps done", then="over"))
        over = generators.folder / "work" / "home" / "over"
        until(over.exists, f"the host of the generator has ended: {generators.log()}", PATIENCE_S)
        until(lambda: "(code 0): this pod waits" in over.read_text(), "it says why", PATIENCE_S)
        assert not generators.ready()
        generators.process.send_signal(signal.SIGTERM)
        assert generators.process.wait(PATIENCE_S) == -signal.SIGTERM
    finally:
        for pod in pods:
            if pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait(PATIENCE_S)

"""A line that is slow, and one that loses large packets: the run goes on, and the status names cause and cure."""

import shutil
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.errors import COME_BACK
from learner.run_files import weights_folder
from protocol.messages.peers import PublishWeights
from protocol.session import SHORT_ONLY
from protocol.weights.files import write_version
from protocol.weights.format import read_manifest, version_folder
from tests.campaigns.faults.proof import MUST_BE_EMPTY
from tests.integration.actors.actor_harness import ENV_FILE
from tests.integration.hosts.hosts_harness import PATIENCE_S
from tests.integration.hosts.test_bad_network import BACK_S, HEAD, PORT, TABLE, WHY_NOT, Numbered, nft, switch
from tests.integration.hosts.test_fleet import gauge
from tests.integration.protocol.encrypted_harness import until

NO_ETHTOOL = "" if shutil.which("ethtool") else "ethtool is not installed"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT or NO_ETHTOOL), reason=f"no network to harm: {WHY_NOT or NO_ETHTOOL}"),
]
SLOW = "tbf rate 2mbit burst 16kb latency 300ms"
HOLE = TABLE.format(name="offbeat_out", device=PORT, rule="meta length gt 1200 drop")
VERSION_FLOATS = 400_000
"""1.6 MB, which take 6.4 s at 2 Mbit/s."""
EVERY_S, UNDER_WAY = 1.0, 12


class Course(Numbered):
    """A run that publishes a version each second, and keeps tasks under way."""

    publishing = True

    def __init__(self, folder):
        super().__init__(folder, HEAD)
        # Each segment is longer than the hole lets through.
        long = ENV_FILE.replace('"content": str(self.number)', '"content": "7 " * 40 + str(self.number)', 1)
        (self.run / "counting.py").write_text(long)
        save_file({"a": np.zeros(VERSION_FLOATS, "f4")}, self.model / "model.safetensors")
        self.versions = weights_folder(self.run)
        self.versions.mkdir()
        self.version, self.published_at, self.trained = 0, 0.0, []

    def is_complete(self, host="far"):
        found = self.status_of(host)
        return found and (found["generators"], found["actors"]) == (1, 1)

    def publish(self):
        self.version += 1
        array = np.random.default_rng(self.version).normal(size=VERSION_FLOATS).astype("<f4")
        manifest = write_version(
            self.versions,
            run="run",
            epoch=1,
            version=self.version,
            shapes={"a": ("F32", array.shape)},
            tensors=[("a", memoryview(array).cast("B"))],
        )
        root, url = read_manifest(manifest).root, f"https://{self.config.weights.http}"
        told = PublishWeights(epoch=1, version=self.version, manifest=str(manifest), url=url, root=root)
        self.learner.send(told)
        shutil.rmtree(version_folder(self.versions, self.version - 8), ignore_errors=True)

    def go_on(self, until_true, what):
        """Train, and publish each second, until the condition holds. Return what it returned, and the seconds."""
        began = time.monotonic()
        while not (found := until_true()):
            now = time.monotonic()
            assert now < began + PATIENCE_S, f"waited in vain: {what}; {self.broker.status()['waits']}"
            if self.publishing and now >= self.published_at + EVERY_S:
                self.published_at = now
                self.publish()
            self.keep_busy()
            time.sleep(0.05)
        return found, time.monotonic() - began

    def keep_busy(self):
        """Take what has come, and give as many tasks as are missing: those of stale units never come."""
        units = []
        self._receive(units)
        self.trained += [{segment.generator for segment in unit} - {""} for unit in units]
        queues = self.broker.status()["queues"]
        missing = UNDER_WAY - queues["tasks_queued"] - queues["tasks_leased"]
        if missing > 0:
            self.put(*self.names(missing))

    def waits_of(self, name, *words):
        """Return the lines of the status about a process that have all of these words."""
        lines = [line for line in self.broker.status()["waits"] if line.startswith(name)]
        return [line for line in lines if all(word in line for word in words)]

    def behind(self, name):
        found = next((peer for peer in self.broker.status()["peers"] if peer["name"] == name), None)
        return self.version - (found["policy_version"] or 0) if found else None

    def sampled_lately(self, name, units=8):
        """Return whether a generator sampled a part of the last units."""
        return name in set().union(*self.trained[-units:], set())

    def trains(self, count):
        """Return a condition: more units than this were trained since now."""
        goal = len(self.trained) + count
        return lambda: len(self.trained) > goal

    def recover(self, name, said, is_cured, what):
        """Wait until the harm to the line has no effect any more and its generator samples; then end the run.

        Args:
            said: what was seen before.
        """
        healed = time.monotonic()
        _, cured_s = self.go_on(is_cured, what)
        self.go_on(lambda: self.sampled_lately(name), "it samples again")
        works_s = time.monotonic() - healed
        ledger, proof = self.finish()
        print(
            f"{said}; healed: well after {cured_s:.1f} s, samples after {works_s:.1f} s; "
            f"{ledger['duplicate_segments']} duplicates; {proof}"
        )
        assert works_s < BACK_S

    def finish(self):
        """Let what is under way end, and prove that each stored segment was trained once, or left out as stale."""
        queues = {}

        def done():
            units = []
            self._receive(units)
            queues.update(self.broker.status()["queues"])
            return not any(
                queues[name] for name in ("tasks_queued", "tasks_leased", "units_ready", "units_leased")
            )

        until(done, f"all tasks end: {queues}", PATIENCE_S)
        ledger = self.broker.status()["ledger"]
        for name in ("far", "near"):
            assert self.end(name) == 75, self.log_of(name)
        proof = self.proof()
        assert not any(getattr(proof, what) for what in MUST_BE_EMPTY), proof
        assert set(proof.outcomes) <= {"trained", "stale", "superseded"}, proof
        assert proof.held == 0
        return ledger, proof

    def close(self):
        super().close()
        shutil.rmtree(self.versions, ignore_errors=True)


@pytest.fixture
def course(tmp_path):
    """A run with a host on the line, whose namespaces come too, and one beside the head."""
    with switch(tmp_path) as host:
        course = Course(tmp_path)
        try:
            course.join("far", course.ticket("--host", "far"), "--actors", "1", pause_s=0.02, inside=host)
            course.join("near", course.ticket("--host", "near"), "--actors", "1", pause_s=0.02)
            for name in ("far", "near"):
                course.await_host(name, name, actors=1)
            yield course, host
        finally:
            course.close()


def on_both_ends(host, command):
    """Run a command for each end of the line, whose device is `{}` in it."""
    subprocess.run(command.format(PORT).split(), check=True)
    host.run(command.format("eth0"))


def test_a_slow_line_is_named_and_its_generator_gets_no_turns_while_it_is_too_far_behind(course):
    course, host = course
    of = "generator-far-0"
    course.go_on(lambda: course.sampled_lately(of) and course.behind(of) is not None, "both hosts sample")
    on_both_ends(host, f"tc qdisc add dev {{}} root {SLOW}")
    (line, *_), told_s = course.go_on(
        lambda: course.waits_of(of, "behind the newest", " MB/s, and one is published each "),
        "the status says that the line is slow",
    )
    assert "a version takes" in line
    assert "take a faster line to the learner's host, publish less often (learner.publish_every)" in line
    trains = course.trains(40)
    _, avoided_s = course.go_on(
        lambda: trains() and not course.sampled_lately(of, 40), "nobody asks it any more"
    )
    # It is there all the time, and the run goes on.
    assert course.waits_of(of, " MB/s")
    assert gauge(course, "lost_total") == 0
    on_both_ends(host, "tc qdisc del dev {} root")
    said = f"2 Mbit/s: {line}; said after {told_s:.1f} s, avoided after {avoided_s:.1f} s more"
    course.recover(of, said, lambda: not course.waits_of(of, " MB/s"), "the cause is gone")


def test_a_line_that_loses_large_packets_is_named_and_the_other_host_trains(course):
    course, host = course
    course.publishing = False
    of = "generator-far-0"
    course.go_on(lambda: course.sampled_lately(of), "both hosts sample")
    on_both_ends(host, "ethtool -K {} tso off gso off gro off")
    nft("-f", "-", text=HOLE)
    try:
        (line, *_), told_s = course.go_on(
            lambda: course.waits_of("actor-far-0", SHORT_ONLY), "the status says what is wrong"
        )
        assert "large packets are lost on the way to the broker" in line
        assert "look at the MTU (docs/run/security.md)" in line
        course.go_on(course.trains(40), "the other host trains")
        # A further host there does not start, says why, and ends as one that its engine starts again.
        course.join("late", course.ticket("--host", "late"), "--actors", "1", inside=host)
        code, refused_s = course.go_on(lambda: course.hosts["late"].poll(), "it does not start")
        said = course.log_of("late")
        assert "lower the MTU of this host's network device" in said
        assert code == COME_BACK, said
    finally:
        nft("delete", "table", "netdev", "offbeat_out", check=False)
    said = f"MTU hole: {line}; said after {told_s:.1f} s; a further host refused after {refused_s:.1f} s (code {code})"
    course.recover(of, said, course.is_complete, "all of the host are there")

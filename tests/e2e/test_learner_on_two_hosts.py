"""A learner with a rank on each of two hosts trains, loses a rank, and goes on. The hosts are network namespaces."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.namespaces import Host, why_not
from tests.e2e.process_tree import descendants

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network namespaces: {WHY_NOT}"),
]
PATIENCE_S = 400.0
SETTINGS = (
    "run.name=run", "learner.steps=12", "learner.evaluation_tasks=0", "learner.checkpoint_every=1",
    "learner.nodes=2", "learner.rendezvous=10.0.0.5:29500",
)  # fmt: skip


@pytest.fixture
def hosts(root, tmp_path, monkeypatch):
    # The names of these hosts resolve to nothing, so gloo has to be told the wire.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    programs = tmp_path / "bin"
    programs.mkdir()
    offbeat = f'PYTHONPATH="{root}" exec "{sys.executable}" -m launch.cli "$@"'
    (programs / "offbeat").write_text(f"#!/bin/sh\n{offbeat}\n")
    (programs / "offbeat").chmod(0o755)
    made = [Host("head", "10.0.0.5", tmp_path / "head", programs)]
    try:
        made.append(Host("second", "10.0.0.7", tmp_path / "second", programs))
        made[0].connect(made[1])
        yield made
    finally:
        for host in made:
            host.close()


def steps(folder):
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def ranks_below(pid):
    """Return the processes below this one that are ranks of a learner, and not the torchrun that starts them."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in descendants(pid)}
    return [
        child
        for child, words in commands.items()
        if b"launch.role" in words
        and b"torch.distributed.run" not in words
        and b"launch.by_hand" not in words
    ]


def test_two_hosts_train_and_come_back_when_one_loses_its_rank(hosts, root, tmp_path):
    head, second = hosts
    shared = tmp_path / "shared"
    places = [f"run.dir={shared}", f"model.cache={root / 'runs' / 'models'}"]
    words = " ".join([str(root / "recipes" / "spell_backward.toml"), *places, *SETTINGS])
    head.start(f"offbeat train {words}")
    # As the page says: a loop starts the other host's ranks again, and before the run folder is there.
    (second.folder / "join").write_text(
        f"until offbeat learner {words} --node 1 || [ $? -eq 65 ]; do sleep 1; done"
    )
    second.start("sh join")
    joined = second.started["join"]

    def until(condition, what):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            said = [log.read_text()[-3000:] for log in (head.log("train"), second.log("join"))]
            assert time.monotonic() < deadline, "\n".join([f"{what} does not come", *said])
            time.sleep(0.2)

    until(lambda: len(steps(shared)) >= 3, "the third step")
    (rank,) = ranks_below(joined.pid)
    os.kill(rank, signal.SIGKILL)
    until(lambda: head.started["train"].poll() is not None, "the end")
    assert head.started["train"].returncode == 0, head.log("train").read_text()[-4000:]
    assert joined.wait(60.0) == 0, "the loop ends with the run"
    summary = json.loads((shared / "run" / "summary.json").read_text())
    assert summary["restarts"]["learner"] == 1
    assert steps(shared) == list(range(1, 13))

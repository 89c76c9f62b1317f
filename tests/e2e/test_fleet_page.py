"""Run the commands of docs/run/fleet.md on a head that only learns and a host, as the page has them."""

import json
import re
import sys
import textwrap
import time

import pytest

from tests.e2e.namespaces import Host, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network namespaces: {WHY_NOT}"),
]
PAGE = "docs/run/fleet.md"
BLOCK = re.compile(r"<!-- fleet: (.+?) -->\n *```\w+\n(.*?)\n *```", re.DOTALL)
PATIENCE_S = 400.0


def blocks(root):
    """Return the marked blocks of the page, in its order, as (mark, text)."""
    return [(mark, textwrap.dedent(text)) for mark, text in BLOCK.findall((root / PAGE).read_text())]


@pytest.fixture
def hosts(root, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    cache = f'XDG_CACHE_HOME="{tmp_path}/$(hostname)/cache"'
    offbeat = f'{cache} PYTHONPATH="{root}" exec "{sys.executable}" -m launch.cli "$@"'
    scp = f'cp -p "$2" "{tmp_path}/${{3%:}}/"'
    for name, script in (("scp", scp), ("offbeat", offbeat)):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    made = []
    try:
        for name, address in (("head", "10.0.0.5"), ("gpu7", "10.0.0.7")):
            made.append(Host(name, address, tmp_path / name, programs))
        made[0].connect(made[1])
        yield {host.name: host for host in made}
    finally:
        for host in made:
            host.close()


def until(condition, hosts, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        logs = {role: host.log(role).read_text()[-3000:] for host in hosts.values() for role in host.started}
        assert time.monotonic() < deadline, f"waited in vain: {what}\n{logs}"
        ended = [process for host in hosts.values() for process in host.started.values() if process.poll()]
        assert not ended, f"ended by a fault while waiting: {what}\n{logs}"
        time.sleep(0.3)
    return found


def test_the_commands_of_the_page_train_on_a_host_that_came_by_a_ticket(hosts, root):
    head, gpu7 = hosts["head"], hosts["gpu7"]
    (root / "runs" / "models").mkdir(parents=True, exist_ok=True)
    (head.folder / "runs").mkdir()
    (head.folder / "runs" / "models").symlink_to(root / "runs" / "models")
    (_, run_file), (_, train), (_, ticket), (_, join), (_, look) = blocks(root)
    (head.folder / "run.toml").write_text(run_file)
    head.start(train)
    until(lambda: "started broker" in head.log("train").read_text(), hosts, "the head starts")
    assert (
        "other hosts join with the command that `offbeat ticket runs/r` prints"
        in head.log("train").read_text()
    )

    # What a further host costs, as the page says.
    commands, files = join.splitlines(), [line for line in ticket.splitlines() if line.startswith("scp")]
    settings = [word for line in commands for word in line.split() if "=" in word]
    counted = f"**{len(commands)} command, {len(files)} file, {len(settings)} settings**"
    assert counted in (root / PAGE).read_text()
    printed = head.run(ticket)
    assert printed.strip() == join.strip(), "the command for the host is the only line of output"
    assert sorted(path.name for path in gpu7.folder.iterdir()) == ["gpu7.ticket"]

    began = time.monotonic()
    gpu7.start(join)
    metrics = head.folder / "runs" / "r" / "metrics.jsonl"
    until(lambda: metrics.exists() and '"step"' in metrics.read_text(), hosts, "the learner makes a step")
    print(f"first step {time.monotonic() - began:.0f} s after the host's command")
    status = head.run(look)
    assert re.search(r"^gpu7 +- +1 +2 ", status, re.MULTILINE) or re.search(
        "run r (ended|is over)", status
    ), status

    # The run is over: all processes of both hosts end, and leave nothing in shared memory.
    assert head.started["train"].wait(PATIENCE_S) == 0, head.log("train").read_text()[-3000:]
    assert gpu7.started["host"].wait(PATIENCE_S) == 0, gpu7.log("host").read_text()[-3000:]
    summary = json.loads((head.folder / "runs" / "r" / "summary.json").read_text())
    assert summary["steps"] == 12
    assert gpu7.run("ls /dev/shm") == ""
    assert head.run("ls /dev/shm") == ""
    assert "the run is over" in gpu7.log("host").read_text()
    assert not list(gpu7.folder.rglob("*.secret"))

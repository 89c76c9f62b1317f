"""Run the commands of "Two hosts, step by step" in docs/run/security.md on two hosts, as the page has them."""

import json
import re
import sys
import textwrap
import time

import pytest

from tests.e2e.namespaces import Host, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network namespaces: {WHY_NOT}"),
]
PAGE = "docs/run/security.md"
BLOCK = re.compile(r"<!-- two-hosts: (.+?) -->\n *```\w+\n(.*?)\n *```", re.DOTALL)
STEPS = 6
"""More than the learner can make with tokens of version 0, because the recipe's lag bound is 3."""
TRAINED_S = 900.0


def blocks(root):
    """Return the marked blocks of the page, in its order, as (mark, text)."""
    return [(mark, textwrap.dedent(text)) for mark, text in BLOCK.findall((root / PAGE).read_text())]


@pytest.fixture
def hosts(root, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    offbeat = f'PYTHONPATH="{root}" exec "{sys.executable}" -m launch.cli "$@"'
    # No ssh server is needed: what is copied to a host goes to its folder.
    scp = 'shift; for last; do :; done; host="${last%:}"\ntest "$1" != "$last"\n'
    scp += f'while [ "$1" != "$last" ]; do cp -rp "$1" {tmp_path}/"$host"/ || exit 1; shift; done'
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


def steps(folder):
    metrics = folder / "runs" / "r" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines), default=0)


def test_the_commands_of_the_page_train_on_two_hosts(hosts, root):
    head, gpu7 = hosts["head"], hosts["gpu7"]
    # All tests share the warm-started models.
    (root / "runs" / "models").mkdir(parents=True, exist_ok=True)
    (head.folder / "runs").mkdir()
    (head.folder / "runs" / "models").symlink_to(root / "runs" / "models")
    *setting_up, (mark, look) = blocks(root)
    assert [name for name, _ in setting_up] == [
        "run.toml",
        "head",
        "head",
        "head, terminals",
        "gpu7, terminals",
    ]
    for name, text in setting_up:
        if name.endswith(".toml"):
            (head.folder / name).write_text(text)
        elif name.endswith(", terminals"):
            for line in text.splitlines():
                hosts[name.removesuffix(", terminals")].start(line)
        else:
            hosts[name].run(text, timeout_s=600.0)
    assert not (gpu7.folder / "keys").exists()

    deadline = time.monotonic() + TRAINED_S
    while steps(head.folder) < STEPS:
        for host in hosts.values():
            for role, process in host.started.items():
                assert process.poll() is None, f"{role} has ended: {host.log(role).read_text()[-4000:]}"
        assert time.monotonic() < deadline, (
            f"{steps(head.folder)} steps; {head.run(look)}\n{gpu7.log('generator').read_text()[-3000:]}"
        )
        time.sleep(0.5)

    assert mark == "head"
    (row,) = [line.split() for line in head.run(look).splitlines() if line.startswith("generator-gpu7 ")]
    assert int(row[3]) >= STEPS - 4, row  # the column "version"
    # Both get the signal at once, and the host leaves without losing an episode.
    assert gpu7.end("generator", "actor") == {"generator": 0, "actor": 0}
    assert "given up" not in gpu7.log("actor").read_text()
    assert head.end("learner", "weights", "broker") == {"learner": 0, "weights": 0, "broker": 0}

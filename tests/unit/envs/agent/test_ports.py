"""A fixed port of the endpoint has room for one actor on a host, and a check says so."""

import json

import pytest

from envs.registry import make_suite
from launch.preflight.environment import shared_ports
from launch.run_file.load import check


def tables(folder, *listens):
    (folder / "rows.jsonl").write_text(json.dumps({"n": 1}) + "\n")
    (folder / "agent.py").write_text("def run(row, base_url, api_key):\n    return 1.0\n")
    params = {"run": f"{folder}/agent.py:run", "train": f"{folder}/rows.jsonl", "heldout": 0.0}
    return [
        {"name": "agent", "label": f"{number}", "params": {**params, "listen": listen}}
        for number, listen in enumerate(listens)
    ]


def said(listens, actors, folder):
    made = tables(folder, *listens)
    several = len(made) > 1
    suite = (
        make_suite("several", {"environments": made}) if several else make_suite("agent", made[0]["params"])
    )
    config = check(
        {"model": {"path": "m"}, "env": {"name": "calculator"}, "actor": {"count": actors}}, "run.toml"
    )
    return list(shared_ports(config, suite.facts()))


@pytest.mark.parametrize(
    ("listens", "actors", "why"),
    [
        (["127.0.0.1:0"], 4, None),
        (["127.0.0.1:5761"], 1, None),
        (["127.0.0.1:5761"], 2, "actor.count is 2, and each actor would listen on port 5761"),
        (["127.0.0.1:5761", "127.0.0.1:5762"], 1, None),
        (["127.0.0.1:5761", "127.0.0.1:5761"], 1, "several [[env]] tables listen on port 5761"),
        (["127.0.0.1:0", "127.0.0.1:5761"], 2, "each actor would listen on port 5761"),
    ],
)
def test_a_port_that_several_would_listen_on_is_refused(tmp_path, listens, actors, why):
    lines = said(listens, actors, tmp_path)
    assert len(lines) == (why is not None)
    assert why is None or why in lines[0]

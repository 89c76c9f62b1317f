"""A head that only learns: generators and actors are on other hosts, and their count here is 0."""

import argparse

import pytest

from launch.errors import ConfigError
from launch.placement import placement
from launch.plan.command import calibrate_to, rates_of_run
from launch.preflight.examine import crowded_engines, unreachable_for_hosts
from launch.preflight.hardware import resolved
from launch.preflight.memory import Gpu, ModelSize, shares
from launch.run_file.load import check
from launch.supervise.posts import posts
from launch.supervise.supervisor import hosts_wanted


def head(generators=0, actors=0, endpoint="tcp://10.0.0.5:5755", weights="10.0.0.5:5757", **sections):
    settings = {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "broker": {"endpoint": endpoint},
        "weights": {"http": weights},
        "generator": {"count": generators},
        "actor": {"count": actors},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return check(settings, "a test")


def test_a_head_has_broker_learner_and_weights_server_and_says_how_hosts_join(tmp_path):
    assert [post.name for post in posts(head())] == ["broker", "learner", "weights"]
    said = hosts_wanted(head(), tmp_path)
    assert said.startswith("no generator and no actor runs here: other hosts join")
    assert f"`offbeat ticket {tmp_path}`" in said
    assert "generator-0" in [post.name for post in posts(head(generators=1))]
    assert hosts_wanted(head(1, 1), tmp_path) == ""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (head(), ""),
        (head(endpoint="tcp://127.0.0.1:5755"), "broker.endpoint = tcp://127.0.0.1:5755"),
        (head(weights=""), "weights.http is empty"),
        (head(generators=1, weights=""), ""),
        (head(1, 1, endpoint="tcp://127.0.0.1:5755", weights=""), ""),
    ],
)
def test_what_keeps_hosts_from_their_part_is_said(config, words):
    remarks = list(unreachable_for_hosts(config))
    assert len(remarks) == bool(words)
    assert all(words in remark for remark in remarks)


def test_the_learner_waits_for_hosts_for_ever_unless_none_can_come():
    inf = float("inf")
    assert head().no_capacity_s == inf
    assert head(1, 1).no_capacity_s == inf
    assert head(1, 1, endpoint="tcp://127.0.0.1:0").no_capacity_s == 300.0
    assert head(1, 0, endpoint="tcp://127.0.0.1:0").no_capacity_s == inf
    assert head(fleet={"no_capacity_minutes": 2}).no_capacity_s == 120.0
    assert head(1, 1, endpoint="tcp://127.0.0.1:0", fleet={"no_capacity_minutes": 0}).no_capacity_s == inf


def test_the_learner_has_all_gpus_and_expects_generators_with_gpus_like_its_own():
    config = head(generator={"tensor_parallel_size": 8})
    placed = placement(config, 2)
    assert set(placed.posts) == {"learner"}
    decided = resolved(config, placed, [Gpu(bfloat16=True)] * 2, None, 4)
    assert decided.generator.dtype == decided.learner.dtype == "bfloat16"
    on_cpu = resolved(config, placement(config, 0), [], None, 4)
    assert on_cpu.generator.dtype == "float32"
    assert on_cpu.learner.threads >= 1


def test_the_check_counts_no_processes_that_are_not_here():
    size = ModelSize(parameters=10**9, hidden=64, inner=128, layers=10)
    assert [role.role for role in shares(head(), size, 0)] == ["learner", "broker"]
    assert list(crowded_engines(head(actors=64))) == []


def test_windows_in_lockstep_do_not_count_actors_of_other_hosts():
    critic = {"critic": {}, "advantage": {"kind": "gae"}}
    learner = {"train_on": "windows", "algorithm": critic}
    run = {"mode": "sync"}
    assert "concurrent_episodes" not in complaints(actors=0, learner=learner, run=run)
    few = {"concurrent_episodes": 1}
    assert "raise concurrent_episodes" in complaints(actors=1, learner=learner, run=run, actor=few)


def complaints(**settings):
    """Return what is wrong with a head, in one text."""
    try:
        head(**settings)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_judge_that_no_actor_could_ask_is_refused():
    with pytest.raises(ConfigError, match="serves the actors of this host alone"):
        head(judge={})


def test_a_plan_says_what_it_needs_here(tmp_path):
    with pytest.raises(ConfigError, match="is 0, and all roles are measured here"):
        calibrate_to(tmp_path / "rates.toml", 30.0, head())
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="its generators were on other hosts"):
        rates_of_run(tmp_path, head(), argparse.Namespace(rate=[]).rate)

"""The page `/metrics`: every family that alerts and the board read, and counters that never fall."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from broker.metrics import prometheus
from learner.metrics import NewestStep
from protocol.gauges import LEARNER_STEP, MAX_GAUGES
from protocol.messages.episodes import Commit, Failure
from protocol.messages.peers import Goodbye, Heartbeat
from tests.broker_driver import Driver, group

MONITORING = Path(__file__).parents[3] / "launch" / "monitoring"
RULES = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"][0]["rules"]
BOARD = json.loads((MONITORING / "board.json").read_text())
QUERIES = [rule["expr"] for rule in RULES]
QUERIES += [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


def scraped(driver):
    """Return the families of the page by name, and the values of its samples by name and labels."""
    families = list(text_string_to_metric_families(prometheus(driver.dispatcher, driver.now).decode()))
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }
    return {family.name: family.type for family in families}, values


@pytest.fixture
def run():
    """A run with a step, an evaluation, a failed episode, and a generator."""
    driver = Driver()
    driver.learner(lineage=1)
    driver.put(*group("g", 1), *group("h", 1))
    driver.actor("a0", tasks=2)
    first, second = driver.leases("a0")
    driver.segment("a0", first, status="finished")
    driver.segment("a0", second, status="failed", failure=Failure(kind="KeyError", message="'a'"))
    driver.hello("generator", "g0", endpoint="x")
    driver.say("g0", Heartbeat(policy_version=3, gauges={"idle_share": 0.25, "tokens_total": 100.0}))
    newest = NewestStep()
    newest.note(
        {"evaluation/hard/accuracy": 0.5, "evaluation/accuracy": 0.25, "evaluation/reward/exact": 0.75}
    )
    newest.note({**dict.fromkeys(LEARNER_STEP, 1.5), "reward/exact": 2.0, "learner/learning_rate": 1e-3})
    driver.say("learner", Heartbeat(gauges=dict(newest.gauges)))
    driver.say("learner", Commit(epoch=1, step=7, trained=[unit.unit_id for unit in driver.deliveries()]))
    driver.now += 60.0
    return driver


def test_the_page_has_what_a_person_is_woken_up_for(run):
    types, values = scraped(run)
    assert values["offbeat_learner_step",] == 7
    assert values["offbeat_learner_seconds_since_step",] == 60.0
    assert values["offbeat_reward", "exact"] == 2.0
    assert values["offbeat_heldout_reward", "exact"] == 0.75
    assert values["offbeat_evaluation", "accuracy", "hard"] == 0.5
    assert values["offbeat_evaluation", "", "accuracy"] == 0.25
    assert values["offbeat_learner_policy_lag_max_versions",] == 1.5
    assert values["offbeat_policy_lag_bound_versions",] == run.dispatcher.state.deliveries.max_policy_lag
    assert values["offbeat_learner_gradient_norm",] == 1.5
    assert values["offbeat_episodes_failed_total", "KeyError"] == 1
    assert values["offbeat_episodes_ended_total",] == 2
    assert values["offbeat_generator_version", "g0"] == 3
    assert values["offbeat_learner_idle_share",] == 1.5
    assert values["offbeat_generator_idle_share",] == 0.25
    assert values["offbeat_tokens_total", "trained"] > 0
    assert values["offbeat_restarts_total", "learner"] == 0
    assert not any("learning_rate" in name for name in types), "a heartbeat carries what is declared for it"


def test_what_ends_in_total_is_a_counter_and_nothing_else_is(run):
    families = list(text_string_to_metric_families(prometheus(run.dispatcher, run.now).decode()))
    for family in families:
        assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples), (
            family.name
        )
    assert any(f.name == "offbeat_generator_tokens" and f.type == "counter" for f in families)


def test_before_the_first_step_the_time_counts_from_the_join():
    driver = Driver()
    assert "offbeat_learner_seconds_since_step" not in scraped(driver)[0]
    driver.learner()
    driver.now += 5.0
    assert scraped(driver)[1]["offbeat_learner_seconds_since_step",] == 5.0


def test_no_counter_falls_when_a_process_comes_back_or_a_step_is_undone(run):
    generator = run.dispatcher.state.peers.get("g0").hello
    before = scraped(run)[1]
    run.say("g0", Goodbye())
    run.hello("generator", "g0", endpoint="x", incarnation=generator.incarnation)
    # The same process is back, and has not sent a heartbeat yet.
    assert scraped(run)[1]["offbeat_generator_tokens_total",] == 100.0
    run.hello("generator", "g0", endpoint="x", incarnation=generator.incarnation + 1)
    run.hello("learner", "learner", epoch=2, lineage=1, step=0, step_back=True, incarnation=2)
    after = scraped(run)[1]
    fallen = {key for key in before if key[0].endswith("_total") and after[key] < before[key]}
    assert not fallen
    assert after["offbeat_restarts_total", "generator"] == 1
    assert after["offbeat_restarts_total", "learner"] == 1
    assert after["offbeat_learner_step",] == 0, "a step is a gauge"
    assert run.dispatcher.state.ledger.outcomes["trained"].tokens == 0
    assert after["offbeat_tokens_total", "trained"] == before["offbeat_tokens_total", "trained"] > 0


def test_a_heartbeat_has_room_for_all_that_a_step_says():
    newest = NewestStep()
    many = {f"reward/{i}": 1.0 for i in range(99)} | {f"evaluation/s{i}/accuracy": 1.0 for i in range(99)}
    newest.note(
        {**dict.fromkeys(LEARNER_STEP, 1.0), **many, "reward/" + "x" * 99: 1.0, "learner/loss": float("nan")}
    )
    assert len(newest.gauges) + 5 <= MAX_GAUGES, "LEARNER's own five are in it, too"
    assert "learner/loss" not in dict(newest.gauges), "missing is not zero"


def test_labels_of_strangers_cannot_break_the_page():
    driver = Driver()
    driver.learner()
    driver.say("learner", Heartbeat(gauges={'reward/a"} 1\n{x="': 2.0, "evaluation/x y/z": 3.0}))
    values = scraped(driver)[1]
    assert values["offbeat_reward", 'a"} 1\n{x="'] == 2.0
    assert not any("x y" in str(key) for key in values)


def test_alerts_and_board_read_families_that_the_page_has(run):
    types, _ = scraped(run)
    names = set(types) | {f"{name}_total" for name, kind in types.items() if kind == "counter"}
    used = {name for query in QUERIES for name in re.findall(r"\boffbeat_\w+", query)}
    assert len(used) > 15
    assert used <= names
    for query in QUERIES:
        for name in re.findall(r"(?:rate|increase)\((\w+)", query):
            assert name.endswith("_total"), f"{query}: only counters have rates"


def test_there_are_five_alerts_and_the_page_explains_each():
    page = (Path(__file__).parents[3] / "docs" / "run" / "alerts.md").read_text()
    names = [rule["alert"] for rule in RULES]
    assert len(names) == 5
    assert all(f"| `{name}` |" in page for name in names)
    assert all({"summary", "description"} <= set(rule["annotations"]) for rule in RULES)


def test_the_board_is_one_that_grafana_takes():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert sorted(set(ids)) == ids
    assert BOARD["schemaVersion"] >= 39
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in BOARD["panels"])
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in BOARD["panels"]]
    assert len(set(places)) == len(places)


def test_a_parser_of_the_language_takes_each_query():
    import promql_parser as parser

    assert all(parser.parse(query.replace("$instance", ".*")) for query in QUERIES)


def test_promtool_takes_the_rules():
    if shutil.which("promtool") is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    subprocess.run(["promtool", "check", "rules", str(MONITORING / "rules.yml")], check=True, timeout=60)

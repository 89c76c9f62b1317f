"""The program that runs a job in every way has a case for each shipped method, which its run file can supply."""

import asyncio
import json
from functools import cache

import pytest

from benchmarks.every_way.cases import SHORT, WAYS, method_cases
from benchmarks.every_way.program import main
from envs.base import SuiteFacts
from envs.registry import make_suite
from launch.run_file.load import METHODS_FOLDER, load, run_files
from launch.run_file.reward_rules import lacking
from learner.rewards import needed_marks, needed_rewards
from learner.settings.families import BranchFamily, RefineFamily

CASES = method_cases()


@cache
def facts_of(env, params) -> SuiteFacts:
    suite = make_suite(env, json.loads(params))
    try:
        return suite.facts()
    finally:
        asyncio.run(suite.close())


def test_every_method_has_a_case():
    assert set(CASES) == set(run_files(METHODS_FOLDER))
    assert {path.parent.name for path in METHODS_FOLDER.rglob("*.toml")} >= {
        "credit",
        "families",
        "objectives",
    }


@pytest.mark.parametrize("name", CASES)
def test_the_run_file_of_a_case_takes_its_settings_and_gives_what_the_method_needs(name):
    case = CASES[name]
    config = load(run_files()[case.run_file or "smollm2"], [*SHORT, *case.overrides, "learner.steps=2"])
    facts = facts_of(config.env.name, json.dumps(config.env.params))
    assert {name for _, name in needed_rewards(config.learner)} <= set(facts.reward_names)
    assert {name for _, name in needed_marks(config.learner)} <= set(facts.mark_names)
    assert not list(lacking(config.learner, facts))
    family = config.learner.family
    if isinstance(family, BranchFamily | RefineFamily) or getattr(family, "begin", "prompt") != "prompt":
        assert config.env.name == "calculator", "the part of the method lies behind an observation"


def test_what_was_not_run_is_shown_as_not_measured(tmp_path, capsys):
    out, js = tmp_path / "out.jsonl", tmp_path / "out.json"
    done = {"name": "grpo", "faults": [], "seconds": 9.0, "steps": 2, "trained_tokens": 400, "gradient_norm": 1.0,
            "lag_max": 1, "restarts": 0, "memory_gib": {}}  # fmt: skip
    out.write_text(json.dumps(done) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["--only-finished", "--out", str(out), "--json", str(js)])
    assert ended.value.code == 0
    head, _, first, *others = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("| grpo | yes | 2 | 400 | 1 |")
    assert {line.split(" | ")[0].removeprefix("| ") for line in others} == {*WAYS, *CASES} - {"grpo"}
    assert all(
        line.split(" | ")[1] == "not measured" and line.count("|") == head.count("|") for line in others
    )
    assert [o["name"] for o in json.loads(js.read_text())["results"]] == ["grpo"]

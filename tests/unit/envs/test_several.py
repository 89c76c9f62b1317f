"""Test that several environments share the tasks of a run by their weights, and keep their own rewards and facts."""

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given

from actors.environments import EnvironmentRunner
from envs.base import TurnFacts
from envs.errors import EnvError
from envs.registry import make_suite
from envs.several import cycle_of, dealt
from launch.run_file.load import load

CODE = """
from envs.base import StepResult, SuiteFacts

class Episode:
    def __init__(self, suite):
        self.suite = suite

    async def reset(self, data):
        self.suite.begun.append((data["split"], data["index"]))
        return [{"role": "user", "content": f"{self.suite.name} {data['index']}"}]

    async def step(self, action):
        return StepResult(rewards={"right": self.suite.reward}, done=True, correct=True, hints=("h",))

    async def close(self):
        self.suite.closed += 1

class Blocking(Episode):
    def reset(self, data):
        return [{"role": "user", "content": f"{self.suite.name} {data['index']}"}]

    def step(self, action):
        return StepResult(rewards={"right": self.suite.reward}, done=True)

    def close(self):
        self.suite.closed += 1

    def turn_limit(self):
        return 9

    def turn_facts(self, facts):
        self.facts = facts

class Own:
    def __init__(self, name, reward=1.0, heldout=None, kind="Episode"):
        self.name, self.reward, self.heldout, self.kind = name, reward, heldout, globals()[kind]
        self.begun, self.closed = [], 0

    def episode(self):
        return self.kind(self)

    def facts(self):
        return SuiteFacts(heldout_tasks=self.heldout, reward_names=("right",), remarks=(f"made {self.name}",))

    def gauges(self):
        return {"episodes_total": 1.0}

    def demonstration(self, index, split):
        return [{"role": "user", "content": f"{self.name} {index}"}, {"role": "assistant", "content": "x"}]

    async def close(self):
        self.closed = -1
"""


@pytest.fixture
def env_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    return "own.py:Own"


def tables(env_file, **changes):
    return [
        {"name": env_file, "label": "sums", "weight": 3.0, "params": {"name": "a", "heldout": 6}},
        {
            "name": env_file,
            "label": "words",
            "params": {"name": "b", "reward": 0.5, "kind": "Blocking"},
            **changes,
        },
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_every_environment_gets_its_share_and_each_of_its_tasks_once(weights):
    cycle = cycle_of([float(weight) for weight in weights])
    total = sum(weights)
    assert [cycle.count(i) * total for i in range(len(weights))] == [
        len(cycle) * weight for weight in weights
    ]
    for place in range(1, len(cycle) + 1):
        for part, weight in enumerate(weights):
            assert abs(cycle[:place].count(part) - place * weight / total) < len(weights)
    seen = [dealt(index, cycle) for index in range(2 * len(cycle))]
    for part in range(len(weights)):
        assert [own for owner, own in seen if owner == part] == list(range(2 * cycle.count(part)))


def test_shares_that_no_short_cycle_gives_are_near_enough():
    cycle = cycle_of([1.0, 3.14159])
    assert cycle.count(1) / cycle.count(0) == pytest.approx(3.14159, rel=0.05)


def test_episodes_of_both_kinds_run_with_labelled_rewards(env_file):
    async def main():
        suite = make_suite("several", {"environments": tables(env_file)})
        runner = EnvironmentRunner(calls=2)
        found = []
        try:
            for index in range(4):
                env, ask = suite.episode(), {"what": "test", "timeout_s": 60.0}
                data = {"index": index, "split": "train"}
                [message] = await runner.call(env.reset, data, **ask)
                result = await runner.call(env.step, "x", **ask)
                await runner.call(env.close, **ask)
                assert await runner.call(env.tool_schemas, on_loop=True, **ask) == ()
                assert env.turn_limit() == (9 if message["content"].startswith("b") else None)
                facts_of = TurnFacts(5, index, cut=False)
                env.turn_facts(facts_of)
                assert getattr(env._env, "facts", facts_of) is facts_of
                found.append((message["content"], result.rewards))
            facts, gauges = suite.facts(), suite.gauges()
            closed = [part.suite.closed for part in suite._parts]
            await runner.call(suite.close, what="close", timeout_s=60.0)
        finally:
            runner.close()
        return found, facts, gauges, closed, [part.suite.closed for part in suite._parts]

    found, facts, gauges, episodes, closed = asyncio.run(asyncio.wait_for(main(), 60))
    assert found == [
        ("a 0", {"sums/right": 1.0}),
        ("a 1", {"sums/right": 1.0}),
        ("b 0", {"words/right": 0.5}),
        ("a 2", {"sums/right": 1.0}),
    ]
    assert facts.reward_names == ("sums/right", "words/right")
    assert facts.heldout_tasks == 8, "the seventh task of sums would be task 8"
    assert facts.remarks == ("sums: made a", "words: made b")
    assert gauges == {"sums/episodes_total": 1.0, "words/episodes_total": 1.0}
    assert episodes == [3, 1]
    assert closed == [-1, -1]


def test_an_environment_of_weight_0_has_only_tasks_that_name_it(env_file):
    suite = make_suite("several", {"environments": tables(env_file, weight=0, label="hard")})
    assert [suite.at(index)[0].label for index in range(5)] == ["sums"] * 5
    facts = suite.facts()
    assert (facts.heldout_tasks, facts.heldout_by_env) == (6, {"sums": 6, "hard": None})

    def begun(**data):
        env = suite.episode()
        talk = env.reset({"split": "heldout", **data})
        result = env.step("x") if not asyncio.iscoroutine(talk) else None
        return talk, result

    [message], result = begun(index=2, env="hard")
    assert (message["content"], result.rewards) == ("b 2", {"hard/right": 0.5})
    with pytest.raises(EnvError, match=r"no .* table 'none'"):
        begun(index=2, env="none")
    asyncio.run(suite.close())


def test_with_no_weight_there_is_nothing_to_train_on(env_file):
    with pytest.raises(EnvError, match="nothing to train on"):
        make_suite("several", {"environments": tables(env_file, weight=0)[1:]})


def test_a_run_file_has_one_table_for_each(env_file, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "job.toml").write_text(
        f'[model.tiny]\n[[env]]\nname = "{env_file}"\nlabel = "sums"\nweight = 3\n[env.params]\nname = "a"\n'
        '[[env]]\nname = "calculator"\n'
    )
    config = load(tmp_path / "runs" / "job.toml")
    assert config.env.name == "several"
    first, second = config.env.params["environments"]
    assert (first["label"], first["weight"], first["params"]) == ("sums", 3.0, {"name": "a"})
    assert second == {"name": "calculator", "label": "calculator", "weight": 1.0, "params": {}}
    suite = make_suite(config.env.name, config.env.params)
    assert suite.demonstration(1, "train")[0]["content"] == "a 1"
    asyncio.run(suite.close())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": "sums"}, "two .* tables have the label 'sums'"),
        ({"label": "a b"}, "label 'a b': write letters"),
        ({"weight": -1}, "weight = -1: write a number, 0 or above"),
        ({"weigth": 1}, "there is no key 'weigth'"),
        ({"name": 3}, "number 2 has no name"),
        ({"params": {"nme": "b"}}, r"\[\[env\]\] words: .* params.nme"),
        ({"name": "calculatr"}, "did you mean 'calculator'"),
    ],
)
def test_mistakes_are_named(env_file, change, words):
    with pytest.raises(EnvError, match=words):
        make_suite("several", {"environments": tables(env_file, **change)})
    with pytest.raises(EnvError, match="is empty"):
        make_suite("several", {"environments": []})

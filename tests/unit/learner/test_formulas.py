"""Formulas of the user's own: how they are found, what is refused and in which words, and what a view has."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from launch.commands import retrain
from launch.errors import ConfigError
from launch.preflight.examine import try_formulas
from launch.run_file.load import check, load, with_files
from launch.run_folder import changes
from learner.advantages import assign_advantages
from learner.errors import FormulaError
from learner.formulas import Members, Reward, Rollouts, hash_of, load_formula
from learner.replay.file import decode_item, encode_item
from learner.rewards import as_given, composed, own_rewards
from learner.settings.advantages import RewardConfig
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.formulas import OwnReward, OwnSurrogate, own_formulas, with_own_formulas
from learner.settings.learner import LearnerConfig
from learner.update.checkpoint import changed_formulas
from learner.update.formula_probe import probe_trajectories, probe_view, problems
from learner.update.objective import make_surrogate
from tests.methods import OWN
from tests.trajectories import make_batch_of_groups, make_trajectory

HEAD = """
import torch
import numpy as np
from learner.formulas import Members, Reward, Rollouts, Section
from learner.update.objective import CorrectionValue, SurrogateValue, View

class Settings(Section):
    strength: float = 1.0

def none(value): return torch.zeros_like(value, dtype=torch.bool)
"""
SURROGATE = "def f(view: View, settings: Settings) -> SurrogateValue:\n    "
PLAIN = "value = view.ratio('behaviour') * view.advantage * settings.strength\n    "


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file of formulas and returns the `kind` of its function f."""
    count = iter(range(99))

    def make(body: str, head: str = HEAD) -> str:
        path = tmp_path / f"formulas{next(count)}.py"
        path.write_text(head + body + "\n")
        return f"{path}:f"

    return make


def found(section: str, kind: str, **settings):
    """Return what the probe finds wrong, and its remarks."""
    own = {"kind": kind, **settings}
    if section == "reward":
        config = LearnerConfig.model_validate({"reward": {"own": own}})
    else:
        config = LearnerConfig.model_validate(
            {"algorithm": {section: [own] if section == "corrections" else own}}
        )
    return problems(config)


# --- the run file -----------------------------------------------------------------------------------------------------


def test_keys_beside_the_kind_are_settings_and_survive_the_run_folder():
    algorithm = {
        "surrogate": {"kind": "a.py:f", "strength": 2.0},
        "corrections": [{"kind": "truncated"}, {"kind": "m.n:g", "x": [1, 2]}],
        "advantage": {"kind": "a.py:h"},
    }
    config = LearnerConfig.model_validate({"algorithm": algorithm, "reward": {"own": {"kind": "a.py:r"}}})
    assert config.algorithm.surrogate.own_settings == {"strength": 2.0}
    assert [place for place, _ in own_formulas(config, "learner")] == [
        "learner.reward.own",
        "learner.algorithm.advantage",
        "learner.algorithm.corrections.1",
        "learner.algorithm.surrogate",
    ]
    assert LearnerConfig.model_validate_json(config.model_dump_json()) == config


def test_a_shipped_kind_is_what_it_was():
    assert isinstance(
        LearnerConfig.model_validate({"algorithm": {"surrogate": {"kind": "a:f"}}}).algorithm.surrogate,
        OwnSurrogate,
    )
    plain = {"model": {"path": "x"}, "env": {"name": "calculator"}}
    with pytest.raises(
        ConfigError, match=r"unknown kind 'clap'; use one of balanced, bounded, .*file.py:function, gamma"
    ):
        check(plain | {"learner": {"algorithm": {"surrogate": {"kind": "clap"}}}}, "job.toml")
    with pytest.raises(ConfigError, match=r"surrogate.hgh: unknown key .*did you mean 'high'"):
        check(plain | {"learner": {"algorithm": {"surrogate": {"hgh": 0.3}}}}, "job.toml")


def test_a_file_beside_the_run_file_gets_an_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "loss.py").write_text("")
    job = tmp_path / "my" / "job.toml"
    job.write_text(
        '[model]\npath = "x"\n[env]\nname = "calculator"\n[learner.algorithm.surrogate]\nkind = "loss.py:f"\n'
    )
    monkeypatch.chdir(tmp_path)
    kind = load(job).learner.algorithm.surrogate.kind
    assert kind == f"{tmp_path / 'my' / 'loss.py'}:f"
    again = with_files(load(job), tmp_path)
    assert again.learner.algorithm.surrogate.kind == kind


def test_a_changed_file_is_told_when_a_run_is_resumed():
    section = {"learner": {"algorithm": {"surrogate": {"kind": "a.py:f", "content": "01"}}}}
    other = {"learner": {"algorithm": {"surrogate": {"kind": "a.py:f", "content": "02"}}}}
    assert [str(change) for change in changes(section, other)] == [
        "the file of the formula of learner.algorithm.surrogate has changed"
    ]


def test_a_checkpoint_of_another_file_is_told():
    now = {"learner.algorithm.surrogate": "02"}
    assert changed_formulas(now, now) == []
    assert changed_formulas({}, now) == [
        "the file of learner.algorithm.surrogate has changed: the checkpoint was written with no such formula, this "
        "process has 02"
    ]


# --- loading ----------------------------------------------------------------------------------------------------------


def refused(kind, **settings):
    """Return the words with which a surrogate is refused."""
    with pytest.raises(FormulaError) as error:
        load_formula(OwnSurrogate(kind=kind, **settings), "learner.algorithm.surrogate")
    return str(error.value)


def test_no_such_file(tmp_path):
    (tmp_path / "loss.py").write_text("")
    words = refused(f"{tmp_path}/los.py:f")
    assert words.endswith(f"there is no file {tmp_path}/los.py (files there: loss.py)")


def test_no_such_module():
    assert "module no_such_module_here cannot be imported: ModuleNotFoundError" in refused(
        "no_such_module_here:f"
    )


def test_no_such_function(write):
    assert refused(write("def g(view): pass")).endswith("has no function 'f' (functions: g, none)")


def test_a_file_that_raises_names_its_line(write):
    kind = write("raise RuntimeError('no luck')", head="\n\n")
    assert f"cannot be imported: RuntimeError: no luck ({kind.removesuffix(':f')}:3)" in refused(kind)


def test_a_syntax_error_names_its_line(write):
    kind = write("def f(", head="\n")
    assert "SyntaxError: '(' was never closed" in refused(kind)
    assert f"{kind.removesuffix(':f')}:2)" in refused(kind)


def test_unknown_settings_are_refused(write):
    kind = write(SURROGATE + PLAIN + "return SurrogateValue(value, none(value))")
    assert refused(kind, strenght=1.0) == (
        f"learner.algorithm.surrogate.strenght: unknown key (value 1.0); settings of {kind}: strength"
    )


def test_settings_of_a_wrong_type_are_refused(write):
    kind = write(SURROGATE + PLAIN + "return SurrogateValue(value, none(value))")
    assert "learner.algorithm.surrogate.strength: Input should be a valid number" in refused(
        kind, strength="a"
    )


def test_a_function_without_settings_takes_none(write):
    kind = write("def f(view): pass")
    assert "surrogate.strength: unknown key" in refused(kind, strength=1.0)
    assert "takes no settings" in refused(kind, strength=1.0)


def test_a_second_parameter_needs_a_type(write):
    assert "does not say what its settings are" in refused(write("def f(view, settings): pass"))
    assert "takes 3 parameters" in refused(write("def f(view, a, b): pass"))


def test_a_file_that_has_changed_since_the_start_is_refused(write):
    kind = write("def f(view): pass")
    assert load_formula(OwnSurrogate(kind=kind, content=hash_of(kind)), "x").digest == hash_of(kind)
    assert "has changed since the run was started" in refused(kind, content="00")


def test_retrain_refuses_a_file_that_is_not_the_recorded_one(write, tmp_path, monkeypatch):
    own = {"kind": write("def f(view): pass"), "content": "00"}
    plain = {"model": {"path": "x"}, "env": {"name": "calculator"}}
    config = check(plain | {"learner": {"algorithm": {"surrogate": own}}}, "job.toml")
    monkeypatch.setattr("launch.model.prepare", lambda _: tmp_path)
    with pytest.raises(ConfigError, match="has changed since the run was started"):
        retrain.train(config, [], tmp_path / "out")


def test_a_module_is_found_by_its_name():
    formula = load_formula(OwnSurrogate(kind="tests.own_formulas:clip", low=0.1), "x")
    assert (formula.settings.low, formula.digest) == (0.1, hash_of(f"{OWN}:clip"))


# --- the probe --------------------------------------------------------------------------------------------------------


def test_the_copies_of_shipped_formulas_pass():
    for section, name in (
        ("surrogate", "clip"),
        ("surrogate", "by_length"),
        ("corrections", "truncated"),
        ("advantage", "group"),
        ("reward", "as_given"),
    ):
        assert found(section, f"{OWN}:{name}") == ([], []), name


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return value", "returned Tensor; return a SurrogateValue(value, clipped)"),
        ("return SurrogateValue(value.mean(), none(value))", "returned value of shape () for (12,) tokens"),
        (
            "return SurrogateValue(value.double(), none(value))",
            "returned value as torch.float64; it has to be torch.float32",
        ),
        (
            "return SurrogateValue(value, torch.zeros_like(value))",
            "returned clipped as torch.float32; it has to be torch.bool",
        ),
        ("return SurrogateValue(value / 0, none(value))", "returned a value that is not finite"),
        ("return SurrogateValue(value.detach(), none(value))", "returned a value without gradient"),
        (
            "return SurrogateValue((value - value.detach()).abs().sqrt(), none(value))",
            "has a gradient that is not finite",
        ),
        (
            "view.advantage.mul_(2); return SurrogateValue(value, none(value))",
            "changed view.advantage, which others read",
        ),
        (
            "value = value / view.advantage.abs().max(); return SurrogateValue(value, none(value))",
            "for a view without tokens",
        ),
        ("return {}['x']", "raised KeyError: 'x'"),
    ],
)
def test_what_a_surrogate_must_not_return(write, body, words):
    wrong, _ = found("surrogate", write(SURROGATE + PLAIN + body))
    assert len(wrong) == 1
    assert wrong[0].startswith("learner.algorithm.surrogate: ")
    assert words in wrong[0]


def test_a_surrogate_that_mixes_trajectories_is_remarked(write):
    kind = write(SURROGATE + PLAIN + "return SurrogateValue(value - value.detach().sum() / 12, none(value))")
    wrong, remarks = found("surrogate", kind)
    assert not wrong
    assert "when other trajectories are beside it" in remarks[0]


def test_a_surrogate_without_effect_is_remarked(write):
    kind = write(SURROGATE + PLAIN + "return SurrogateValue(value * 0, none(value))")
    assert "so nothing would be trained" in found("surrogate", kind)[1][0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return view.lag", "return a CorrectionValue(weight, cut)"),
        ("return CorrectionValue(-1 - view.lag, none(view.lag))", "returned a weight below 0"),
        ("return CorrectionValue(1 / view.lag, none(view.lag))", "returned a weight that is not finite"),
    ],
)
def test_what_a_correction_must_not_return(write, body, words):
    wrong, _ = found("corrections", write(f"def f(view: View) -> CorrectionValue:\n    {body}"))
    assert wrong[0].startswith("learner.algorithm.corrections.0: ")
    assert words in wrong[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return rollouts.returns[:2]",
            "returned advantages of shape (2,); return one for each of the 5 trajectories",
        ),
        ("return rollouts.returns / rollouts.length", "returned advantages that are not finite"),
        ("return 'good'", "returned str; return an array of numbers"),
        ("return rollouts.returns / rollouts.returns.std()", "of a single trajectory that are not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_an_advantage_must_not_return(write, body, words):
    wrong, _ = found("advantage", write(f"def f(rollouts: Rollouts):\n    {body}"))
    assert words in wrong[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return []", "returned 0 lists; return a list with one list of rewards for each of 3 members"),
        ("return [[1.0] for t in members.trajectories]", "return a list of Reward"),
        (
            "return [[Reward('x', 9, 1.0)] for t in members.trajectories]",
            "a reward in turn 9, which it does not have",
        ),
        ("return [[Reward('x', 1, float('nan'))] for t in members.trajectories]", "it has to be finite"),
    ],
)
def test_what_rewards_must_not_be(write, body, words):
    wrong, _ = found("reward", write(f"def f(members: Members):\n    {body}"))
    assert wrong[0].startswith("learner.reward.own: ")
    assert words in wrong[0]


def test_a_later_objective_is_probed_in_its_place(write):
    change = {"reincarnation": {"surrogate": {"kind": write("def f(view): return 1")}}}
    wrong, _ = problems(LearnerConfig.model_validate({"algorithm": change}))
    assert len(wrong) == 1
    assert "returned int" in wrong[0]


def test_check_refuses_in_a_process_of_its_own(write):
    kind = write("print('hello')\ndef f(view): return view.lag")
    plain = {"model": {"path": "x"}, "env": {"name": "calculator"}}
    config = check(plain | {"learner": {"algorithm": {"surrogate": {"kind": kind}}}}, "job.toml")
    with pytest.raises(ConfigError, match=r"returned Tensor; return a SurrogateValue\(value, clipped\)"):
        try_formulas(config)
    assert try_formulas(check(plain, "job.toml")) == []


def test_the_probe_writes_json():
    config = LearnerConfig.model_validate({"algorithm": {"surrogate": {"kind": f"{OWN}:clip"}}})
    done = subprocess.run(
        [sys.executable, "-m", "learner.update.formula_probe"],
        input=config.model_dump_json(),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(OWN).parents[1],
    )
    assert json.loads(done.stdout) == {"wrong": [], "remarks": []}


# --- views ------------------------------------------------------------------------------------------------------------


def test_a_view_of_tokens_has_versions_groups_and_lengths():
    view = probe_view((2, 1))
    assert view.version.tolist() == [9, 9, 8]
    assert view.group.tolist() == [0, 0, 0]
    assert view.length.tolist() == [2, 2, 1]
    assert view.sequence.tolist() == [0, 0, 1]
    assert view.advantage.tolist() == [1, 1, -1]
    value = make_surrogate(OwnSurrogate(kind=f"{OWN}:by_length"))(view).value
    assert value[2] == 0
    torch.testing.assert_close(value[:2], view.logp_current[:2] / 2)


def test_rollouts_have_the_arrays_of_a_batch():
    members = [
        make_trajectory("a", group="g1", actions=2, reward=1.0, version=3),
        make_trajectory("b", group="g0", actions=1, reward=0.5, version=4),
    ]
    rollouts = Rollouts(members, current_version=5)
    assert rollouts.returns.tolist() == [1.0, 0.5]
    assert rollouts.group.tolist() == [1, 0]
    assert rollouts.length.tolist() == [2, 1]
    assert rollouts.sequence.tolist() == [0] * 6 + [1] * 5
    assert rollouts.lag[rollouts.mask].tolist() == [2, 2, 1]
    assert rollouts.per_trajectory(np.ones(11)).tolist() == [2, 1]
    assert rollouts.per_trajectory(rollouts.reward).tolist() == [1.0, 0.5]
    assert rollouts.logp_behaviour[rollouts.mask].tolist() == [-3.0] * 3
    empty = Rollouts([])
    assert [len(a) for a in (empty.returns, empty.group, empty.mask, empty.version)] == [0] * 4


def test_an_advantage_of_each_token(write):
    kind = write(
        "def f(rollouts: Rollouts):\n    return rollouts.turn * 1.0 + rollouts.returns[rollouts.sequence]"
    )
    members = make_batch_of_groups(2, 2)
    credit = assign_advantages(AlgorithmConfig.model_validate({"advantage": {"kind": kind}}), members)
    expected = np.concatenate([t.action_turn_index() + t.return_ for t in members])
    assert credit.advantage.tolist() == expected.tolist()


def test_own_rewards_of_numpy_are_kept_in_the_replay_table(write):
    """MessagePack has no numbers of numpy, so each checkpoint of a run with replay would fail."""
    kind = write(
        "def f(members):\n    return [[Reward('x', np.int64(1), np.float32(2))] for t in members.trajectories]"
    )
    t = probe_trajectories()[0]
    (rewards,) = own_rewards(OwnReward(kind=kind), Members([t], group=False, updates=0))
    stored = encode_item(replace(t, rewards=rewards))
    again = decode_item(msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=type(stored)))
    assert again.rewards == [Reward("x", 1, 2.0)]


def test_own_rewards_that_are_no_numbers_are_refused(write):
    kind = write("def f(members):\n    return [[Reward('x', 1, 'much')] for t in members.trajectories]")
    (wrong,), _ = found("reward", kind)
    assert "gave g0.0 the reward 'much'; it has to be a number" in wrong


def test_own_rewards_come_last_and_the_given_ones_are_kept(write):
    kind = write(
        "def f(members: Members):\n    return [[Reward('twice', 1, 2 * t.return_)] for t in members.trajectories]"
    )
    config = RewardConfig(weights={"score": 3.0}, own=OwnReward(kind=kind))
    made = composed(config, [make_trajectory("a", reward=0.5)])[0]
    assert made.rewards == [Reward("twice", 1, 3.0)]
    assert made.given_rewards == [Reward("score", 1, 0.5)]
    assert composed(config, [as_given(made)], group=False)[0].return_ == 3.0


def test_contents_are_filled_in_everywhere():
    config = LearnerConfig.model_validate(
        {"algorithm": {"corrections": [{"kind": f"{OWN}:truncated"}], "surrogate": {"kind": f"{OWN}:clip"}}}
    )
    changed = with_own_formulas(config, lambda own: own.model_copy(update={"content": hash_of(own.kind)}))
    assert {own.content for _, own in own_formulas(changed, "learner")} == {hash_of(f"{OWN}:clip")}
    assert with_own_formulas(LearnerConfig(), lambda own: own) == LearnerConfig()

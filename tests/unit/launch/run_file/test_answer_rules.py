"""`offbeat check` refuses judgements and refined episodes that could not be trained, and says what to change."""

import re
from dataclasses import replace

import numpy as np
import pytest

from launch.errors import ConfigError
from launch.run_file.load import load
from learner.advantages import assign_advantages
from learner.rewards import needed_rewards
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig
from learner.settings.rules import family_contradictions
from tests.trajectories import make_trajectory

REFINE = {"kind": "refine"}
COMPARED = {"kind": "compared", "terms": [{"value": "right"}]}
SPREAD = {"kind": "compared", "whiten": "trajectories"}
DIFFICULTY = {"kind": "compared", "by_difficulty": {}}
STAGES = [{"until_version": 3, "weights": {"right": 0.0}}]


def learner(family=None, **settings):
    return LearnerConfig(family={"kind": "judge", **(family or {})}, **settings)


def test_the_shipped_settings_are_allowed():
    for family in ({}, REFINE):
        assert not list(family_contradictions(learner(family, sampling={"max_trajectory_tokens": 4096})))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (learner({"answers": 8}), "family.answers is 8 but learner.group_size is 8, .* lower answers"),
        (learner(algorithm={"advantage": {"kind": "batch_mean"}}), 'kind is "batch_mean" .* use an advantage within'),
        (learner(algorithm={"advantage": COMPARED}), 'terms compare the reward "right" .* use value = "return"'),
        (learner(replay={"rule": "success"}), "learner.replay is set with .* take one of the two out"),
        (
            learner(sampling={"max_turn_tokens": 64, "max_trajectory_tokens": 320}),
            "max_trajectory_tokens is 320 with .*: 4 answers of max_turn_tokens 64 .* raise it above 320",
        ),
        (learner(REFINE | {"rollouts": 8}), "rollouts is 8 but learner.group_size is 8, .* lower rollouts"),
        (
            learner(REFINE, algorithm={"advantage": {"kind": "turn_return"}}),
            'kind is "turn_return" with .*"refine", .* an advantage of their own; use an advantage of whole',
        ),
        (learner(REFINE, algorithm={"advantage": {"kind": "risk"}}), 'kind is "risk" with .*"refine"'),
        (
            learner({"answers": 7}),
            "family.answers is 7 but learner.group_size is 8, .* a lone one is compared with nobody, .* lower answers",
        ),
        (
            learner(REFINE | {"rollouts": 7}),
            "rollouts is 7 but learner.group_size is 8, .* a lone one never beats the mean .* lower rollouts",
        ),
        (learner(REFINE, reward={"stages": STAGES}), 'reward.stages is set with .*"refine", .* take one of the two'),
        (learner(REFINE, reward={"bonus": {}}), 'reward.bonus is set with .*"refine", .* valued by two rules'),
        (
            learner(REFINE, algorithm={"advantage": SPREAD}),
            'advantage.whiten is "trajectories" with .*"refine": .* use whiten = "none"',
        ),
        (
            learner(REFINE, algorithm={"advantage": DIFFICULTY}),
            'advantage.by_difficulty is set with .*"refine": .* take one of the two out',
        ),
        *(
            (
                learner(algorithm={"advantage": {"kind": "compared", part: {"value": "right"}}}),
                f'advantage.{part}.value is "right" with .*"judge", .* "agreement" alone; use value = "return"',
            )
            for part in ("amplify", "by_difficulty", "novelty")
        ),
    ],
)  # fmt: skip
def test_what_they_cannot_be_combined_with_is_refused(config, said):
    lines = list(family_contradictions(config))
    assert any(re.search(said, line) for line in lines), lines


def test_two_members_of_each_half_are_enough():
    room = {"max_trajectory_tokens": 4096}
    for family in ({"answers": 2}, {"answers": 6}, REFINE | {"rollouts": 2}, REFINE | {"rollouts": 6}):
        assert not list(family_contradictions(learner(family, sampling=room)))
    returns = {"kind": "compared", "amplify": {}, "by_difficulty": {}, "novelty": {}}
    assert not list(family_contradictions(learner(sampling=room, algorithm={"advantage": returns})))
    better = {"kind": "compared", "amplify": {"value": "right"}, "novelty": {"value": "right"}}
    assert not list(family_contradictions(learner(REFINE, algorithm={"advantage": better})))


@pytest.mark.parametrize("part", [{"whiten": "trajectories"}, {"by_difficulty": {}}])
def test_what_is_refused_beside_refined_episodes_would_let_them_act_on_plain_ones(part):
    """Two tasks with plain returns 0, 1 and 2, 4: their advantages are to be the same whatever refined ones get."""

    def of_plain(config, refined):
        groups = {"0g0": (0, 1), "0g0.1": refined, "0g1": (2, 4), "0g1.1": (0, 1)}
        members = [
            replace(
                make_trajectory(f"{group}.{i}", group=group, reward=float(value)),
                advantage=0.0 if group.endswith(".1") else None,
            )
            for group, values in groups.items()
            for i, value in enumerate(values)
        ]
        tokens = assign_advantages(AlgorithmConfig(advantage=config), members).advantage
        starts = np.cumsum([0, *map(len, members)])[:-1]
        return [float(tokens[at]) for at, t in zip(starts, members, strict=True) if t.advantage is None]

    without = {"kind": "compared", "terms": [{"scale": "none"}]}
    assert of_plain(without, (0, 1)) == of_plain(without, (5, 9))
    assert of_plain(without | part, (0, 1)) != pytest.approx(of_plain(without | part, (5, 9)), abs=0.01)


def test_a_lone_plain_episode_is_refused_with_its_name(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('extends = "calculator"\n[learner.family]\nkind = "refine"\nrollouts = 1\n')
    with pytest.raises(ConfigError, match=r"learner.family.rollouts.*\b2\b"):
        load(path)


def test_the_reference_is_a_reward_that_the_environment_must_give(tmp_path):
    assert list(needed_rewards(learner({"reference": "right"}))) == [("learner.family.reference", "right")]
    assert not list(needed_rewards(learner()))


@pytest.mark.parametrize("family", ["answers = 1", 'note = "rate them"', 'reference = ""', "highest = 0"])
def test_a_wrong_setting_is_refused_with_its_name(tmp_path, family):
    path = tmp_path / "job.toml"
    path.write_text(f'extends = "spell_backward"\n[learner.family]\nkind = "judge"\n{family}\n')
    with pytest.raises(ConfigError, match=f"learner.family.{family.split()[0]}"):
        load(path)

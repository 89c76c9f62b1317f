"""`offbeat check` refuses judgements and refined episodes that could not be trained, and says what to change."""

import re

import pytest

from launch.errors import ConfigError
from launch.run_file.family_rules import family_contradictions
from launch.run_file.load import load
from learner.config import LearnerConfig
from learner.credit.needs import needed_rewards

REFINE = {"kind": "refine"}
COMPARED = {"kind": "compared", "terms": [{"value": "right"}]}


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
    ],
)  # fmt: skip
def test_what_they_cannot_be_combined_with_is_refused(config, said):
    lines = list(family_contradictions(config))
    assert any(re.search(said, line) for line in lines), lines


def test_the_reference_is_a_reward_that_the_environment_must_give(tmp_path):
    assert list(needed_rewards(learner({"reference": "right"}))) == [("learner.family.reference", "right")]
    assert not list(needed_rewards(learner()))


@pytest.mark.parametrize("family", ["answers = 1", 'note = "rate them"', 'reference = ""', "highest = 0"])
def test_a_wrong_setting_is_refused_with_its_name(tmp_path, family):
    path = tmp_path / "job.toml"
    path.write_text(f'extends = "spell_backward"\n[learner.family]\nkind = "judge"\n{family}\n')
    with pytest.raises(ConfigError, match=f"learner.family.{family.split()[0]}"):
        load(path)

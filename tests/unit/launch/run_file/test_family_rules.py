"""`offbeat check` refuses families that could not be trained, and says what to add."""

import pytest

from envs.base import SuiteFacts
from launch.errors import ConfigError
from launch.preflight.environment import lacking, unknown_rewards
from launch.run_file.load import check
from learner.settings.learner import LearnerConfig
from learner.settings.rules import family_contradictions, family_notes

HINT, DRAFT = {"kind": "hint"}, {"kind": "draft", "drafts": 4}
BRANCH = {"kind": "branch", "rollouts": 4}
RETRY = {"kind": "retry", "rollouts": 4}
PARTING = RETRY | {"begin": "parting"}
REFLECTED = RETRY | {"reflection": "{attempt}?", "note": "{reflection}!"}
GUIDED = {"kind": "guided"}
PROPOSE, POPULATION = {"kind": "propose"}, {"kind": "population"}
TAUGHT = {"kind": "taught", "teachers": ["big"]}
SHAPED = {"by_origin": [{"origin": "taught", "surrogate": {"kind": "shaped"}}]}


def learner(family=HINT, **settings):
    return LearnerConfig(family=family, **settings)


def job(family=None, **settings):
    content = {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "learner": {"family": family, **settings},
    }
    return check(content, "run.toml")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (learner(train_on="windows"), 'learner.train_on is "windows" with .* use train_on = "groups"'),
        (learner(train_on="trajectories"), 'learner.train_on is "trajectories" with '),
        (learner(replay={"rule": "success"}), "learner.replay is set with .* take one of the two out"),
        (learner(algorithm={"advantage": {"kind": "greedy"}}), 'kind is "greedy" with .* use kind "group"'),
        (learner(reward={"group": {"kind": "win_rate"}}), "learner.reward.group is set with "),
        (
            learner(DRAFT, sampling={"max_turn_tokens": 64, "max_trajectory_tokens": 128}),
            "a draft of max_turn_tokens 64 in the prompt leaves no room .* above 128",
        ),
        (
            learner(REFLECTED, sampling={"max_turn_tokens": 64, "max_trajectory_tokens": 128}),
            "a reflection of max_turn_tokens 64 in the prompt leaves no room .* above 128",
        ),
        (
            learner({"kind": "retry"}, sampling={"max_turn_tokens": 64, "max_trajectory_tokens": 128}),
            "an earlier answer of max_turn_tokens 64 in the prompt leaves no room .* above 128",
        ),
        (
            learner({"kind": "refine"}, sampling={"max_turn_tokens": 64, "max_trajectory_tokens": 128}),
            "an earlier answer of max_turn_tokens 64 in the prompt leaves no room .* above 128",
        ),
        (learner(PROPOSE), 'selection.kind is "sequential" with .* use selection kind "population"'),
        (
            learner(PROPOSE, selection=POPULATION | {"prune_every": 0}),
            "prune_every is 0 with .* set prune_every",
        ),
        (
            learner(PROPOSE, selection=POPULATION, checkpoint_every=0),
            "checkpoint_every is 0 with .* a restart knows it again; set checkpoint_every",
        ),
        (
            learner(
                PROPOSE,
                selection=POPULATION,
                sampling={"max_turn_tokens": 64, "max_trajectory_tokens": 192},
            ),
            "an instruction and an answer, each of max_turn_tokens 64 .* leaves no room .* above 192",
        ),
        (
            learner(GUIDED, sampling={"max_turn_tokens": 64, "max_trajectory_tokens": 192}),
            "2 examples of max_turn_tokens 64 in the prompt leaves no room .* above 192",
        ),
        (
            learner(RETRY | {"rollouts": 8}),
            "rollouts is 8 but learner.group_size is 8, which counts retries, .* lower rollouts",
        ),
        (
            learner(RETRY, reward={"bonus": {}}),
            "reward.bonus is set with .* valued by two rules",
        ),
        (
            learner(PARTING, reward={"coverage": {}}),
            'reward.coverage is set with .* "retry": it counts turns, .* are not the retry\'s',
        ),
        (
            learner(PARTING, algorithm={"advantage": {"kind": "turn_return"}}),
            'kind is "turn_return" with .* a retry\'s first turn would be credited with rewards of the turns before',
        ),
        (learner(GUIDED, train_on="windows"), 'learner.train_on is "windows" with .* kind "guided"'),
        (
            learner(RETRY, algorithm={"shared_prefix": "mean"}),
            'shared_prefix is "mean" but no trajectory begins',
        ),
        (
            learner({"kind": "branch", "rollouts": 8}),
            "rollouts is 8 but learner.group_size is 8, .* lower rollouts",
        ),
        (
            learner(None, algorithm={"shared_prefix": "mean"}),
            'shared_prefix is "mean" but no trajectory begins',
        ),
        (
            learner(BRANCH, algorithm={"advantage": {"kind": "turn_return"}}),
            'kind is "turn_return" with .* a branch\'s first turn would be credited with rewards of the turns before',
        ),
        (
            learner(BRANCH, reward={"stages": [{"until_version": 3, "weights": {"right": 0.0}}]}),
            "reward.stages is set with .* valued by two rules",
        ),
        (
            learner({**HINT, "members": 1}, reward={"bonus": {}}),
            "reward.bonus is set with .* valued by two rules",
        ),
        (
            learner(BRANCH, reward={"coverage": {}}),
            'reward.coverage is set with .* "branch": it counts turns',
        ),
        (
            learner(BRANCH, reward={"length": {"longest_tokens": 64, "buffer_tokens": 16}}),
            'reward.length is set with .* "branch"',
        ),
        (
            learner(BRANCH, algorithm={"shared_prefix": "mean", "advantage": {"kind": "risk"}}),
            'shared_prefix is "mean" but .* of kind "risk" is made for a whole batch',
        ),
        (
            learner(BRANCH, algorithm={"shared_prefix": "sum", "aggregation": "sequence_mean"}),
            'shared_prefix is "sum" but .*aggregation is "sequence_mean"',
        ),
        (
            learner(
                DRAFT,
                sampling={"max_turn_tokens": 64, "max_trajectory_tokens": 999, "max_context_tokens": 128},
            ),
            "learner.sampling.max_context_tokens is 128 with .* a draft of max_turn_tokens 64",
        ),
    ],
)
def test_what_families_cannot_be_combined_with_is_refused(config, said):
    (line,) = family_contradictions(config)
    import re

    assert re.search(said, line), line


@pytest.mark.parametrize("family", [HINT, RETRY, GUIDED])
def test_the_reward_that_says_what_is_right_must_be_given_by_the_environment(family):
    given = SuiteFacts(reward_names=("answer", "step"))
    assert not list(unknown_rewards(job(family), given))
    assert not list(unknown_rewards(job(family | {"reward": "answer"}), given))
    (line,) = unknown_rewards(job(family | {"reward": "anwser"}), given)
    assert line == (
        'learner.family.reward is "anwser": the environment has no reward of this name; did you mean '
        "'answer'? (rewards: answer, step)"
    )


@pytest.mark.parametrize("part", ["amplify", "by_difficulty", "novelty"])
@pytest.mark.parametrize("name", ["anwser", "each", "return_to_go"])
def test_the_reward_that_a_part_of_an_advantage_reads_must_be_given(part, name):
    """A part reads one value of an episode; "each" and "return_to_go" are values of terms."""
    given = SuiteFacts(reward_names=("answer", "step"))
    for value in ("return", "answer"):
        advantage = {"kind": "compared", part: {"value": value}}
        assert not list(unknown_rewards(job(algorithm={"advantage": advantage}), given))
    advantage = {"kind": "compared", part: {"value": name}}
    (line,) = unknown_rewards(job(algorithm={"advantage": advantage}), given)
    assert line.startswith(
        f'learner.algorithm.advantage.{part}.value is "{name}": the environment has no reward'
    )


def test_families_of_groups_are_taken():
    for family in (HINT, DRAFT, BRANCH, RETRY, PARTING, REFLECTED, GUIDED, None):
        assert not list(family_contradictions(learner(family)))


def test_a_run_file_is_refused_with_all_its_mistakes():
    settings = {"train_on": "trajectories", "family": HINT}
    content = {"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": settings}
    with pytest.raises(
        ConfigError, match=r"\[learner\.family\] of kind \"hint\", which has to see a whole group"
    ):
        check(content, "run.toml")
    content["learner"] = {"family": {"kind": "hint", "shares": [0.5, 0.5]}}
    with pytest.raises(ConfigError, match="each hint must be stronger than the one before"):
        check(content, "run.toml")
    content["learner"] = {"family": {"kind": "hint", "note": "help"}}
    with pytest.raises(ConfigError, match=r"write \{hint\} once"):
        check(content, "run.toml")
    content["learner"] = {"family": {"kind": "draft", "note": "{draft} {draft}"}}
    with pytest.raises(ConfigError, match=r"write \{draft\} once"):
        check(content, "run.toml")


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (
            RETRY | {"note": "it says {reflection}"},
            r"note has \{reflection\} but there is none; set reflection",
        ),
        (RETRY | {"begin": "named"}, 'begin is "named" but no reflection names a step'),
        (REFLECTED | {"reflection": "why?"}, r"reflection is 'why\?'; write \{attempt\} once"),
        (REFLECTED | {"note": "again"}, r"note is 'again'; write \{reflection\} once"),
        (
            RETRY | {"note": ""},
            'note is empty but begin is "prompt": a retry would be nothing but a further answer',
        ),
        (PARTING | {"note": "", "clean": True}, "note is empty but clean is true"),
        (PARTING | {"rollouts": 1}, 'begin is "parting" but rollouts is 1'),
        (RETRY | {"mask_shared": True}, 'mask_shared is true but begin is "prompt"'),
        (GUIDED | {"examples": 9}, "examples is 9 but candidates is 8"),
        (GUIDED | {"note": "look"}, r"write \{examples\} once"),
    ],
)
def test_retries_and_examples_that_could_not_work_are_refused(family, said):
    content = {"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": {"family": family}}
    with pytest.raises(ConfigError, match=said):
        check(content, "run.toml")


def test_an_environment_that_cannot_serve_a_family_is_refused():
    (line,) = lacking(learner(), SuiteFacts(hints=False))
    assert "the environment gives no hints; add StepResult.hints" in line
    assert not list(lacking(learner(), SuiteFacts()))
    assert not list(lacking(learner(), SuiteFacts(hints=True)))
    assert not list(lacking(learner(DRAFT), SuiteFacts(hints=False)))
    (line,) = lacking(learner(DRAFT), SuiteFacts(own_prompts=True))
    assert "writes every prompt itself" in line
    assert not list(lacking(learner(None), SuiteFacts(own_prompts=True, hints=False)))


def test_a_lag_bound_that_lets_few_families_be_under_way_is_told():
    (line,) = family_notes(learner(max_policy_lag=2))
    assert "families of up to 4 groups in a row" in line
    assert "raise it to 7" in line
    assert not list(family_notes(learner(max_policy_lag=7)))
    assert not list(family_notes(learner(None, max_policy_lag=0)))


BIG = {"name": "big", "url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("teachers", "changed", "said"),
    [
        (
            [],
            {},
            r"learner.family.teachers has 'big', but \[\[actor.teachers\]\] has no tables; add it there",
        ),
        ([BIG | {"name": "x"}], {}, r"has 'big', but .* has \['x'\]"),
        ([BIG, BIG | {"name": "x"}], {}, "actor.teachers has 'x', which nobody asks"),
        ([BIG, BIG], {}, "actor.teachers has 'big' twice"),
        ([BIG | {"url": "own"}], {}, r'url is "own", the model of \[judge\]; take model'),
        ([{"name": "big", "url": "own"}], {}, r'url = "own", but there is no \[judge\]'),
        ([{"name": "big", "url": BIG["url"]}], {}, "model is empty"),
        ([BIG | {"url": "http://me:secret@host/v1"}], {}, "url"),
        ([BIG], {"algorithm": {}}, "its tokens have no behaviour probability"),
        ([BIG], {"taught": {}}, "learner.taught"),
        ([BIG], {"group_size": 2}, "learner.family.members is 2 but learner.group_size is 2"),
        (
            [BIG],
            {"algorithm": SHAPED | {"advantage": {"kind": "batch_mean"}}},
            "joins groups that nobody solved",
        ),
    ],
)
def test_a_run_with_teachers_has_them_asks_them_and_has_a_loss_for_them(teachers, changed, said):
    content = {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "actor": {"teachers": teachers},
        "learner": {"family": TAUGHT, "algorithm": SHAPED, **changed},
    }
    with pytest.raises(ConfigError, match=said):
        check(content, "run.toml")
    learner = {"family": TAUGHT, "algorithm": SHAPED}
    assert check({**content, "actor": {"teachers": [BIG]}, "learner": learner}, "run.toml").actor.teachers
    own = {**content, "actor": {"teachers": [{"name": "big", "url": "own"}]}, "judge": {}, "learner": learner}
    assert check(own, "run.toml").judge is not None


def test_a_judge_of_verdicts_is_a_teacher_of_the_actors():
    family = {"kind": "verdict", "reward": "right", "judge": "big"}
    content = {"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": {"family": family}}
    with pytest.raises(ConfigError, match=r"learner.family.judge has 'big', but .* has no tables; add it"):
        check(content, "run.toml")
    teachers = {"actor": {"teachers": [BIG]}}
    assert check({**content, **teachers}, "run.toml").learner.family.judge == "big"
    without = {**content, **teachers, "learner": {"family": {**family, "judge": ""}}}
    with pytest.raises(ConfigError, match=r"which nobody asks; name it .* learner.family.judge"):
        check(without, "run.toml")

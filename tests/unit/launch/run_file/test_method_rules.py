"""A method that lacks a required part, or corrects for something twice, is refused before anything starts."""

import pytest

from launch.errors import ConfigError
from launch.run_file.load import check, load
from launch.run_file.recipes import recipes
from learner.errors import ReplayConfigError
from learner.replay.table import make_table
from learner.settings.rules import notes

GAE = {"kind": "gae"}
WINDOWS = {"train_on": "windows", "algorithm": {"advantage": GAE, "critic": {}}}
REPLAY = {"rule": "recent"}
FLAWED = {"reward": "right", "needs": "sound", "least": 0.5, "trained": False}
CENTRED = {"kind": "clip", "centre": "behaviour"}


def run_file(learner, **sections):
    return {"model": {"path": "some/model"}, "env": {"name": "calculator"}, "learner": learner, **sections}


def problems(learner, **sections):
    """Return the lines of the error for these settings, or [] if they are accepted."""
    try:
        check(run_file(learner, **sections), "run.toml")
    except ConfigError as error:
        return str(error).splitlines()
    return []


def algorithm(**settings):
    return {"algorithm": settings}


def terms(*terms, **more):
    return algorithm(advantage={"kind": "compared", "terms": list(terms), **more})


REFUSED = {
    "gae without a critic": (algorithm(advantage=GAE), ['"gae"', "add [learner.algorithm.critic]"]),
    "a critic without gae": (algorithm(critic={}), ["critic is set", '"group"', 'use kind "gae"']),
    "windows without gae": ({"train_on": "windows"}, ['train_on is "windows"', 'use kind "gae"']),
    "a group of one": ({"group_size": 1}, ["group_size is 1", "at least 2"]),
    "turns of a group of one": (
        {"group_size": 1} | algorithm(advantage={"kind": "turn_return"}),
        ["group_size is 1", '"turn_return"'],
    ),
    "a group by its members": ({"train_on": "trajectories"}, ['"trajectories"', 'train_on = "groups"']),
    "a greedy member by itself": (
        {"train_on": "trajectories"} | algorithm(advantage={"kind": "greedy"}),
        ['"greedy"', "whole group"],
    ),
    "a median without a group": (
        algorithm(surrogate={"kind": "bounded"}, advantage={"kind": "batch_mean"}),
        ['surrogate.kind is "bounded"', '"batch_mean"', "leave_one_out"],
    ),
    "groups counted where there are none": (
        algorithm(scale_by_informative=True, advantage={"kind": "batch_mean"}),
        ["scale_by_informative", '"batch_mean"'],
    ),
    "replay beside a critic": (
        {"replay": REPLAY, "train_on": "trajectories", "algorithm": {"advantage": GAE, "critic": {}}},
        ["learner.replay", "critic", "take [learner.replay] out"],
    ),
    "replay of windows": ({"replay": REPLAY} | WINDOWS, ["learner.replay", "windows"]),
    "single winners by turn": (
        {"replay": {"rule": "advantage"}} | algorithm(advantage={"kind": "turn_return"}),
        ['rule is "advantage"', '"turn_return"'],
    ),
    "a target without its group": (
        {"replay": {"rule": "advantage"}} | algorithm(surrogate={"kind": "bounded"}),
        ['rule is "advantage"', '"bounded"'],
    ),
    "a learning rate by weights that are all 1": (
        algorithm(proximal="behaviour", corrections=[], lr_by_ess="sqrt"), ['lr_by_ess is "sqrt"', "are 1"]
    ),
    "a baseline of groups where there are none": (
        algorithm(optimal_baseline=True, advantage={"kind": "batch_mean"}),
        ["optimal_baseline is a mean of rollout groups", '"batch_mean"', "leave_one_out"],
    ),
    "balance without a group": (
        algorithm(surrogate={"kind": "trajectory_balance"}, advantage={"kind": "batch_mean"}),
        ['surrogate.kind is "trajectory_balance"', 'use kind "group"'],
    ),
    "balance with a reference that is replaced": (
        {"replay": {"rule": "recent", "stop_at_step": 50}}
        | algorithm(reincarnation={"step": 50, "surrogate": {"kind": "trajectory_balance"}, "corrections": []}),
        ["reincarnation.surrogate.kind", "a reincarnation replaces"],
    ),
    "a head that steps by itself": (
        algorithm(advantage=GAE, critic={"steps": 2}), ["critic.steps is 2", 'model = "separate"']
    ),
    "fresh tokens rejected": (
        algorithm(surrogate={"kind": "weighted", "low": 1.2, "high": 3.0, "outside": "reject"}, corrections=[]),
        ['outside = "reject"', "fresh tokens", "contain 1"],
    ),
    "gradients in shards": (
        {"zero_stage": 2} | algorithm(gradient_alignment=0.1),
        ["gradient_alignment compares whole gradients", "zero_stage = 0"],
    ),
    "a second weight beside a trust region": (
        algorithm(surrogate={"kind": "trust_region"}, corrections=[{"kind": "divergence"}]),
        ['"trust_region"', "corrections (divergence)", "weight = false only"],
    ),
    "a penalty at its own centre": (
        algorithm(kl={"kind": "penalty", "to": "proximal"}), ['kl.to is "proximal"', "passes to 2"]
    ),
    "rescue without a group": (
        {"replay": {"rule": "success"}} | algorithm(advantage={"kind": "batch_mean"}),
        ['rule is "success"', '"batch_mean"'],
    ),
    "nothing fresh": (
        {"replay": {"rule": "recent", "share": 0.6}, "group_size": 8, "batch_trajectories": 16},
        ["share is 0.6", "not one group of 8", "lower the share"],
    ),
    "a replay table that would never give anything": (
        {"replay": {"rule": "recent", "min_size": 9, "capacity_groups": 8}},
        ["min_size is 9", "capacity_groups = 8"],
    ),
    "a share out of the table's reach": (
        {"replay": {"rule": "uniform", "share": 0.8, "max_policy_lag": 1}},
        ["share = 0.8", "raise max_policy_lag"],
    ),
    "replay that outlives the reincarnation": (
        {"replay": {"rule": "recent", "stop_at_step": 40}} | algorithm(reincarnation={"step": 50}),
        ["step is 50", "stop_at_step is 40", "make them equal"],
    ),
    "reincarnation of nothing": (
        algorithm(reincarnation={}, kl={"kind": "penalty", "to": "proximal"}, passes=2),
        ["reincarnation is set", 'kind "convex"'],
    ),
    "corrections that are all 1": (
        algorithm(proximal="behaviour"), ['proximal is "behaviour"', "set corrections = []"]
    ),
    "entropies of another policy than the clip's": (
        algorithm(surrogate={"kind": "entropy"}, proximal="interpolated"),
        ['surrogate.kind is "entropy"', 'proximal is "interpolated"', 'use proximal = "recomputed"'],
    ),
    "a weight of groups that nobody has formed": (
        algorithm(corrections=[{"kind": "truncated", "level": "group"}], proximal="interpolated"),
        ['level "group"', 'proximal is "interpolated"', 'use proximal = "recomputed"'],
    ),
    "an empty interval": (
        algorithm(corrections=[{"kind": "interval", "low": 2.0, "high": 2.0}]),
        ["corrections.0", "low 2 is not below high 2"],
    ),
    "bounds in disorder": (
        algorithm(surrogate={"kind": "balanced", "low_stop": 1.1}, corrections=[]),
        ["low 0.6 to 1.1", "low_stop < 1 < high_start"],
    ),
    "weights in disorder": (
        algorithm(surrogate={"kind": "weighted", "low": 3.0}, corrections=[]), ["low 3 is above high 2"]
    ),
    "three bounds in disorder": (
        algorithm(surrogate={"kind": "triplet", "negative_low": 5.0}, corrections=[]),
        ["negative_low 5 is not below negative_high 5"],
    ),
    "a dual clip inside the clip": (
        algorithm(surrogate={"kind": "clip", "high": 0.3, "dual": 1.25}), ["dual is 1.25", "upper bound 1.3"]
    ),
    "a dual clip inside the balanced one": (
        algorithm(surrogate={"kind": "balanced", "dual": 2.5}, corrections=[]), ["dual is 2.5", "bound 3"]
    ),
    "a dual clip inside the uncertain tokens' clip": (
        algorithm(surrogate={"kind": "entropy", "high": 0.5, "dual": 1.9}), ["dual is 1.9", "bound 2"]
    ),
    "a mirror that shows nothing": (
        algorithm(surrogate={"kind": "mirror_descent"}), ["mirror_descent", "passes to 2"]
    ),
    "more updates than groups": (
        {"group_size": 8, "batch_trajectories": 16} | algorithm(updates_per_batch=3),
        ["updates_per_batch is 3", "only 2 groups"],
    ),
    "more updates than windows": (
        WINDOWS | {"batch_trajectories": 4, "algorithm": WINDOWS["algorithm"] | {"updates_per_batch": 5}},
        ["updates_per_batch is 5", "only 4 windows"],
    ),
    "more updates than groups, once reincarnated": (
        {"group_size": 8, "batch_trajectories": 16}
        | algorithm(reincarnation={"updates_per_batch": 3}, kl={"kind": "convex"}),
        ["reincarnation.updates_per_batch is 3", "only 2 groups"],
    ),
    "an entropy coefficient above its maximum": (
        algorithm(entropy={"coefficient": 0.1, "target": 0.5}), ["coefficient 0.1", "maximum 0.02"]
    ),
    "a scale of groups that were dropped": (
        algorithm(scale_by_informative=True), ["scale_by_informative", "filter_uniform_groups = false"]
    ),
    "balanced bounds of a ratio that is 1": (
        algorithm(surrogate={"kind": "balanced", "centre": "proximal"}),
        ['kind "balanced"', "ratio is 1", "updates_per_batch to 2", 'centre = "behaviour"'],
    ),
    "a penalty on a ratio that is 1": (
        algorithm(surrogate={"kind": "ratio_variance", "centre": "proximal"}),
        ['kind "ratio_variance"', "ratio is 1"],
    ),
    "a penalty on a ratio that is 1, once reincarnated": (
        algorithm(reincarnation={"surrogate": {"kind": "mirror_descent"}}, passes=2, kl={"kind": "convex"}),
        ["reincarnation.surrogate", "mirror_descent", "raise learner.algorithm.reincarnation.passes"],
    ),
    "three bounds that leave fresh tokens below": (
        algorithm(surrogate={"kind": "triplet", "negative_low": 1.1}, corrections=[]),
        ["negative_low is 1.1", "no gradient", "at most 1"],
    ),
    "three bounds that leave fresh tokens above": (
        algorithm(surrogate={"kind": "triplet", "positive_high": 0.9}, corrections=[]),
        ["positive_high is 0.9", "at least 1"],
    ),
    "a penalty that regularises nothing": (
        algorithm(kl={"kind": "penalty", "estimator": "k1"}), ['estimator is "k1"', 'use "k2" or "k3"']
    ),
    "a mixture of penalties that regularises nothing": (
        algorithm(kl={"kind": "convex", "estimator": "k1"}), ['estimator is "k1"']
    ),
    "interpolation by a lag that does not count updates": (
        {"publish_every": 3} | algorithm(proximal="interpolated"),
        ['"interpolated"', "publish_every is 3", "2 updates old", "publish_every = 1"],
    ),
    "a comparison of turns that trajectories do not have": (
        terms({"among": ["group", "anchor"]}), ['terms.0.among has "anchor"', 'set of = "turn"']
    ),
    "a return to go of a trajectory": (terms({"value": "return_to_go"}), ['"return_to_go"', 'set of = "turn"']),
    "a comparison within and over groups": (terms({"among": ["group", "batch"]}), ["'batch']", '"batch" by itself']),
    "positions of all groups": (
        terms({"of": "turn", "among": ["position"]}), ["['position']", 'add "group"']
    ),
    "a discount of nothing": (terms({"discount": 0.9}), ["discount is 0.9", '"return_to_go" is discounted']),
    "a history of no state": (terms({"of": "turn", "history": 2}), ["history is 2", 'add "anchor"']),
    "a spread that is not divided by": (
        terms({"weight": "spread", "scale": "none"}), ['weight is "spread"', 'scale "none"', '"mean_abs"']
    ),
    "a mean by spread": (terms({"weight": "spread"}, combine="mean"), ['combine is "mean"', 'combine = "sum"']),
    "whitened trajectories of turns": (
        terms({"of": "turn"}, whiten="trajectories"), ['whiten is "trajectories"', '"tokens"']
    ),
    "difficulty of a batch": (
        terms({"among": ["batch"]}, by_difficulty={}), ["by_difficulty weighs groups", "take by_difficulty out"]
    ),
    "a comparison in a group of one": ({"group_size": 1} | terms({}), ["group_size is 1", '"compared"']),
    "a reward of a group that is not waited for": (
        {"train_on": "trajectories", "reward": {"group": {"kind": "win_rate"}}}
        | algorithm(advantage={"kind": "batch_mean"}),
        ['group.kind is "win_rate"', 'train_on is "trajectories"', "take it out"],
    ),
    "gates of a trajectory that still grows": (
        WINDOWS | {"reward": {"gates": [{"reward": "short", "needs": "right"}]}},
        ["reward.gates is set", '"windows"', "take gates out"],
    ),
    "a band of no bonus": (algorithm(entropy={"band": {}}), ["entropy.band is set", "raise coefficient"]),
    "two parts that replace a reward": (
        {"reward": {"wrong": {"reward": "x"}, "group": {"kind": "win_rate"}}},
        ['"win_rate" beside learner.reward.wrong', "take one of them out"],
    ),
    "two values of one answer": (
        {"reward": {"wrong": {"reward": "x"}, "steps": {"reward": "x"}}}, ["wrong and learner.reward.steps", "take one"]
    ),
    "stages in disorder": (
        {"reward": {"stages": [{"until_version": n, "weights": {}} for n in (5, 5)]}}, ["[5, 5]", "put them in order"]
    ),
    "a stage that never ends": (
        {"steps": 60, "publish_every": 2, "reward": {"stages": [{"until_version": 30, "weights": {}}]}},
        ["stages.0.until_version is 30", "learner.steps 60", "versions up to 29", "lower until_version"],
    ),
    "a rescue of groups that nobody loses": (
        {"replay": {"rule": "success", "outcome": "return"}, "reward": {"group": {"kind": "win_rate"}}},
        ['rule is "success" beside', '"win_rate"', "set learner.replay.outcome"],
    ),
    "a regression on advantages of turns": (
        algorithm(surrogate={"kind": "regression"}, corrections=[]), ['"regression"', '"group"', 'use kind "gae"']
    ),
    "a novelty of turns": (terms({"of": "turn"}, novelty={}), ["novelty is of whole answers", 'set of = "trajectory"']),
    "an amplified turn": (terms({"of": "turn"}, amplify={}), ["amplify is of whole episodes", 'set of = "trajectory"']),
    "a bundle that no batch fills": (
        {"batch_trajectories": 48} | algorithm(advantage={"kind": "risk"}), ["bundle is 5", "6 groups", "a multiple"]
    ),
    "quantiles in disorder": (
        {"batch_trajectories": 40} | algorithm(advantage={"kind": "risk", "levels": [0.8, 0.2]}), ["[0.8, 0.2]", "swap"]
    ),
    "a bundle of replayed groups": (
        {"batch_trajectories": 40, "replay": {"rule": "success"}} | algorithm(advantage={"kind": "risk"}),
        ['"risk" beside learner.replay', "take replay out"],
    ),
    "a risk of a group of one": (
        {"group_size": 1, "batch_trajectories": 5} | algorithm(advantage={"kind": "risk"}), ['"risk" is always zero']
    ),
    "a table that never fires": (
        {"replay": {"rule": "advantage", "fire_at": 99, "capacity_groups": 64}}, ["fire_at is 99", "64", "never fire"]
    ),
    "a table that fires by no rule": (
        {"replay": {"rule": "recent", "fire_at": 9}}, ["fire_at is set", '"recent"', 'rule = "advantage"']
    ),
    "a covariance between nothing": (
        algorithm(covariance={"low": 2.0, "high": 1.0}), ["low 2 is not below high 1"]
    ),
    "an outcome that no rule asks for": (
        {"replay": {"rule": "recent", "outcome": "answer"}}, ['outcome is "answer"', '"recent"', "per_prompt"]
    ),
    "a wrong answer between nothing": (
        {"reward": {"wrong": {"reward": "x", "highest": -2.0}}}, ["highest -2 is below lowest -1"]
    ),
    "a buffer above its limit": (
        {"reward": {"length": {"longest_tokens": 4, "buffer_tokens": 5}}}, ["buffer_tokens is 5", "longest_tokens 4"]
    ),
    "a penalty that no answer gets": (
        {"reward": {"length": {"longest_tokens": 90000, "buffer_tokens": 1}}},
        ["at 89999 tokens", "lower longest_tokens"],
    ),
    "a weight of what is not trained": (
        {"reward": {"flawed": FLAWED, "weights": {"sound": 0.3}}},
        ["learner.reward.weights.sound is 0.3", "trained is false", "take the weight out, or set trained = true"],
    ),
    "a stage's weight of what is not trained": (
        {"reward": {"flawed": FLAWED, "stages": [{"until_version": 3, "weights": {"sound": -1.0}}]}},
        ["learner.reward.stages.0.weights.sound is -1", "flawed.trained is false", "take the weight out"],
    ),
    "a reward that needs itself": (
        {"reward": {"gates": [{"reward": "x", "needs": "x"}]}}, ['needs "x"', "change one"]
    ),
    "routes that cannot change": (
        algorithm(routes="proximal"),
        ['routes is "proximal"', "single step", "raise learner.algorithm.updates_per_batch"],
    ),
    "a lag forced upon nobody": ({"forced_lag": 2}, ["forced_lag is 2", "run.mode", '"sync"']),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_cannot_supply_is_refused_with_the_cure(name):
    learner, words = REFUSED[name]
    (line,) = problems(learner)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "learner",
    [
        WINDOWS | {"group_size": 1},
        {"train_on": "trajectories", "group_size": 3, "algorithm": {"advantage": GAE, "critic": {}}},
        {"group_size": 1, "batch_trajectories": 4} | algorithm(advantage={"kind": "greedy"}),
        {"train_on": "trajectories", "group_size": 1} | algorithm(advantage={"kind": "batch_mean"}),
        {"train_on": "trajectories"} | algorithm(advantage={"kind": "turn_return", "baseline": "none"}),
        {"replay": {"rule": "success"}} | algorithm(advantage={"kind": "greedy"}),
        {"replay": {"rule": "recent", "stop_at_step": 50}} | algorithm(reincarnation={"step": 50}),
        algorithm(reincarnation={}, kl={"kind": "penalty"}),
        algorithm(surrogate={"kind": "mirror_descent"}, updates_per_batch=2),
        algorithm(surrogate={"kind": "clip", "high": 0.28, "dual": 1.3}),
        {"filter_uniform_groups": False} | algorithm(scale_by_informative=True),
        {"filter_uniform_groups": False}
        | terms({"of": "turn"})
        | algorithm(scale_by_informative=True, advantage={"kind": "compared", "terms": [{"of": "turn"}]}),
        {"steps": 61, "publish_every": 2, "reward": {"stages": [{"until_version": 30, "weights": {}}]}},
        {"replay": {"rule": "success", "outcome": "answer"}, "reward": {"group": {"kind": "win_rate"}}},
        algorithm(surrogate={"kind": "ratio_variance", "centre": "proximal"}, passes=2),
        algorithm(surrogate={"kind": "triplet", "negative_low": 1.0, "positive_high": 1.0}, corrections=[]),
        algorithm(proximal="interpolated"),
        {"group_size": 1} | terms({"among": ["batch"]}),
        terms(
            {
                "of": "turn",
                "value": "return_to_go",
                "among": ["group", "anchor"],
                "history": 2,
                "discount": 0.9,
            }
        ),
        algorithm(routes="proximal", updates_per_batch=4),
        algorithm(routes="proximal", reincarnation={"updates_per_batch": 4}, kl={"kind": "convex"}),
        {"reward": {"flawed": FLAWED, "weights": {"right": 2.0, "sound": 0.0}}},
        {"reward": {"flawed": FLAWED | {"trained": True}, "weights": {"sound": 0.3}}},
    ],
)
def test_what_a_run_can_supply_is_taken(learner):
    assert problems(learner) == []


@pytest.mark.parametrize(
    "surrogate",
    [
        {"kind": "window"},
        {"kind": "minirl"},
        {"kind": "triplet"},
        {"kind": "weighted"},
        {"kind": "balanced"},
        {"kind": "ratio_variance"},
        {"kind": "bounded", "centre": "behaviour"},
        CENTRED,
    ],
    ids=lambda s: s["kind"],
)
def test_staleness_is_not_corrected_twice(surrogate):
    """The surrogate's ratio current / behaviour corrects; a weight proximal / behaviour would do it again."""
    mask = {"kind": "interval", "weight": False}
    for corrections in ([{"kind": "truncated"}], [{"kind": "interval"}], [mask, {"kind": "truncated"}]):
        (line,) = problems(algorithm(surrogate=surrogate, corrections=corrections))
        assert "second time" in line
        assert "set corrections = []" in line
    for corrections in ([], [mask]):
        assert problems(algorithm(surrogate=surrogate, corrections=corrections)) == []


def test_nor_after_a_reincarnation():
    learner = algorithm(reincarnation={"surrogate": CENTRED}, kl={"kind": "convex"})
    (line,) = problems(learner)
    assert "learner.algorithm.reincarnation.surrogate" in line
    assert "learner.algorithm.reincarnation.corrections (truncated)" in line
    change = {"surrogate": CENTRED, "corrections": []}
    assert problems(algorithm(reincarnation=change, kl={"kind": "convex"})) == []


def test_corrections_after_a_reincarnation_are_looked_at_too():
    change = {"corrections": [{"kind": "interval", "low": 3.0}]}
    (line,) = problems(algorithm(reincarnation=change, kl={"kind": "convex"}))
    assert "learner.algorithm.reincarnation.corrections.0: low 3" in line
    behaviour = algorithm(proximal="behaviour", corrections=[], reincarnation={}, kl={"kind": "convex"})
    (line,) = problems(behaviour)
    assert "learner.algorithm.reincarnation.corrections" in line


@pytest.mark.parametrize(
    ("room", "evaluations", "wrong"), [(32, 0, False), (33, 1, False), (32, 1, True), (31, 0, True)]
)
def test_in_lockstep_a_batch_of_windows_has_to_stand_still_at_once(room, evaluations, wrong):
    learner = {**WINDOWS, "batch_trajectories": 32, "evaluation_tasks": evaluations}
    lines = problems(learner, run={"mode": "sync"}, actor={"count": 1, "concurrent_episodes": room})
    assert len(lines) == wrong
    assert all("raise concurrent_episodes" in line for line in lines)


def test_a_lag_cannot_be_forced_on_single_trajectories():
    learner = {"train_on": "trajectories", "forced_lag": 1, "algorithm": {"advantage": GAE, "critic": {}}}
    (line,) = problems(learner, run={"mode": "sync"})
    assert "only whole groups" in line


@pytest.mark.parametrize(
    ("tokens", "tail", "word"), [(1, 0, "at least 2 tokens"), (8, 8, "ignored_tail is 8")]
)
def test_a_window_must_hold_what_it_trains(tokens, tail, word):
    critic = {"advantage": {"kind": "gae", "ignored_tail": tail}, "critic": {}}
    (line,) = problems({"train_on": "windows", "algorithm": critic}, actor={"segment_tokens": tokens})
    assert word in line


def test_room_is_counted_with_the_greedy_member_and_the_forced_lag():
    settings = {"group_size": 3, "batch_trajectories": 30, "evaluation_tasks": 0, "max_policy_lag": 1}
    greedy = settings | algorithm(advantage={"kind": "greedy"})
    (line,) = problems(greedy, broker={"max_queued_tasks": 79})
    assert "max_policy_lag 1 with batches of 40" in line
    assert "80 tasks" in line
    assert problems(greedy, broker={"max_queued_tasks": 80}) == []
    forced, sync = settings | {"forced_lag": 3}, {"mode": "sync"}
    assert (
        "forced_lag 3 with batches of 30" in problems(forced, run=sync, broker={"max_queued_tasks": 119})[0]
    )
    assert problems(forced, run=sync, broker={"max_queued_tasks": 120}) == []


def test_a_forced_lag_is_the_bound_that_all_roles_keep():
    data = run_file({"forced_lag": 3, "max_policy_lag": 1}, run={"mode": "sync"})
    assert check(data, "x").max_policy_lag == 3


def test_the_table_is_asked_with_the_items_that_it_would_get():
    """One group of 4 is fresh per step and stays for 2 steps: the table never holds the 3 it waits for."""
    replay = {"rule": "recent", "share": 0.5, "max_policy_lag": 2, "min_size": 3}
    learner = {"group_size": 4, "batch_trajectories": 8, "replay": replay}
    (line,) = problems(learner)
    assert "1 items per step" in line
    winners = learner | {"replay": replay | {"rule": "advantage"}}
    assert problems(winners) == [], "4 fresh trajectories a step make 8"
    config = check(run_file(winners), "x").learner.replay
    with pytest.raises(ReplayConfigError):
        make_table(config, fresh_items=1)


BEHAVIOUR = {"corrections": [], "surrogate": CENTRED}


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (algorithm(), []),
        (algorithm(corrections=[{"kind": "interval"}]), []),
        (
            algorithm(surrogate={"kind": "clip"}),
            [["surrogate", '"clip"', "never act", "raise learner.algorithm.updates_per_batch"]],
        ),
        (algorithm(updates_per_batch=2), []),
        (algorithm(passes=2), []),
        (
            {"steps": 600}
            | algorithm(
                updates_per_batch=2, reincarnation={"step": 50, "updates_per_batch": 2}, kl={"kind": "convex"}
            ),
            [["reincarnation.step", "50 of 600 steps", "8 % of the run"]],
        ),
        (
            {"steps": 1000, "reward": {"stages": [{"until_version": 30, "weights": {"a": 0.0}}]}},
            [["learner.reward.stages", "30 of 1000 steps", "3 % of the run"]],
        ),
        (algorithm(proximal="interpolated"), []),
        (algorithm(**BEHAVIOUR), []),
        (algorithm(surrogate={"kind": "weighted", "centre": "proximal"}), [['"weighted"', "never act"]]),
        (algorithm(surrogate={"kind": "minirl"}, corrections=[]), [['"minirl"', "never act"]]),
        (algorithm(surrogate={"kind": "bounded"}), []),
        (
            algorithm(updates_per_batch=2, reincarnation={}, kl={"kind": "convex"}),
            [["raise learner.algorithm.reincarnation.updates_per_batch"]],
        ),
        (
            {"max_policy_lag": 0, "publish_every": 5} | algorithm(**BEHAVIOUR),
            [["max_policy_lag is 0", "publish_every 5", "4 updates old"]],
        ),
        ({"lora": {}} | algorithm(**BEHAVIOUR), []),
        (
            {"lora": {}, "optimizer": {"lr": 1e-6}} | algorithm(**BEHAVIOUR),
            [["learner.optimizer.lr is 1e-06", "try 1e-05 to 0.0001"]],
        ),
        ({"lora": {}, "optimizer": {"lr": 1e-5}} | algorithm(**BEHAVIOUR), []),
        (
            {"lora": {}, "optimizer": {"lr": 1e-5}}
            | algorithm(advantage={"kind": "gae"}, critic={"model": "separate"}, **BEHAVIOUR),
            [['critic.model is "separate"', 'use model = "head"']],
        ),
        (
            {"nodes": 3, "rendezvous": "10.0.0.1:29500"} | algorithm(**BEHAVIOUR),
            [["waits at 10.0.0.1:29500", "offbeat learner RUN_FILE --node N", "from 1 to 2"]],
        ),
    ],
)
def test_what_never_acts_is_noted(learner, words):
    config = check(run_file(learner), "run.toml")
    found = list(notes(config.learner, segment_tokens=16))
    assert len(found) == len(words)
    for line, expected in zip(found, words, strict=True):
        assert all(word in line for word in expected), line


def test_recipes_whose_bounds_never_act_have_a_note():
    noted = {
        recipe.name
        for recipe in recipes()
        if any("never act" in n for n in notes(load(recipe.path).learner, segment_tokens=6))
    }
    assert noted == {"distillation", "rloo", "remax"}, "their surrogate has no bound that is a part of them"

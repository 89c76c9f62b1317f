"""Test the replay table: what it keeps, refuses and writes, and how it joins the batch."""

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from learner.errors import ReplayConfigError, ReplayStateError
from learner.replay.batch import alone, batch_metrics, can_rescue, mix, prompt_key, remember, rescue_group
from learner.replay.table import Limiter, ReplayTable, make_limiter, make_selector, make_table
from learner.rewards import as_given, composed
from learner.settings.advantages import RewardConfig
from learner.settings.learner import ReplayConfig
from learner.trajectory import Unit
from tests.trajectories import make_group, make_trajectory


def rng(seed=0):
    return np.random.default_rng(seed)


def table_of(rule="uniform", **settings) -> ReplayTable:
    return make_table(ReplayConfig(rule=rule, **{"share": 0.4, "max_policy_lag": 2} | settings))


def group_of(name, rewards=(0.0, 1.0), version=0):
    return Unit(f"{name}.u", name, make_group(name, list(rewards), version=version))


def task_group(name, rewards, prompt):
    """Return a group whose members all begin with the same tokens."""
    members = [make_trajectory(f"{name}.{i}", group=name, reward=r) for i, r in enumerate(rewards)]
    return Unit(name, name, [replace(t, token_ids=np.full(len(t), prompt, np.int32)) for t in members])


def keys(entries):
    return [entry.key for entry in entries]


def fill(table, names, version=0, **metadata):
    for name in names:
        table.insert(group_of(name, version=version), key=name, version=version, **metadata)


def balanced(table):
    return table.inserted == len(table) + sum(table.evicted.values())


# --- retention --------------------------------------------------------------------------------------------


def test_oldest_goes_when_full():
    table = table_of(capacity_groups=2)
    fill(table, "abc")
    assert keys(table.entries.values()) == ["b", "c"]
    assert table.evicted["capacity"] == 1
    assert balanced(table)


def test_too_old_goes_before_anything_is_drawn():
    table = table_of(max_policy_lag=2)
    fill(table, "a", version=1)
    fill(table, "b", version=3)
    assert sorted(keys(table.sample(2, step=0, version=3, rng=rng()))) == ["a", "b"]
    assert keys(table.sample(2, step=0, version=4, rng=rng())) == ["b"]
    assert table.evicted["age"] == 1
    assert table.sample(2, step=0, version=6, rng=rng()) == []
    assert table.evicted["age"] == 2
    assert balanced(table)


def test_used_up_goes():
    table = table_of(max_uses=2)
    fill(table, "a")
    for _ in range(2):
        assert keys(table.sample(3, step=0, version=0, rng=rng())) == ["a"], "once per call"
    assert table.sample(1, step=0, version=0, rng=rng()) == []
    assert table.evicted["uses"] == 1
    assert table.sampled == 2
    assert balanced(table)


@pytest.mark.parametrize(("rule", "most"), [("difficulty", 1), ("per_prompt", 1), ("success", 3)])
def test_newest_of_a_prompt_stay(rule, most):
    table = table_of(rule, per_prompt_capacity=3)
    for i in range(5):
        table.insert(group_of(f"g{i}"), key="p", version=0, return_=1.0)
    table.insert(group_of("h"), key="q", version=0, return_=1.0)
    assert [e.order for e in table.entries.values()] == [*range(5 - most, 5), 5]
    assert table.evicted["prompt"] == 5 - most
    assert balanced(table)


def test_nothing_is_drawn_or_kept_after_the_last_step():
    table = table_of(stop_at_step=5)
    groups = [group_of("a"), group_of("b")]
    remember(table, groups, step=3)
    assert len(mix(table, [group_of("c")] * 3, step=4, version=0, rng=rng())) > 6
    assert len(mix(table, [group_of("c")] * 3, step=5, version=0, rng=rng())) == 6
    assert (len(table), table.evicted["stopped"]) == (0, 2)
    remember(table, groups, step=5)
    assert (len(table), table.inserted) == (0, 2)


def test_an_item_from_the_future_is_an_error():
    table = table_of()
    fill(table, "a", version=7)
    with pytest.raises(ValueError, match="item 0 is of version 7, the learner is at 5"):
        table.sample(1, step=0, version=5, rng=rng())


def test_counts_of_tokens():
    table = table_of()
    fill(table, "ab", tokens=7)
    table.sample(2, step=0, version=0, rng=rng())
    assert table.sampled_tokens == 14
    assert table.metrics() == {
        "replay/items": 2.0, "replay/inserted": 2.0, "replay/sampled": 2.0, "replay/evicted": 0.0,
    }  # fmt: skip


# --- sampling ---------------------------------------------------------------------------------------------


def test_nothing_before_the_minimum_is_there():
    table = table_of(min_size=2)
    fill(table, "a")
    assert table.sample(1, step=0, version=0, rng=rng()) == []
    fill(table, "b")
    assert len(table.sample(2, step=0, version=0, rng=rng())) == 2


def test_samples_keep_to_inserts():
    """The table gives two samples per insert beyond the first, and two ahead."""
    table = table_of(samples_per_insert=2.0, share=0.5, max_uses=9)
    drawn = []
    for name in "abcd":
        fill(table, name)
        drawn.append([len(table.sample(9, step=0, version=0, rng=rng())) for _ in range(4)])
    assert drawn == [[1, 1, 0, 0], [2, 0, 0, 0], [2, 0, 0, 0], [2, 0, 0, 0]]


def test_a_key_restricts_the_draw():
    table = table_of("success")
    fill(table, "aabb", return_=1.0)
    assert keys(table.sample(9, step=0, version=0, rng=rng(), key="b")) == ["b", "b"]
    assert table.sample(1, step=0, version=0, rng=rng(), key="c") == []


def test_difficulty_draws_the_group_in_the_middle():
    table = table_of("difficulty", temperature=0.001)
    for rate in (0.0, 0.25, 0.5, 0.75, 1.0):
        table.insert(group_of(f"g{rate}"), key=str(rate), version=0, success_rate=rate)
    assert keys(table.sample(1, step=0, version=0, rng=rng())) == ["0.5"]


def test_draws_repeat_with_their_seed():
    def drawn(seed):
        table = table_of()
        fill(table, "abcdefgh")
        return [keys(table.sample(3, step=0, version=0, rng=rng([seed, i]))) for i in range(4)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


# --- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "known", "cure"),
    [
        ({"min_size": 9, "capacity_groups": 8}, {}, "lower min_size or raise capacity_groups"),
        ({"samples_per_insert": 5.0, "max_uses": 4}, {}, "raise max_uses or lower samples_per_insert"),
        ({"share": 0.8, "max_uses": 3, "max_policy_lag": 9}, {}, "raise max_uses to 4 or lower share"),
        ({"share": 0.8, "max_policy_lag": 3}, {}, "raise max_policy_lag to 4 or lower share"),
        ({"share": 0.6, "samples_per_insert": 1.0}, {}, "raise samples_per_insert to 1.5 or lower share"),
        ({"share": 0.5, "capacity_groups": 9}, {"fresh_items": 10}, "raise capacity_groups to 10"),
        ({"min_size": 9, "max_policy_lag": 2}, {"fresh_items": 4}, "lower min_size or raise max_policy_lag"),
    ],
)
def test_settings_that_could_not_be_kept_are_refused(settings, known, cure):
    with pytest.raises(ReplayConfigError, match=cure):
        make_table(ReplayConfig(**settings), **known)


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"min_size": 8, "capacity_groups": 8}, {}),
        ({"samples_per_insert": 4.0, "max_uses": 4}, {}),
        ({"share": 0.8, "max_uses": 4, "max_policy_lag": 4}, {}),
        ({"share": 0.6, "samples_per_insert": 1.5}, {}),
        ({"share": 0.5, "capacity_groups": 10}, {"fresh_items": 10}),
        ({"min_size": 8, "max_policy_lag": 2}, {"fresh_items": 4}),
        ({"share": 0.8, "max_policy_lag": 2}, {"publish_every": 2}),
        ({"rule": "success", "share": 0.99}, {}),
    ],
)
def test_settings_on_the_edge_are_taken(settings, known):
    assert len(make_table(ReplayConfig(**settings), **known)) == 0


@pytest.mark.parametrize(
    "settings", [{"min_size": 9, "capacity_groups": 8}, {"min_size": 9, "max_policy_lag": 2}]
)
def test_what_is_refused_would_have_waited_for_ever(settings):
    """The test inserts four items per step, in lockstep, and no draw ever succeeds."""
    config = ReplayConfig(rule="uniform", **settings)
    table = ReplayTable(config, make_selector(config), Limiter(config.min_size))
    for version in range(50):
        assert table.sample(1, step=version, version=version, rng=rng()) == []
        fill(table, "abcd", version=version)


def test_an_error_buffer_smaller_than_an_insert_is_refused():
    with pytest.raises(ReplayConfigError, match="make it at least 3"):
        Limiter(samples_per_insert=3.0, error_buffer=2.9)
    with pytest.raises(ReplayConfigError, match="make it at least 1"):
        Limiter(samples_per_insert=0.5, error_buffer=0.9)
    assert make_limiter(ReplayConfig(samples_per_insert=3.0)).error_buffer == 3.0


# --- the batch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["uniform", "recent", "difficulty"])
def test_groups_are_replayed_as_they_were(rule):
    table = table_of(rule, share=0.5)
    before = [group_of("a"), group_of("b")]
    remember(table, before, step=0)
    fresh = [group_of("c", version=1), group_of("d", version=1)]
    batch = mix(table, fresh, step=1, version=1, rng=rng())
    assert [t.replayed for t in batch] == [False] * 4 + [True] * 4
    replayed = {t.trajectory_id: t for t in batch if t.replayed}
    for original in (t for group in before for t in group.trajectories):
        again = replayed[original.trajectory_id]
        assert (again.group_id, again.return_) == (original.group_id, original.return_)
        assert again.logp_behaviour is original.logp_behaviour
        assert again.policy_version is original.policy_version
        assert not original.replayed
    assert batch_metrics(batch, version=1) == {"replay/share": 0.5, "replay/age_mean_versions": 1.0}
    assert batch_metrics(batch[:4], version=1) == {"replay/share": 0.0, "replay/age_mean_versions": 0.0}


def test_the_first_batch_is_fresh():
    table = table_of(share=0.9, max_uses=9, max_policy_lag=9)
    assert not any(t.replayed for t in mix(table, [group_of("a")], step=0, version=0, rng=rng()))


def test_a_group_is_kept_for_rescue_only_where_a_success_may_be_drawn():
    failed = task_group("f", [0.0] * 3, prompt=5).trajectories
    for least, kept in ((1, True), (9, False)):
        table = table_of("success", min_size=least)
        remember(table, [task_group("s", [0.0, 1.0, 1.0], prompt=5)], step=0)
        assert can_rescue(table, failed) is kept
        assert len(rescue_group(table, failed, step=1, version=1, rng=rng())) == 3
        assert bool(table.sampled) is kept


@pytest.mark.parametrize("rule", ["success", "per_prompt"])
def test_a_failed_group_is_rescued_by_a_success_of_its_prompt(rule):
    table = table_of(rule)
    solved, failed = task_group("s", [0.0, 1.0, 1.0], prompt=5), task_group("f", [0.0] * 3, prompt=5)
    other = task_group("o", [0.0] * 3, prompt=6)
    remember(table, [solved], step=0)
    stored = [e.item.trajectory_id for e in table.entries.values()]
    assert stored == {"success": ["s.1", "s.2"], "per_prompt": ["s.2"]}[rule]
    batch = mix(table, [failed, other, solved], step=1, version=1, rng=rng())
    assert [t.group_id for t in batch] == ["f"] * 3 + ["o"] * 3 + ["s"] * 3
    (joined,) = [t for t in batch if t.replayed]
    assert (joined.group_id, joined.return_, table.sampled) == ("f", 1.0, 1)
    remember(table, [Unit("f", "f", batch[:3])], step=1)
    assert table.inserted == 2, "a replayed success is not stored again"


@pytest.mark.parametrize("reward", ["return", "score"])
def test_a_rescue_beside_win_rates_is_judged_by_the_named_outcome(reward):
    """All failed: win rates are 1/2 each. The stored success beats both others, whose rates are 1/4 then."""
    rule = RewardConfig(group={"kind": "win_rate", "reward": reward})
    table = table_of("success", outcome="score")

    def valued(group):
        return replace(group, trajectories=composed(rule, group.trajectories))

    solved, failed = (
        valued(task_group(n, r, prompt=5)) for n, r in (("s", [0.0, 1.0, 1.0]), ("f", [0.0] * 3))
    )
    assert [t.return_ for t in failed.trajectories] == [0.5] * 3
    remember(table, [solved], step=0)
    assert [e.return_ for e in table.entries.values()] == [1.0, 1.0], "what the environment gave"
    assert can_rescue(table, failed.trajectories)
    batch = mix(
        table, [failed, solved], step=1, version=1, rng=rng(),
        compose=lambda members: composed(rule, [as_given(t) for t in members]),
    )  # fmt: skip
    assert sorted((t.replayed, t.return_) for t in batch[:3]) == [(False, 0.25), (False, 0.25), (True, 1.0)]
    assert [t.return_ for t in batch[3:]] == [t.return_ for t in solved.trajectories]


def test_a_greedy_member_is_neither_stored_nor_replaced():
    greedy = make_trajectory("greedy", reward=1.0, temperature=0.0)
    table = table_of("success")
    remember(table, [Unit("u", "g0", [greedy])], step=0)
    assert len(table) == 0
    remember(table, [Unit("u", "g0", [replace(greedy, temperature=1.0)])], step=0)
    group = [replace(greedy, rewards=[]), replace(greedy, rewards=[], temperature=1.0)]
    # Draw as often as the one success may be used.
    for seed in range(4):
        rescued = rescue_group(table, group, step=1, version=0, rng=rng(seed))
        assert [t.replayed for t in rescued] == [False, True]


def test_winners_are_replayed_alone_with_an_advantage_of_today():
    table = table_of("advantage", share=0.5)
    remember(table, [group_of("a", [0.0, 0.2, 1.0]), group_of("b", [0.0, 0.0])], step=0)
    assert list(table.baselines) == pytest.approx([0.4, 0.0])
    (entry,) = table.entries.values()
    assert (entry.item.trajectory_id, entry.advantage) == ("a.2", pytest.approx(0.6))
    batch = mix(table, [group_of("c", version=1)], step=1, version=1, rng=rng(), weight=0.5)
    assert [t.replayed for t in batch] == [False, False, True]
    won = batch[-1]
    assert (won.group_id, won.group_size) == ("a.2", 1)
    assert won.advantage == pytest.approx(0.5 * (1.0 - 0.2)), "return less the median of 0.4 and 0"
    # The usual return is now as good as the stored one.
    remember(table, [group_of(n, [1.0, 1.0]) for n in "dgh"], step=1)
    assert not any(t.replayed for t in mix(table, [group_of("f")] * 2, step=2, version=1, rng=rng()))
    assert alone(entry, [1.5]).advantage == pytest.approx(-0.5)


def test_unfinished_trajectories_are_not_successes():
    table = table_of("success")
    remember(
        table, [Unit("u", "g", [replace(make_trajectory("t", reward=1.0), status="unfinished")])], step=0
    )
    assert len(table) == 0


def test_prompts_are_told_apart_by_tokens_and_environment():
    a, b = make_trajectory("a"), make_trajectory("b")
    assert prompt_key(a) != prompt_key(b)
    assert prompt_key(a) != prompt_key(replace(a, env="another"))
    longer = replace(a, token_ids=np.concatenate([a.token_ids[:-1], [3]]).astype(np.int32))
    assert prompt_key(a) == prompt_key(longer), "answers do not matter"


# --- the file ---------------------------------------------------------------------------------------------


def test_a_table_survives_its_file(tmp_path):
    table = table_of("recent", max_uses=3)
    remember(table, [group_of(n, version=2) for n in "abcd"], step=2)
    mix(table, [group_of("e")] * 2, step=3, version=3, rng=rng())
    path = tmp_path / "checkpoint" / "replay.msgpack"
    table.save(path)
    table.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["replay.msgpack"]
    again = table_of("recent", max_uses=3)
    again.load(path)
    assert again.state() == table.state()
    for before, after in zip(table.entries.values(), again.entries.values(), strict=True):
        assert (before.item.unit_id, before.item.group_id) == (after.item.unit_id, after.item.group_id)
        for t, u in zip(before.item.trajectories, after.item.trajectories, strict=True):
            for field in fields(t):
                left, right = getattr(t, field.name), getattr(u, field.name)
                if isinstance(left, np.ndarray):
                    assert left.dtype == right.dtype
                    assert right.flags.writeable
                np.testing.assert_array_equal(left, right)
            assert type(u.turns[0]) is type(t.turns[0])
    for step in range(4, 9):
        draws = [
            [t.trajectory_id for t in mix(x, [group_of("e")] * 2, step=step, version=3, rng=rng(step))]
            for x in (table, again)
        ]
        assert draws[0] == draws[1]


@pytest.mark.parametrize("rule", ["success", "advantage"])
def test_single_trajectories_survive_too(rule):
    table = table_of(rule)
    remember(table, [group_of("a", [0.0, 1.0])], step=0)
    again = table_of(rule)
    again.restore(table.state())
    assert [e.item.trajectory_id for e in again.entries.values()] == ["a.1"]
    assert again.baselines == table.baselines
    assert again.state() == table.state()


def test_a_smaller_table_keeps_the_newest(tmp_path):
    table = table_of(max_uses=4)
    fill(table, "abcd")
    table.sample(4, step=0, version=0, rng=rng())
    fill(table, "e")
    small = table_of(capacity_groups=1, max_uses=1, share=0.2)
    small.restore(table.state())
    assert keys(small.entries.values()) == ["e"]
    assert small.evicted["uses"] == 4
    assert balanced(small)


def test_what_cannot_be_continued_from_is_refused(tmp_path):
    table = table_of("uniform")
    fill(table, "ab")
    state = table.state()
    with pytest.raises(ReplayStateError, match="'uniform', this run has 'recent'"):
        table_of("recent").restore(state)
    path = tmp_path / "replay.msgpack"
    path.write_bytes(state[:-9])
    with pytest.raises(ReplayStateError, match=r"replay\.msgpack: .*delete its file"):
        table_of("uniform").load(path)
    raw = msgspec.msgpack.decode(state)
    for name, value, text in [
        ("format", 2, "format 2"),
        ("inserted", 7, "7 inserted, but 2 held and 0 evicted"),
    ]:
        with pytest.raises(ReplayStateError, match=text):
            table_of("uniform").restore(msgspec.msgpack.encode(raw | {name: value}))
    raw["entries"][0]["item"]["trajectories"][0]["fields"]["kv"] = "lost"
    with pytest.raises(ReplayStateError, match="item cannot be read"):
        table_of("uniform").restore(msgspec.msgpack.encode(raw))
    raw["entries"][0]["item"]["trajectories"][0]["body"] = b""
    with pytest.raises(ReplayStateError, match="item cannot be read"):
        table_of("uniform").restore(msgspec.msgpack.encode(raw))

"""Properties of a replay table that hold for any order of inserts, draws and restarts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from learner.algorithms.replay import choose, replay_quota_beside, selection_probabilities
from learner.errors import ReplayConfigError
from learner.replay.batch import mix, remember
from learner.replay.table import make_table
from learner.settings.learner import ReplayConfig
from learner.trajectory import Unit
from tests.property.effort import EFFORT
from tests.trajectories import make_group

GROUP_RULES = ["uniform", "recent", "difficulty"]
RULES = [*GROUP_RULES, "success", "per_prompt", "advantage"]
TEMPLATES = [Unit(f"u{i}", f"g{i}", make_group(f"g{i}", [0.0, i / 7])) for i in range(8)]

logits = st.lists(st.one_of(st.floats(-800, 800), st.just(-math.inf)), max_size=12)
shares = st.floats(0.01, 0.95)
configs = st.builds(
    ReplayConfig,
    rule=st.sampled_from(RULES),
    share=shares,
    capacity_groups=st.integers(1, 12),
    max_policy_lag=st.integers(1, 4),
    max_uses=st.integers(1, 4),
    min_size=st.integers(1, 12),
    samples_per_insert=st.one_of(st.none(), st.floats(0.05, 4.0)),
    per_prompt_capacity=st.integers(1, 3),
    stop_at_step=st.sampled_from([0, 0, 0, 9]),
)


# --- choosing ---------------------------------------------------------------------------------------------


@given(logits, st.integers(0, 15), st.integers(0, 2**32))
def test_a_choice_is_of_different_items_that_may_be_drawn(values, count, seed):
    drawn = choose(values, count, np.random.default_rng(seed))
    possible = {i for i, x in enumerate(values) if x > -math.inf}
    assert len(drawn) == len(set(drawn)) == min(count, len(possible))
    assert set(drawn) <= possible
    assert drawn == choose(values, count, np.random.default_rng(seed))


@given(logits, st.integers(0, 15), st.integers(0, 2**32))
def test_a_larger_choice_begins_with_the_smaller(values, count, seed):
    fewer, more = (choose(values, n, np.random.default_rng(seed)) for n in (count, count + 1))
    assert more[:count] == fewer


@given(logits)
def test_probabilities_add_up_and_follow_the_weights(values):
    p = selection_probabilities(values)
    assert np.isfinite(p).all()
    assert p.sum() == pytest.approx(1.0 if any(x > -math.inf for x in values) else 0.0)
    order = np.argsort(values, kind="stable")
    assert (np.diff(p[order]) >= 0).all()


# --- share ------------------------------------------------------------------------------------------------


@given(shares, st.lists(st.integers(0, 300), min_size=1, max_size=200))
def test_quotas_are_within_one_of_the_share_at_all_times(share, batches):
    beside, carry = 0, 0.0
    for k, batch in enumerate(batches, start=1):
        quota, carry = replay_quota_beside(share, batch, carry)
        beside += quota
        assert abs(beside - share / (1 - share) * sum(batches[:k])) < 1 + 1e-6


@settings(max_examples=30 * EFFORT, deadline=None)
@given(st.sampled_from(GROUP_RULES), st.floats(0.05, 0.6), st.integers(1, 6))
def test_the_share_of_what_is_trained_converges(kind, share, fresh):
    """Every group has a different prompt and none is scarce, so only the first step has nothing to draw."""
    table = make_table(ReplayConfig(rule=kind, share=share, max_policy_lag=4), fresh_items=fresh)
    replayed = total = 0
    for step in range(60):
        names = [f"{step}-{i}" for i in range(fresh)]
        batch = [Unit(name, name, make_group(name, [0.0], version=step)) for name in names]
        mixed = mix(table, batch, step=step, version=step, rng=np.random.default_rng(step))
        remember(table, batch, step=step)
        replayed += sum(t.replayed for t in mixed)
        total += len(mixed)
    assert replayed == pytest.approx(share * total, abs=2 * fresh + 2)


# --- the table --------------------------------------------------------------------------------------------


class Replay(RuleBasedStateMachine):
    """A learner that inserts, draws, publishes and sometimes restarts, beside one that never restarts."""

    @initialize(config=configs, seed=st.integers(0, 1000))
    def start(self, config, seed):
        self.seed, self.config = seed, config
        self.step = self.version = 0
        self.uses = {}
        try:
            self.table, self.steady = make_table(config), make_table(config)
        except ReplayConfigError:
            self.config = config.model_copy(update={"share": 0.01, "min_size": 1, "samples_per_insert": None})
            self.table, self.steady = make_table(self.config), make_table(self.config)

    @rule(
        which=st.integers(0, 7),
        lag=st.integers(0, 6),
        return_=st.floats(-1, 1),
        advantage=st.floats(-1, 1),
        rate=st.floats(0, 1),
    )
    def insert(self, which, lag, return_, advantage, rate):
        for table in (self.table, self.steady):
            table.baselines.append(return_ / 2)
            table.insert(
                TEMPLATES[which],
                key=f"p{which % 3}",
                version=max(0, self.version - lag),
                return_=return_,
                advantage=advantage,
                success_rate=rate,
                tokens=which,
            )

    @rule(count=st.integers(0, 6), key=st.sampled_from([None, None, "p0", "p9"]))
    def draw(self, count, key):
        """Draw for one step of the learner."""
        drawn = []
        for table in (self.table, self.steady):
            rng = np.random.default_rng([self.seed, self.step])
            drawn.append(table.sample(count, step=self.step, version=self.version, rng=rng, key=key))
        assert [e.order for e in drawn[0]] == [e.order for e in drawn[1]], "a restart changes nothing"
        assert len({e.order for e in drawn[0]}) == len(drawn[0]) <= count
        stopped = 0 < self.config.stop_at_step <= self.step
        assert not (stopped and drawn[0])
        for entry in drawn[0]:
            assert 0 <= self.version - entry.version <= self.config.max_policy_lag
            assert key in (None, entry.key)
            self.uses[entry.order] = self.uses.get(entry.order, 0) + 1
            assert entry.uses == self.uses[entry.order] <= self.config.max_uses
            if self.config.rule == "advantage":
                assert entry.advantage > 0
            if self.config.rule in ("success", "per_prompt"):
                assert entry.return_ > 0.1
        self.step += 1

    @rule()
    def publish(self):
        self.version += 1

    @rule()
    def restart(self):
        state = self.table.state()
        self.table = make_table(self.config)
        self.table.restore(state)
        assert self.table.state() == state

    @rule(fresh=st.integers(0, 5))
    def quota(self, fresh):
        assert self.table.quota(fresh, step=self.step) == self.steady.quota(fresh, step=self.step)

    @invariant()
    def the_books_balance(self):
        if not hasattr(self, "table"):
            return
        table, limit = self.table, self.config.samples_per_insert
        assert table.inserted == len(table) + sum(table.evicted.values())
        assert len(table) <= self.config.capacity_groups
        assert table.sampled == sum(self.uses.values())
        if table.per_key is not None:
            held = [e.key for e in table.entries.values()]
            assert all(held.count(key) <= table.per_key for key in held)
        if limit is not None and table.sampled:
            assert table.sampled <= limit * (table.inserted - self.config.min_size) + max(1.0, limit) + 1e-6


TestReplayTable = Replay.TestCase
TestReplayTable.settings = settings(max_examples=60 * EFFORT, stateful_step_count=40, deadline=None)


@settings(max_examples=150 * EFFORT, deadline=None)
@given(configs, st.integers(1, 6), st.integers(1, 3))
def test_what_is_accepted_never_waits_for_ever(config, fresh, publish_every):
    """Draws go on to the end of the run, unless the settings were refused.

    The run is in lockstep, the rule keeps every item, and every item has a different prompt.
    """
    try:
        table = make_table(config, fresh_items=fresh, publish_every=publish_every)
    except ReplayConfigError:
        return
    quiet, longest, last = 0, 0, config.stop_at_step or 400
    to_fill = config.min_size / fresh + 1 / (fresh * (config.samples_per_insert or math.inf))
    patience = 2 + to_fill + publish_every * (config.max_policy_lag + 1)
    inserted = 0
    for step in range(last):
        version = step // publish_every
        drawn = table.sample(3, step=step, version=version, rng=np.random.default_rng(step))
        quiet = 0 if drawn else quiet + 1
        longest = max(longest, quiet)
        for _ in range(fresh):
            inserted += 1
            table.insert(
                TEMPLATES[0],
                key=f"p{inserted}",
                version=version,
                return_=1.0,
                advantage=1.0,
                success_rate=0.5,
            )
    if last > patience:
        assert longest <= patience
    if config.stop_at_step:
        assert table.sample(3, step=last, version=last, rng=np.random.default_rng(0)) == []

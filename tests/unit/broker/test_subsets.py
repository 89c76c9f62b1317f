"""Each actor of a large fleet has a stable subset of the generators, and each generator has actors."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core.subsets import HOMES, SIZE, Subsets, key_of, scores

NAMES = st.integers(0, 199)


def plainly(generators, actors):
    """Return all subsets by the definition: sort everything, for each actor and each generator."""

    def score(actor, generator):
        import numpy as np

        return int(scores(key_of(actor), np.array([key_of(generator)], np.uint64))[0])

    homes = {g: set(sorted(actors, key=lambda a: score(a, g), reverse=True)[:HOMES]) for g in generators}
    found = {}
    for actor, host in actors.items():
        own = sorted(g for g, at in generators.items() if host and at == host)[:SIZE]
        first = dict.fromkeys([*own, *sorted(g for g in generators if actor in homes[g])])
        best = sorted(generators, key=lambda g: score(actor, g), reverse=True)[:SIZE]
        others = [g for g in best if g not in first][: max(0, SIZE - len(first))]
        found[actor] = {*first, *others}
    return found


steps = st.lists(st.tuples(st.sampled_from(["generator", "actor"]), NAMES), max_size=60)


@settings(deadline=None, max_examples=60)
@given(start=st.tuples(st.integers(0, 110), st.integers(0, 6)), steps=steps)
def test_subsets_are_those_of_the_definition_after_any_coming_and_going(start, steps):
    subsets, generators, actors = Subsets(), {}, {}

    def toggle(kind, number):
        name, there = f"{kind[0]}{number}", generators if kind == "generator" else actors
        host = f"h{number % 40}" if number % 3 else ""
        if name in there:
            del there[name]
            (subsets.remove_generator if kind == "generator" else subsets.remove_actor)(name)
        else:
            there[name] = host
            (subsets.add_generator if kind == "generator" else subsets.add_actor)(name, host)

    for kind, count in zip(("generator", "actor"), start, strict=True):
        for number in range(count):
            toggle(kind, number)
    before = {actor: set(subsets.of(actor)) for actor in actors}
    subsets.take_changed()
    for kind, number in steps:
        toggle(kind, number)
        changed = subsets.take_changed()
        after = {actor: set(subsets.of(actor)) for actor in actors}
        if kind == "generator":
            for actor in actors:
                assert len(after[actor] - before[actor]) <= 1, "at most one entry comes"
                assert len(before[actor] - after[actor]) <= 1, "and one goes"
        assert {a for a in actors if a in before and before[a] != after[a]} <= changed
        before = after
    assert before == plainly(generators, actors)
    covered = set().union(*before.values())
    assert covered == (set(generators) if actors else set())
    for actor, host in actors.items():
        assert len(before[actor]) >= min(len(generators), SIZE)
        assert {g for g, at in generators.items() if host and at == host} <= before[actor]


def fleet(actors, generators):
    subsets = Subsets()
    for i in range(generators):
        subsets.add_generator(f"generator-{i}", f"host{i // 8}")
    for i in range(actors):
        subsets.add_actor(f"actor-{i}", f"host{i}")
    subsets.take_changed()
    return subsets


@pytest.mark.parametrize("actors", [600, 100])
def test_two_thousand_generators_are_all_used_and_an_event_costs_little(actors):
    before = time.process_time()
    subsets = fleet(actors, 2_000)
    took = time.process_time() - before
    chosen = [subsets.of(f"actor-{i}") for i in range(actors)]
    users = dict.fromkeys((f"generator-{i}" for i in range(2_000)), 0)
    for names in chosen:
        for name in names:
            users[name] += 1
    assert min(users.values()) >= HOMES
    connections = sum(map(len, chosen))
    assert connections <= actors * SIZE + HOMES * 2_000
    assert took < 10.0
    begun, changed = time.process_time(), []
    for i in range(50):
        subsets.add_generator(f"new-{i}", "")
        changed.append(len(subsets.take_changed()))
        subsets.remove_generator(f"new-{i}")
        changed.append(len(subsets.take_changed()))
    assert (time.process_time() - begun) / 100 < 0.1
    assert sum(changed) / 100 < actors * SIZE / 2_000 + 3 * HOMES

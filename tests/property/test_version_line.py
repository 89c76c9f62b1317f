"""Test the line of versions against a walk through the tree of updates, edge by edge."""

from collections import defaultdict, deque

from hypothesis import given
from hypothesis import strategies as st

from protocol.version_line import VersionLine


@st.composite
def trees(draw):
    forks, newest = [], draw(st.integers(0, 6))
    for _ in range(draw(st.integers(0, 4))):
        continued = draw(st.integers(0, newest))
        forks.append((continued, newest + 1))
        newest += 1 + draw(st.integers(0, 5))
    return forks, newest


def distances(forks, newest, start):
    edges = defaultdict(list)
    parents = {number: (continued, 0) for continued, number in forks}
    for version in range(1, newest + 1):
        parent, updates = parents.get(version, (version - 1, 1))
        edges[version].append((parent, updates))
        edges[parent].append((version, updates))
    found, todo = {start: 0}, deque([start])
    while todo:
        version = todo.popleft()
        for other, updates in edges[version]:
            if other not in found:
                found[other] = found[version] + updates
                todo.append(other)
    return found


@given(trees())
def test_lag_is_the_length_of_the_way_through_the_tree(tree):
    forks, newest = tree
    line, way = VersionLine(forks), distances(forks, newest, newest)
    assert {v: line.lag(v, newest) for v in range(newest + 1)} == way


@given(trees())
def test_places_are_versions_and_the_freshest_is_the_best_of_those_up_to_it(tree):
    forks, newest = tree
    line = VersionLine(forks)
    places = [line.place(v) for v in range(newest + 1)]
    assert all(0 <= place <= newest for place in places)
    assert [line.freshest(v) for v in range(newest + 1)] == [max(places[: v + 1]) for v in range(newest + 1)]

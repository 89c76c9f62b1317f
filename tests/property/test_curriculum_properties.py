"""Whatever crashes, no task is dealt twice in a lineage, and each ends once in the surviving line."""

import copy
import json
from types import SimpleNamespace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.curriculum import Curriculum
from learner.settings.learner import LearnerConfig
from protocol.names import choice_of, group_index, group_of_task, without_choice
from tests.property.effort import EFFORT

SEED, EPOCH = 3, 4


def ids(tasks):
    return [task.task_id for task in tasks]


class World:
    """A curriculum, its checkpoint, and a broker that keeps tasks until a checkpoint covers their commit."""

    def __init__(self, train_on, selection):
        values = {"group_size": 3, "batch_trajectories": 6, "max_policy_lag": 1, "train_on": train_on}
        if selection is SELECTIONS["shared"]:
            values["budget"] = {"kind": "by_uncertainty", "smallest": 2, "largest": 5}
        self.config, self.whole = LearnerConfig(**values, selection=selection), train_on == "groups"
        self.curriculum = Curriculum("e", self.config, epoch=1, seed=SEED)
        self.epoch = 1
        self.known: set[str] = set()
        self.held: dict[str, bool] = {}
        """Map from task id to whether the task is committed."""
        self.index: dict[int, int] = {}
        """Map from the number of a group to that of its task, where the number decides it."""
        self.dropped: set[str] = set()
        """Tasks that the broker has given up."""
        self.settled: list[str] = []
        self.checkpoint(0)

    def deal(self, choice):
        fresh = self.curriculum.refill(version=0, lockstep=False)
        out = self.curriculum._taken
        assert not fresh or out <= self.curriculum.capacity(lockstep=False)
        again = set(ids(fresh)) & self.known
        assert again <= self.dropped, "the broker alone knows that these are over"
        # One time in four, the tasks are lost with the connection, and the learner crashes.
        self.put(fresh if choice % 4 else [])
        if choice % 4 == 0:
            self.crash(choice)

    def put(self, tasks):
        for task in tasks:
            choice, group, index = choice_of(task.group_id), group_index(task.group_id), task.data["index"]
            chosen = choice.task
            assert task.note == ("" if choice.instruction is None else "abcd"[choice.instruction])
            if chosen is None:
                assert self.index.setdefault(group, index) == index, "dealt again with another task"
            else:
                assert index == chosen, "the name says another task than the data"
            if task.task_id not in self.known:
                self.known.add(task.task_id)
                self.held[task.task_id] = False
            elif task.task_id in self.dropped:
                # The broker answers that the task is over.
                self.drop_here(task.group_id, task.task_id)

    def units(self):
        """Return the deliverable units: groups of which no member is missing, or single members."""
        out = [(t.group_id, t.task_id) for tasks in self.curriculum.outstanding.values() for t in tasks]
        here = [(group, task) for group, task in out if self.held.get(task) is False]
        if not self.whole:
            return [[one] for one in here]
        groups = {group: [pair for pair in here if pair[0] == group] for group, _ in here}
        return [members for group, members in groups.items() if len(members) == self.missing(group)]

    def missing(self, group):
        members = choice_of(group).size or self.config.group_members
        return sum(f"{group}.{m}" not in self.dropped for m in range(members))

    def train(self, choice):
        if units := self.units():
            for group, task in units[choice % len(units)]:
                self.held[task] = True
                self.settle(group, task)

    def give_up(self, choice):
        if units := self.units():
            for group, task in units[choice % len(units)]:
                del self.held[task]
                self.dropped.add(task)
                # Otherwise the notice is lost with the learner.
                if choice % 3:
                    self.drop_here(group, task)
            if choice % 3 == 0:
                self.crash(choice)

    def drop_here(self, group, task):
        if self.curriculum.awaits(group, task):
            self.settle(group, task)

    def settle(self, group, task):
        self.settled.append(task)
        # Whether an answer is right depends on its name alone, so that two lines see the same answers.
        answer = SimpleNamespace(
            group_id=group,
            status="finished",
            baseline=False,
            lane=False,
            return_=float(crc32(task.encode()) % 2),
            correct=None,
        )
        self.curriculum.note_ended(group, [answer])
        self.curriculum.free_member(group, task)

    def checkpoint(self, _):
        self.held = {task: done for task, done in self.held.items() if not done}
        self.saved = self.curriculum.state(), list(self.settled)

    def crash(self, _):
        self.epoch += 1
        state, self.settled = self.saved[0], list(self.saved[1])
        self.held = dict.fromkeys(self.held, False)
        self.curriculum, again = self.resumed(state)
        self.chooses_the_same_again(state)
        assert not set(ids(again)) & self.held.keys()
        out = {task for tasks in self.curriculum.outstanding.values() for task in ids(tasks)}
        assert self.held.keys() <= out
        self.put(again)

    def resumed(self, state):
        """Return a curriculum that goes on from a checkpoint, and what it puts again."""
        curriculum = Curriculum("e", self.config, epoch=self.epoch, lineage=1, seed=SEED)
        curriculum.restore(copy.deepcopy(state))
        return curriculum, curriculum.adopt(self.held)

    def chooses_the_same_again(self, state):
        """Two processes that go on from one checkpoint and one broker deal the same, and count what is held."""
        one, other = (self.resumed(state)[0] for _ in range(2))
        assert one.state() == other.state() == self.curriculum.state()
        fresh = [c.refill(version=0, lockstep=False) for c in (one, other)]
        assert fresh[0] == fresh[1]
        if one.stats is not None:
            held = {name for name in map(choice_of, one.outstanding) if name.task is not None}
            assert all(one.stats.dealt[name.task] for name in held)
            assert one.stats.dealt.sum() <= one.next_index + (one._dealt > 0)


SELECTIONS = {"sequential": {"kind": "sequential"}, "epochs": {"kind": "epochs", "tasks": EPOCH}}
SELECTIONS |= {kind: {"kind": kind, "tasks": 9} for kind in ("near", "failures", "prune", "filter", "value")}
SELECTIONS["population"] = {"kind": "population", "instructions": ["a", "b", "c", "d"], "prune_every": 3}
SELECTIONS["shared"] = {"kind": "epochs", "tasks": 9}
ACTIONS = ["deal", "train", "train", "train", "give_up", "checkpoint", "crash"]


CASES = [
    (train_on, selection)
    for train_on in ("groups", "trajectories", "windows")
    for selection in SELECTIONS
    # The others differ from "near" in the choice alone.
    if train_on == "groups" or selection in ("sequential", "epochs", "near", "population")
]


@pytest.mark.parametrize(("train_on", "selection"), CASES)
@settings(max_examples=100 * EFFORT, deadline=None)
@given(actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=60))
def test_each_index_is_settled_once_in_the_line_that_survives(train_on, selection, actions):
    world = World(train_on, SELECTIONS[selection])
    for action, choice in actions:
        getattr(world, action)(choice)
        assert len(world.settled) == len(set(map(without_choice, world.settled)))
    while world.units():
        world.train(0)
    assert not world.curriculum.outstanding
    cursor = world.curriculum.next_index * 3 + world.curriculum._dealt
    dealt = {f"1g{i // 3}.{i % 3}" for i in range(cursor)}
    if selection == "shared":
        groups = {group_index(group_of_task(task)) for task in world.settled}
        assert groups <= set(range(world.curriculum.next_index))
        return
    settled = set(map(without_choice, world.settled))
    assert settled <= dealt
    assert dealt - settled <= set(map(without_choice, world.dropped))
    for group, index in world.index.items():
        if selection == "sequential":
            assert index == group
    if selection == "epochs" and len(world.index) == cursor // 3:
        for first in range(0, len(world.index) - EPOCH + 1, EPOCH):
            assert {world.index[group] for group in range(first, first + EPOCH)} == set(range(EPOCH))


def settings_of(size, lane, train_on):
    beside = {"lane": {"members": 1}, "algorithm": {"surrogate": {"kind": "clip"}}} if lane else {}
    return LearnerConfig(
        group_size=size, batch_trajectories=12, max_policy_lag=1, train_on=train_on, **beside
    )


@pytest.mark.parametrize("train_on", ["groups", "trajectories"])
@settings(max_examples=50 * EFFORT, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 9), st.sampled_from([1, 2, 3, 4]), st.booleans(), st.booleans(), st.booleans()
        ),
        max_size=8,
    )
)
def test_groups_under_way_keep_their_size_when_a_run_goes_on_with_another_one(train_on, steps):
    """The broker refuses a member of a group that it knows with a different size, and that ends the run."""
    curriculum = Curriculum("e", settings_of(3, False, train_on), epoch=1)
    saved, held = curriculum.state(), {}

    def put(tasks):
        for task in tasks:
            assert held.setdefault(task.group_id, {"size": task.group_size, "there": set()})["size"] == (
                task.group_size
            )
            held[task.group_id]["there"].add(task.member)
            assert task.member < task.group_size

    for epoch, (count, size, lane, saves, loses) in enumerate(steps, start=2):
        put(curriculum.refill(version=0, lockstep=False))
        for group in list(curriculum.outstanding)[:count]:
            # Member by member, a group may end before all its members are dealt out.
            curriculum.free(group)
        fresh = curriculum.refill(version=0, lockstep=False)
        saved = curriculum.state() if saves else saved
        put([] if loses else fresh)
        here = [f"{group}.{member}" for group, of in held.items() for member in of["there"]]
        curriculum = Curriculum("e", settings_of(size, lane, train_on), epoch=epoch, lineage=1)
        curriculum.restore(json.loads(json.dumps(saved)))
        put(curriculum.adopt(here))
        for group, tasks in curriculum.outstanding.items():
            of = held[group]
            assert {task.group_size for task in tasks} == {of["size"]}
            assert train_on != "groups" or len(of["there"]) == of["size"], "nobody else puts the rest"

"""Whatever crashes, a family asks for the same tasks again, is trained once and whole, and every token is counted.

The broker's state and journal and the learner's exchange, intake, curriculum and families are real, as in
test_exactly_once.py. Members fail and are lost as well.
"""

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.commands import retrain
from protocol import names
from protocol.messages.episodes import PutTasks
from tests.property.effort import EFFORT
from tests.property.test_exactly_once import ACTIONS, World

FAMILIES = {
    "group": {"kind": "hint", "shares": [0.25, 0.5]},
    "member": {"kind": "hint", "shares": [0.25, 0.5, 1.0], "members": 1},
    "draft": {"kind": "draft", "drafts": 3},
    "judge": {"kind": "judge", "answers": 2, "highest": 1e9},
    "judge of itself": {"kind": "judge", "answers": 2, "highest": 1e9, "reference": "absent"},
    "verdict": {"kind": "verdict", "reward": "score", "above": -1.0, "readers": 2, "from_version": 1},
    "refine": {"kind": "refine", "rollouts": 2},
    "branch": {"kind": "branch", "rollouts": 1},
    "retry": {
        "kind": "retry",
        "rollouts": 1,
        "reflection": "{attempt}?",
        "note": "{reflection}!",
        "clean": True,
    },
    "again": {"kind": "retry", "rollouts": 1},
    "guided": {"kind": "guided", "candidates": 3},
    "taught": {"kind": "taught", "teachers": ["big", "other"], "members": 1},
}


class FamilyWorld(World):
    """A run with families, which remembers every task that was ever put, and the families that were trained."""

    def __init__(self, folder, seed, lag, family, **settings):
        self.tasks, self.families, self.beside = {}, {}, {}
        # Two answers are judged by two judgements, and two episodes are refined.
        size = 4 if family["kind"] in ("judge", "refine") else 2
        self.observed = family["kind"] == "refine"
        super().__init__("groups", folder, seed, lag, family=family, trouble=True, size=size, **settings)

    def live(self):
        self.session = SimpleNamespace(
            minor=7 if self.config.family.kind == "taught" else 3, policy_version=0, joined=True
        )
        kept = self.saved and set(range(self.saved["step"] + 1))
        self.families, self.beside = (
            {step: ids for step, ids in found.items() if kept and step in kept}
            for found in (self.families, self.beside)
        )
        super().live()

    def send(self, message, join=None):
        if isinstance(message, PutTasks):
            for task in message.tasks:
                before = self.tasks.setdefault(task.task_id, task)
                for part in ("note", "start", "policy", "group_size", "data"):
                    assert getattr(before, part) == getattr(task, part)
                self.check_kind(task)
        super().send(message, join)

    def check_kind(self, task):
        """Check that a task has what its kind of family and its stage ask for."""
        index, stage = names.group_index(task.group_id), names.stage_of(task.group_id)
        looks_for_examples = self.config.family.kind == "guided" and stage == 1
        taught = self.config.family.kind == "taught"
        assert bool(task.policy) == (taught and bool(stage))
        if self.config.family.kind != "branch" and not taught:
            assert bool(task.note) == (bool(stage) and not looks_for_examples)
        assert (task.data["index"] == index) != looks_for_examples

    def train(self, **how):
        exchange = self.exchange
        collect = exchange.collect

        def collected(**at):
            units = collect(**at)
            self.families[self.step + 1] = [unit.unit_id for unit in units]
            parts = [part for unit in units for part in unit.parts]
            self.beside[self.step + 1] = {part.unit_id for part in parts if not part.trained}
            for unit in units:
                held = [part.unit_id for part in unit.parts]
                assert {names.family_of(each) for each in held} == {unit.unit_id}
                assert exchange.curriculum.owns(unit.unit_id)
                parts = {t.trajectory_id for part in unit.parts for t in part.trained}
                assert parts == {t.trajectory_id for t in unit.trajectories}
            return units

        exchange.collect = collected
        try:
            super().train(**how)
        finally:
            exchange.collect = collect
        ids = [family for step in self.families.values() for family in step]
        assert len(ids) == len(set(ids)), "a family is trained once"


@pytest.mark.parametrize("kind", FAMILIES)
@settings(max_examples=25 * EFFORT, deadline=None)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), max_size=10),
    seed=st.integers(0, 99),
    lag=st.integers(0, 3),
)
def test_each_family_is_trained_once_in_the_line_that_survives(kind, actions, seed, lag):
    folder = Path(tempfile.mkdtemp())
    try:
        world = FamilyWorld(folder, seed, lag, FAMILIES[kind])
        for action in [*actions, "train", "kill_broker", "train", "checkpoint"]:
            getattr(world, action)()
            assert world.driver.balanced()
        world.settle()
        world.driver.flush()
        recorded = retrain.read_recording(folder)
        told = {step: sorted(batch.trained) for step, batch in recorded.batches.items() if batch.trained}
        assert told == {step: sorted(units) for step, units in world.trained.items()}
        beside = {step: set(batch.beside) for step, batch in recorded.batches.items() if batch.trained}
        assert beside == world.beside, "a recording has all that the families were trained with"
        world.driver.journal.close()
    finally:
        shutil.rmtree(folder)

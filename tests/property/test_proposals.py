"""Whatever crashes, a proposed instruction keeps its number, and nothing that cannot be read stands in a prompt."""

import json
import shutil
import tempfile
from pathlib import Path
from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st

from learner.curriculum import Curriculum
from learner.population import plain
from protocol import names
from tests.property.effort import EFFORT
from tests.property.test_exactly_once import ACTIONS
from tests.property.test_families import FamilyWorld

WRITTEN, MOST = ["a", "b", "c"], 6
FAMILY = {"kind": "propose", "every": 1, "most": MOST}
SELECTION = {"kind": "population", "instructions": WRITTEN, "prune_every": 1, "temperature": 0.5}


class ProposingWorld(FamilyWorld):
    """A run whose policy proposes instructions, and which remembers what stood behind every prompt."""

    def __init__(self, folder, seed, lag):
        self.meaning: dict[int, str] = {}
        super().__init__(folder, seed, lag, FAMILY, selection=SELECTION)

    @staticmethod
    def decode(ids):
        """Return a text that depends on the tokens; one in five may not stand in a prompt."""
        return ("<|user|>", "Say {}.", "say  {}.", "{}!", "Do\n{}?")[sum(ids) % 5].format(
            "xyz"[crc32(bytes(str(ids), "ascii")) % 3]
        )

    def check_kind(self, task):
        """Check that a number never means two instructions, in no line of checkpoints."""
        if not names.stage_of(task.group_id):
            number = names.choice_of(task.group_id).instruction
            assert task.note
            assert "<" not in task.note
            assert self.meaning.setdefault(number, task.note) == task.note

    @property
    def population(self):
        return self.exchange.curriculum.population

    def check(self):
        it = self.population
        assert it.texts[:3] == WRITTEN, "what a person wrote is never lost from the record"
        assert len({plain(text) for text in it.texts}) == len(it.texts)
        assert 2 <= it.kept.sum() <= 3
        assert len(it.texts) == 3 + len(it.proposals.taken) <= 3 + MOST
        assert it.proposals.made >= it.proposals.unreadable + it.proposals.repeated + len(it.proposals.taken)
        assert {self.meaning.get(number, text) for number, text in enumerate(it.texts)} == set(it.texts)
        if self.saved is not None:
            self.chooses_the_same_again()

    def chooses_the_same_again(self):
        """Two processes that go on from one checkpoint and one broker deal the same."""
        state = json.dumps(self.saved["curriculum"])
        dealt = []
        for _ in range(2):
            curriculum = Curriculum("e", self.config, self.epoch + 1, lineage=1)
            curriculum.restore(json.loads(state))
            out = self.exchange.curriculum.outstanding.values()
            curriculum.adopt(task.task_id for tasks in out for task in tasks)
            dealt.append([(task.task_id, task.note) for task in curriculum.refill(version=0, lockstep=False)])
        assert dealt[0] == dealt[1]


def run_through(actions, seed, lag):
    folder = Path(tempfile.mkdtemp())
    try:
        world = ProposingWorld(folder, seed, lag)
        for action in [*actions, "train", "kill_broker", "train", "checkpoint"]:
            getattr(world, action)()
            assert world.driver.balanced()
            world.check()
        world.settle()
        world.driver.journal.close()
        return world
    finally:
        shutil.rmtree(folder)


@settings(max_examples=15 * EFFORT, deadline=None)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), max_size=10),
    seed=st.integers(0, 99),
    lag=st.integers(0, 3),
)
def test_a_number_means_one_instruction_in_all_lines(actions, seed, lag):
    run_through(actions, seed, lag)


def test_proposals_enter_and_are_drawn():
    """The property holds of runs in which something is proposed: here all that may enter does."""
    world = run_through([*(["train"] * 4 + ["checkpoint", "kill_learner"]) * 6], seed=0, lag=1)
    proposals = world.population.proposals
    assert len(proposals.taken) == MOST
    assert proposals.unreadable
    assert proposals.repeated
    assert max(world.meaning) > 2, "a proposed one stood behind a prompt"

"""At least two hundred faults with each kind of family: nothing is lost, nothing is trained twice, and the sums close.

As in test_families.py, broker, journal, exchange, intake, curriculum and families are real. Here episodes have turns,
so that branches and retries begin in the middle of others. Beside deaths of learner, broker and connections, episodes
are lost, and segments and deliveries come twice.
"""

import zlib
from collections import Counter

import numpy as np
import pytest

from launch.commands import retrain
from learner.families.family import UNBEGUN
from protocol import names
from protocol.codec import encode_arrays
from protocol.messages.episodes import Deliver, LeaseTask, Reward, Segment, TaskCredit, TaskRejected, Turn
from tests.property.test_exactly_once import DEATHS, World
from tests.property.test_families import FamilyWorld

FAULTS, ROUNDS, BETWEEN = 200, 6, 3
"""Least number of faults of a run, how often each death is among them, and learner steps between two deaths."""
LAG = 5
"""Largest policy lag: twice the groups that follow each other in the longest family, and one more."""
FAMILIES = {
    "hint": {"kind": "hint", "shares": [0.5, 1.0]},
    "hint for a member": {"kind": "hint", "shares": [0.5, 1.0], "members": 1},
    "draft": {"kind": "draft", "drafts": 4},
    "branch": {"kind": "branch", "rollouts": 2, "where": "anywhere"},
    "retry": {"kind": "retry", "rollouts": 2, "begin": "named", "reflection": "{attempt}?", "note": "{reflection}!",
              "clean": True, "mask_shared": True},
    "parting": {"kind": "retry", "rollouts": 2, "begin": "parting", "note": "", "mask_shared": True},
    "guided": {"kind": "guided", "candidates": 4},
    "judge": {"kind": "judge", "answers": 2, "highest": 1e9},
    "judge of itself": {"kind": "judge", "answers": 2, "highest": 1e9, "reference": "absent"},
    "refine": {"kind": "refine", "rollouts": 2},
}  # fmt: skip
STARTS = {"branch", "retry", "parting"}
"""Kinds with episodes that begin in the middle of others."""
AT_MOST_MASKED = 0.02


def words(token_ids):
    """Decode tokens; an even answer names a step, so that reflections do."""
    return " ".join(f"keep {token % 3}" for token in token_ids)


class FaultyWorld(FamilyWorld):
    """A run whose episodes have turns, and whose messages may come twice."""

    decode = staticmethod(words)

    def __init__(self, folder, seed, family, lag):
        self.tasks, self.families, self.beside = {}, {}, {}
        self.happened: Counter[str] = Counter()
        self.ends: dict[str, tuple[int, int]] = {}
        """Tokens and turns of the segments that were sent, by trajectory."""
        self.sampled = self.masked = 0
        World.__init__(self, "groups", folder, seed, lag, family=family, trouble=True, size=4)

    def live(self):
        self.config = self.config.model_copy(update={"steps": 10**6})
        super().live()

    def check_kind(self, task):
        if self.config.family.kind != "retry":
            super().check_kind(task)
        self.happened["starts"] += task.start is not None

    def hear(self):
        before = len(self.queued)
        super().hear()
        for message, frames in list(self.queued)[before:]:
            if isinstance(message, Deliver) and self.rng.random() < 0.1:
                self.queued.append((message, frames))
                self.happened["second deliveries"] += 1

    def go_on(self):
        """Continue an episode. Time passes meanwhile, so that the broker offers a lost task again."""
        self.driver.wait(0.1, beating=("actor", "learner"))
        super().go_on()

    def train(self, **how):
        # The driver keeps all messages, and looks through them each time.
        self.driver.sent["actor"] = self.driver.got("actor", LeaseTask)
        exchange, collect = self.exchange, self.exchange.collect

        def collected(**at):
            units = collect(**at)
            for t in (t for unit in units for t in unit.trajectories):
                late = at["version"] - t.policy_version > self.config.max_policy_lag
                self.sampled += t.action_tokens
                self.masked += int((t.action_mask & late).sum())
            return units

        exchange.collect = collected
        try:
            super().train(**how)
        finally:
            exchange.collect = collect

    def move(self, lease_id):
        """Send the next turns of an episode. It may be lost or fail, and its segment may come twice."""
        lease, index, length = self.running.pop(lease_id)
        if self.rng.random() < 0.05:
            self.driver.say("actor", TaskRejected(lease_id=lease_id, reason="lost"))
            self.driver.say("actor", TaskCredit(tasks=1))
            self.happened["lost episodes"] += 1
            return
        last = index == length - 1
        frames = self.frames_of(lease, index, last=last)
        for n in range(1 + (self.rng.random() < 0.1)):
            (answer,) = [m for m in self.driver.say_frames("actor", frames) if hasattr(m, "trajectory_id")]
            assert answer.status == ("duplicate" if n else "stored"), answer
            self.happened["second segments"] += n
        if last:
            self.driver.say("actor", TaskCredit(tasks=1))
        else:
            self.running[lease_id] = lease, index + 1, length

    def frames_of(self, lease, index, *, last):
        """Return a segment of an observation and an answer of two tokens; the environment repeats what it is told."""
        task, name = lease.task, names.trajectory_id(lease.task.task_id, lease.attempt)
        offset, turn = self.ends.get(name, (0, 0)) if index else (0, 0)
        if index:
            seen = [[7]]
        else:
            noted = [1000 + zlib.crc32(task.note.encode()) % 1000] if task.note else []
            seen = [[200 + task.data["index"], 5, *noted]]
            if task.start is not None:
                prefix = np.frombuffer(task.start.token_ids, "<i4").tolist()
                seen += [prefix[each.start : each.end] for each in task.start.turns[1:]]
        said = [*seen, (10 + self.rng.integers(0, 2, 2)).tolist()]
        ends = (offset + np.cumsum([0, *map(len, said)])).tolist()
        turns = [Turn(turn + n, ends[n], ends[n + 1], n == len(said) - 1) for n in range(len(said))]
        self.ends[name] = ends[-1], turn + len(said)
        tokens, mask = ends[-1] - offset, np.zeros(ends[-1] - offset, "u1")
        mask[-2:] = 1
        failed = last and self.rng.random() < 0.1
        status = ("failed" if failed else "finished") if last else "unfinished"
        score = [Reward("score", turns[-1].index, float(self.rng.random()))]
        segment = Segment(
            trajectory_id=name, task_id=task.task_id, group_id=task.group_id, group_size=task.group_size,
            index=index, offset=offset, tokens=tokens, action_tokens=2, status=status, purpose=task.purpose,
            version_min=self.version, version_max=self.version, turns=turns, rewards=score if last else [],
            extra={"correct": bool(self.rng.random() < 0.3), "hints": ["solution"]} if last else {},
        )  # fmt: skip
        arrays = {
            "token_ids": np.array([token for turn in said for token in turn], "<i4"),
            "action_mask": mask,
            "logp_behaviour": np.where(mask, -self.rng.random(tokens), 0).astype("<f4"),
            "policy_version": np.where(mask, self.version, -1).astype("<i4"),
        }
        return encode_arrays(segment, arrays)


@pytest.mark.parametrize("kind", FAMILIES)
def test_after_two_hundred_faults_nothing_is_lost_or_trained_twice(kind, tmp_path, record_property):
    world = FaultyWorld(tmp_path, len(kind), FAMILIES[kind], LAG)
    for number, death in enumerate(ROUNDS * DEATHS):
        for _ in range(BETWEEN):
            world.train()
            # What a learner without a new checkpoint gets again is older, with and without families.
            if number % 6:
                world.checkpoint()
        getattr(world, death)()
        # Sums of the broker; those of the learner are checked in each step.
        assert world.driver.balanced()
    world.checkpoint()
    dealt = world.exchange.curriculum.next_index
    for _ in range(3 * (LAG + 1)):
        world.train()
        assert world.driver.balanced()
    left = map(names.group_index, world.exchange.curriculum.outstanding)
    assert min(left) >= dealt - 2, "no family of before is left over"
    world.checkpoint()
    world.settle()
    world.driver.flush()
    told = {
        step: sorted(b.trained) for step, b in retrain.read_recording(tmp_path).batches.items() if b.trained
    }
    assert told == {step: sorted(units) for step, units in world.trained.items()}, (
        "each unit once, and none lost"
    )
    world.driver.journal.close()
    assert UNBEGUN not in world.exchange.intake.counts.trajectories
    assert (world.happened.pop("starts") > 0) == (kind in STARTS)
    assert len(world.happened) == 3
    assert ROUNDS * len(DEATHS) + world.happened.total() >= FAULTS
    record_property("masked_share", share := world.masked / world.sampled)
    print(f"{kind}: masked share {share:.4f}, {dict(world.happened)}")
    assert share <= AT_MOST_MASKED

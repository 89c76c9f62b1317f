"""Marks of turns, `Task.note` and `Task.start` travel between older and newer peers."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.env_results import checked_marks
from actors.errors import EnvironmentFailed
from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from envs.base import SuiteFacts
from envs.calculator import Game, Rules
from launch.preflight.environment import missing_marks, unknown_rewards
from launch.run_file.load import check
from learner.errors import BrokenTrajectory
from learner.intake.trajectories import assemble
from learner.metrics import Report
from learner.replay.file import decode_item, encode_item
from learner.settings.advantages import RewardConfig
from learner.settings.learner import LearnerConfig
from learner.trainer import Trainer
from protocol.codec import MINOR, decode, encode, encode_arrays, unpack_arrays
from protocol.errors import Malformed
from protocol.messages.episodes import LeaseTask, PutTasks, Reward, Task, TaskStart, Turn, TurnMark
from protocol.messages.fields import MAX_PREFIX_BYTES, MAX_TEXT
from tests.broker_driver import Driver, group, segment_frames
from tests.trajectories import make_turns


class OldReward(msgspec.Struct, array_like=True):
    name: str
    turn: int
    value: float


class OldSegment(msgspec.Struct, tag="segment", tag_field="type", kw_only=True):
    """The fields of a segment of protocol 4.1 that a receiver needs."""

    trajectory_id: str
    rewards: list[OldReward] = []
    failure: Any = None


def tokens(*ids):
    array = np.array(ids, np.int32)
    return Sampled(array, -np.ones(len(ids), np.float32), np.zeros(len(ids), np.int32))


def cuts_of_two_turns(segment_tokens=3):
    """Return the segments of a prompt, an action of five tokens, an observation, and an action of one."""
    cutter = SegmentCutter(Task(task_id="g.0", env="e", group_id="g", group_size=1), "g.0.0", segment_tokens)
    cuts = [*cutter.observe([1, 2]), *cutter.act(tokens(3, 4, 5, 6, 7))]
    cuts += cutter.close_turn({"r": 0.5}, "stop", None, {"anchor": "start", "calls": 2.0})
    cuts += [*cutter.observe([8]), *cutter.act(tokens(9))]
    return [*cuts, *cutter.close_turn({}, "stop", Closing("finished", "stop"), {"anchor": "end"})]


def test_the_cutter_writes_marks_when_the_turn_closes():
    cuts = cuts_of_two_turns()
    assert [len(cut.segment.marks) for cut in cuts] == [0, 0, 2, 1]
    assert cuts[2].segment.marks == [TurnMark("anchor", 1, "start"), TurnMark("calls", 1, 2.0)]
    assert cuts[3].segment.marks == [TurnMark("anchor", 3, "end")]


def test_marks_reach_the_learner_over_the_wire():
    arrived = []
    for cut in cuts_of_two_turns():
        message, (body,) = decode(encode_arrays(cut.segment, cut.arrays))
        arrived.append(cut._replace(segment=message, arrays=unpack_arrays(message.arrays, body)))
    t = assemble(arrived[::-1])
    assert t.marks == [
        TurnMark("anchor", 1, "start"),
        TurnMark("calls", 1, 2.0),
        TurnMark("anchor", 3, "end"),
    ]
    assert t.anchors == {1: "start", 3: "end"}
    again = decode_item(encode_item(t))
    assert again.marks == t.marks


def test_an_older_receiver_ignores_marks_and_a_newer_one_has_none_of_an_older_sender():
    segment = cuts_of_two_turns()[-1].segment
    header = encode_arrays(segment, cuts_of_two_turns()[-1].arrays)[1]
    assert msgspec.msgpack.decode(header, type=OldSegment).trajectory_id == "g.0.0"
    fields = msgspec.msgpack.decode(header)
    assert fields.pop("marks") == [["anchor", 3, "end"]]
    message, _ = decode([b"OB\x04\x01", msgspec.msgpack.encode(fields), b""])
    assert message == msgspec.structs.replace(segment, marks=[], arrays=message.arrays)


def test_the_broker_forwards_marks_without_reading_them():
    driver = Driver()
    driver.learner()
    driver.put(*group("g", 1))
    driver.actor()
    (lease,) = driver.leases()
    frames = segment_frames(lease, marks=[TurnMark("anchor", 1, "s"), TurnMark("calls", 1, 3.0)])
    driver.say_frames("actor", frames)
    (delivery,) = driver.deliveries()
    assert driver.frames[delivery.unit_id] == [(frames[1], frames[2])]
    assert b"anchor" in frames[1]


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"anchor": [1]}, "neither text nor a finite number"),
        ({"calls": math.nan}, "neither text nor a finite number"),
        ({"anchor": "x" * 257}, "257 characters, at most 256; give a hash"),
        ({"": 1}, "1 to 256 characters"),
        ({7: 1}, "1 to 256 characters"),
        (["anchor"], "at most 4096, by name"),
    ],
)
def test_a_mark_that_is_none_is_the_environments_fault(marks, said):
    with pytest.raises(EnvironmentFailed, match=said):
        checked_marks(marks)
    assert checked_marks({"a": "b", "c": 2, "d": True}) == {"a": "b", "c": 2.0, "d": 1.0}


def test_a_mark_that_is_not_finite_breaks_the_trajectory():
    (*_, last) = cuts_of_two_turns(segment_tokens=99)
    cuts = cuts_of_two_turns(segment_tokens=99)
    bad = msgspec.structs.replace(last.segment, marks=[TurnMark("calls", 3, math.inf)])
    with pytest.raises(BrokenTrajectory, match="mark 'calls' of turn 3 is inf"):
        assemble([*cuts[:-1], last._replace(segment=bad)])


def test_the_calculator_marks_the_state_it_was_in_and_the_calls():
    game = Game("State the final answer to the following arithmetic problem: 4 + 3 - 9 =", Rules())
    results = [game.step(action) for action in ("4+3", "1+1", "1 + 1", "7-9", "=-2")]
    new, again = "exploration", "redundant_query"
    assert [tuple(r.marks.values()) for r in results] == [
        ("0 ", 1.0, new), ("1 7", 1.0, new), ("1 2", 1.0, again), ("1 2", 1.0, new), ("2 -2", 0.0, "none"),
    ]  # fmt: skip
    assert all(tuple(r.marks) == ("anchor", "calls", "call") for r in results)


def run(**learner):
    return check({"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": learner}, "run.toml")


STEP = {"of": "turn", "value": "return_to_go", "among": ["group", "anchor"]}


def test_a_check_refuses_what_the_environment_does_not_give():
    anchored = run(algorithm={"advantage": {"kind": "compared", "terms": [{}, STEP]}})
    (line,) = missing_marks(anchored, SuiteFacts(mark_names=("calls",)))
    assert line.startswith('learner.algorithm.advantage.terms.1.among needs the mark "anchor" of each turn')
    assert "(marks: calls); add it to StepResult.marks" in line
    assert not list(missing_marks(anchored, SuiteFacts(mark_names=("anchor",))))
    assert not list(missing_marks(anchored, SuiteFacts()))
    named = run(
        algorithm={"advantage": {"kind": "compared", "terms": [{"value": "anwser"}, {"value": "each"}]}},
        reward={"weights": {"answer": 2.0}, "group": {"kind": "win_rate"}},
    )
    (line,) = unknown_rewards(named, SuiteFacts(reward_names=("answer", "step")))
    assert line == (
        'learner.algorithm.advantage.terms.0.value is "anwser": the environment has no reward of this name; did you '
        "mean 'answer'? (rewards: answer, step)"
    )


def test_marks_that_never_come_are_told_after_the_first_step(tmp_path):
    config = LearnerConfig(
        algorithm={"advantage": {"kind": "compared", "terms": [STEP]}},
        reward=RewardConfig(group={"kind": "fewest_calls", "reward": "r", "calls": "calls"}),
    )
    report = Report(tmp_path)
    trainer = Trainer(config, tmp_path, None, None, None, report, step=1)
    arrived = [make_turns("t", [{"r": 1.0}], anchors=["s"])]
    trainer.note_unknown_weights([replace(t, rewards=[*t.rewards, Reward("s", 1, 0.0)]) for t in arrived])
    report.close()
    (note,) = [
        msgspec.json.decode(line)["note"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert note == (
        "learner.reward.group.calls: no turn of the first 1 episodes has the mark 'calls', which the environment must "
        "give in StepResult.marks (marks: anchor)"
    )


TASK = Task(task_id="1g0r1.0", env="e", group_id="1g0r1", group_size=1, note="Begin with 7.")


class OldTask(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of a task of protocol 4.2 that the broker copies, without the optional ones."""

    task_id: str
    env: str
    group_id: str
    group_size: int


class OldPutTasks(msgspec.Struct, tag="put_tasks", tag_field="type", kw_only=True):
    tasks: list[OldTask]


def test_a_note_travels_from_the_learner_to_the_actor():
    driver = Driver()
    driver.learner()
    driver.put(TASK)
    driver.actor()
    (lease,) = driver.leases()
    assert decode(encode(lease))[0].task == TASK
    assert MINOR >= 3


def test_a_task_without_a_note_has_the_bytes_of_before():
    plain = group("g", 1)
    assert b"note" not in encode(PutTasks(tasks=plain))[1]


def test_an_older_receiver_ignores_the_note_and_a_newer_one_has_none_of_an_older_sender():
    header = encode(PutTasks(tasks=[TASK]))[1]
    (old,) = msgspec.msgpack.decode(header, type=OldPutTasks).tasks
    assert old.task_id == TASK.task_id
    # A broker of that age writes what it knows into the lease: this is why the learner looks at its version.
    lease = {"type": "lease_task", "lease_id": "l", "attempt": 0, "task": msgspec.to_builtins(old)}
    message, _ = decode([b"OB\x04\x02", msgspec.msgpack.encode(lease)])
    assert message == LeaseTask(lease_id="l", attempt=0, task=msgspec.structs.replace(TASK, note=""))


def test_a_note_is_bounded():
    header = encode(PutTasks(tasks=[msgspec.structs.replace(TASK, note="x" * (MAX_TEXT + 1))]))
    with pytest.raises(Malformed, match=r"tasks\[0\]\.note"):
        decode(header)


START = TaskStart(
    token_ids=b"\x05\x00\x00\x00\x06\x00\x00\x00\x07\x00\x00\x00",
    turns=[Turn(0, 0, 1, False), Turn(1, 1, 2, True), Turn(2, 2, 3, False)],
    parent="1g0.0.0",
)


def test_a_prefix_travels_from_the_learner_to_the_actor_and_is_kept_by_the_journal(tmp_path):
    driver = Driver(folder=tmp_path / "journal")
    driver.learner(lineage=1)
    task = msgspec.structs.replace(TASK, note="", start=START)
    driver.put(task)
    driver.kill_broker()
    driver.actor()
    (lease,) = driver.leases()
    assert decode(encode(lease))[0].task == task
    driver.journal.close()


def test_an_older_receiver_ignores_the_prefix():
    header = encode(PutTasks(tasks=[msgspec.structs.replace(TASK, start=START)]))[1]
    (old,) = msgspec.msgpack.decode(header, type=OldPutTasks).tasks
    assert old.group_id == TASK.group_id
    assert b"start" not in encode(PutTasks(tasks=group("g", 1)))[1]


def test_a_prefix_is_bounded_so_that_its_task_fits_into_a_header():
    turns = [Turn(0, 0, MAX_PREFIX_BYTES // 4, False)]
    largest = TaskStart(token_ids=bytes(MAX_PREFIX_BYTES), turns=turns, parent="p")
    decode(encode(PutTasks(tasks=[msgspec.structs.replace(TASK, start=largest)])))
    larger = msgspec.structs.replace(largest, token_ids=bytes(MAX_PREFIX_BYTES + 4))
    header = encode(PutTasks(tasks=[msgspec.structs.replace(TASK, start=larger)]))
    with pytest.raises(Malformed, match=r"tasks\[0\]\.start\.token_ids"):
        decode(header)

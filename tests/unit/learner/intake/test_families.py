"""Families between deliveries and units: what comes late, too early or never, and what a broker must understand."""

import queue
from types import SimpleNamespace

import numpy as np
import pytest

from learner.curriculum import Curriculum
from learner.errors import BrokerRefused, ModelUnusable
from learner.given import TaughtMembers
from learner.intake.intake import Intake
from learner.intake.session import BrokerSession, messages_of
from learner.intake.waiting_families import WaitingFamilies, open_decoder, waiting_families
from learner.recorded_steps import RecordedStep, RecordedUnit
from learner.retrain import RecordedBatches
from learner.settings.learner import LearnerConfig
from protocol import names
from protocol.codec import MAX_HEADER_BYTES, decode, encode, encode_arrays, encode_delivery
from protocol.messages.episodes import Deliver, Dropped, Reward, Sampling, Segment, Task, TaskStart, Turn
from protocol.messages.fields import MAX_TEXT

HINTS = {"kind": "hint", "shares": [0.5, 1.0], "deadline_s": 10.0}
MEMBER = {"kind": "hint", "shares": [0.5, 1.0], "members": 1}


def intake_with(family, **settings):
    values = {"group_size": 2, "batch_trajectories": 4, "max_policy_lag": 5, **settings}
    config = LearnerConfig(family=family, **values)
    curriculum = Curriculum("e", config)
    curriculum.refill(version=0, lockstep=False)
    return Intake(curriculum, True, families=WaitingFamilies(config.family, curriculum, str))


def member(
    group,
    number,
    reward,
    *,
    plain=False,
    version=0,
    status="finished",
    hints=("solution",),
    error="",
    policy="",
):
    segment = Segment(
        trajectory_id=f"{group}.{number}.0", task_id=f"{group}.{number}", group_id=group, group_size=2, index=0,
        offset=0, tokens=3, action_tokens=2, status=status, error=error,
        turns=[Turn(0, 0, 1, False), Turn(1, 1, 3, True)],
        rewards=[Reward("score", 1, reward)], extra={"correct": reward == 1, "hints": list(hints)}, policy=policy,
    )  # fmt: skip
    noted = names.stage_of(group) and not plain
    arrays = {
        "token_ids": np.array([9 if noted else 1, 2, 3], dtype=np.int32),
        "action_mask": np.array([0, 1, 1], dtype=np.uint8),
        "logp_behaviour": np.array([0.0, -1, -1], dtype=np.float32),
        "policy_version": np.array([-1, version, version], dtype=np.int32),
    }
    return tuple(encode_arrays(segment, arrays)[1:])


def test_an_environment_without_hints_is_named_once(caplog):
    intake = intake_with(HINTS)
    for group in ("0g0", "0g1"):
        deliver(intake, group, 0.0, 0.5, hints=[])
    assert [unit.unit_id for unit in intake.ready] == ["0g0", "0g1"]
    (record,) = caplog.records
    assert (
        "family 0g0 has no hints: the environment must give them in StepResult.hints" in record.getMessage()
    )


def deliver(intake, group, *rewards, **how):
    members = [member(group, i, reward, **how) for i, reward in enumerate(rewards)]
    message, rest = decode(encode_delivery(Deliver(unit_id=group, segments=len(members)), members))
    intake.receive(message, rest)
    intake.check()


def asked(intake):
    return [(t.task_id, t.note) for t in intake.curriculum.refill(version=0, lockstep=False) if t.note]


def drop(intake, group):
    intake.receive(Dropped(unit_id=group, group_id=group, trajectories=2, reason="stale"), [])
    intake.check()


def note(text):
    return f"A solution begins like this: {text}"


def test_a_family_is_trained_and_committed_as_one():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 0.5)
    assert asked(intake) == [("0g0r1.0", note("solu")), ("0g0r1.1", note("solu"))]
    assert asked(intake) == [], "each task is asked for once"
    assert not intake.ready
    assert intake.commit(1, 1, []) is None, "what waits is not committed"
    deliver(intake, "0g0r1", 0.0, 1.0)
    (unit,) = intake.take_batch(1)
    assert [t.trajectory_id for t in unit.trajectories] == ["0g0r1.0.0", "0g0r1.1.0"]
    commit = intake.commit(epoch=1, step=3, trained=[unit], version=2)
    assert (commit.trained, commit.dropped, commit.step) == (["0g0r1"], ["0g0"], 3)
    assert intake.counts.tokens == {"unhinted": 4}
    assert intake.trained_tokens == 4
    intake.check()
    assert not [group for group in intake.curriculum.outstanding if group.startswith("0g0")]
    assert all(unit_id in intake.commits.committed for unit_id in ("0g0", "0g0r1"))
    deliver(intake, "0g0r1", 0.0, 1.0)
    assert [c.trained for c in intake.commits.recommit(1)] == [["0g0r1"]]


def test_a_solved_group_is_trained_at_once_and_one_that_nobody_ever_solves_is_dropped_whole():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 1.0)
    assert [unit.unit_id for unit in intake.ready] == ["0g0"]
    for group in ("0g1", "0g1r1", "0g1r2"):
        deliver(intake, group, 0.0, 0.0)
        asked(intake)
    assert len(intake.ready) == 1
    assert intake.counts.trajectories == {"unhinted": 4, "uniform": 2}
    assert intake.commit(1, 1, []).dropped == ["0g1", "0g1r1", "0g1r2"]
    assert intake.signal.uniform_groups == 1


def test_one_member_is_replaced_and_counted():
    intake = intake_with(MEMBER)
    deliver(intake, "0g0", 0.0, 0.0)
    assert asked(intake) == [("0g0r1.0", note("solu"))]
    deliver(intake, "0g0r1", 1.0)
    (unit,) = intake.take_batch(1)
    assert {t.group_id for t in unit.trajectories} == {"0g0"}
    commit = intake.commit(epoch=1, step=1, trained=[unit])
    assert (commit.trained, commit.dropped) == (["0g0", "0g0r1"], [])
    assert intake.counts.tokens == {"replaced": 2}
    intake.check()


TAUGHT = {"kind": "taught", "teachers": ["big", "other"], "members": 1, "deadline_s": 10.0}
BY_TEACHER = {"plain": True, "version": -1, "policy": "big"}


def test_teachers_are_asked_for_what_nobody_solved_and_their_right_answers_join_the_group():
    intake = intake_with(TAUGHT)
    deliver(intake, "0g0", 0.0, 0.0)
    tasks = [t for t in intake.curriculum.refill(version=0, lockstep=False) if t.policy]
    assert [(t.task_id, t.policy, t.group_size) for t in tasks] == [
        ("0g0r1.0", "big", 2),
        ("0g0r1.1", "other", 2),
    ]
    deliver(intake, "0g0r1", 1.0, 0.0, **BY_TEACHER)
    (unit,) = intake.take_batch(1)
    assert [(t.origin, t.group_id) for t in unit.trajectories] == [
        ("own", "0g0"),
        ("own", "0g0"),
        ("taught", "0g0"),
    ]
    batch = TaughtMembers(1).teach([unit], lambda ts: [-1.0] * len(ts))
    assert [t.trajectory_id for t in batch] == ["0g0.0.0", "0g0r1.0.0"]
    commit = intake.commit(epoch=1, step=1, trained=[unit])
    assert (commit.trained, commit.dropped) == (["0g0", "0g0r1"], [])
    assert intake.counts.tokens == {"untaught": 2}
    intake.check()


def test_teachers_that_are_wrong_fail_or_stay_away_leave_the_group_as_it_was():
    intake = intake_with(TAUGHT, filter_uniform_groups=False)
    deliver(intake, "0g0", 0.0, 1.0)
    assert [len(unit.trajectories) for unit in intake.ready] == [2], "a solved group asks nobody"
    for group in ("0g1", "0g2"):
        deliver(intake, group, 0.0, 0.0)
    deliver(intake, "0g1r1", 0.0, 0.0, status="failed", error="teacher big: no answer", **BY_TEACHER)
    intake.close_overdue(now=0.0)
    intake.close_overdue(now=11.0)
    assert {unit.unit_id for unit in intake.ready} == {"0g0"}, "groups with equal returns train nothing"
    assert intake.counts.trajectories["uniform"] == 4


def test_tokens_with_a_version_are_no_teachers_and_those_without_one_are_no_policys(caplog):
    intake = intake_with(TAUGHT)
    deliver(intake, "0g0", 0.0, 0.0)
    deliver(intake, "0g0r1", 1.0, 1.0, plain=True, version=3, policy="big")
    deliver(intake, "0g1", 0.0, 1.0, version=-1)
    said = [record.getMessage() for record in caplog.records]
    assert sum("has a policy version" in text for text in said) == 2
    assert sum("has no policy version" in text for text in said) == 2


def test_a_group_that_came_before_the_one_that_asks_for_it_waits():
    """After a restart, the broker delivers again in any order."""
    intake = intake_with(HINTS)
    deliver(intake, "0g0r1", 0.0, 1.0)
    assert (len(intake.ready), len(intake.families)) == (0, 1)
    deliver(intake, "0g0", 0.0, 0.0)
    assert [len(part.trained) for part in intake.ready[0].parts] == [0, 2]
    assert asked(intake) == []


def test_groups_whose_first_one_is_lost_are_dropped():
    intake = intake_with(HINTS)
    deliver(intake, "0g0r1", 0.0, 1.0)
    drop(intake, "0g0")
    assert intake.counts.trajectories == {"orphaned": 2, "dropped_stale": 2}
    assert intake.commit(1, 1, []).dropped == ["0g0r1"]
    assert not intake.curriculum.owns("0g0")
    deliver(intake, "0g0r2", 0.0, 1.0)
    assert intake.counts.trajectories["other_epoch"] == 2


def test_a_lost_group_is_followed_by_the_next_one():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 0.5)
    asked(intake)
    drop(intake, "0g0")
    assert len(intake.families) == 1, "a group that is here is not lost"
    drop(intake, "0g0r1")
    assert asked(intake) == [("0g0r2.0", note("solution")), ("0g0r2.1", note("solution"))]
    drop(intake, "0g0r2")
    (unit,) = intake.ready
    assert [t.trajectory_id for t in unit.trajectories] == ["0g0.0.0", "0g0.1.0"]
    assert [part.unit_id for part in unit.parts] == ["0g0"]


def test_a_family_does_not_wait_beyond_its_deadline_and_late_groups_are_dropped():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 0.5)
    asked(intake)
    intake.close_overdue(100.0)
    intake.close_overdue(110.0)
    assert not intake.ready
    intake.close_overdue(110.5)
    assert [unit.unit_id for unit in intake.ready] == ["0g0"]
    assert intake.families.metrics([], version=0, max_policy_lag=0)["family/deadlines"] == 1
    deliver(intake, "0g0r1", 0.0, 1.0)
    assert intake.counts.trajectories == {"late_child": 2}
    message = intake.commit(1, 1, intake.take_batch(1))
    assert (message.trained, message.dropped) == (["0g0"], []), "or retraining would take it for a part"
    assert intake.commit(1, 1, []).dropped == ["0g0r1"]
    intake.check()


def test_the_clock_begins_anew_with_each_group():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 0.0)
    intake.close_overdue(100.0)
    deliver(intake, "0g0r1", 0.0, 0.0)
    intake.close_overdue(111.0)
    intake.close_overdue(120.0)
    assert len(intake.families) == 1


def test_answers_without_their_note_are_not_trained():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 0.0)
    deliver(intake, "0g0r1", 0.0, 1.0, plain=True)
    assert [unit_id for unit_id, _ in asked(intake)] == ["0g0r1.0", "0g0r1.1", "0g0r2.0", "0g0r2.1"]
    deliver(intake, "0g0r2", 0.0, 1.0)
    intake.commit(1, 1, intake.take_batch(1))
    assert intake.counts.trajectories == {"unhinted": 2, "without_note": 2}
    intake.check()


def test_retraining_leaves_out_answers_without_their_note_too():
    """The group r1 was committed as trained, for its second member alone."""
    config = LearnerConfig(family=HINTS, group_size=2, batch_trajectories=4)
    first = [member("0g0", i, 0.0) for i in (0, 1)]
    second = [member("0g0r1", 0, 1.0, plain=True), member("0g0r1", 1, 0.0)]
    units = [
        RecordedUnit(*decode(encode_delivery(Deliver(unit_id=group, segments=2), members)))
        for group, members in (("0g0", first), ("0g0r1", second))
    ]
    tasks = [Task(task_id=f"0g0r1.{i}", env="e", group_id="0g0r1", group_size=2, note="n") for i in (0, 1)]
    batches = RecordedBatches(config)
    batches.load(RecordedStep(step=1, version=0, units=units, trained=["0g0r1"], tasks=tasks))
    batch = batches.collect(step=1, version=0)
    assert [t.trajectory_id for unit in batch for t in unit.trajectories] == ["0g0r1.1.0"]
    batches.commit(batch, step=1)
    batches.intake.check()
    assert batches.intake.counts.trajectories == {"not_trained": 2, "without_note": 1}


def test_retraining_finds_the_answers_of_teachers():
    """A group of teachers that are all right has equal returns, and is trained all the same."""
    config = LearnerConfig(family=TAUGHT, group_size=2, batch_trajectories=4)
    groups = {
        "0g0": [member("0g0", i, 0.0) for i in (0, 1)],
        "0g0r1": [member("0g0r1", i, 1.0, **BY_TEACHER) for i in (0, 1)],
    }
    units = [
        RecordedUnit(*decode(encode_delivery(Deliver(unit_id=group, segments=2), members)))
        for group, members in groups.items()
    ]
    tasks = [
        Task(task_id=f"0g0r1.{i}", env="e", group_id="0g0r1", group_size=2, policy="big") for i in (0, 1)
    ]
    batches = RecordedBatches(config)
    batches.load(RecordedStep(step=1, version=0, units=units, trained=list(groups), tasks=tasks))
    (unit,) = batches.collect(step=1, version=0)
    assert [t.origin for t in unit.trajectories] == ["own", "own", "taught", "taught"]
    batches.commit([unit], step=1)
    batches.intake.check()


def test_failed_members_are_left_out_and_a_group_of_them_alone_is_unusable():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 0.0, status="failed")
    assert intake.commit(1, 1, []).dropped == ["0g0"]
    assert (len(intake.families), intake.curriculum.owns("0g0")) == (0, False)
    assert intake.counts.trajectories == {"failed": 2}


def test_a_stale_family_is_dropped_with_all_its_groups():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 0.0)
    deliver(intake, "0g0r1", 0.0, 1.0, version=3)
    intake.drop_stale(4)
    assert intake.counts.trajectories == {"unhinted": 2, "stale": 2}
    assert intake.commit(1, 1, []).dropped == ["0g0", "0g0r1"]
    intake.check()


def test_metrics_tell_how_many_groups_and_how_old_tokens_are():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 0.0)
    deliver(intake, "0g0r1", 0.0, 1.0, version=3)
    deliver(intake, "0g1", 0.0, 1.0)
    trained = [t for unit in intake.take_batch(2) for t in unit.trajectories]
    assert intake.families.metrics(trained, version=5, max_policy_lag=2) == {
        "family/stages": 1.5, "family/waiting": 0.0, "family/children": 2.0, "family/masked_share": 0.5,
        "family/deadlines": 0.0, "family/diverged_prefixes": 0.0, "family/hinted_right_share": 0.5,
    }  # fmt: skip
    assert "family/stages" not in intake.families.metrics([], version=5, max_policy_lag=2)


@pytest.mark.parametrize(
    ("family", "lag", "groups"),
    [(None, 5, 12), (HINTS, 5, 4), (HINTS, 2, 2), ({"kind": "draft", "drafts": 3}, 5, 6)],
)
def test_families_share_the_room_by_their_groups_in_a_row(family, lag, groups):
    config = LearnerConfig(family=family, group_size=2, batch_trajectories=4, max_policy_lag=lag)
    tasks = Curriculum("e", config).refill(version=0, lockstep=False)
    assert len({task.group_id for task in tasks}) == groups
    assert len(tasks) == groups * config.first_members
    assert {task.sampling.temperature for task in tasks} == {1.0}


def test_in_lockstep_the_groups_of_a_family_wait_for_one_version():
    config = LearnerConfig(family=HINTS, group_size=2, batch_trajectories=4, max_policy_lag=0, forced_lag=1)
    curriculum = Curriculum("e", config)
    tasks = curriculum.refill(version=7, lockstep=True)
    assert len(tasks) == 2 * 4, "a forced lag has all its batches"
    intake = Intake(curriculum, True, families=WaitingFamilies(config.family, curriculum, str))
    deliver(intake, "0g0", 0.0, 0.0)
    assert {t.min_policy_version for t in curriculum.refill(version=9, lockstep=True)} == {7}


def test_the_state_for_the_checkpoint_has_no_later_groups():
    intake = intake_with(HINTS)
    deliver(intake, "0g0", 0.0, 0.0)
    asked(intake)
    state = intake.curriculum.state()
    assert state["unfinished"] == [[i, [0, 1]] for i in range(4)]
    again = intake_with(HINTS)
    again.curriculum.restore(state)
    assert again.curriculum.adopt(["0g0.0", "0g0.1", "0g0r1.0", "0g0r1.1"])[0].task_id == "0g1.0"
    assert sorted(again.curriculum.outstanding) == ["0g0", "0g1", "0g2", "0g3"]


class Link:
    def __init__(self, minor):
        self.session, self.sent, self.inbox = (
            SimpleNamespace(minor=minor, joined=True),
            [],
            queue.SimpleQueue(),
        )

    def send(self, message, join=None):
        self.sent.append(message)


def test_a_broker_that_would_lose_a_note_gets_no_such_task():
    config = LearnerConfig(family=HINTS, group_size=2, batch_trajectories=4)
    noted = Task(task_id="0g0r1.0", env="e", group_id="0g0r1", group_size=1, note="n")
    old = BrokerSession(
        Link(2), Curriculum("e", config), config, lockstep=False, stop_reason=lambda: "", broker="tcp://h:1"
    )
    old.put_tasks([Task(task_id="0g0.0", env="e", group_id="0g0", group_size=1)])
    with pytest.raises(
        BrokerRefused, match=r"tcp://h:1 speaks protocol 4\.2, which has no notes and prefixes .* need 4\.3"
    ):
        old.put_tasks([noted])
    bounded = Sampling(max_context_tokens=9)
    with pytest.raises(BrokerRefused, match=r"learner\.sampling\.max_context_tokens"):
        old.put_tasks(
            [Task(task_id="0g0.1", env="e", group_id="0g0", group_size=2, member=1, sampling=bounded)]
        )
    routed = Task(task_id="0g0.2", env="e", group_id="0g0", group_size=2, sampling=Sampling(routes=True))
    for minor in (2, 3):
        old._link.session.minor = minor
        with pytest.raises(
            BrokerRefused, match=r"cannot ask for experts; learner\.algorithm\.routes .* need 4\.4"
        ):
            old.put_tasks([noted, routed])
    new = BrokerSession(Link(3), Curriculum("e", config), config, lockstep=False, stop_reason=lambda: "")
    new.put_tasks([noted])
    assert (len(old._link.sent), len(new._link.sent)) == (1, 1)


def test_messages_with_long_notes_stay_within_the_bound_of_a_header():
    tasks = [
        Task(task_id=f"1g17r3.{i}", env="e" * 256, group_id="1g17r3", group_size=40, note="é" * MAX_TEXT)
        for i in range(40)
    ]
    messages = messages_of(tasks)
    assert [task.task_id for message in messages for task in message.tasks] == [t.task_id for t in tasks]
    assert len(messages) > 1
    assert all(len(encode(message)[1]) <= MAX_HEADER_BYTES for message in messages)
    assert [len(m.tasks) for m in messages_of([tasks[0]] * 3)] == [3]
    assert messages_of([]) == []


def test_a_decoder_leaves_special_tokens_out(tmp_path):
    from launch.model import make_tokenizer, save_tokenizer

    save_tokenizer(make_tokenizer(["abc"]), tmp_path, max_length=64)
    decode_ids = open_decoder(str(tmp_path))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("abc", add_special_tokens=False).ids
    special = next(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
    assert decode_ids([*ids, special]) == tokenizer.decode(ids)
    assert waiting_families(LearnerConfig(), None, "", seed=0) is None
    with pytest.raises(ModelUnusable, match=r"learner\.family\] needs the tokenizer"):
        waiting_families(LearnerConfig(family=HINTS), None, str(tmp_path / "none"), seed=0)


def test_a_branch_that_diverged_is_counted_and_its_group_goes_on():
    intake = intake_with({"kind": "branch", "rollouts": 1})
    deliver(intake, "0g0", 0.0)
    (task,) = [t for t in intake.curriculum.refill(version=0, lockstep=False) if names.stage_of(t.group_id)]
    assert (task.task_id, task.note, task.start) == ("0g0r1.0", "", None), "no observation to branch behind"
    deliver(intake, "0g0r1", 1.0, status="failed", error="prefix diverged at turn 2: ...")
    assert intake.families.metrics([], version=0, max_policy_lag=0)["family/diverged_prefixes"] == 1
    assert intake.counts.trajectories == {"failed": 1, "uniform": 1}
    deliver(intake, "0g1", 0.0)
    deliver(intake, "0g1r1", 1.0, plain=True)
    (unit,) = intake.take_batch(1)
    assert [t.group_id for t in unit.trajectories] == ["0g1", "0g1"]
    commit = intake.commit(epoch=1, step=1, trained=[unit])
    assert (commit.trained, commit.dropped) == (["0g1", "0g1r1"], ["0g0", "0g0r1"])
    intake.check()


def test_a_task_with_a_prefix_counts_its_bytes():
    start = TaskStart(token_ids=bytes(100_000), turns=[Turn(0, 0, 25_000, False)], parent="p")
    tasks = [Task(task_id=f"g.{i}", env="e", group_id="g", group_size=3, start=start) for i in range(3)]
    assert [len(message.tasks) for message in messages_of(tasks)] == [2, 1]
    assert all(len(encode(message)[1]) <= MAX_HEADER_BYTES for message in messages_of(tasks))

"""Test what the learner sends to the broker, and when, on a scripted link."""

import math
import queue
import time

import pytest

from learner.curriculum import SOLVED, Curriculum, SignalWatch
from learner.errors import NoData, NothingToLearn, Stopped
from learner.intake import session as module
from learner.intake.session import NO_CAPACITY, BrokerSession
from learner.settings.learner import EvaluationConfig, LearnerConfig
from protocol.messages.episodes import (
    Checkpointed,
    CheckpointWanted,
    Commit,
    Deliver,
    DeliveryCredit,
    Dropped,
    Held,
    PutTasks,
)
from protocol.messages.peers import Drain, PublishWeights, QueueStats
from tests.trajectories import make_trajectory


class Session:
    joined, welcome = True, None


class Link:
    """A link whose ``inbox`` gives what the script holds, then nothing."""

    def __init__(self, *script):
        self.script, self.sent, self.session, self.inbox = list(script), [], Session(), self
        self.helds = []  # answers to `rejoin`, one each
        self.credit = []  # units, and the join they belong to

    def send(self, message, join=None):
        self.sent.append(message)
        if isinstance(message, DeliveryCredit):
            self.credit.append((message.units, join))

    def get_nowait(self):
        if not self.script:
            raise queue.Empty
        item = self.script.pop(0)
        return item if item is None else (item, [])

    def get(self, timeout):
        return self.get_nowait()

    def rejoin(self):
        self.sent.append("Hello")
        self.script += [None, self.helds.pop(0)] if self.helds else [None]

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]


def an_exchange(*script, lineage=3, step=0, reason="", no_capacity_s=0.0, **settings):
    values = {
        "group_size": 2,
        "batch_trajectories": 4,
        "max_policy_lag": 0,
        "checkpoint_every": 5,
        "data_timeout_s": 0.05,
        "start_timeout_s": 0.05,
        **settings,
    }
    config = LearnerConfig(**values)
    curriculum = Curriculum("e", config, epoch=4, lineage=lineage)
    return BrokerSession(
        Link(*script),
        curriculum,
        config,
        lockstep=False,
        stop_reason=lambda: reason,
        broker="tcp://10.0.0.1:5755",
        step=step,
        no_capacity_s=no_capacity_s,
    )


def names(messages):
    return [task.task_id for message in messages for task in message.tasks]


HELD = Held(task_ids=["3g0.0", "3g0.1", "3g5.0", "3g5.1"], unit_ids=["3g0"])
STATE = {"lineage": 3, "next_index": 2, "dealt": 0, "unfinished": [[0, [0, 1]], [1, [0, 1]]]}


def test_nothing_is_put_and_no_delivery_asked_for_before_the_broker_says_what_it_holds():
    it = an_exchange(None, HELD)
    it.curriculum.restore(STATE)
    it.inherit()
    assert [type(m) for m in it._link.sent] == [PutTasks, DeliveryCredit]
    assert names(it._link.of(PutTasks)) == ["3g1.0", "3g1.1"]
    assert sorted(it.curriculum.outstanding) == ["3g0", "3g1", "3g5"]


def test_what_the_broker_dropped_meanwhile_is_not_put_again():
    over = Dropped(unit_id="3g1", group_id="3g1", trajectories=2, reason="stale")
    it = an_exchange(None, over, HELD)
    it.curriculum.restore(STATE)
    it.inherit()
    assert it._link.of(PutTasks) == []


def test_a_second_word_on_what_is_held_changes_nothing():
    it = an_exchange(None, HELD)
    it.inherit()
    it._link.script += [None, Held(task_ids=["3g90.0"])]
    it.receive_messages(0.0)
    assert "3g90" not in it.curriculum.outstanding
    assert sorted(names(it._link.of(PutTasks))) == ["3g0.0", "3g0.1", "3g5.0", "3g5.1"]


def test_a_broker_that_does_not_say_what_it_holds_is_named(monkeypatch):
    monkeypatch.setattr(module, "HELD_TIMEOUT_S", 0.05)
    it = an_exchange(None)
    with pytest.raises(NoData, match=r"broker at tcp://10\.0\.0\.1:5755 .* lineage 3; .* --resume"):
        it.inherit()


def test_who_waits_for_word_of_the_broker_can_be_stopped():
    with pytest.raises(Stopped, match="SIGTERM"):
        an_exchange(None, reason="SIGTERM").inherit()
    with pytest.raises(Stopped, match="enough"):
        an_exchange(None, Drain(reason="enough")).inherit()


@pytest.mark.parametrize("joined", [True, False])
def test_a_wait_that_ends_names_whom_it_waited_for(joined):
    it = an_exchange(None)
    it._link.session.joined = joined
    with pytest.raises(
        NoData, match=r"0 of 2 groups are here; the broker at tcp://10\.0\.0\.1:5755"
    ) as caught:
        it.collect(step=0, version=0)
    assert ("is silent: start it again" in str(caught.value)) is not joined
    with pytest.raises(NoData, match="evaluation 'x': 256 of 256 tasks are out"):
        it.evaluate("x", EvaluationConfig(tasks=256), version=0)


def lacking(seconds):
    return QueueStats(gauges={NO_CAPACITY: seconds})


def test_a_wait_without_capacity_is_no_silence():
    """Nobody could have sent anything, so only the limit of its own ends it."""
    it = an_exchange(lacking(100.0), no_capacity_s=math.inf)
    looks = []

    def look():
        looks.append(1)
        if len(looks) == 30:
            it._link.script += [Drain(reason="long enough")]

    it.while_waiting = look
    with pytest.raises(Stopped, match="long enough"):
        it.collect(step=0, version=0)


def test_capacity_that_stays_away_ends_the_run_after_its_own_limit():
    it = an_exchange(lacking(301.0), no_capacity_s=300.0)
    with pytest.raises(
        NoData, match=r"for 301 s no generator has served, .* \(fleet.no_capacity_minutes\): 0 of 2"
    ):
        it.collect(step=0, version=0)


@pytest.mark.parametrize(("seconds", "joined"), [(0.0, True), (9.0, False)])
def test_silence_with_capacity_or_of_a_broker_that_is_gone_ends_the_run_as_before(seconds, joined):
    it = an_exchange(lacking(seconds), no_capacity_s=math.inf)
    it._link.session.joined = joined
    with pytest.raises(NoData, match="nothing arrived for"):
        it.collect(step=0, version=0)


def test_without_checkpoints_each_commit_is_final():
    it = an_exchange(checkpoint_every=0)
    it.intake.commits.drop_unit("3g0")
    it.flush(step=7)
    assert [type(m) for m in it._link.sent] == [Commit, Checkpointed]
    assert it._link.sent[1] == Checkpointed(epoch=4, step=7)


def test_with_checkpoints_a_commit_is_final_when_one_covers_it_and_a_new_broker_is_told_again():
    it = an_exchange(step=5)
    it.intake.commits.drop_unit("3g0")
    it.flush(step=7)
    assert it._link.of(Checkpointed) == []
    it.checkpointed(step=10)
    # Step 10 had no units, and the broker takes no checkpoint of a step that was not committed.
    assert it._link.sent[-2:] == [Commit(epoch=4, step=10), Checkpointed(epoch=4, step=10)]
    it.announce(PublishWeights(epoch=4, version=8, manifest="m"))
    it._link.sent.clear()
    it._link.script += [None, Held(task_ids=[])]
    it.receive_messages(0.0)
    assert [type(m) for m in it._link.sent] == [PublishWeights, Checkpointed, DeliveryCredit]


@pytest.mark.parametrize(("train_on", "later"), [("groups", 0), ("windows", 1)])
def test_context_that_is_dropped_after_a_checkpoint_belongs_to_the_next_step(train_on, later):
    """Otherwise a crash would restore a checkpoint without the context that the broker has released."""
    it = an_exchange(train_on=train_on, step=5)
    for step in (5, 6):
        it.intake.commits.drop_unit(f"3g0.0.0/{step}")
        it.flush(step=step)
    assert [message.step for message in it._link.of(Commit)] == [5 + later, 6]


def test_a_wish_for_a_checkpoint_is_heard_while_waiting():
    it = an_exchange(None, CheckpointWanted(reason="the journal is filling"))
    seen = []
    it.while_waiting = lambda: seen.append(it.checkpoint_wanted)
    with pytest.raises(NoData):
        it.collect(step=0, version=0)
    assert "the journal is filling" in seen


def settling(*helds):
    """Return an exchange at the end of its run, in which 3g0 was trained."""
    it = an_exchange(None)
    it._link.helds += helds
    it.curriculum.restore({**STATE, "unfinished": []})
    it.intake.commits.committed.add("3g0", step=7, trained=True)
    return it


def test_after_a_lost_connection_commits_go_out_again_before_the_broker_may_deliver():
    """Otherwise the broker would drop a trained unit as stale, if the version has risen meanwhile."""
    it = settling()
    it._link.script += [HELD]
    it.receive_messages(0.0)
    assert it._link.sent == [Commit(epoch=4, step=7, trained=["3g0"], dropped=[]), DeliveryCredit(units=64)]


def test_credit_is_of_the_join_in_which_the_delivery_came():
    """Credit sent in the next join would make the broker deliver before it hears what is trained."""
    it = an_exchange(
        None, HELD, Deliver(unit_id="3g9", segments=1), None, HELD, Deliver(unit_id="3g8", segments=1)
    )
    it.receive_messages(0.0)
    assert it._link.credit == [(64, 1), (1, 1), (64, 2), (1, 2)]


def test_what_answers_a_hello_that_was_given_up_is_of_no_join():
    """A broker that starts late answers each Hello that waited; only the answer to the last Hello counts."""
    it = an_exchange(HELD, HELD, None, HELD)
    it.receive_messages(0.0)
    assert it._link.credit == [(64, 0), (64, 0), (64, 1)]


def test_who_leaves_commits_again_what_the_broker_still_holds_until_it_holds_it_no_more():
    it = settling(HELD, Held(task_ids=["3g1.0", "3g1.1"], unit_ids=["3g1"]))
    it.confirm_commits(step=7)
    assert it._link.sent == ["Hello", Commit(epoch=4, step=7, trained=["3g0"], dropped=[]), "Hello"]
    assert not it._link.helds


def test_who_leaves_does_not_wait_for_ever_for_a_broker_that_is_gone(monkeypatch, caplog):
    monkeypatch.setattr(module, "CONFIRM_TIMEOUT_S", 0.05)
    settling().confirm_commits(step=7)
    assert "tcp://10.0.0.1:5755 has not confirmed within 0.05 s" in caplog.text


def test_a_wait_ends_when_everything_that_arrives_fails():
    it = an_exchange(None, max_failed_episodes=2)
    for _ in range(2):
        it.intake.signal.episode(make_trajectory("t", status="failed", error="out of paper"))
    with pytest.raises(NothingToLearn, match="2 of 2 episodes failed, one after the other: out of paper"):
        it.collect(step=0, version=0)


def test_a_success_before_the_first_step_does_not_lengthen_the_wait():
    it = an_exchange(None, max_failed_episodes=2, data_timeout_s=600.0)
    it.intake.signal.episode(make_trajectory("t"))
    for _ in range(2):
        it.intake.signal.episode(make_trajectory("t", status="failed", error="out of paper"))
    with pytest.raises(NothingToLearn, match="2 of 2 episodes failed, one after the other: out of paper"):
        it.collect(step=0, version=0)
    it.intake.trained_tokens = 1
    with pytest.raises(NoData):
        it.collect(step=1, version=0)


def test_a_run_that_has_nothing_left_to_learn_is_evaluated_all_the_same():
    it, signal = an_exchange(None, max_uniform_groups=2, evaluation_tasks=1), SignalWatch()
    it.intake.signal = signal
    signal.group([0.0, 1.0], uniform=False)
    for _ in range(2):
        signal.group([1.0, 1.0], uniform=True)
    signal.look(it._config, time.monotonic() - 1.0)
    with pytest.raises(Stopped, match=SOLVED):
        it.collect(step=0, version=0)
    with pytest.raises(NoData, match="evaluation 'after 1': 1 of 1 tasks are out"):
        it.evaluate("after 1", EvaluationConfig(tasks=1), version=0)


def test_groups_with_equal_returns_are_told_to_the_broker_in_heartbeats():
    it = an_exchange()
    assert it.gauges() == ()
    it.intake.signal.group([0.5, 0.5], uniform=True)
    assert dict(it.gauges()) == {"uniform_groups_in_a_row": 1.0, "uniform_return": 0.5}


def test_a_version_must_be_announced_before_tasks_are_put_where_no_token_may_lag():
    assert an_exchange(max_policy_lag=0).awaits_versions
    assert not an_exchange(max_policy_lag=1).awaits_versions
    it = an_exchange(max_policy_lag=1)
    it.lockstep = True
    assert it.awaits_versions


def test_announcing_and_repeating_an_announcement_exclude_each_other():
    """The publisher's thread announces while the main thread joins; the broker refuses a version below its newest."""
    it, excluded = an_exchange(), []
    send = it._link.send

    def watched(message, join=None):
        if isinstance(message, PublishWeights):
            excluded.append(it._announcing.locked())
        send(message, join)

    it._link.send = watched
    it.announce(PublishWeights(epoch=4, version=1, manifest="m"))
    it._repeat_at_join()
    assert excluded == [True, True]
    assert not it._announcing.locked()

"""Test learners that die and return: what is redelivered, what is released, what a new lineage leaves."""

import pytest

from protocol.codec import MAX_HEADER_BYTES, encode
from protocol.messages.episodes import CancelTask, CheckpointWanted, Held
from protocol.messages.peers import Goodbye, Hello
from tests.broker_driver import Driver, evaluation, group
from tests.unit.broker.lineage_harness import begun, held, make, tokens, units


@pytest.fixture
def driver():
    return begun()


def test_what_no_checkpoint_covers_comes_back_and_the_rest_is_gone(driver):
    assert make(driver, "a", "b", "c") == ["a", "b", "c"]
    driver.commit("a", step=1)
    driver.commit("b", step=2, dropped=())
    driver.checkpointed(1)
    assert (tokens(driver, "trained"), driver.held) == (8, 1)
    driver.learner(epoch=2, lineage=1, step=1)
    assert held(driver) == (["b.0", "c.0"], ["b", "c"])
    again = driver.deliveries()
    assert [(d.unit_id, d.redelivered) for d in again] == [("b", True), ("c", True)]
    ledger = driver.dispatcher.state.ledger
    assert (tokens(driver, "trained"), ledger.rolled_back.tokens) == (4, 4)
    driver.commit("b", "c", epoch=2, step=2)
    assert (tokens(driver, "trained"), driver.held) == (12, 0)
    assert driver.balanced()


def test_a_checkpoint_the_broker_did_not_hear_of_counts_by_the_hello(driver):
    make(driver, "a", "b")
    driver.commit("a", step=1)
    driver.commit("b", step=2)
    driver.learner(epoch=2, lineage=1, step=2)
    assert units(driver) == []
    assert driver.dispatcher.state.store.committed_nbytes == 0


def test_a_commit_that_was_lost_can_be_made_again(driver):
    make(driver, "a")
    driver.learner(epoch=2, lineage=1, step=5)
    # The checkpoint says that the unit was trained at step 3, so the learner commits it again.
    assert units(driver) == ["a"]
    driver.commit("a", epoch=2, step=5)
    driver.commit("a", epoch=2, step=5)
    assert tokens(driver, "trained") == 4
    assert "unknown_unit" not in driver.dispatcher.state.ledger.refused


def test_another_lineage_leaves_nothing_of_the_one_before(driver):
    make(driver, "done", "committed")
    driver.commit("committed", step=1)
    driver.put(*group("open", 2))
    one, _ = driver.leases()
    driver.segment("actor", one, status="unfinished")
    driver.put(evaluation("ev"))
    driver.learner(epoch=2, lineage=2)
    assert len(driver.got("actor", CancelTask)) == 3
    assert held(driver) == ([], [])
    assert (driver.held, driver.dispatcher.state.store.committed_nbytes) == (0, 0)
    assert (tokens(driver, "trained"), tokens(driver, "superseded")) == (4, 8)
    assert driver.segment("actor", one, 1, offset=4).status == "refused"
    assert driver.balanced()


def test_evaluations_of_a_learner_that_is_gone_are_let_go(driver):
    driver.put(evaluation("ev1"), evaluation("ev2"))
    one, two = driver.leases()
    driver.segment("actor", one)
    driver.learner(epoch=2, lineage=1)
    # This unit had been delivered to the previous learner.
    assert units(driver) == ["ev1.0"]
    assert [c.lease_id for c in driver.got("actor", CancelTask)] == [two.lease_id]
    assert driver.held == 0
    assert driver.dispatcher.state.tasks.live() == []


def test_held_tasks_are_queued_running_stored_and_returned_ones(driver):
    make(driver, "done")
    driver.put(*group("g", 3))
    driver.segment("actor", driver.leases()[0])
    driver.say("actor", Goodbye())
    driver.put(evaluation("ev"))
    driver.learner(epoch=2, lineage=1)
    assert held(driver) == (["done.0", "g.0", "g.1", "g.2"], ["done"])


def test_a_unit_that_no_learner_survives_is_dropped(driver):
    make(driver, "poison")
    for epoch in (2, 3):
        driver.learner(epoch=epoch, lineage=1)
        assert units(driver) == ["poison"]
    driver.learner(epoch=4, lineage=1)
    assert units(driver) == []
    (dropped,) = driver.dropped()
    assert (dropped.unit_id, dropped.reason) == ("poison", "poison")
    assert tokens(driver, "poison") == 4
    assert driver.balanced()


def test_a_learner_that_gets_on_clears_a_unit_of_suspicion(driver):
    make(driver, "slow", "quick")
    for epoch in range(2, 8):
        driver.learner(epoch=epoch, lineage=1)
        assert "slow" in units(driver)
        driver.checkpointed(0, epoch=epoch)


def test_an_actor_of_another_incarnation_does_not_have_the_leases(driver):
    driver.put(*group("g", 1))
    (first,) = driver.leases()
    driver.actor(incarnation=2)
    (again,) = driver.leases()
    assert (again.attempt, first.attempt) == (1, 0)


def test_the_learner_is_asked_for_a_checkpoint_when_the_store_is_crowded(driver, monkeypatch):
    make(driver, "a")
    driver.wait(1.0)
    assert driver.got("learner", CheckpointWanted) == []
    monkeypatch.setattr(type(driver.dispatcher.state.store), "crowded", True)
    driver.wait(1.0)
    assert driver.got("learner", CheckpointWanted) == []  # nothing is committed
    driver.commit("a")
    driver.wait(7.0)
    assert len(driver.got("learner", CheckpointWanted)) == 2
    assert "bytes" in driver.got("learner", CheckpointWanted)[0].reason


def test_no_credit_while_the_store_is_low(driver, monkeypatch):
    driver.put(*group("g", 1))
    driver.leases()
    monkeypatch.setattr(type(driver.dispatcher.state.store), "low", True)
    driver.say("late", Hello(role="actor", peer="late", incarnation=1))
    assert driver.credit("late") == 0
    assert driver.dispatcher.state.full()
    monkeypatch.setattr(type(driver.dispatcher.state.store), "low", False)
    driver.wait(0.5)
    assert driver.credit("late") > 0


def test_the_length_meter_sees_what_is_trained_against_all_that_ended(driver):
    driver.put(*group("short", 2), *group("long", 2))
    for lease in driver.leases():
        long = lease.task.group_id == "long"
        driver.segment("actor", lease, tokens=40 if long else 10, action_tokens=30 if long else 6)
    lengths = driver.dispatcher.state.ledger.lengths
    assert lengths.all == {6: 2, 30: 2}
    assert (lengths.bias_tokens, lengths.distance_tokens) == (0.0, 0.0)  # nothing is trained yet
    driver.commit("short", step=1)
    assert (lengths.bias_tokens, lengths.distance_tokens) == (-12.0, 12.0)
    driver.commit("long", step=2)
    assert (lengths.bias_tokens, lengths.distance_tokens) == (0.0, 0.0)
    driver.learner(epoch=2, lineage=1, step=1)
    assert lengths.of_trained == {6: 2}
    driver.commit(epoch=2, step=2, dropped=["long"])
    assert lengths.bias_tokens == -12.0


def test_windows_count_their_trajectory_when_the_last_is_trained():
    driver = Driver(heartbeat_s=1000.0)
    driver.learner(deliver="segment")
    driver.actor()
    driver.put(*group("g", 1))
    (lease,) = driver.leases()
    driver.segment("actor", lease, 0, status="unfinished")
    driver.segment("actor", lease, 1, offset=4)
    lengths = driver.dispatcher.state.ledger.lengths
    driver.commit("g.0.0/0")
    assert (lengths.all, lengths.of_trained) == ({4: 1}, {})
    driver.commit("g.0.0/1")
    assert lengths.of_trained == {4: 1}


def test_many_held_tasks_come_in_several_messages(driver):
    name = "g" * 200
    for n in range(30):
        driver.put(*group(f"{name}{n}", 60))
    driver.learner(epoch=2, lineage=1)
    parts = driver.take("learner", Held)[-3:]
    assert [part.more for part in parts] == [True, True, False]
    assert sum(len(part.task_ids) for part in parts) == 1_800
    assert all(len(encode(part)[1]) < MAX_HEADER_BYTES for part in parts)

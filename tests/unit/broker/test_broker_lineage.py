"""Test learners that die and return: what is redelivered, what is released, what a new lineage leaves."""

import msgspec
import pytest

from broker.journal.records import Kind, Place, Record
from broker.journal_store import JournalStore
from broker.recovery import recover, snapshot
from protocol.codec import MAX_HEADER_BYTES, encode
from protocol.messages.delivery import CheckpointWanted, Held
from protocol.messages.peers import Goodbye, Hello, Refused, Welcome
from protocol.messages.tasks import CancelTask
from tests.broker_driver import Driver, evaluation, group


@pytest.fixture
def driver():
    driver = Driver(heartbeat_s=1000.0, task_lease_s=1000.0, max_deliveries=3)
    driver.learner(epoch=1, lineage=1)
    driver.actor()
    return driver


def make(driver, *names):
    """Finish rollout groups of one. Return the ids of the delivered units."""
    driver.put(*(task for name in names for task in group(name, 1)))
    for lease in driver.leases():
        assert driver.segment("actor", lease).status == "stored"
    return units(driver)


def units(driver):
    return [delivery.unit_id for delivery in driver.deliveries()]


def held(driver):
    """Return the task ids and unit ids of the last Held, which may span several messages."""
    said = driver.take("learner", Held)
    begin = max((n for n, one in enumerate(said[:-1], start=1) if not one.more), default=0)
    last = said[begin:]
    return sorted(i for one in last for i in one.task_ids), sorted(i for one in last for i in one.unit_ids)


def tokens(driver, outcome):
    return driver.dispatcher.state.ledger.outcomes[outcome].tokens


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


def refusals(driver):
    return [message.code for message in driver.take("learner", Refused)]


def test_a_checkpoint_of_a_step_that_was_not_committed_is_refused(driver):
    make(driver, "a", "b")
    driver.commit("a", step=6)
    driver.checkpointed(1_000_000)
    assert refusals(driver) == ["not_committed"]
    # Nothing was released: the unit comes back to a learner that lacks its step.
    driver.learner(epoch=2, lineage=1, step=5)
    assert units(driver) == ["a", "b"]
    driver.commit("a", epoch=2, step=6)
    driver.commit(epoch=2, step=7)
    driver.checkpointed(7, epoch=2)
    assert refusals(driver) == []
    assert driver.dispatcher.state.store.committed_nbytes == 0


def released_up_to_4(driver):
    """Train a unit in each of four steps, all of which a checkpoint covers, and drop one beside."""
    make(driver, "a", "b", "c", "d", "e")
    for step, unit in enumerate("abcd", start=1):
        driver.commit(unit, step=step, dropped=["e"] if unit == "d" else ())
    driver.checkpointed(4)
    assert (tokens(driver, "trained"), tokens(driver, "dropped")) == (16, 4)


@pytest.mark.parametrize("lineage", [1, 2], ids=["the same lineage", "another"])
def test_a_learner_with_fewer_steps_than_were_released_is_refused(driver, lineage):
    released_up_to_4(driver)
    (refused,) = driver.learner(epoch=2, lineage=lineage, step=2, credit=0)
    assert (refused.code, refused.fatal) == ("step_back", True)
    assert "3 units of 12 tokens (c, d, e)" in refused.message
    assert "--resume --from 2" in refused.message
    assert driver.dispatcher.state.lineage.epoch == 1
    # A restart that did not count its epoch up is no way around.
    (refused,) = driver.hello("learner", "learner", incarnation=9, epoch=1, lineage=1, step=2)
    assert refused.code == "step_back"
    assert type(driver.learner(epoch=2, lineage=lineage, step=4, credit=0)[0]) is Welcome


def test_a_learner_that_may_step_back_is_welcome_and_the_units_between_are_lost(driver, caplog):
    released_up_to_4(driver)
    driver.learner(epoch=2, lineage=1, step=2, step_back=True)
    outcomes = {name: tokens(driver, name) for name in ("trained", "dropped", "lost")}
    assert outcomes == {"trained": 8, "dropped": 0, "lost": 12}
    assert driver.balanced()
    assert "from step 4 to 2: 3 units of 12 tokens (c, d, e) are lost" in caplog.text
    # The line goes on from step 2, and a later step back does not count the units again.
    make(driver, "f")
    driver.commit("f", epoch=2, step=3)
    driver.checkpointed(3, epoch=2)
    driver.learner(epoch=3, lineage=1, step=1, step_back=True)
    assert {name: tokens(driver, name) for name in outcomes} == {"trained": 4, "dropped": 0, "lost": 20}
    assert driver.dispatcher.state.ledger.lengths.of_trained == {2: 1}


@pytest.mark.parametrize(("step", "lost"), [(2, 8), (4, 0)], ids=["a step back", "lockstep"])
def test_in_a_new_lineage_what_was_trained_after_the_checkpoint_counts_no_more(driver, step, lost):
    make(driver, "a", "b", "c", "d", "e", "f", "g")
    for number, unit in enumerate("abcdef", start=1):
        driver.commit(unit, step=number)
    driver.checkpointed(4)
    driver.learner(epoch=2, lineage=2, step=step, step_back=True)
    outcomes = {name: tokens(driver, name) for name in ("trained", "superseded", "lost")}
    assert outcomes == {"trained": 4 * step, "superseded": 12, "lost": lost}
    assert (units(driver), driver.held) == ([], 0)
    assert driver.balanced()


def test_the_process_that_wrote_the_checkpoint_may_join_again(driver):
    released_up_to_4(driver)
    assert type(driver.learner(epoch=1, lineage=1)[0]) is Welcome
    # One that starts anew takes nothing up.
    assert type(driver.learner(epoch=2, lineage=2)[0]) is Welcome
    assert tokens(driver, "lost") == 0


@pytest.mark.parametrize("rotate", [True, False])
def test_the_next_broker_knows_which_steps_were_released(tmp_path, rotate):
    driver = Driver(folder=tmp_path / "journal", heartbeat_s=1000.0, task_lease_s=1000.0)
    driver.learner(epoch=1, lineage=1)
    driver.actor()
    released_up_to_4(driver)
    driver.flush(rotate=rotate)
    driver.kill_broker()
    (refused,) = driver.learner(epoch=2, lineage=1, step=3, credit=0)
    assert "2 units of 8 tokens (d, e)" in refused.message
    driver.learner(epoch=2, lineage=1, step=3, step_back=True)
    assert tokens(driver, "lost") == 8
    driver.kill_broker()
    assert tokens(driver, "lost") == 8
    assert driver.balanced()


def test_a_snapshot_of_an_earlier_version_is_read(tmp_path):
    driver = Driver(folder=tmp_path / "journal", heartbeat_s=1000.0, task_lease_s=1000.0)
    driver.learner(epoch=1, lineage=1, step=9)
    driver.actor()
    make(driver, "a")
    driver.commit("a", step=12)
    state = driver.dispatcher.state
    content = msgspec.msgpack.decode(snapshot(state, state.store))
    del content["steps"], content["ledger"]["outcomes"]["lost"]
    old = Record(Kind.SNAPSHOT, msgspec.msgpack.encode(content), Place(1, 0, 0))
    begun = Driver(heartbeat_s=1000.0, task_lease_s=1000.0)
    store = JournalStore(driver.journal, 1 << 20)
    begun.dispatcher.state.store = begun.dispatcher.state.deliveries._store = store
    recover(begun.dispatcher.state, store, [old], begun.now)
    steps = begun.dispatcher.state.steps
    assert (steps.committed, steps.released, tokens(begun, "lost")) == (12, 9, 0)

"""A learner with fewer steps than a checkpoint that was written needs permission, and units between are lost."""

import msgspec
import pytest

from broker.journal.writer import Kind, Place, Record
from broker.output_commit import JournalStore, recover, snapshot
from protocol.messages.peers import Refused, Welcome
from tests.broker_driver import Driver
from tests.unit.broker.lineage_harness import begun, make, tokens, units


@pytest.fixture
def driver():
    return begun()


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

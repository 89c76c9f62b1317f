"""Test the ledger's checks, and segments that are delivered from memory."""

import pytest

from broker import output_commit
from protocol.messages.episodes import DeliveryCredit, LeaseTask
from protocol.messages.peers import Refused
from tests.broker_driver import Driver, group


@pytest.fixture
def driver():
    driver = Driver()
    driver.learner()
    driver.actor()
    return driver


def deliver_one(driver, name):
    driver.put(*group(name, 1))
    (lease,) = driver.leases()
    driver.segment("actor", lease)
    assert len(driver.deliveries()) == 1


def test_a_commit_notices_a_segment_that_the_ledger_does_not_know(driver):
    deliver_one(driver, "g")
    driver.dispatcher.state.ledger.stored.segments += 1
    driver.commit("g")
    (refused,) = driver.take("learner", Refused)
    assert (refused.code, refused.fatal) == ("ledger_violation", True)
    assert "0 segments are held, the sums leave 1" in refused.message


def test_within_a_second_or_so_a_token_is_noticed_that_the_ledger_does_not_know(driver):
    deliver_one(driver, "g")
    driver.dispatcher.state.ledger.stored.tokens += 1
    driver.wait(1.2, beating=("learner", "actor"))
    refused = driver.take("learner", Refused)
    assert {message.code for message in refused} == {"ledger_violation"}
    assert ": -1; this is a fault of the broker" in refused[0].message


def test_no_false_alarm(driver):
    for n in range(5):
        deliver_one(driver, f"g{n}")
        driver.commit(f"g{n}", step=n + 1)
        driver.wait(1.2, beating=("learner", "actor"))
    driver.checkpointed(5)
    assert driver.take("learner", Refused) == []


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_what_is_delivered_is_what_was_sent_from_memory_or_from_the_journal(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(output_commit, "RECENT_BYTES", kept)
    driver = Driver(folder=tmp_path / "journal")
    driver.learner(credit=0)
    driver.actor()
    driver.put(*(task for n in range(4) for task in group(f"g{n}", 1)))
    for lease in driver.take("actor", LeaseTask):
        driver.segment("actor", lease, tokens=3 + int(lease.task.group_id[1:]))
    driver.flush()
    driver.say("learner", DeliveryCredit(units=4))
    assert [message.unit_id for message in driver.deliveries()] == ["g0", "g1", "g2", "g3"]
    store = driver.dispatcher.state.store
    first = {name: frames for name, frames in driver.frames.items()}
    assert all(frames == [store_read(store, (f"{name}.0.0", 0))] for name, frames in first.items())
    assert driver.kill_broker() > 0


def store_read(store, key):
    """Return a segment as it stands in the journal, whatever is in memory."""
    return output_commit.unpack_segment(store.journal.read(store._places[key]))

"""A broker that is killed and recovers has the state it had."""

import errno
import os

import msgspec
import pytest

from broker import output_commit
from broker.core.state import BrokerState
from broker.errors import JournalError
from broker.journal.writer import Kind
from broker.output_commit import JournalStore, Snapshot, snapshot
from protocol.messages.episodes import DeliveryCredit, LeaseTask, PutTasks
from tests.broker_driver import Driver, evaluation, group


@pytest.fixture
def driver(tmp_path):
    driver = Driver(folder=tmp_path / "journal", heartbeat_s=1.0, task_lease_s=1000.0)
    driver.learner(epoch=1, lineage=1)
    driver.actor()
    return driver


def picture(state: BrokerState) -> dict:
    """Return what must outlive the process: a snapshot, without clocks and without counts of refusals."""
    saved = msgspec.to_builtins(msgspec.msgpack.decode(snapshot(state, state.store), type=Snapshot))
    for record in saved["tasks"]:
        record["retry_at"] = 0.0
        if record["lease"]:
            record["lease"]["renewed"] = record["lease"]["limit"] = 0.0
    for entry in saved["groups"]:
        entry["since"] = entry["since"] is not None
        entry["out"] = sorted(entry["out"])
    saved["ledger"]["refused"], saved["ledger"]["duplicate_segments"] = {}, 0
    for name in ("segments", "tasks", "groups", "trajectories", "units"):
        saved[name] = sorted(saved[name], key=repr)
    return saved


def busy(driver):
    """Give the broker tasks and units in every state. Return the leases by task id."""
    driver.put(*group("done", 1), *group("kept", 1), *group("half", 2), *group("g", 3), evaluation("ev"))
    driver.publish(3)
    leases = {lease.task.task_id: lease for lease in driver.leases()}
    for name in ("done.0", "kept.0", "half.0", "ev"):
        driver.segment("actor", leases[name])
    driver.segment("actor", leases["g.0"], status="unfinished")
    driver.deliveries()
    driver.commit("done", step=1)
    driver.checkpointed(1)
    driver.commit("kept", step=2)
    return leases


@pytest.mark.parametrize("rotate", [False, True])
def test_everything_that_lasts_is_there_again(driver, rotate):
    busy(driver)
    before = picture(driver.dispatcher.state)
    driver.flush(rotate=rotate)
    assert driver.kill_broker() > 0
    assert picture(driver.dispatcher.state) == before
    assert driver.balanced()
    assert driver.kill_broker() > 0
    assert picture(driver.dispatcher.state) == before


def test_what_follows_a_snapshot_is_read_on_top_of_it(driver):
    leases = busy(driver)
    driver.flush(rotate=True)
    driver.segment("actor", leases["half.1"])
    driver.learner(epoch=2, lineage=1, step=1)
    before = picture(driver.dispatcher.state)
    assert driver.kill_broker() < 12
    assert picture(driver.dispatcher.state) == before
    assert [unit.unit_id for unit in driver.dispatcher.state.deliveries.units()] == ["kept", "half"]


def test_an_episode_goes_on_after_the_broker_was_killed(driver):
    leases = busy(driver)
    driver.kill_broker()
    # The actor is the same process, so its leases live, and the broker sends them again.
    driver.actor(tasks=100)
    assert {lease.lease_id for lease in driver.leases()} == {
        leases[name].lease_id for name in ("half.1", "g.0", "g.1", "g.2")
    }
    acknowledged = driver.segment("actor", leases["g.0"], 1, offset=4)
    assert acknowledged.status == "stored"
    assert driver.segment("actor", leases["g.0"], 1, offset=4).status == "duplicate"


def test_a_learner_goes_on_and_a_commit_to_the_one_before_counts_now(driver):
    busy(driver)
    driver.kill_broker()
    driver.learner(epoch=1, lineage=1, credit=0)
    driver.say("learner", DeliveryCredit(units=10))
    # All other units were committed.
    assert [d.unit_id for d in driver.deliveries()] == ["ev.0"]
    driver.commit("kept", step=2)
    assert "unknown_unit" not in driver.dispatcher.state.ledger.refused


def test_leases_of_an_actor_that_does_not_come_back_are_given_to_another(driver):
    busy(driver)
    driver.kill_broker()
    driver.actor("other")
    driver.wait(14.0, beating=["other"])
    assert driver.leases("other") == []
    driver.wait(3.0, beating=["other"])
    assert sorted(lease.task.task_id for lease in driver.leases("other")) == ["g.0", "g.1", "g.2", "half.1"]
    assert driver.balanced()


def test_an_actor_that_was_restarted_meanwhile_does_not_have_the_old_leases(driver):
    busy(driver)
    driver.kill_broker()
    driver.actor(incarnation=2)
    again = driver.take("actor", LeaseTask)
    assert {lease.task.task_id: lease.attempt for lease in again} == {
        "g.0": 1, "g.1": 1, "g.2": 1, "half.1": 1
    }  # fmt: skip


def test_tasks_put_again_are_known(driver):
    busy(driver)
    driver.kill_broker()
    driver.learner(epoch=1, lineage=1)
    before = len(driver.dispatcher.state.tasks.live())
    driver.say("learner", PutTasks(tasks=[*group("g", 3), *group("done", 1)]))
    assert len(driver.dispatcher.state.tasks.live()) == before
    assert [(notice.group_id, notice.reason) for notice in driver.dropped()] == [("done", "over")]


def test_the_newest_weights_are_announced_after_a_restart(driver):
    busy(driver)
    driver.kill_broker()
    answers = driver.hello("generator", "gen", endpoint="tcp://127.0.0.1:1")
    assert [m.version for m in answers if hasattr(m, "manifest")] == [3]


def test_segments_are_read_where_they_stand(driver):
    busy(driver)
    driver.flush(rotate=True)
    store = driver.dispatcher.state.store
    assert isinstance(store, JournalStore)
    driver.learner(epoch=2, lineage=1, step=1)
    (again,) = [d for d in driver.deliveries() if d.unit_id == "kept"]
    ((header, body),) = driver.frames[again.unit_id]
    assert b"kept.0.0" in header
    assert len(body) > 0


def test_files_that_hold_nothing_needed_are_deleted_beyond_what_is_kept(tmp_path):
    driver = Driver(folder=tmp_path, journal={"keep_bytes": 0})
    driver.learner()
    driver.actor()
    driver.put(*group("a", 1), *group("b", 1))
    one, two = driver.leases()
    driver.segment("actor", one)
    driver.flush(rotate=True)
    driver.segment("actor", two)
    driver.flush(rotate=True)
    assert len(list(tmp_path.glob("*.log"))) == 3
    driver.commit("b")
    driver.checkpointed(1)
    driver.flush(rotate=True)
    names = sorted(path.name[-5:-4] for path in tmp_path.glob("*.log"))
    assert names == ["1", "4"]
    driver.kill_broker()
    assert driver.held == 1


def test_a_record_that_cannot_be_applied_is_named(driver):
    driver.journal.append(Kind.EVENT, b"\xc1")
    with pytest.raises(JournalError, match="offset"):
        driver.kill_broker()


def test_after_accepted_damage_what_rests_on_it_is_left_out(tmp_path):
    folder = tmp_path / "journal"
    driver = Driver(folder=folder, heartbeat_s=1.0)
    driver.learner(epoch=1, lineage=1)
    driver.actor()
    driver.put(*group("first", 1))
    driver.flush()
    before = driver.journal.nbytes
    driver.put(*group("lost", 1))
    driver.flush()
    behind = driver.journal.nbytes
    driver.put(*group("kept", 1))
    leases = {lease.task.task_id: lease for lease in driver.leases()}
    for lease in leases.values():
        driver.segment("actor", lease)
    driver.flush()
    driver.journal.abandon()
    (path,) = folder.glob("*.log")
    data = bytearray(path.read_bytes())
    data[before:behind] = bytes(behind - before)
    path.write_bytes(data)
    with pytest.raises(JournalError, match="damaged"):
        driver._recover()
    driver._recover(accept_loss=True)
    held = {unit.unit_id for unit in driver.dispatcher.state.deliveries.units()}
    assert held == {"first", "kept"}


def test_a_unit_that_cannot_be_read_just_now_is_delivered_later(driver, monkeypatch, caplog):
    monkeypatch.setattr(output_commit, "RECENT_BYTES", 0)
    driver.hello("learner", "learner", epoch=1, lineage=1)
    driver.put(*group("g", 1))
    driver.segment("actor", driver.leases()[0])
    driver.flush()
    with monkeypatch.context() as short:

        def none_left(*_):
            raise OSError(errno.EMFILE, "Too many open files")

        short.setattr(os, "open", none_left)
        driver.say("learner", DeliveryCredit(units=9))
        driver.wait(1.0, beating=["learner"])
        assert driver.deliveries() + driver.dropped() == []
        assert len(caplog.records) == 1
    driver.wait(0.2, beating=["learner"])
    assert [delivery.unit_id for delivery in driver.deliveries()] == ["g"]

"""Test which units are too old to be delivered: those without a fresh token, and no others."""

import pytest

from protocol.messages.episodes import DeliveryCredit
from tests.broker_driver import Driver, close, evaluation, group, units


def test_a_group_without_any_fresh_token_is_dropped_at_delivery():
    driver = Driver(lag=2, heartbeat_s=1000.0)
    driver.learner(credit=0)
    driver.actor()
    driver.put(*group("old", 2), *group("half", 2), *group("new", 2))
    versions = iter([1, 2, 2, 3, 5, 5])
    for lease in driver.leases():
        close(driver, lease, version=next(versions))
    driver.publish(5)
    driver.say("learner", DeliveryCredit(units=9))
    assert units(driver) == ["half", "new"]
    (dropped,) = driver.dropped()
    assert (dropped.unit_id, dropped.reason, dropped.trajectories) == ("old", "stale", 2)
    assert driver.dispatcher.state.ledger.outcomes["stale"].tokens == 8
    assert driver.balanced()


@pytest.mark.parametrize("killed", [False, True])
def test_after_a_learner_went_back_staleness_is_counted_along_its_weights(killed, tmp_path):
    """After a checkpoint at 10 and a crash at 19, version 9 is one update behind version 20, not eleven."""
    driver = Driver(lag=2, heartbeat_s=1000.0, folder=tmp_path if killed else None)
    driver.learner(credit=0)
    driver.actor()
    driver.put(*group("old", 1), *group("kept", 1), *group("undone", 1))
    versions = iter([7, 9, 17])
    for lease in driver.leases():
        close(driver, lease, version=next(versions))
    driver.publish(19)
    driver.learner(epoch=2, credit=0)
    driver.publish(20, epoch=2, line=[(10, 20)])
    if killed:
        driver.kill_broker()
        driver.learner(epoch=2, credit=0)
    driver.say("learner", DeliveryCredit(units=9))
    # The broker knows only a unit's largest version, so it keeps "undone"; the learner masks its tokens.
    assert units(driver) == ["kept", "undone"]
    assert [dropped.unit_id for dropped in driver.dropped()] == ["old"]
    assert driver.balanced()


def test_evaluation_and_units_without_action_tokens_are_never_stale():
    driver = Driver(lag=0, heartbeat_s=1000.0)
    driver.learner(credit=0)
    driver.actor()
    driver.put(evaluation("ev"), *group("g", 1))
    one, two = driver.leases()
    close(driver, one, version=1)
    close(driver, two, action_tokens=0, status="failed")
    driver.publish(9)
    driver.say("learner", DeliveryCredit(units=9))
    assert units(driver) == ["ev.0", "g"]


def test_a_unit_the_learner_may_hold_is_not_dropped_as_stale(driver):
    driver.put(*group("g", 1))
    close(driver, driver.leases()[0], version=0)
    assert units(driver) == ["g"]
    driver.publish(3)
    driver.wait(60.0, step=1.0)
    assert units(driver) == ["g"]
    assert driver.dropped() == []


def test_for_another_process_a_returned_unit_is_judged_by_the_version_of_then(driver):
    driver.put(*group("g", 1))
    close(driver, driver.leases()[0], version=0)
    assert units(driver) == ["g"]
    driver.publish(3)
    driver.learner(epoch=2)
    assert units(driver) == []
    assert [d.reason for d in driver.dropped()] == ["stale"]


def test_a_stale_piece_of_an_open_trajectory_is_delivered_as_context():
    driver = Driver(lag=0, heartbeat_s=1000.0)
    driver.learner(deliver="segment", credit=0)
    driver.actor()
    driver.put(*group("g", 1))
    (lease,) = driver.leases()
    driver.segment("actor", lease, status="unfinished")
    driver.segment("actor", lease, 1, offset=4, status="finished")
    driver.publish(9)
    driver.say("learner", DeliveryCredit(units=5))
    assert units(driver) == ["g.0.0/0"]
    assert [d.unit_id for d in driver.dropped()] == ["g.0.0/1"]

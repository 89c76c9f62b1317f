"""Test units: when one is ready, who gets it, what is redelivered."""

from protocol.messages.episodes import CancelTask, DeliveryCredit, TaskRejected
from protocol.messages.peers import Goodbye, Heartbeat
from tests.broker_driver import Driver, close, evaluation, group, segment_frames, units


def test_a_group_is_delivered_when_its_last_member_is_closed(driver):
    driver.put(*group("g", 3))
    *first, last = driver.leases()
    for lease in first:
        close(driver, lease)
    assert units(driver) == []
    close(driver, last)
    (delivery,) = driver.deliveries()
    assert (delivery.unit_id, delivery.segments, delivery.complete) == ("g", 3, True)
    assert not delivery.redelivered
    assert driver.balanced()


def test_a_group_whose_members_all_failed_is_delivered_too(driver):
    driver.put(*group("g", 2))
    for lease in driver.leases():
        close(driver, lease, status="failed", error="env")
    assert units(driver) == ["g"]


def test_at_its_deadline_a_group_is_delivered_as_it_is_and_the_rest_is_cancelled(driver):
    driver.put(*group("g", 4, deadline_s=1000.0))
    one, two, three, four = driver.leases()
    close(driver, one)
    close(driver, two)
    driver.segment("actor", three, status="unfinished")
    driver.wait(29.0)
    assert units(driver) == []
    driver.wait(2.0)
    (delivery,) = driver.deliveries()
    assert (delivery.segments, delivery.complete) == (2, False)
    assert [c.lease_id for c in driver.got("actor", CancelTask)] == [three.lease_id, four.lease_id]
    assert driver.dispatcher.state.ledger.outcomes["late"].tokens == 4
    assert driver.segment("actor", three, 1, offset=4).status == "refused"
    assert driver.balanced()


def test_a_group_with_too_few_members_at_its_deadline_is_dropped(driver):
    driver.put(*group("g", 4, deadline_s=1000.0))
    close(driver, driver.leases()[0])
    driver.wait(31.0)
    assert units(driver) == []
    (dropped,) = driver.dropped()
    assert (dropped.unit_id, dropped.group_id, dropped.trajectories) == ("g", "g", 4)
    assert dropped.reason == "deadline"
    assert driver.held == 0
    assert driver.balanced()


def test_a_member_given_up_makes_its_group_incomplete():
    driver = Driver(heartbeat_s=1000.0)
    driver.learner()
    driver.actor(tasks=3)
    driver.put(*group("g", 3))
    one, two, three = driver.leases()
    close(driver, one)
    close(driver, two)
    holder, lease = "actor", three
    for other in ("x", "y", ""):
        driver.say(holder, TaskRejected(lease_id=lease.lease_id, reason="broken"))
        if other:
            driver.actor(other, tasks=1)
            (lease,), holder = driver.leases(other), other
    (delivery,) = driver.deliveries()
    assert (delivery.segments, delivery.complete) == (2, False)


def test_evaluation_comes_first_and_singly():
    driver = Driver(heartbeat_s=1000.0)
    driver.learner(credit=0)
    driver.actor()
    driver.put(*group("g", 1))
    driver.put(evaluation("ev"))
    for lease in driver.leases():
        close(driver, lease)
    driver.say("learner", DeliveryCredit(units=2))
    assert units(driver) == ["ev.0", "g"]


def test_no_more_is_delivered_than_the_learner_has_credit_oldest_first():
    driver = Driver(heartbeat_s=1000.0)
    driver.learner(credit=0)
    driver.actor()
    driver.put(*(task for n in range(5) for task in group(f"g{n}", 1)))
    for lease in driver.leases():
        close(driver, lease)
    assert units(driver) == []
    driver.say("learner", DeliveryCredit(units=2))
    assert units(driver) == ["g0", "g1"]
    driver.say("learner", DeliveryCredit(units=1))
    assert units(driver) == ["g2"]
    assert driver.dispatcher.state.deliveries.ready == 2


def test_single_trajectories(driver):
    driver.learner(deliver="trajectory", epoch=2)
    driver.put(*group("g", 2))
    one, two = driver.leases()
    close(driver, two)
    assert units(driver) == ["g.1.0"]
    close(driver, one)
    assert units(driver) == ["g.0.0"]
    assert driver.dispatcher.state.assembly.groups == {}


def test_single_segments_in_order(driver):
    driver.learner(deliver="segment", epoch=2)
    driver.put(*group("g", 1))
    (lease,) = driver.leases()
    driver.segment("actor", lease, 0, status="unfinished")
    driver.segment("actor", lease, 1, offset=4, status="unfinished")
    driver.segment("actor", lease, 2, offset=8)
    delivered = driver.deliveries()
    assert [d.unit_id for d in delivered] == ["g.0.0/0", "g.0.0/1", "g.0.0/2"]
    assert [d.complete for d in delivered] == [False, False, True]
    driver.commit(*(d.unit_id for d in delivered), epoch=2)
    assert driver.balanced()
    assert driver.dispatcher.state.assembly.trajectories == driver.dispatcher.state.assembly.groups == {}


def test_a_change_of_units_cuts_what_is_here(driver):
    driver.put(*group("g", 2))
    one, two = driver.leases()
    close(driver, one)
    driver.segment("actor", two, 0, status="unfinished")
    driver.learner(deliver="segment", epoch=2)
    assert units(driver) == ["g.0.0/0", "g.1.0/0"]
    driver.learner(deliver="group", epoch=3)
    assert [d.redelivered for d in driver.deliveries()] == [True, True]
    driver.segment("actor", two, 1, offset=4)
    # A rollout group that was delivered in part continues in parts.
    assert units(driver) == ["g.1.0/1"]
    assert driver.balanced()
    assert driver.dispatcher.state.assembly.groups == {}


def test_the_bytes_of_header_and_body_are_passed_on(driver):
    driver.put(*group("g", 1))
    (lease,) = driver.leases()
    frames = segment_frames(lease)
    driver.say_frames("actor", frames)
    (delivery,) = driver.deliveries()
    assert driver.frames[delivery.unit_id] == [(frames[1], frames[2])]


def test_without_progress_of_the_learner_a_delivery_comes_again(driver):
    driver.put(*group("g", 1))
    close(driver, driver.leases()[0])
    (first,) = driver.deliveries()
    for step in range(4):
        driver.wait(40.0, step=1.0)
        driver.say("learner", Heartbeat(progress=step + 1, busy=True))
    assert driver.deliveries() == []
    driver.wait(51.0, step=1.0)
    (again,) = driver.deliveries()
    assert (again.unit_id, again.redelivered) == ("g", True)
    assert driver.dispatcher.state.ledger.redelivered.tokens == 4
    # The commit is late, but still prevents a second training.
    driver.commit(first.unit_id)
    assert driver.held == 0
    driver.commit(again.unit_id)
    assert driver.dispatcher.state.ledger.outcomes["trained"].tokens == 4
    assert driver.balanced()


def test_a_learner_that_leaves_returns_its_deliveries(driver):
    driver.put(*group("g", 1))
    close(driver, driver.leases()[0])
    (first,) = driver.deliveries()
    driver.say("learner", Goodbye())
    driver.learner()
    (again,) = driver.deliveries()
    assert (again.unit_id, again.redelivered) == (first.unit_id, True)
    # The delivery is from before the Goodbye, but the commit names the unit, so it counts.
    driver.commit(first.unit_id)
    assert driver.held == 0


def test_a_repeated_hello_brings_again_what_may_have_been_lost_on_the_way(driver):
    driver.put(*group("g", 1), *group("h", 1))
    for lease in driver.leases():
        close(driver, lease)
    first, _ = driver.deliveries()
    driver.learner()
    again = driver.deliveries()
    assert [(d.unit_id, d.redelivered) for d in again] == [("g", True), ("h", True)]
    # The commit comes from the same process, so it counts.
    driver.commit(first.unit_id)
    driver.commit(again[1].unit_id)
    assert driver.held == 0
    assert driver.balanced()


def test_tasks_put_again_whose_notice_was_lost_are_said_to_be_over_once_a_group(driver):
    driver.put(*group("g", 4, deadline_s=1000.0), *group("running", 2, deadline_s=1000.0))
    close(driver, driver.leases()[0])
    driver.wait(31.0)
    assert [d.reason for d in driver.dropped()] == ["deadline"]
    driver.put(*group("g", 4))
    # The learner was notified since its last Hello.
    assert driver.dropped() == []
    driver.learner()
    driver.put(*group("g", 4), *group("running", 2))
    driver.put(*group("g", 4))
    assert [(d.unit_id, d.group_id, d.trajectories, d.reason) for d in driver.dropped()] == [
        ("g", "g", 4, "over")
    ]


def test_tasks_put_again_whose_unit_is_held_are_not_over(driver):
    driver.put(*group("g", 2), evaluation("ev"))
    for lease in driver.leases():
        close(driver, lease)
    first = driver.deliveries()
    driver.learner()
    driver.put(*group("g", 2), evaluation("ev"))
    assert driver.dropped() == []
    driver.commit(*(d.unit_id for d in first))
    driver.put(evaluation("ev"))
    assert [(d.unit_id, d.group_id) for d in driver.dropped()] == [("ev", "ev")]


def test_lease_ids_of_two_starts_of_the_broker_differ():
    ids = []
    for boot in ("1", "2"):
        driver = Driver(boot=boot)
        driver.learner()
        driver.actor()
        driver.put(*group("g", 1))
        (lease,) = driver.leases()
        close(driver, lease)
        ids.append(lease.lease_id)
    assert len(set(ids)) == 2


def test_notices_wait_for_an_absent_learner(driver):
    driver.put(*group("g", 3, deadline_s=1000.0))
    close(driver, driver.leases()[0])
    driver.say("learner", Goodbye())
    driver.wait(31.0)
    assert driver.dropped() == []
    driver.learner()
    assert [d.unit_id for d in driver.dropped()] == ["g"]


def test_a_unit_too_large_for_one_message_is_dropped_not_sent_in_vain(driver, monkeypatch):
    monkeypatch.setattr("broker.core.records.MAX_FRAMES", 4)
    driver.put(*group("g", 2))
    for lease in driver.leases():
        close(driver, lease)
    assert units(driver) == []
    assert [d.reason for d in driver.dropped()] == ["too_large"]
    assert driver.held == 0
    assert driver.balanced()

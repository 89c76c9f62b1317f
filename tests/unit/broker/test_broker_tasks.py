"""Test the task queue: order, fairness, leases, loss, giving up."""

import pytest

from broker.core.actors import MAX_FREE_ATTEMPTS
from protocol.messages.episodes import CancelTask, TaskCredit, TaskRejected
from protocol.messages.peers import Goodbye, Heartbeat, Refused
from tests.broker_driver import Driver, evaluation, group


def ids(leases):
    return [lease.task.task_id for lease in leases]


@pytest.fixture
def driver():
    driver = Driver(task_lease_s=10.0, max_attempts=3, heartbeat_s=100.0)
    driver.learner()
    return driver


def test_tasks_are_leased_in_order_evaluation_first_and_no_more_than_the_credit(driver):
    driver.put(*group("g", 3), evaluation("ev"))
    driver.actor(tasks=2)
    assert ids(driver.leases()) == ["ev", "g.0"]
    driver.say("actor", TaskCredit(tasks=1))
    assert ids(driver.leases()) == ["g.1"]
    assert driver.dispatcher.state.tasks.queued == 1


def test_actors_take_turns(driver):
    for name in ("a", "b", "c"):
        driver.actor(name, tasks=2)
    driver.put(*group("g", 5))
    assert [ids(driver.leases(name)) for name in ("a", "b", "c")] == [["g.0", "g.3"], ["g.1", "g.4"], ["g.2"]]


def test_a_task_put_twice_runs_once_also_after_it_is_over(driver):
    driver.put(*group("g"), *group("g"))
    driver.put(*group("g"))
    driver.actor()
    leases = driver.leases()
    assert ids(leases) == ["g.0", "g.1"]
    for lease in leases:
        driver.segment("actor", lease)
    driver.commit(driver.deliveries()[0].unit_id)
    driver.put(*group("g"))
    assert driver.leases() == []


def test_a_full_queue_refuses_all_of_a_message_and_names_the_limit():
    driver = Driver(max_queued_tasks=3)
    driver.learner()
    driver.put(*group("g", 2))
    (refused,) = [m for m in driver.put(*group("h", 2)) if isinstance(m, Refused)]
    assert refused.code == "queue_full"
    assert "max_queued_tasks" in refused.message
    assert driver.dispatcher.state.tasks.queued == 2
    assert driver.put(*group("i", 1)) == []


def test_a_group_takes_no_more_members_than_its_size(driver):
    driver.put(*group("g", 2))
    extra = group("g", 3)[2:]
    assert [m.code for m in driver.put(*extra)] == ["bad_task"]
    assert driver.dispatcher.state.tasks.queued == 2


def test_without_progress_a_lease_ends_and_the_old_holder_is_told(driver):
    driver.put(*group("g", 1))
    driver.actor("a")
    (lease,) = driver.leases("a")
    driver.actor("b", tasks=0)
    driver.wait(9.0)
    assert driver.got("a", CancelTask) == []
    # A sign of life is not progress.
    driver.say("a", TaskCredit(tasks=0))
    driver.wait(1.5)
    assert [c.lease_id for c in driver.got("a", CancelTask)] == [lease.lease_id]
    (again,) = driver.leases("a") + driver.leases("b")
    assert (again.task.task_id, again.attempt) == ("g.0", 1)


def test_progress_in_heartbeats_and_segments_renews_a_lease(driver):
    driver.put(*group("g", 1, deadline_s=1000.0))
    driver.actor("a", tasks=1)
    (lease,) = driver.leases("a")
    for beat in range(5):
        driver.wait(8.0)
        driver.say("a", Heartbeat(progress=beat + 1, busy=True))
    for index in range(3):
        driver.wait(8.0)
        ack = driver.segment("a", lease, index, offset=4 * index, status="unfinished")
        assert ack.status == "stored"
    assert driver.got("a", CancelTask) == []


def test_no_progress_keeps_a_lease_past_the_task_s_own_deadline(driver):
    driver.put(*group("g", 1, deadline_s=20.0))
    driver.actor("a", tasks=1)
    driver.wait(29.0, beating=("a",), progress=lambda peer, now: now)
    assert driver.got("a", CancelTask) == []
    driver.wait(2.0, beating=("a",), progress=lambda peer, now: now)
    assert len(driver.got("a", CancelTask)) == 1


@pytest.mark.parametrize("cause", ["death", "goodbye", "incarnation"])
def test_what_a_lost_actor_ran_goes_to_the_front_in_its_old_order(cause):
    driver = Driver(heartbeat_s=1.0)
    driver.learner()
    driver.put(*group("g", 4))
    driver.actor("a", tasks=2)
    driver.leases("a")
    driver.actor("b", tasks=0)
    if cause == "death":
        driver.wait(6.0, beating=("b",))
    elif cause == "goodbye":
        driver.say("a", Goodbye())
    else:
        driver.hello("actor", "a", incarnation=2)
    driver.say("b", TaskCredit(tasks=9))
    leases = driver.leases("b")
    assert ids(leases) == ["g.0", "g.1", "g.2", "g.3"]
    assert [lease.attempt for lease in leases] == [1, 1, 0, 0]


def test_an_old_attempt_s_segments_are_refused_and_what_it_sent_is_let_go(driver):
    driver.put(*group("g", 1))
    driver.actor("a", tasks=1)
    (lease,) = driver.leases("a")
    assert driver.segment("a", lease, 0, status="unfinished").status == "stored"
    driver.wait(11.0)
    assert driver.held == 0
    ack = driver.segment("a", lease, 1, offset=4)
    assert (ack.status, ack.reason.partition(":")[0]) == ("refused", "superseded")
    assert driver.dispatcher.state.ledger.outcomes["superseded"].tokens == 4
    assert driver.balanced()


def test_a_rejected_task_goes_to_another_actor(driver):
    driver.actor("a")
    driver.put(*group("g", 1))
    driver.actor("b")
    (lease,) = driver.leases("a")
    driver.say("a", TaskRejected(lease_id=lease.lease_id, reason="unknown environment"))
    assert driver.leases("a") == []
    (again,) = driver.leases("b")
    assert again.attempt == 1


def test_a_rejected_task_comes_back_to_the_only_actor_after_a_second(driver):
    driver.actor("a")
    driver.put(*group("g", 1))
    (lease,) = driver.leases("a")
    driver.say("a", TaskRejected(lease_id=lease.lease_id, reason="unknown environment"))
    assert driver.leases("a") == []
    driver.wait(1.2)
    assert len(driver.leases("a")) == 1


@pytest.mark.parametrize("reason", ["draining", "full"])
def test_a_draining_or_full_actor_costs_no_attempt_and_gets_nothing_more(driver, reason):
    driver.actor("a")
    driver.put(*group("g", 3))
    for lease in driver.leases("a"):
        driver.say("a", TaskRejected(lease_id=lease.lease_id, reason=reason))
    driver.wait(5.0)
    assert driver.leases("a") == []
    assert all(driver.dispatcher.state.tasks.get(f"g.{i}").losses == 0 for i in range(3))


def test_a_task_lost_too_often_is_given_up_and_its_group_dropped(driver):
    driver.put(*group("g", 1))
    for attempt in range(3):
        driver.actor(f"a{attempt}", tasks=1)
        (lease,) = driver.leases(f"a{attempt}")
        assert lease.attempt == attempt
        driver.say(f"a{attempt}", TaskRejected(lease_id=lease.lease_id, reason="broken"))
    (dropped,) = driver.dropped()
    assert (dropped.group_id, dropped.trajectories, dropped.reason) == ("g", 1, "given_up")
    assert driver.dispatcher.state.tasks.queued == driver.dispatcher.state.tasks.leased == 0
    assert driver.dispatcher.state.assembly.groups == {}


def test_an_evaluation_task_that_is_given_up_is_reported(driver):
    driver.put(evaluation("ev"))
    for attempt in range(3):
        driver.actor(f"a{attempt}", tasks=1)
        (lease,) = driver.leases(f"a{attempt}")
        driver.say(f"a{attempt}", TaskRejected(lease_id=lease.lease_id, reason="broken"))
    assert [(d.group_id, d.reason) for d in driver.dropped()] == [("ev", "given_up")]


def test_memory_of_tasks_that_are_over_is_bounded(driver, monkeypatch):
    driver.dispatcher.state.tasks.over._size = 10
    driver.actor()
    for number in range(40):
        driver.put(*group(f"g{number}", 1))
        for lease in driver.leases():
            driver.segment("actor", lease)
        for delivery in driver.deliveries():
            driver.commit(delivery.unit_id)
        driver.say("actor", TaskCredit(tasks=1))
    assert len(driver.dispatcher.state.tasks.over) == 10
    assert driver.dispatcher.state.tasks._live == {}
    assert driver.dispatcher.state.deliveries._units == {}


def test_tasks_given_back_return_to_their_actor_if_no_other_takes_any(driver):
    driver.actor("a", tasks=140)
    driver.actor("idle", tasks=0)
    driver.put(*group("g", 70))
    for lease in driver.leases("a"):
        driver.say("a", TaskRejected(lease_id=lease.lease_id, reason="no generator", fault=False))
    driver.wait(5.0, beating=("learner", "a", "idle"))
    assert driver.leases("a") == []
    driver.wait(7.0, beating=("learner", "a", "idle"))
    assert len(driver.leases("a")) == 70


def test_a_task_that_is_given_back_again_and_again_is_given_up_in_the_end(driver):
    """Its prompt may end each generator that gets it."""
    driver.actor("a", tasks=100)
    driver.put(*group("g", 1))
    attempts = 0
    while leases := driver.leases("a"):
        attempts += 1
        driver.say("a", TaskRejected(lease_id=leases[0].lease_id, reason="no generator", fault=False))
        driver.wait(2.0, beating=("learner", "a"))
    assert attempts == MAX_FREE_ATTEMPTS + driver.dispatcher.config.max_attempts
    assert [(d.group_id, d.reason) for d in driver.dropped()] == [("g", "given_up")]

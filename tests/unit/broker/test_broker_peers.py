"""Test joining, liveness, incarnations, epochs, statistics and the drain."""

from broker.core.state import gauges_of
from protocol.messages.episodes import CancelTask, Commit, DeliveryCredit, LeaseTask, PutTasks, TaskCredit
from protocol.messages.peers import (
    Drain,
    Goodbye,
    Heartbeat,
    Hello,
    PublishWeights,
    QueueStats,
    Refused,
    Welcome,
)
from tests.broker_driver import Driver, group


def names(messages):
    return [type(message).__name__ for message in messages]


def refusal(answers):
    (refused,) = [message for message in answers if isinstance(message, Refused)]
    return refused.code, refused.fatal


def test_a_peer_that_speaks_before_hello_is_told_to_say_hello():
    driver = Driver()
    assert refusal(driver.say("actor", Heartbeat())) == ("unknown_peer", False)
    assert driver.say("actor", Goodbye()) == []
    welcome = driver.hello("actor", "actor")[0]
    assert isinstance(welcome, Welcome)
    assert (welcome.run, welcome.heartbeat_s, welcome.policy_version) == ("run", 1.0, 0)
    assert names(driver.say("actor", Heartbeat())) == ["Heartbeat"]


def test_a_welcome_says_which_hello_it_answers():
    driver = Driver()
    assert [driver.hello("actor", "a", attempt=n)[0].attempt for n in (0, 1, 7)] == [0, 1, 7]


def test_hello_must_name_the_routing_id():
    driver = Driver()
    assert refusal(driver.say("a", Hello(role="actor", peer="b", incarnation=1))) == ("bad_hello", True)


def test_messages_of_the_wrong_role_and_direction_are_refused():
    driver = Driver()
    driver.actor()
    driver.learner()
    assert refusal(driver.say("actor", PutTasks(tasks=[]))) == ("wrong_role", False)
    assert refusal(driver.say("learner", TaskCredit(tasks=1))) == ("wrong_role", False)
    assert refusal(driver.say("actor", Drain())) == ("unexpected", False)


def test_five_missed_beats_are_death_and_any_message_is_life():
    driver = Driver(heartbeat_s=1.0)
    driver.actor()
    for _ in range(4):
        driver.wait(4.0)
        driver.say("actor", TaskCredit(tasks=0))
    driver.wait(4.8)
    assert driver.dispatcher.state.peers.get("actor") is not None
    driver.wait(0.5)
    assert driver.dispatcher.state.peers.get("actor") is None
    assert refusal(driver.say("actor", Heartbeat())) == ("unknown_peer", False)


def test_a_newer_incarnation_replaces_and_an_older_one_is_refused():
    driver = Driver()
    driver.learner()
    driver.put(*group("g"))
    driver.actor(incarnation=5)
    assert len(driver.leases()) == 2
    assert refusal(driver.hello("actor", "actor", incarnation=4)) == ("stale_incarnation", True)
    driver.hello("actor", "other")
    driver.say("other", TaskCredit(tasks=9))
    driver.hello("actor", "actor", incarnation=6)
    assert [lease.attempt for lease in driver.leases("other")] == [1, 1]


def test_the_same_incarnation_keeps_its_leases_and_starts_without_credit():
    driver = Driver(segment_credit=8)
    driver.learner()
    driver.put(*group("g"), *group("h"))
    driver.actor(tasks=3)
    (first, *_) = driver.leases()
    assert driver.credit() == 8
    driver.hello("actor", "actor", incarnation=1)
    assert driver.credit() == 8
    # The broker sends the leases again, before the Welcome.
    assert len(driver.leases()) == 3
    # Task credit counts from zero.
    assert driver.leases() == []
    driver.say("actor", TaskCredit(tasks=1))
    assert len(driver.leases()) == 1
    assert driver.segment("actor", first).status == "stored"


def test_a_lower_epoch_is_refused_and_a_higher_one_takes_over():
    driver = Driver()
    driver.learner(epoch=2)
    driver.put(*group("g"))
    driver.actor()
    for lease in driver.leases():
        driver.segment("actor", lease)
    (first,) = driver.deliveries()
    late = Hello(role="learner", peer="late", incarnation=1, epoch=1)
    assert refusal(driver.say("late", late)) == ("stale_epoch", True)
    driver.say("next", Hello(role="learner", peer="next", incarnation=1, epoch=3))
    assert [r.code for r in driver.got("learner", Refused)] == ["stale_epoch"]
    driver.say("next", DeliveryCredit(units=1))
    (again,) = driver.take("next", type(first))
    assert (again.unit_id, again.redelivered) == (first.unit_id, True)
    answers = driver.say("learner", Commit(epoch=2, step=1, trained=[first.unit_id]))
    assert refusal(answers) == ("unknown_peer", False)


def test_commit_and_weights_of_another_epoch_are_refused():
    driver = Driver()
    driver.learner(epoch=2)
    assert refusal(driver.commit("d1", epoch=1)) == ("stale_epoch", True)
    stale = PublishWeights(epoch=1, version=9, manifest="m")
    assert refusal(driver.say("learner", stale)) == ("stale_epoch", True)
    assert driver.dispatcher.learners.policy_version == 0
    driver.publish(5, epoch=2)
    assert refusal(driver.publish(4, epoch=2)) == ("stale_version", False)
    assert driver.dispatcher.learners.policy_version == 5


def test_a_version_with_a_line_that_cannot_be_is_refused():
    driver = Driver()
    driver.learner()
    driver.publish(3)
    for line in ([(4, 4)], [(2, 5)], [(1, 3), (0, 3)], [(1, 4), (1, 2)]):
        assert refusal(driver.publish(4, line=line)) == ("bad_line", False)
    assert driver.dispatcher.learners.policy_version == 3
    assert driver.publish(5, line=[(2, 5)]) == []
    assert driver.publish(5, line=[(2, 5)]) == [], "told again after another join"
    assert driver.publish(6, line=[(2, 5)]) == []
    assert driver.dispatcher.learners.policy_version == 6
    assert driver.dispatcher.state.line.forks == ((2, 5),)


def test_of_one_epoch_only_one_learner_lives():
    driver = Driver()
    driver.learner(epoch=1)
    second = Hello(role="learner", peer="second", incarnation=1, epoch=1)
    assert refusal(driver.say("second", second)) == ("second_learner", False)
    driver.say("learner", Goodbye())
    assert names(driver.say("second", second)) == ["Welcome", "Held"]


def test_a_silent_learner_that_comes_back_may_commit_what_it_held():
    driver = Driver()
    driver.learner()
    driver.put(*group("g"))
    driver.actor()
    for lease in driver.leases():
        driver.segment("actor", lease)
    (delivery,) = driver.deliveries()
    driver.wait(10.0)
    assert driver.dispatcher.learners.learner is None
    driver.learner()
    assert [d.unit_id for d in driver.deliveries()] == [delivery.unit_id]
    driver.commit(delivery.unit_id)
    assert driver.held == 0


def test_a_repeated_hello_is_no_standstill():
    driver = Driver(heartbeat_s=1000.0, task_lease_s=10.0, delivery_lease_s=20.0)
    driver.learner()
    driver.put(*group("g", 1), *group("h", 1, deadline_s=1000.0))
    driver.actor()
    done, running = driver.leases()
    driver.segment("actor", done)
    assert len(driver.deliveries()) == 1
    driver.wait(9.0)
    driver.actor(tasks=0)
    driver.learner()
    assert len(driver.deliveries()) == 1
    driver.wait(9.0)
    assert driver.got("actor", CancelTask) == []
    driver.wait(2.0)
    assert [c.lease_id for c in driver.got("actor", CancelTask)] == [running.lease_id]


def test_a_restarted_learner_process_gets_its_deliveries_again():
    driver = Driver()
    driver.hello("learner", "learner", incarnation=1, epoch=1)
    driver.say("learner", DeliveryCredit(units=9))
    driver.put(*group("g"))
    driver.actor()
    for lease in driver.leases():
        driver.segment("actor", lease)
    assert len(driver.deliveries()) == 1
    driver.hello("learner", "learner", incarnation=2, epoch=1)
    driver.say("learner", DeliveryCredit(units=9))
    assert [d.redelivered for d in driver.deliveries()] == [True]


def test_statistics_reach_the_learner_each_second_with_gauges_put_together():
    driver = Driver()
    driver.learner()
    driver.hello("generator", "g0", endpoint="x")
    driver.hello("generator", "g1", endpoint="y")
    driver.actor()
    gauges = {"tokens_total": 10.0, "idle_share": 0.5, "policy_version": 4.0, "pause_seconds": 1.0}
    driver.say("g0", Heartbeat(gauges=gauges))
    driver.say("g1", Heartbeat(gauges={"tokens_total": 5.0, "idle_share": 0.0, "policy_version": 2.0}))
    driver.say("actor", Heartbeat(gauges={"episodes_running": 7.0}))
    driver.wait(3.05)
    stats = driver.got("learner", QueueStats)
    assert len(stats) == 3
    assert stats[-1].gauges["generator/tokens_total"] == 15.0
    assert stats[-1].gauges["generator/idle_share"] == 0.25
    assert stats[-1].gauges["generator/policy_version"] == 3.0
    assert stats[-1].gauges["generator/pause_seconds"] == 1.0
    assert stats[-1].gauges["actor/episodes_running"] == 7.0
    assert stats[-1].gauges["broker/tasks_queued"] == 0.0
    driver.say("g0", Goodbye())
    # Totals outlive their peer.
    assert gauges_of(driver.dispatcher.state)["generator/tokens_total"] == 15.0
    assert gauges_of(driver.dispatcher.state)["generator/idle_share"] == 0.0


def test_totals_of_a_peer_that_was_only_silent_are_counted_once():
    driver = Driver()
    driver.hello("generator", "g0", endpoint="x")
    driver.say("g0", Heartbeat(gauges={"tokens_total": 10.0}))
    driver.wait(10.0)
    assert gauges_of(driver.dispatcher.state)["generator/tokens_total"] == 10.0
    driver.hello("generator", "g0", endpoint="x")
    driver.say("g0", Heartbeat(gauges={"tokens_total": 12.0}))
    assert gauges_of(driver.dispatcher.state)["generator/tokens_total"] == 12.0
    driver.hello("generator", "g0", incarnation=2, endpoint="x")
    driver.say("g0", Heartbeat(gauges={"tokens_total": 1.0}))
    assert gauges_of(driver.dispatcher.state)["generator/tokens_total"] == 13.0


def test_gauges_of_a_heartbeat_are_bounded():
    driver = Driver()
    driver.actor()
    driver.say("actor", Heartbeat(gauges={"x" * 100: 1.0, **{f"g{i}": 1.0 for i in range(1000)}}))
    assert len(driver.dispatcher.state.peers.get("actor").heartbeat.gauges) == 63


def test_drain_asks_everybody_waits_and_leases_nothing_more():
    driver = Driver()
    driver.learner()
    driver.actor(tasks=0)
    driver.put(*group("g"))
    driver.dispatcher.drain("SIGTERM", driver.now)
    driver.say("actor", TaskCredit(tasks=5))
    assert driver.got("actor", LeaseTask) == []
    assert not driver.dispatcher.drained(driver.now)
    driver.say("actor", Goodbye())
    driver.say("learner", Goodbye())
    assert driver.dispatcher.drained(driver.now)


def test_drain_ends_after_five_seconds_whatever_peers_do():
    driver = Driver()
    driver.actor()
    driver.dispatcher.drain("SIGTERM", driver.now)
    assert not driver.dispatcher.drained(driver.now + 4.9)
    assert driver.dispatcher.drained(driver.now + 5.1)
    joined = driver.hello("actor", "late")
    assert "Drain" in names(joined)

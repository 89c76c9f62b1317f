"""The end of a run reaches every host, and nobody waits for ever for what is gone."""

import pytest

from broker.core.dispatch import DRAIN_S
from broker.core.fleet import Limits
from broker.status import status
from protocol.messages.peers import Drain, Goodbye, Hello
from tests.broker_driver import Driver, group


def fleet(**settings):
    """Return a broker with a learner, an actor and a generator, whose limits are short."""
    driver = Driver(**settings)
    driver.dispatcher._limits = Limits(orphan_s=60.0, over_s=25.0)
    driver.learner()
    driver.actor("a")
    generator(driver)
    return driver


def generator(driver):
    driver.hello("generator", "g", endpoint="tcp://g")


def let(driver, seconds, *peers, step=0.5):
    """Let time pass, in which these peers make progress."""
    driver.wait(seconds, beating=peers, progress=lambda peer, now: now, step=step)


def drains(driver, *peers):
    return [[m.then for m in driver.sent.get(peer, []) if isinstance(m, Drain)] for peer in peers]


def drained(driver, reason="the run is over"):
    """Do what the process around the dispatcher does once the run is over."""
    driver._note(driver.dispatcher.drain(reason, driver.now))


def test_a_learner_that_is_done_ends_the_run_and_the_broker_waits_for_every_peer():
    driver = fleet()
    assert not driver.dispatcher.over
    driver.say("learner", Goodbye(then="over"))
    assert driver.dispatcher.over
    drained(driver)
    assert drains(driver, "a", "g") == [["over"], ["over"]]
    let(driver, 20.0, "a", "g")
    assert not driver.dispatcher.drained(driver.now), "episodes may take longer than after a signal"
    driver.say("a", Goodbye())
    assert not driver.dispatcher.drained(driver.now)
    driver.say("g", Goodbye())
    assert driver.dispatcher.drained(driver.now)


def test_a_peer_that_stays_does_not_hold_the_end_up():
    driver = fleet()
    driver.say("learner", Goodbye(then="over"))
    drained(driver)
    let(driver, 25.2, "a", "g")
    assert driver.dispatcher.drained(driver.now)


def test_a_peer_that_was_away_hears_of_the_end_when_it_comes_back():
    driver = fleet()
    driver.say("learner", Goodbye(then="over"))
    drained(driver)
    driver.wait(10.0)
    driver.sent.clear()
    driver.say("g", Hello(role="generator", peer="g", incarnation=1, endpoint="tcp://g"))
    assert drains(driver, "g") == [["over"]]


@pytest.mark.parametrize("then", ["", "resumed"])
def test_a_learner_that_comes_back_ends_nothing(then):
    driver = fleet()
    driver.say("learner", Goodbye(then=then))
    let(driver, 30.0, "a", "g")
    assert not driver.dispatcher.over
    assert drains(driver, "a", "g") == [[], []]


def test_only_the_live_learner_can_end_the_run():
    driver = fleet()
    for peer in ("a", "g"):
        driver.say(peer, Goodbye(then="over"))
    assert not driver.dispatcher.over


def test_at_a_signal_the_peers_learn_that_the_run_goes_on():
    driver = fleet()
    drained(driver, "the broker is ending")
    assert drains(driver, "a", "g", "learner") == [["resumed"]] * 3
    let(driver, DRAIN_S + 0.2, "a", "g")
    assert driver.dispatcher.drained(driver.now)


def test_peers_without_a_learner_are_sent_away_once_and_only_after_their_own_wait():
    driver = fleet()
    driver.put(*group("g0"))
    driver.say("learner", Goodbye(then="resumed"))
    let(driver, 40.0, "a", "g")
    driver.actor("late")
    let(driver, 25.0, "a", "g", "late")
    assert drains(driver, "a", "g", "late") == [["resumed"], ["resumed"], []]
    (why,) = [m.reason for m in driver.sent["a"] if isinstance(m, Drain)]
    assert why == (
        "no learner has been there for 1 minutes (fleet.orphan_minutes); start this process again when one is"
    )
    let(driver, 40.0, "a", "g", "late")
    assert drains(driver, "a", "g", "late") == [["resumed"]] * 3


def test_a_learner_that_comes_back_in_time_keeps_its_peers():
    driver = fleet()
    for _ in range(3):
        driver.say("learner", Goodbye(then="resumed"))
        let(driver, 50.0, "a", "g")
        driver.learner()
        let(driver, 1.0, "a", "g", "learner")
    assert drains(driver, "a", "g") == [[], []]


def test_without_a_limit_nobody_is_sent_away():
    driver = Driver()
    driver.actor("a")
    let(driver, 10_000.0, "a", step=4.0)
    assert drains(driver, "a") == [[]]


# --- capacity ---------------------------------------------------------------------------------------------


def no_capacity(driver):
    page = driver.dispatcher.state.capacity
    return round(page.spell_s), page.missing


def test_tasks_without_a_generator_are_no_capacity_and_it_is_counted():
    driver = fleet()
    let(driver, 5.0, "learner", "a", "g")
    assert no_capacity(driver) == (0, ""), "without tasks nothing is missing"
    driver.put(*group("g0"))
    let(driver, 5.0, "learner", "a", "g")
    assert no_capacity(driver) == (0, "")
    driver.say("g", Goodbye())
    let(driver, 10.0, "learner", "a")
    assert no_capacity(driver) == (10, "no generator serves")
    page = status(driver.dispatcher, driver.now)
    assert page["fleet"]["no_capacity_s"] == pytest.approx(10.0, abs=0.5)
    assert page["waits"][0] == "no capacity for 10 s: 2 tasks wait, no generator serves"
    assert page["gauges"]["fleet/no_capacity_now_seconds"] == pytest.approx(10.0, abs=0.5)
    driver.say("a", Goodbye())
    let(driver, 2.0, "learner")
    assert no_capacity(driver) == (12, "no generator serves and no actor has joined")
    generator(driver)
    driver.actor("a")
    let(driver, 3.0, "learner", "a", "g")
    assert no_capacity(driver) == (0, "")
    assert driver.dispatcher.state.capacity.total_s == pytest.approx(12.0, abs=0.5)

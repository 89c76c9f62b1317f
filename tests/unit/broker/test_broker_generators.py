"""Test what generators hear of weights, and what actors hear of generators."""

from protocol.messages.peers import Generators, Goodbye, Heartbeat, WeightsReady
from tests.broker_driver import Driver


def offered(driver, actor="actor"):
    return [info.peer for info in driver.got(actor, Generators)[-1].generators]


def test_weights_reach_generators_at_once_and_those_that_join_later():
    driver = Driver()
    driver.learner()
    driver.hello("generator", "g0", endpoint="tcp://127.0.0.1:1")
    assert driver.got("g0", WeightsReady) == []
    driver.publish(3)
    driver.hello("generator", "g1", endpoint="tcp://127.0.0.1:2")
    wanted = WeightsReady(epoch=1, version=3, manifest="v3")
    assert driver.got("g0", WeightsReady) == [wanted]
    assert driver.got("g1", WeightsReady) == [wanted]
    assert driver.hello("actor", "a")[0].policy_version == 3


def test_a_generator_that_missed_the_announcement_hears_it_again_until_it_serves_the_version():
    driver = Driver()
    driver.learner()
    driver.hello("generator", "g0", endpoint="tcp://127.0.0.1:1")
    driver.publish(3)
    driver.take("g0", WeightsReady)
    for _ in range(12):
        driver.now += 1.0
        driver.say("g0", Heartbeat(policy_version=2))
    assert [ready.version for ready in driver.take("g0", WeightsReady)] == [3, 3]
    driver.now += 60.0
    driver.say("g0", Heartbeat(policy_version=3))
    assert driver.take("g0", WeightsReady) == []


def test_actors_hear_of_every_change_of_generators():
    driver = Driver()
    driver.actor()
    assert offered(driver) == []
    driver.hello("generator", "g0", endpoint="tcp://127.0.0.1:1")
    assert offered(driver) == ["g0"]
    changes = len(driver.got("actor", Generators))
    driver.say("g0", Heartbeat(policy_version=2))
    driver.wait(0.5, beating=["g0", "actor"])
    # A new policy version is no change.
    assert len(driver.got("actor", Generators)) == changes
    driver.actor("late")
    assert offered(driver, "late") == ["g0"]
    driver.say("g0", Goodbye())
    assert offered(driver) == []


def test_a_generator_without_an_endpoint_is_not_offered():
    driver = Driver()
    driver.actor()
    driver.hello("generator", "g0")
    assert offered(driver) == []


def test_a_generator_that_stands_still_with_work_is_not_offered_until_it_moves():
    driver = Driver(generator_stall_s=3.0)
    driver.actor()
    driver.hello("generator", "g0", endpoint="tcp://127.0.0.1:1")
    driver.say("g0", Heartbeat(progress=5, busy=False))
    beating = ("actor", "g0")
    driver.wait(2.5, beating=beating, progress=lambda peer, now: 5.0)
    assert offered(driver) == ["g0"]
    driver.wait(1.0, beating=beating, progress=lambda peer, now: 5.0)
    assert offered(driver) == []
    driver.say("g0", Heartbeat(progress=6, busy=True))
    assert offered(driver) == ["g0"]


def test_an_idle_generator_is_healthy_however_long():
    driver = Driver(generator_stall_s=3.0)
    driver.actor()
    driver.hello("generator", "g0", endpoint="tcp://127.0.0.1:1")
    for _ in range(20):
        driver.now += 1.0
        driver.say("g0", Heartbeat(progress=5, busy=False))
    driver.say("g0", Heartbeat(progress=5, busy=True))
    assert offered(driver) == ["g0"]


def marked(driver):
    """Return the generators that the newest list says are too far behind."""
    return [info.peer for info in driver.got("actor", Generators)[-1].generators if info.behind]


def test_a_generator_beyond_the_lag_bound_is_marked_while_others_are_within_it():
    driver = Driver(lag=4)
    driver.learner()
    driver.actor()
    for name in ("quick", "slow"):
        driver.hello("generator", name, endpoint=f"tcp://{name}")
    serves = {"quick": 0, "slow": 0}

    def let(seconds, newest=None):
        if newest is not None:
            driver.publish(newest)
        for _ in range(int(2 * seconds)):
            driver.now += 0.5
            for name in ("learner", "actor", *serves):
                driver.say(name, Heartbeat(policy_version=serves.get(name, 0)))
            driver._note(driver.dispatcher.tick(driver.now))

    serves["quick"] = 4
    let(20, newest=4)
    assert marked(driver) == [], "four versions behind are within the bound"
    serves["quick"] = 5
    let(4, newest=5)
    assert marked(driver) == [], "it may be loading"
    let(3)
    assert marked(driver) == ["slow"]
    lists = len(driver.got("actor", Generators))
    for version in range(6, 30):
        serves["quick"] = version
        let(1, newest=version)
    assert len(driver.got("actor", Generators)) == lists, "the same word is not repeated with each version"
    # Where all are beyond the bound, none is worse than the others.
    serves["quick"] = 20
    let(8)
    assert marked(driver) == []
    serves.update(quick=30, slow=29)
    let(8, newest=30)
    assert marked(driver) == []

"""Generators that only evaluate, in the lists that actors get."""

from broker.core.subsets import SIZE
from protocol.messages.peers import Heartbeat
from tests.broker_driver import Driver


def test_every_actor_of_a_large_fleet_has_the_evaluator_which_is_never_behind():
    driver = Driver()
    names = [f"g{number}" for number in range(SIZE + 8)]
    for number, name in enumerate(names):
        driver.hello("generator", name, endpoint=f"tcp://10.0.0.1:{number}")
    driver.hello("generator", "judge", endpoint="tcp://10.0.0.2:1", evaluates=True)
    for number in range(3):
        driver.actor(f"a{number}")
    driver.wait(5.0, beating=(*names, "judge", "a0", "a1", "a2"))
    side = driver.dispatcher.generators
    for actor in ("a0", "a1", "a2"):
        listed = side._list._list_of(actor)
        assert [info.peer for info in listed if info.evaluates] == ["judge"]
        assert len(listed) > SIZE / 2
    driver.say("judge", Heartbeat(policy_version=0))
    assert not any(info.behind for info in side._list.offered.values() if info.evaluates)

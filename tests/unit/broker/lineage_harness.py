"""A broker with one learner and one actor, and what its learner is told."""

from protocol.messages.episodes import Held
from tests.broker_driver import Driver, group


def begun():
    """Return a broker with a learner of epoch and lineage 1 and an actor."""
    driver = Driver(heartbeat_s=1000.0, task_lease_s=1000.0, max_deliveries=3)
    driver.learner(epoch=1, lineage=1)
    driver.actor()
    return driver


def make(driver, *names):
    """Finish rollout groups of one. Return the ids of the delivered units."""
    driver.put(*(task for name in names for task in group(name, 1)))
    for lease in driver.leases():
        assert driver.segment("actor", lease).status == "stored"
    return units(driver)


def units(driver):
    return [delivery.unit_id for delivery in driver.deliveries()]


def held(driver):
    """Return the task ids and unit ids of the last Held, which may span several messages."""
    said = driver.take("learner", Held)
    begin = max((n for n, one in enumerate(said[:-1], start=1) if not one.more), default=0)
    last = said[begin:]
    return sorted(i for one in last for i in one.task_ids), sorted(i for one in last for i in one.unit_ids)


def tokens(driver, outcome):
    return driver.dispatcher.state.ledger.outcomes[outcome].tokens

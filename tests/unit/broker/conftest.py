"""A broker with a learner and an actor, for the tests of units."""

import pytest

from tests.broker_driver import Driver


@pytest.fixture
def driver():
    driver = Driver(
        lag=2, heartbeat_s=1000.0, group_deadline_s=30.0, delivery_lease_s=50.0, task_lease_s=1000.0
    )
    driver.learner()
    driver.actor()
    return driver

"""Test who waits for whom, and the two pages of numbers."""

import json

from broker.metrics import prometheus
from broker.status import status
from protocol.messages.episodes import Commit, Failure, TaskRejected
from protocol.messages.peers import Heartbeat
from tests.broker_driver import Driver, group


def said(driver):
    return status(driver.dispatcher, driver.now)["waits"]


def test_without_a_learner_everybody_waits_for_one():
    driver = Driver()
    driver.actor("a0")
    assert said(driver) == [
        "everybody waits for a learner: none has joined",
        "a0 waits for tasks, it has room for 100 more episodes",
    ]


def test_a_group_in_the_making_is_counted():
    driver = Driver()
    driver.learner()
    assert said(driver) == [
        "learner waits for groups: no tasks are under way, and the learner has put no others"
    ]
    driver.put(*group("g12", 3))
    assert said(driver) == ["learner waits for groups: 3 tasks wait for an actor, none has joined"]
    driver.actor("a0", tasks=3)
    driver.hello("generator", "g0", endpoint="x")
    first, _, _ = driver.leases("a0")
    driver.segment("a0", first)
    assert (
        said(driver)[0]
        == "learner waits for groups: actors run 2 tasks; of 1 group some members are still out"
    )


def test_units_wait_for_credit():
    driver = Driver()
    driver.learner(credit=0)
    driver.put(*group("g", 1), *group("h", 1))
    driver.actor("a0", tasks=2)
    for lease in driver.leases("a0"):
        driver.segment("a0", lease)
    assert said(driver) == ["2 groups wait for learner to ask for more"]


def test_a_full_broker_and_a_standing_generator_are_named():
    driver = Driver(max_queued_segments=2, segment_credit=2, heartbeat_s=1000.0, generator_stall_s=3.0)
    driver.learner(credit=0)
    driver.put(*group("g", 1), *group("h", 1))
    driver.actor("a0", tasks=2)
    driver.hello("generator", "g0", endpoint="x")
    driver.say("g0", Heartbeat(busy=True, gauges={"running_requests": 3.0}))
    for lease in driver.leases("a0"):
        driver.segment("a0", lease)
    driver.wait(4.0, beating=("a0", "g0", "learner"))
    driver.say("a0", Heartbeat(gauges={"segments_waiting": 2.0}))
    driver.say("g0", Heartbeat(busy=True, gauges={"running_requests": 3.0}))
    assert any(
        line.startswith("a0 waits for segment credit with 2 segments: the broker holds 2")
        for line in said(driver)
    )
    (standing,) = [line for line in said(driver) if "g0" in line]
    assert standing.startswith("g0 has 3 requests without a step of its engine for 4")


def test_the_pages_have_peers_queues_and_the_ledger():
    driver = Driver()
    driver.learner()
    driver.put(*group("g", 2))
    driver.actor("a0", tasks=2)
    first, _ = driver.leases("a0")
    driver.segment("a0", first)
    driver.hello("generator", "g0", endpoint="x")
    driver.say("g0", Heartbeat(gauges={"tokens per second!": 5.0}))
    driver.now += 0.5
    page = json.loads(json.dumps(status(driver.dispatcher, driver.now)))
    assert {peer["name"]: peer["silent_s"] for peer in page["peers"]} == {
        "learner": 0.5,
        "a0": 0.5,
        "g0": 0.5,
    }
    (actor,) = [peer for peer in page["peers"] if peer["role"] == "actor"]
    assert (actor["leases"], actor["task_credit"]) == (["g.1.0"], 0)
    assert page["queues"]["segments_held"] == 1
    assert page["ledger"]["held_tokens"] == page["ledger"]["stored"]["tokens"] == 4
    text = prometheus(driver.dispatcher, driver.now).decode()
    assert 'offbeat_peer_silence_seconds{peer="a0",role="actor"} 0.5' in text
    assert "offbeat_generator_tokens_per_second_ 5.0" in text
    assert 'offbeat_tasks_total{event="leased"} 2.0' in text


def test_tokens_trained_again_are_told_apart_from_those_trained_once():
    driver = Driver()
    driver.learner()
    driver.put(*group("g", 1))
    driver.actor()
    (lease,) = driver.leases()
    driver.segment("actor", lease, status="finished")
    (delivery,) = driver.deliveries()
    driver.say("learner", Commit(epoch=1, step=1, trained=[delivery.unit_id], replayed_tokens=7))
    ledger = status(driver.dispatcher, driver.now)["ledger"]
    assert (ledger["outcomes"]["trained"]["tokens"], ledger["replayed_tokens"], ledger["held_tokens"]) == (
        4,
        7,
        0,
    )
    assert (
        'offbeat_tokens_total{outcome="replayed"} 7.0' in prometheus(driver.dispatcher, driver.now).decode()
    )


def test_the_status_says_what_share_of_the_episodes_failed_and_why():
    driver = Driver()
    driver.learner()
    driver.put(*group("g", 4))
    driver.actor("a0", tasks=4)
    first, second, third, fourth = driver.leases("a0")
    failure = Failure(kind="KeyError", message="'answer'", place="my_task.py:23")
    driver.segment("a0", first)
    driver.segment("a0", second, status="failed", failure=failure)
    driver.segment("a0", second, status="failed", failure=failure)
    # An actor of others has no parts of the failure to send.
    driver.segment("a0", third, status="failed", error="out of paper")
    lost = Failure(message="no generator", fault=False)
    driver.say("a0", TaskRejected(lease_id=fourth.lease_id, reason="no generator", fault=False, failure=lost))
    episodes = status(driver.dispatcher, driver.now)["episodes"]
    assert {name: value for name, value in episodes.items() if name != "failures"} == {
        "ended": 3,
        "failed": 2,
        "recent": 3,
        "recent_failed": 2,
        "why": "KeyError: 'answer' in my_task.py:23 (and 1 more kind)",
        "interrupted": 1,
        "interrupted_why": "no generator",
    }
    assert [(row["kind"], row["message"], row["count"]) for row in episodes["failures"]] == [
        ("KeyError", "'answer'", 1),
        ("", "out of paper", 1),
    ]
    json.dumps(episodes)

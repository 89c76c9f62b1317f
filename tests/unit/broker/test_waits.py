"""Test who waits for whom, as read from what a broker serves at `/status`."""

import json
from copy import deepcopy

import pytest

from broker.status import status, who_waits
from protocol.messages.episodes import TaskCredit
from protocol.messages.peers import Heartbeat
from tests.broker_driver import Driver, group

RECORDED = json.loads("""
{"run": "spell", "policy_version": 12, "epoch": 2, "delivery_unit": "group",
 "peers": [
  {"name": "learner", "role": "learner", "host": "h", "pid": 11, "silent_s": 0.4, "connected_s": 61.0, "busy": false,
   "progress": 57.0, "stalled_s": 0.0, "delivery_credit": 60, "epoch": 2,
   "gauges": {"waiting_seconds": 12.3, "units_here": 3, "units_wanted": 8}},
  {"name": "generator-0", "role": "generator", "host": "h", "pid": 12, "silent_s": 0.1, "connected_s": 70.0,
   "busy": true, "progress": 90210.0, "stalled_s": 0.2, "policy_version": 12, "endpoint": "tcp://127.0.0.1:4000",
   "gauges": {"running_requests": 24.0, "held_requests": 0.0}},
  {"name": "actor-0", "role": "actor", "host": "h", "pid": 13, "silent_s": 0.3, "connected_s": 70.0, "busy": true,
   "progress": 4000.0, "stalled_s": 0.5, "task_credit": 0, "segment_credit": 250, "leases": [], "leases_count": 24,
   "gauges": {"segments_waiting": 0.0}}],
 "generators_offered": ["generator-0"],
 "queues": {"tasks_queued": 0, "tasks_leased": 24, "groups_incomplete": 3, "units_ready": 0, "units_leased": 0,
  "segments_held": 40, "segments_in_units_leased": 0, "room_segments": 65496},
 "ledger": {"violation": ""}, "journal": {"blocked": "", "messages_waiting": 0}}
""")


def changed(**peers):
    """Return the recorded status with changed fields of some peers; None removes the peer."""
    said = deepcopy(RECORDED)
    for name, fields in peers.items():
        (peer,) = [p for p in said["peers"] if p["name"] == name.replace("_", "-")]
        if fields is None:
            said["peers"].remove(peer)
        else:
            peer.get("gauges", {}).update(fields.pop("gauges", {}))
            peer.update(fields)
    return said


def test_a_learner_waits_for_groups_and_it_is_said_for_how_many_and_why():
    assert who_waits(RECORDED) == [
        "learner waits 12.3 s for 5 of 8 groups: actors run 24 tasks; of 3 groups some members are still out"
    ]


def test_the_chain_goes_on_to_a_generator_that_stands_still():
    said = changed(generator_0={"stalled_s": 6.5}, actor_0={"stalled_s": 6.4})
    assert who_waits(said) == [
        "learner waits 12.3 s for 5 of 8 groups: actors run 24 tasks; actors wait for generator-0; "
        "of 3 groups some members are still out",
        "actor-0 has 24 episodes without progress for 6.4 s",
        "generator-0 has 24 requests without a step of its engine for 6.5 s",
    ]


def test_it_is_said_why_new_weights_do_not_arrive_and_why_an_actor_takes_no_tasks():
    why = "new weights do not arrive: set weights.http"
    said = changed(generator_0={"policy_version": 0, "note": why}, actor_0={"note": "refused our key"})
    lines = who_waits(said)
    assert "actor-0 takes no tasks: refused our key" in lines
    behind = said["policy_version"]
    assert f"generator-0 serves version 0, {behind} behind the newest: {why}" in lines


def test_no_generator_is_well():
    said = changed(generator_0=None)
    said["generators_offered"] = []
    assert who_waits(said)[0].endswith(
        "they wait for a generator, none is well; of 3 groups some members are still out"
    )
    assert who_waits(said)[1] == "actor-0 waits for a generator with 24 episodes: none is well"


def test_actors_wait_for_credit_of_a_full_broker():
    said = changed(
        learner={"busy": True},
        actor_0={"segment_credit": 0, "busy": False, "gauges": {"segments_waiting": 7}},
    )
    said["queues"] |= {"segments_held": 4096, "segments_in_units_leased": 4000, "units_ready": 9}
    assert who_waits(said) == [
        "9 groups wait for learner, which is busy",
        "actor-0 waits for segment credit with 7 segments: the broker holds 4096, 4000 of them with the learner",
    ]


def test_idle_generators_and_actors_with_room():
    said = changed(
        learner={"busy": True},
        generator_0={"busy": False, "gauges": {"running_requests": 0}},
        actor_0={"busy": False, "leases_count": 0, "task_credit": 32},
    )
    said["queues"] |= {"tasks_leased": 0, "groups_incomplete": 0}
    assert who_waits(said) == [
        "actor-0 waits for tasks, it has room for 32 more episodes",
        "generator-0 idle: no requests",
    ]


def test_silence_is_named_before_all_else():
    said = changed(learner={"silent_s": 4.2}, generator_0={"silent_s": 3.9}, actor_0={"silent_s": 4.0})
    assert who_waits(said) == [
        "everybody waits for learner: silent for 4.2 s",
        "actor-0 is silent for 4.0 s; its 24 tasks wait for it",
        "generator-0 is silent for 3.9 s",
    ]


def test_held_requests_and_versions_behind():
    said = changed(
        learner={"busy": True},
        generator_0={
            "busy": False,
            "policy_version": 9,
            "gauges": {"running_requests": 0, "held_requests": 2},
        },
    )
    assert who_waits(said) == [
        "2 requests at generator-0 wait for a policy version it does not have yet",
        "generator-0 serves version 9, 3 behind the newest",
    ]


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("journal", "blocked"), "the disk is full", "actors wait for the journal: the disk is full"),
        (("journal", "messages_waiting"), 3, "3 messages wait for the journal to be written"),
        (("ledger", "violation"), "3 tokens too many", "the ledger does not add up: 3 tokens too many"),
    ],
)
def test_faults_come_first(place, value, sentence):
    said = changed()
    said[place[0]][place[1]] = value
    assert who_waits(said)[0] == sentence


def test_nobody_but_a_learner():
    said = changed(actor_0=None, generator_0=None)
    said["queues"] |= {"tasks_leased": 0, "tasks_queued": 64, "groups_incomplete": 0}
    assert who_waits(said) == [
        "learner waits 12.3 s for 5 of 8 groups: 64 tasks wait for an actor, none has joined"
    ]


def test_it_reads_what_a_broker_really_says():
    driver = Driver()
    driver.learner(credit=4)
    assert status(driver.dispatcher, driver.now)["waits"] == [
        "learner waits for groups: no tasks are under way, and the learner has put no others"
    ]
    driver.put(*group("g", 2))
    driver.actor("a0", tasks=2)
    driver.say("a0", Heartbeat(busy=True))
    assert status(driver.dispatcher, driver.now)["waits"] == [
        "learner waits for groups: actors run 2 tasks; they wait for a generator, none is well; "
        "of 1 group some members are still out",
        "a0 waits for a generator with 2 episodes: none is well",
    ]
    for lease in driver.leases("a0"):
        driver.segment("a0", lease)
        driver.say("a0", TaskCredit(tasks=1))
    driver.say("learner", Heartbeat(busy=True, progress=1.0))
    assert status(driver.dispatcher, driver.now)["waits"] == [
        "a0 waits for tasks, it has room for 2 more episodes"
    ]


def test_a_disk_without_room_is_the_first_thing_that_is_said():
    said = changed() | {"journal": {"low": True, "why_low": "the disk has 40.0 MB free"}}
    assert who_waits(said)[0] == "actors wait for room on the disk: the disk has 40.0 MB free"


def test_a_learner_waits_for_groups_of_which_all_episodes_fail():
    said = changed() | {"episodes": {"recent": 64, "recent_failed": 64, "why": "KeyError: 'a' in t.py:3"}}
    assert who_waits(said)[0] == (
        "learner waits 12.3 s for 5 of 8 groups: all of the last 64 episodes failed: KeyError: 'a' in t.py:3"
    )
    said["episodes"]["recent_failed"] = 63
    assert "actors run 24 tasks" in who_waits(said)[0]


def test_a_learner_waits_for_groups_whose_returns_are_all_equal():
    said = changed(learner={"gauges": {"uniform_groups_in_a_row": 40.0, "uniform_return": 0.0}})
    assert who_waits(said)[0] == (
        "learner waits 12.3 s for 5 of 8 groups: in each of the last 40 groups all returns are equal (in the last "
        "one 0), so there is nothing to learn from them"
    )


def test_figures_that_cannot_be_are_not_shown():
    """The learner's heartbeat is a second old, and may want fewer units than have come since."""
    (line,) = [w for w in who_waits(changed(learner={"gauges": {"units_here": 13}})) if "learner waits" in w]
    assert line.startswith("learner waits 12.3 s for groups: ")
    for version, words in ((None, []), (0, ["generator-0 serves version 0, 12 behind the newest"]), (40, [])):
        said = changed(generator_0={"policy_version": version})
        assert [w for w in who_waits(said) if "serves version" in w] == words


def test_a_version_that_was_not_heard_yet_is_not_told():
    driver = Driver()
    driver.learner()
    driver.publish(256)
    driver.hello("generator", "g0", endpoint="tcp://g0")

    def told():
        page = status(driver.dispatcher, driver.now)
        (peer,) = [peer for peer in page["peers"] if peer["name"] == "g0"]
        return peer["policy_version"], [w for w in page["waits"] if "serves version" in w]

    assert told() == (None, [])
    driver.say("g0", Heartbeat(policy_version=256))
    assert told() == (256, [])
    driver.hello("generator", "g0", endpoint="tcp://g0")
    assert told() == (256, []), "the same process has only joined again"
    driver.hello("generator", "g0", incarnation=2, endpoint="tcp://g0")
    assert told() == (None, [])
    driver.say("g0", Heartbeat(policy_version=0))
    assert told() == (0, ["g0 serves version 0, 256 behind the newest"])


def test_a_path_that_loses_large_packets_is_shown_for_every_peer():
    trouble = "short messages pass, one of 5,000 bytes did not"
    lines = who_waits(changed(actor_0={"note": trouble}, generator_0={"note": trouble}))
    assert [line for line in lines if trouble in line] == [f"actor-0: {trouble}", f"generator-0: {trouble}"]

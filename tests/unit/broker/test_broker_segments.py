"""Test incoming segments: order, validity, duplicates, credit and bounds."""

from collections import deque

import numpy as np
import pytest

from broker.core.tasks import is_stale
from protocol.codec import decode, encode, encode_arrays, unpack_arrays
from protocol.messages.episodes import CancelTask, Commit, Sampling, Segment, TaskCredit, Turn
from protocol.messages.peers import Heartbeat
from tests.broker_driver import Driver, group, segment_frames


@pytest.fixture
def driver():
    driver = Driver(max_attempts=3, heartbeat_s=1000.0)
    driver.learner()
    driver.put(*group("g", 2))
    driver.actor()
    return driver


def outcome(ack):
    return ack.status, ack.reason.partition(":")[0]


def test_segments_are_stored_in_order_and_each_once(driver):
    lease, _ = driver.leases()
    assert outcome(driver.segment("actor", lease, 0, status="unfinished")) == ("stored", "")
    assert outcome(driver.segment("actor", lease, 0, status="unfinished")) == ("duplicate", "")
    assert outcome(driver.segment("actor", lease, 1, offset=4)) == ("stored", "")
    assert driver.held == 2
    assert driver.dispatcher.state.ledger.duplicate_segments == 1


def test_a_segment_of_a_closed_trajectory_is_a_duplicate_also_after_its_commit(driver):
    one, two = driver.leases()
    driver.segment("actor", one)
    driver.segment("actor", two)
    assert outcome(driver.segment("actor", one)) == ("duplicate", "")
    driver.commit(driver.deliveries()[0].unit_id)
    assert outcome(driver.segment("actor", one)) == ("duplicate", "")
    assert driver.held == 0


def test_a_gap_is_refused_and_the_task_starts_again(driver):
    lease, _ = driver.leases()
    driver.segment("actor", lease, 0, status="unfinished")
    ack = driver.segment("actor", lease, 2, offset=8)
    assert outcome(ack) == ("refused", "gap")
    assert "expected segment 1" in ack.reason
    assert [c.lease_id for c in driver.got("actor", CancelTask)] == [lease.lease_id]
    (again,) = driver.leases()
    assert again.attempt == 1
    assert driver.held == 0
    assert driver.segment("actor", again).status == "stored"


def test_an_attempt_has_one_name_only(driver):
    lease, _ = driver.leases()
    driver.segment("actor", lease, 0, status="unfinished")
    ack = driver.segment("actor", lease, 0, trajectory_id="g.0.00")
    assert outcome(ack) == ("refused", "invalid")
    assert list(driver.dispatcher.state.assembly.trajectories) == ["g.0.0"]


def test_an_unknown_task_and_a_foreign_lease_are_refused(driver):
    lease, _ = driver.leases()
    driver.actor("thief")
    assert outcome(driver.segment("thief", lease)) == ("refused", "not_leased")
    (other,) = group("other", 1)
    frames = segment_frames(lease, task_id=other.task_id, trajectory_id="other.0.0")
    (ack,) = [m for m in driver.say_frames("actor", frames) if hasattr(m, "status")]
    assert outcome(ack) == ("refused", "unknown_task")
    assert driver.held == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"group_id": "h"}, "group"),
        ({"group_size": 3}, "group"),
        ({"purpose": "eval"}, "purpose"),
        ({"offset": 1}, "offset"),
        ({"action_tokens": 5}, "action tokens"),
        ({"version_min": 3, "version_max": 2}, "policy versions"),
        ({"version_min": -1, "version_max": -1}, "without a policy version"),
        ({"version_min": -1, "version_max": -1, "policy": "big"}, "policy 'big', the task says ''"),
        ({"tokens": 5}, "elements"),
        ({"turns": [Turn(0, 0, 9, False)]}, "turn 0"),
        ({"trajectory_id": "g.0.-1"}, "trajectory id"),
        ({"trajectory_id": "g.0.x"}, "trajectory id"),
        ({"trajectory_id": "g.0.999999999999"}, "trajectory id"),
    ],
)
def test_headers_that_contradict_themselves_or_the_task_are_refused(driver, changes, text):
    lease, _ = driver.leases()
    fields = {"version_min": 0, "version_max": 0, **changes}
    good = segment_frames(lease)
    message = Segment(**{**_fields(good), **fields})
    frames = [*encode(message), good[2]]
    (ack,) = [m for m in driver.say_frames("actor", frames) if hasattr(m, "status")]
    assert outcome(ack) == ("refused", "invalid")
    assert text in ack.reason
    assert driver.held == 0
    assert driver.balanced()


def _fields(frames):
    message, _ = decode(frames)
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_further_arrays_have_any_length_within_the_body(driver):
    one, two = driver.leases()
    header, body = decode(segment_frames(one))
    arrays = unpack_arrays(header.arrays, body[0])
    rows = {"routed_token": np.arange(3, dtype="<i4"), "routed_experts": np.arange(24, dtype="<i2")}
    (ack,) = [
        m for m in driver.say_frames("actor", encode_arrays(header, arrays | rows)) if hasattr(m, "status")
    ]
    assert ack.status == "stored"
    header, body = decode(segment_frames(two))
    frames = encode_arrays(header, unpack_arrays(header.arrays, body[0]) | rows)
    (ack,) = [m for m in driver.say_frames("actor", [*frames[:2], frames[2][:-8]]) if hasattr(m, "status")]
    assert outcome(ack) == ("refused", "invalid")
    assert "'routed_experts' ends behind the body" in ack.reason


def test_a_body_that_is_cut_or_missing_is_refused(driver):
    one, two = driver.leases()
    frames = segment_frames(one)
    for body in ([frames[2][:-8]], []):
        (ack,) = [m for m in driver.say_frames("actor", [*frames[:2], *body]) if hasattr(m, "status")]
        assert ack.status == "refused"
    (ack,) = [m for m in driver.say_frames("actor", [*segment_frames(two), b""]) if hasattr(m, "status")]
    assert outcome(ack) == ("refused", "invalid")
    assert driver.held == 0


def test_an_empty_closing_segment_is_fine(driver):
    lease, _ = driver.leases()
    ack = driver.segment("actor", lease, tokens=0, action_tokens=0, status="failed", error="env fell over")
    assert ack.status == "stored"


def test_credit_never_exceeds_the_window_and_comes_back_with_use():
    driver = Driver(segment_credit=8, heartbeat_s=1000.0)
    driver.learner()
    driver.put(*group("g", 1, deadline_s=1e6))
    driver.actor()
    (lease,) = driver.leases()
    credit = driver.credit()
    assert credit == 8
    for index in range(50):
        assert credit > 0
        driver.segment("actor", lease, index, offset=4 * index, status="unfinished")
        credit += driver.credit() - 1
        assert credit <= 8


def test_far_more_than_granted_is_refused():
    driver = Driver(segment_credit=4, max_queued_segments=4, heartbeat_s=1000.0)
    driver.learner(credit=0)
    driver.put(*group("g", 1))
    driver.actor()
    (lease,) = driver.leases()
    acks = [driver.segment("actor", lease, i, offset=4 * i, status="unfinished") for i in range(12)]
    assert {outcome(ack) for ack in acks[-3:]} == {("refused", "no_credit")}
    assert driver.held <= 4 + 4


@pytest.mark.parametrize("bound", ["segments", "bytes"])
def test_at_a_bound_credit_is_withheld_until_the_learner_makes_room(bound):
    limits = {"max_queued_segments": 40} if bound == "segments" else {"max_queued_bytes": 1 << 20}
    driver = Driver(segment_credit=8, heartbeat_s=1000.0, **limits)
    driver.learner(credit=0)
    long = Sampling(max_trajectory_tokens=5000)
    driver.put(*(task for number in range(400) for task in group(f"g{number}", 1, sampling=long)))
    driver.actor(tasks=1)
    size = 16 if bound == "segments" else 5000
    credit, stored, leases = driver.credit(), 0, driver.leases()
    while credit and leases:
        assert driver.segment("actor", leases.pop(), tokens=size).status == "stored"
        stored += 1
        driver.say("actor", TaskCredit(tasks=1))
        credit += driver.credit() - 1
        leases += driver.leases()
    assert 8 <= stored < 400
    assert driver.held <= 40 if bound == "segments" else driver.dispatcher.state.store.nbytes <= 1 << 20
    driver.wait(2.0)
    assert driver.credit() == 0
    driver.learner()
    driver.commit(*(delivery.unit_id for delivery in driver.deliveries()))
    assert driver.credit() == 8
    assert driver.leases()
    assert driver.balanced()


def test_an_unfinished_group_that_fills_the_broker_can_still_be_finished():
    driver = Driver(max_queued_segments=4, segment_credit=4, heartbeat_s=1000.0)
    driver.learner()
    driver.put(*group("g", 3))
    driver.actor(tasks=3)
    driver.say("learner", Heartbeat(progress=0, busy=False))
    running = deque((lease, 0) for lease in driver.leases())
    credit = driver.credit()
    while running:
        if credit == 0:
            driver.wait(0.3)
            credit += driver.credit()
        assert credit > 0, f"stuck with {driver.held} segments held"
        lease, index = running.popleft()
        status = "finished" if index == 9 else "unfinished"
        assert driver.segment("actor", lease, index, offset=4 * index, status=status).status == "stored"
        credit += driver.credit() - 1
        if status == "unfinished":
            running.append((lease, index + 1))
    (delivery,) = driver.deliveries()
    assert delivery.segments == 30
    assert driver.balanced()


def test_while_the_learner_computes_the_bound_is_kept():
    driver = Driver(max_queued_segments=4, segment_credit=4, heartbeat_s=1000.0, generator_stall_s=10.0)
    driver.learner()
    driver.put(*group("g", 2))
    driver.actor(tasks=2)
    driver.say("learner", Heartbeat(progress=1, busy=True))
    lease = driver.leases()[0]
    credit, index = driver.credit(), 0
    while credit:
        driver.segment("actor", lease, index, offset=4 * index, status="unfinished")
        index += 1
        credit += driver.credit() - 1
    driver.wait(5.0)
    assert (index, driver.credit()) == (4, 0)
    # The peers claim to be busy, but nothing moves: exceeding the bound is better than standing still.
    driver.wait(6.0)
    assert driver.credit() == 1


def test_leases_do_not_run_out_while_the_broker_withholds_credit():
    driver = Driver(
        max_queued_segments=4, segment_credit=4, heartbeat_s=1000.0, task_lease_s=5.0, group_deadline_s=5.0
    )
    driver.learner(credit=0)
    driver.put(*group("g", 2, deadline_s=10.0))
    driver.actor(tasks=2)
    one, _ = driver.leases()
    for index in range(4):
        driver.segment(
            "actor", one, index, offset=4 * index, status="unfinished" if index < 3 else "finished"
        )
    driver.wait(60.0)
    assert driver.got("actor", CancelTask) == []
    assert len(driver.dispatcher.state.assembly.groups) == 1
    driver.learner()
    driver.wait(0.5)
    assert driver.credit("actor") > 0


def test_a_second_actor_gets_credit_though_the_first_was_granted_some():
    driver = Driver(max_queued_segments=8, segment_credit=100)
    driver.learner()
    for name in ("a", "b", "c", "d"):
        driver.actor(name)
        assert driver.credit(name) == 2
    assert driver.dispatcher.state.flow.outstanding == 8
    driver.hello("actor", "a", incarnation=2)
    assert driver.dispatcher.state.flow.outstanding == 8


@pytest.mark.parametrize(
    ("newest", "stale"), [(-1, False), (0, True), (5, True), (6, False), (10, False), (11, False)]
)
def test_stale_is_older_than_the_bound(newest, stale):
    assert is_stale(newest, 10, 4) is stale


def test_a_commit_frees_memory_and_counts_tokens(driver):
    one, two = driver.leases()
    driver.segment("actor", one)
    driver.segment("actor", two, status="failed", error="x")
    (delivery,) = driver.deliveries()
    driver.say("learner", Commit(epoch=1, step=1, trained=[delivery.unit_id, "nonsense"]))
    state = driver.dispatcher.state
    assert (len(state.store), state.store.nbytes, state.ledger.held_tokens) == (0, 0, 0)
    assert state.ledger.outcomes["trained"].tokens == 8
    assert state.ledger.outcomes["trained"].action_tokens == 4
    assert state.ledger.refused == {"unknown_unit": 1}

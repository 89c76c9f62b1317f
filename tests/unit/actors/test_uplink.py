"""Test what an actor keeps until the broker has stored it, and how many tasks it offers to take."""

import numpy as np

from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from actors.uplink import LeaseBook, Outbox
from protocol.codec import decode
from protocol.messages.episodes import LeaseTask, SegmentAck, Task, TaskCredit


def task(name="t"):
    return Task(task_id=name, env="e", group_id="g", group_size=1)


def offer(outbox, name, count):
    for index in range(count):
        outbox.offer_frames((f"{name}.0", index), [f"{name}{index}".encode()])


def sent(outbox):
    return [frames[0].decode() for frames in outbox.due()]


def stored(name, index, status="stored"):
    return SegmentAck(trajectory_id=f"{name}.0", index=index, status=status)


def test_no_more_than_the_credit_is_unacknowledged():
    outbox = Outbox()
    offer(outbox, "a", 3)
    assert sent(outbox) == []
    outbox.granted(2)
    assert sent(outbox) == ["a0", "a1"]
    assert outbox.waiting == 1
    outbox.acked(stored("a", 0))
    # An acknowledgement alone is no credit.
    assert sent(outbox) == []
    outbox.granted(1)
    assert sent(outbox) == ["a2"]
    assert not outbox.empty


def test_after_a_rejoin_everything_unacknowledged_is_sent_again_in_order():
    outbox = Outbox()
    offer(outbox, "a", 4)
    outbox.granted(3)
    assert sent(outbox) == ["a0", "a1", "a2"]
    outbox.acked(stored("a", 1))
    outbox.rejoined()
    # The old connection's credit is void.
    assert sent(outbox) == []
    outbox.granted(10)
    assert sent(outbox) == ["a0", "a2", "a3"]
    assert outbox.resent == 2


def test_a_late_acknowledgement_after_a_rejoin_still_counts():
    outbox = Outbox()
    offer(outbox, "a", 1)
    outbox.granted(1)
    sent(outbox)
    outbox.rejoined()
    outbox.acked(stored("a", 0, "duplicate"))
    assert outbox.empty
    assert outbox.acks == {"duplicate": 1}


def test_a_cancelled_trajectory_takes_its_segments_along():
    outbox = Outbox()
    offer(outbox, "a", 2)
    offer(outbox, "b", 1)
    outbox.granted(1)
    sent(outbox)
    outbox.forget("a.0")
    outbox.granted(1)
    assert sent(outbox) == ["b0"]


def test_an_offered_cut_is_a_message_with_its_arrays():
    cutter = SegmentCutter(task(), "t.0", 8)
    cutter.act(Sampled(np.array([5], "i4"), np.array([-1], "f4"), np.array([2], "i4")))
    outbox = Outbox()
    outbox.offer(cutter.close_turn({"r": 1.0}, closing=Closing("finished"))[0])
    outbox.granted(1)
    message, rest = decode(outbox.due()[0])
    assert (message.trajectory_id, message.status, len(rest)) == ("t.0", "finished", 1)


def lease(number, name="t"):
    return LeaseTask(lease_id=f"l{number}", attempt=1, task=task(f"{name}{number}"))


def served(book):
    """Return the book of an actor that a generator has let in."""
    assert book.served(by_any=True).void
    return book


def test_without_a_generator_there_is_no_credit_and_no_lease_is_run():
    book = LeaseBook(2)
    assert book.joined() is None
    assert book.why_not() == "full"
    assert not book.leased(lease(0))
    assert book.served(by_any=True) == TaskCredit(tasks=2, void=True)
    assert book.served(by_any=True) is None  # the credit is announced once
    assert book.leased(lease(1))
    # The last generator is lost: what the broker has of our credit is void, and the end of a lease frees none.
    assert book.served(by_any=False) == TaskCredit(tasks=0, void=True)
    assert book.ended("l1") is None
    assert book.joined() is None
    assert book.served(by_any=True) == TaskCredit(tasks=2, void=True)
    book.draining = True
    assert book.served(by_any=False) is None


def test_credit_is_announced_at_join_and_given_back_one_by_one():
    book = served(LeaseBook(2))
    assert book.joined() == TaskCredit(tasks=2)
    assert book.leased(lease(0))
    assert book.ended("l0") == TaskCredit(tasks=1)
    assert book.ended("l0") is None  # once only


def test_after_a_rejoin_credit_is_what_does_not_run():
    book = served(LeaseBook(2))
    book.joined()
    assert book.leased(lease(0))
    assert book.joined() == TaskCredit(tasks=1)
    assert book.leased(lease(1))
    assert book.joined() is None
    assert book.ended("l0") == TaskCredit(tasks=1)


def test_more_leases_than_there_is_room_for_are_not_run():
    book = served(LeaseBook(1))
    assert book.leased(lease(0))
    assert book.why_not() == "full"
    assert not book.leased(lease(1))
    book.ended("l0")
    assert book.why_not() == ""
    assert book.leased(lease(1))


def test_the_same_lease_is_run_once_and_none_while_draining():
    book = served(LeaseBook(2))
    assert book.leased(lease(0))
    assert not book.leased(lease(0))
    assert book.lease_of("t0.1") == "l0"
    book.draining = True
    assert not book.leased(lease(1))
    assert book.ended("l0") is None
    assert book.joined() is None

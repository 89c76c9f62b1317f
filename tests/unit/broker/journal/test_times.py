"""Test the wall clock of the journal's records: written, printed, never read by the state, absent from older ones."""

import shutil

import msgspec
import pytest

from broker.core.records import GroupClosed, decode_event, encode_event
from broker.errors import JournalError
from broker.journal.files import each_file
from broker.journal.writer import Kind, arrival_of, pack_segment, unpack_segment
from broker.output_commit import JournalStore
from launch.commands.journal import clock_text, shown, trajectories
from tests.broker_driver import Driver, group
from tests.pages import ROOT

OLD = ROOT / "tests" / "fixtures" / "journals" / "protocol-4.4"
"""A journal that a broker of protocol 4.4 wrote, of the commit 1bc60205: events and segments have no time."""


@pytest.fixture
def stopped_clock(monkeypatch):
    """Have the broker's stores take this time from the wall clock."""
    at = [1_800_000_000.25]
    given = JournalStore.__init__

    def init(self, journal, max_bytes):
        given(self, journal, max_bytes, wall_clock=lambda: at[0])

    monkeypatch.setattr(JournalStore, "__init__", init)
    return at


def busy(folder):
    """Run a broker for a moment. Return the driver."""
    driver = Driver(folder=folder)
    driver.learner(epoch=1, lineage=1)
    driver.actor()
    driver.put(*group("g", 1))
    (lease,) = driver.leases()
    driver.segment("actor", lease)
    driver.flush()
    return driver


def payloads(folder, kind):
    return [
        contents.record(entry).payload
        for contents in each_file(folder)
        for entry in contents.entries
        if entry.kind is kind
    ]


def test_each_event_and_each_segment_says_when(tmp_path, stopped_clock):
    driver = busy(tmp_path / "journal")
    stopped_clock[0] = 1_800_000_060.5
    driver.commit("g", step=1)
    driver.journal.close()
    times = [decode_event(payload).at for payload in payloads(tmp_path / "journal", Kind.EVENT)]
    assert set(times[:-1]) == {1_800_000_000.25}
    assert times[-1] == 1_800_000_060.5
    (segment,) = payloads(tmp_path / "journal", Kind.SEGMENT)
    assert arrival_of(segment) == 1_800_000_000.25
    ((held,),) = trajectories(tmp_path / "journal").values()
    assert held.arrived == 1_800_000_000.25
    lines = list(shown(tmp_path / "journal"))
    assert all("2027-01-15T08:0" in line for line in lines)
    assert "2027-01-15T08:01:00.500Z  committed" in lines[-1]
    assert '"at"' not in "".join(lines)


def test_a_wrong_clock_changes_nothing_that_the_broker_does(tmp_path, stopped_clock):
    first = busy(tmp_path / "one")
    stopped_clock[0] = -1e300
    second = busy(tmp_path / "other")
    assert first.sent == second.sent
    assert first.kill_broker() == second.kill_broker() > 0
    assert first.balanced()
    assert second.balanced()
    assert any("  ?  " in line for line in shown(tmp_path / "other"))


def test_a_journal_of_an_earlier_version_opens_and_goes_on(tmp_path):
    folder = tmp_path / "journal"
    shutil.copytree(OLD, folder)
    before = list(shown(folder))
    assert len(before) > 15
    assert not any("Z  " in line for line in before)
    driver = Driver(folder=folder, heartbeat_s=1.0, task_lease_s=1000.0)
    assert driver.balanced()
    driver.learner(epoch=2, lineage=1, step=1)
    assert [unit.unit_id for unit in driver.dispatcher.state.deliveries.units()] == ["kept"]
    driver.put(*group("later", 1))
    driver.flush()
    driver.journal.close()
    assert list(shown(folder))[: len(before)] == before
    assert decode_event(payloads(folder, Kind.EVENT)[-1]).at is not None
    assert {piece.arrived for held in trajectories(folder).values() for piece in held} == {None}


def test_an_event_without_a_time_and_one_with_it_are_read(tmp_path):
    event = GroupClosed(group_id="g")
    assert decode_event(encode_event(event)) == event
    assert decode_event(encode_event(event, 2.5)) == msgspec.structs.replace(event, at=2.5)
    with pytest.raises(msgspec.MsgspecError):
        decode_event(msgspec.msgpack.encode({"type": "group_closed", "group_id": "g", "at": "noon"}))


@pytest.mark.parametrize("at", [None, 0.0, 1_800_000_000.125])
def test_a_segment_is_the_same_with_and_without_a_time(at):
    payload = b"".join(pack_segment(b"header", b"body", at))
    assert unpack_segment(payload) == (b"header", b"body")
    assert arrival_of(payload) == at
    for cut in range(12 if at is not None else 4):
        with pytest.raises(JournalError, match=f"a segment of {cut} bytes"):
            arrival_of(payload[:cut])


def test_a_time_that_is_none_is_shown_as_unknown():
    assert clock_text(1_800_000_000.25) == "2027-01-15T08:00:00.250Z"
    assert [clock_text(at) for at in (float("nan"), 1e300, -1e300)] == ["?"] * 3

"""A writer may be killed at any moment: everything it called durable is read again."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from broker.errors import JournalError
from broker.journal.claim import boot_id, read_known, read_mark
from broker.journal.files import numbers
from tests.journals import DEADLINE_S, begin

ROOT = Path(__file__).parents[3]
WRITER = """
import itertools, sys, time
from pathlib import Path
from broker.journal.journal import Journal
from broker.journal.writer import Kind
from broker.config import JournalConfig

config = JournalConfig(durability=sys.argv[2], file_bytes=8192, keep_bytes=20_000)
journal = Journal.open(Path(sys.argv[1]), run="run", config=config)
first = max((int(record.payload.split()[0]) for record in journal.recovered()), default=-1) + 1
number, said = first, first
for number in itertools.count(first):
    journal.append(Kind.EVENT, b"%d " % number + b"x" * (number % 700))
    if number % 3 == 0:
        journal.flush()
    while journal.sequence - journal.durable > 100:
        time.sleep(0.0005)
    if journal.wants_snapshot:
        journal.append(Kind.EVENT, b"%d " % number)
        journal.rotate(b"%d " % number)
        first -= 2  # records that are not numbers
        journal.retain([])
    if (durable := first + journal.durable - 1) > said:
        said = durable
        print(said, flush=True)
"""


@pytest.mark.parametrize("durability", ["written", "synced"])
def test_everything_that_was_durable_is_there_after_kill_9(tmp_path, durability):
    folder = tmp_path / "journal"
    durable = -1
    for round_ in range(8):
        command = [sys.executable, "-c", WRITER, str(folder), durability]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        # The first line shows that the writer has begun.
        first = process.stdout.readline()
        assert int(first) > durable
        # Each round kills the writer a little later, in the middle of different work.
        time.sleep(0.02 * round_)
        process.kill()
        lines = [first, *process.stdout.read().splitlines()]
        assert process.wait(DEADLINE_S) == -9
        process.stdout.close()
        durable = max(int(line) for line in lines)
        with begin(folder) as journal:
            found = [int(record.payload.split()[0]) for record in journal.recovered()]
        assert found == sorted(found)
        assert max(found) >= durable
        durable = max(found)
    assert durable > 20


@pytest.mark.skipif(not boot_id(), reason="without an id of the boot, the marks are of the disk alone")
def test_what_is_cut_after_kill_9_is_missed_although_the_disk_was_not_asked_for_it(tmp_path):
    """The writer is killed within its first second; between two syncs only the operating system has the records."""
    folder = tmp_path / "journal"
    program = WRITER.replace("durability=", "sync_interval_s=1e6, durability=")
    command = [sys.executable, "-c", program, str(folder), "written"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 30:
        pass
    process.kill()
    process.stdout.close()
    assert process.wait(DEADLINE_S) == -9
    newest = folder / f"journal-{numbers(folder)[-1]:08d}.log"
    whole, known = newest.read_bytes(), read_known(folder)
    assert known > read_mark(folder)
    assert known.bytes_of(numbers(folder)[-1]) <= len(whole)
    for nbytes in range(0, known.bytes_of(numbers(folder)[-1]), 97):
        newest.write_bytes(whole[:nbytes])
        with pytest.raises(JournalError, match=newest.name):
            begin(folder)
    newest.write_bytes(whole)
    begin(folder).close()

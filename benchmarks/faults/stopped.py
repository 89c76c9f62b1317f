"""Faults of a run while it is stopped: its journal is damaged, or ends in the middle of a record."""

import random
import subprocess
import time
from pathlib import Path

from benchmarks.faults.scene import Scene
from benchmarks.faults.system import alive
from broker.journal.files import Contents, numbers, read_file
from broker.journal.records import FoundRecord, Kind, file_name, record_head

GONE_S = 30.0
REFUSED_S = 120.0


def stop(scene: Scene) -> None:
    """Kill `offbeat train` (kill -9), and wait until all its processes have died with it."""
    system = scene.system
    pids = [system.pid(name) for name in system.names()]
    assert system.supervisor is not None
    system.supervisor.kill()
    system.supervisor.wait()
    deadline = time.monotonic() + GONE_S
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"of {pids} some outlive the supervisor"
        time.sleep(0.05)


def damage_journal(scene: Scene) -> None:
    """Flip a bit of the stopped run's journal: `offbeat train --resume` must refuse until it is restored."""
    stop(scene)
    path, offset = somewhere_in_the_middle(scene.system.folder / "journal", scene.rng)
    _flip(path, offset)
    try:
        code = scene.system.start(resume=True).wait(REFUSED_S)
        said = (scene.system.dir / "train.log").read_text()[-4000:]
    except subprocess.TimeoutExpired:
        stop(scene)
        code, said = 0, ""
    finally:
        _flip(path, offset)
        scene.system.start(resume=True)
    assert code != 0, f"{path.name} had a flipped bit at {offset}, and the run began all the same"
    assert path.name in said, f"what was said does not name {path.name}: {said[-1000:]}"


def tear_journal(scene: Scene) -> None:
    """Append half a record to the journal, as a power failure would. Nobody was told that it is stored."""
    stop(scene)
    folder = scene.system.folder / "journal"
    newest = numbers(folder)[-1]
    with open(folder / file_name(newest), "ab") as file:
        file.write(half_a_record(read_file(folder, newest), scene.rng))
    scene.system.start(resume=True)


def half_a_record(contents: Contents, rng: random.Random) -> bytes:
    """Return the beginning of the record that would come next."""
    number = contents.entries[-1].number + 1
    payload = rng.randbytes(200)
    whole = record_head(Kind.EVENT, number, (payload,)) + payload
    return whole[: rng.randrange(1, len(whole))]


def somewhere_in_the_middle(folder: Path, rng: random.Random) -> tuple[Path, int]:
    """Return file and offset of a byte in the first half of a file's records: whole records follow it."""
    number = rng.choice(numbers(folder))
    entries = [item for item in read_file(folder, number).found if isinstance(item, FoundRecord)]
    place = rng.choice(entries[: max(1, len(entries) // 2)]).place
    return folder / file_name(number), place.offset + rng.randrange(place.nbytes)


def _flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))

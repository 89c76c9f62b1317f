"""Faults of a stopped run and faults at the edges.

The journal of a stopped run is damaged, or ends in the middle of a record. Slow is not hung, damage is not silent,
names are not taken, hosts come and go.
"""

import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.journal.files import Contents, numbers, read_file
from broker.journal.writer import FoundRecord, Kind, file_name, record_head
from learner.checkpoint_files import kept
from learner.run_files import SHARED_MEMORY
from tests.campaigns.faults.intruder import Intruder
from tests.campaigns.faults.scene import START_S, Scene, System, alive

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


SLOW_S = 12.0
SPINNERS = 9
LEAVE_S = 60.0
SPIN = "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"


def slow_engine(scene: Scene) -> None:
    """Slow one generator's engine down about ten times for a while: the supervisor must not replace it."""
    name = scene.name("generator")
    before = scene.system.pid(name)
    family = [before, *scene.system.descendants(name)]
    with _on_core_0(family), _spinners():
        time.sleep(SLOW_S)
    assert scene.system.pid(name) == before, f"{name} was slow, and was replaced"


@contextmanager
def _on_core_0(pids: list[int]) -> Iterator[None]:
    """Let all threads of these processes share the first core."""
    threads = [int(thread.name) for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    everywhere = os.sched_getaffinity(0)
    for thread in threads:
        os.sched_setaffinity(thread, {0})
    try:
        yield
    finally:
        for thread in threads:
            try:
                os.sched_setaffinity(thread, everywhere)
            except ProcessLookupError:
                continue


@contextmanager
def _spinners() -> Iterator[None]:
    """Keep the first core busy with other processes."""
    spinners = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(SPINNERS)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def block_user_code(scene: Scene) -> None:
    """Let each step of the environment block its thread for a while: no actor may be replaced for it."""
    flag = Path(scene.system.config["env"]["params"]["flag"])
    names = [name for name in scene.system.names() if name.startswith("actor")]
    before = {name: scene.system.pid(name) for name in names}
    flag.write_text("block")
    try:
        time.sleep(SLOW_S)
    finally:
        flag.unlink()
    after = {name: scene.system.pid(name) for name in names}
    assert after == before, f"{before} were replaced by {after}, because user code blocked"


# --- the journal --------------------------------------------------------------------------------------------------


def cut_journal(scene: Scene) -> None:
    """Cut the stopped run's newest journal file short: `offbeat train --resume` must refuse, and name it."""
    path = _newest_after_stop(scene)
    whole = path.read_bytes()
    keep = scene.rng.randrange(len(whole) // 4, 3 * len(whole) // 4)

    def restore() -> None:
        path.write_bytes(whole)

    os.truncate(path, keep)
    _must_refuse(scene, path, restore)


def lose_journal(scene: Scene) -> None:
    """Move the stopped run's newest journal file away: `offbeat train --resume` must refuse, and name it."""
    path = _newest_after_stop(scene)
    aside = scene.system.dir / "aside"
    shutil.move(path, aside)

    def restore() -> None:
        shutil.move(aside, path)

    _must_refuse(scene, path, restore)


def _newest_after_stop(scene: Scene) -> Path:
    stop(scene)
    folder = scene.system.folder / "journal"
    return folder / file_name(numbers(folder)[-1])


def _must_refuse(scene: Scene, path: Path, restore: Callable[[], None]) -> None:
    """Start the run with a damaged journal, then repair it and start again.

    Raises:
        AssertionError: the run began with the damage, or its error does not name the file.
    """
    begun = (scene.system.dir / "train.log").stat().st_size
    try:
        code = scene.system.start(resume=True).wait(REFUSED_S)
    except subprocess.TimeoutExpired:
        stop(scene)
        code = 0
    finally:
        restore()
        said = (scene.system.dir / "train.log").read_bytes()[begun:].decode(errors="replace")
        scene.system.start(resume=True)
    assert code != 0, f"{path.name} was short or missing, and the run began all the same"
    assert path.name in said, f"what was said does not name {path.name}: {said[-1000:]}"


# --- names --------------------------------------------------------------------------------------------------------


def squat_shared_memory(scene: Scene) -> None:
    """While the run is stopped, a different user takes its names in shared memory: nothing is overwritten.

    The run must refuse and name the path, or go on without it. Then the names are free again.
    """
    stop(scene)
    secret = scene.system.dir / "secret"
    secret.write_text("untouched")
    nobody = pwd.getpwnam("nobody")
    taken = [path for path in SHARED_MEMORY.iterdir() if path.name.startswith("offbeat")]
    for path in taken:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(secret)
        os.lchown(path, nobody.pw_uid, nobody.pw_gid)
    try:
        code = scene.system.start(resume=True).wait(SLOW_S)
    except subprocess.TimeoutExpired:
        stop(scene)
        code = None
    finally:
        for path in taken:
            if path.is_symlink():
                path.unlink()
        scene.system.start(resume=True)
    assert secret.read_text() == "untouched", f"a planted link was followed (exit code {code})"


def squat_peer_name(intruder: Intruder, scene: Scene) -> None:
    """Say Hello under the learner's name, with an old epoch: no message may reach the intruder."""
    before = _connected_s(scene.system)
    intruder.squat()
    assert _connected_s(scene.system) > before, "the learner had to join again"


def _connected_s(system: System) -> float:
    """Return the seconds since the learner joined."""
    peers = (system.status() or {"peers": []})["peers"]
    return next(float(peer["connected_s"]) for peer in peers if peer["name"] == "learner")


# --- hosts --------------------------------------------------------------------------------------------------------


def host_comes_and_goes(scene: Scene) -> None:
    """Start an actor and a generator by hand, as a host that joins, then end the actor and the generator."""
    system = scene.system
    generator = _by_hand(system, "generator", "generator-new")
    actor = _by_hand(system, "actor", "actor-new")
    try:
        system.until(lambda: "generator-new" in system.generators(), START_S, "the new generator is offered")
        system.until(lambda: _heard(system, "actor-new"), START_S, "the new actor has joined")
        time.sleep(3.0)
        codes = [_ended(process) for process in (actor, generator)]
    finally:
        for process in (actor, generator):
            if process.poll() is None:
                process.kill()
                process.wait()
    assert codes == [0, 0], f"the processes of the host that left ended with {codes}"


def _by_hand(system: System, role: str, name: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "launch.role", role, str(system.folder), "--name", name]
    with open(system.folder / "logs" / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OFFBEAT_LOG_LEVEL": "debug", "OMP_NUM_THREADS": "1"},
        )


def _heard(system: System, name: str) -> bool:
    return any(peer["name"] == name for peer in (system.status() or {"peers": []})["peers"])


def _ended(process: "subprocess.Popen[bytes]") -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(LEAVE_S)


# --- the learner ----------------------------------------------------------------------------------------------


def previous_checkpoint(scene: Scene) -> None:
    """Stop the run, then go on from the checkpoint before the newest one, as the user may ask for."""
    stop(scene)
    steps = sorted(kept(scene.system.folder / "checkpoints"))
    if len(steps) < 2:
        scene.system.start(resume=True)
        return
    scene.system.start(resume=True, back_to=steps[-2])

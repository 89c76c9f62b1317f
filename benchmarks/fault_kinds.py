"""The faults: each a function that breaks something, and mends what does not mend itself."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_intruder import Intruder, record_segments
from benchmarks.fault_system import System
from learner.run_files import weights_folder

HOST, FAR, SPACE, LINK = "10.77.0.1", "10.77.0.2", "offbeat-faults", "offbeat-f0"
FROZEN_S = 12.0
CUT_S = 6.0
REPLACED_S = 60.0
PIECE = 1 << 20


@dataclass
class Scene:
    """What a fault may touch."""

    system: System
    rng: random.Random
    clock: Path
    """File that says by how many seconds processes' wall clocks are off."""

    def name(self, role: str) -> str:
        """Of one process of this role; a generator that has started, as the other may be on its way back."""
        if role == "generator":
            offered = (self.system.status() or {"generators_offered": []})["generators_offered"]
            return str(self.rng.choice(sorted(offered) or ["generator-0"]))
        return role if role in ("broker", "learner") else f"{role}-{self.rng.randrange(2)}"


Fault = Callable[[Scene], float | None]
"""Breaks something, and mends what does not mend itself; returns since when the run has to recover (None: now)."""


def kill(role: str) -> Fault:
    """kill -9 of a role's process."""

    def inject(scene: Scene) -> float:
        name = scene.name(role)
        return _killed(scene, name, scene.system.pid(name))

    return inject


def kill_engine(scene: Scene) -> float:
    """kill -9 of vLLM's own process under a generator; of the generator, if that is only just starting."""
    name = scene.name("generator")
    pids = scene.system.descendants(name) or [scene.system.pid(name)]
    return _killed(scene, name, pids[0])


def _killed(scene: Scene, name: str, pid: int) -> float:
    """Until the supervisor has another process under this name."""
    before, since = scene.system.pid(name), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    scene.system.until(lambda: scene.system.pid(name) != before, REPLACED_S, f"{name} is replaced")
    return since


def kill_scorer(scene: Scene) -> None:
    """kill -9 of the processes that score an actor's answers: its environment."""
    for pid in scene.system.descendants(scene.name("actor")):
        os.kill(pid, signal.SIGKILL)


def kill_supervisor(scene: Scene) -> None:
    """kill -9 of `offbeat train`, and `offbeat train --resume`."""
    supervisor = scene.system.supervisor
    assert supervisor is not None
    supervisor.kill()
    supervisor.wait()
    scene.system.start(resume=True)


def freeze(role: str, seconds: float = FROZEN_S) -> Fault:
    """SIGSTOP: the supervisor has to find it. SIGCONT, should it still be there."""

    def inject(scene: Scene) -> None:
        pid = scene.system.pid(scene.name(role))
        with frozen(pid):
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and _exists(pid):
                time.sleep(0.1)

    return inject


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if _exists(pid):
            os.kill(pid, signal.SIGCONT)


def _exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- the network ----------------------------------------------------------------------------------------------


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


def make_network() -> None:
    """Two network namespaces and a wire between them."""
    remove_network()
    _ip("netns", "add", SPACE)
    _ip("link", "add", LINK, "type", "veth", "peer", "name", "far", "netns", SPACE)
    _ip("addr", "add", f"{HOST}/24", "dev", LINK)
    _ip("link", "set", LINK, "up")
    _ip("-n", SPACE, "addr", "add", f"{FAR}/24", "dev", "far")
    _ip("-n", SPACE, "link", "set", "far", "up")
    _ip("-n", SPACE, "link", "set", "lo", "up")


def remove_network() -> None:
    _ip("netns", "del", SPACE, check=False)
    _ip("link", "del", LINK, check=False)


def far_actor(system: System) -> subprocess.Popen[bytes]:
    """An actor in the other namespace, of the same run."""
    role = [sys.executable, "-m", "launch.role", "actor", str(system.folder), "--name", "actor-far"]
    with open(system.folder / "logs" / "actor-far.log", "ab") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", SPACE, *role],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OFFBEAT_LOG_LEVEL": "debug", "OMP_NUM_THREADS": "1"},
        )


def cut_network(scene: Scene) -> None:
    """The wire is down for a while; then the far actor has to be back."""
    _ip("link", "set", LINK, "down")
    time.sleep(CUT_S)
    _ip("link", "set", LINK, "up")
    _far_is_back(scene)


def cut_one_way(scene: Scene) -> None:
    """What the far actor says arrives, and no answer does."""
    _ip("route", "add", "blackhole", f"{FAR}/32")
    time.sleep(CUT_S)
    _ip("route", "del", "blackhole", f"{FAR}/32")
    _far_is_back(scene)


def slow_network(scene: Scene) -> None:
    """256 kbit/s."""
    limit = ["rate", "256kbit", "burst", "16kbit", "latency", "800ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", LINK, "root", "tbf", *limit], check=True)
    time.sleep(CUT_S)
    subprocess.run(["tc", "qdisc", "del", "dev", LINK, "root"], check=True)
    _far_is_back(scene)


def _far_is_back(scene: Scene) -> None:
    def there() -> bool:
        peers = (scene.system.status() or {"peers": []})["peers"]
        return any(p["name"] == "actor-far" and p["silent_s"] < 2.0 for p in peers)

    scene.system.until(there, 30.0, "the actor behind the network is back")


# --- disk, clock, environment, weights --------------------------------------------------------------------------


def fill_disk(leave: int, seconds: float = 5.0) -> Fault:
    """All but ``leave`` bytes of the run folder's file system are taken for a while."""

    def inject(scene: Scene) -> None:
        ballast = scene.system.dir / "ballast"
        try:
            with open(ballast, "wb") as file, contextlib.suppress(OSError):  # others write meanwhile
                while (free := _free(scene.system.dir) - leave) > 0:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), min(free, PIECE))
            time.sleep(seconds)
        finally:
            ballast.unlink()

    return inject


def _free(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def jump_clock(scene: Scene) -> None:
    """The wall clocks of all processes jump two hours ahead, or back."""
    scene.clock.write_text(scene.rng.choice(("7200", "-7200")))
    time.sleep(4.0)
    scene.clock.write_text("0")


def misbehave(how: str, seconds: float = 3.0) -> Fault:
    """The environment returns NaN as reward, raises or hangs, in every step for a while."""

    def inject(scene: Scene) -> None:
        flag = Path(scene.system.config["env"]["params"]["flag"])
        flag.write_text(how)
        try:
            time.sleep(seconds)
        finally:
            flag.unlink()

    return inject


def damage_weights(truncate: bool) -> Fault:
    """Two published versions in a row are cut short, or have a byte flipped, as soon as they appear."""

    def inject(scene: Scene) -> None:
        folder = weights_folder(scene.system.folder)
        for _ in range(2):
            newest = _newest(folder)
            scene.system.until(lambda before=newest: _newest(folder) > before, 60.0, "another version")  # type: ignore[misc]
            _replace(folder / _newest(folder), truncate, scene.rng)

    return inject


def _newest(folder: Path) -> str:
    return max((p.name for p in folder.glob("v*") if p.name[1:].isdigit()), default="")


def _replace(version: Path, truncate: bool, rng: random.Random) -> None:
    """By another folder under its name: nothing is changed in place."""
    copy = version.with_name("damaged")
    try:
        shutil.copytree(version, copy)
        with open(copy / "model.safetensors", "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if truncate:
                file.truncate(size // 2)
            else:
                file.seek(rng.randrange(size // 2, size))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0xFF]))
        version.rename(version.with_name("removed"))
        copy.rename(version)
    except OSError:
        pass  # retired meanwhile
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(version.with_name("removed"), ignore_errors=True)


# --- strangers --------------------------------------------------------------------------------------------------


def junk_connections(scene: Scene) -> None:
    """Two hundred connections that speak no ZeroMQ."""
    port = int(scene.system.config["broker"]["endpoint"].rpartition(":")[2])
    for _ in range(200):
        with socket.socket() as raw:
            raw.settimeout(2.0)
            try:
                raw.connect((HOST, port))
                raw.sendall(scene.rng.randbytes(64))
            except OSError:
                pass


def with_intruder(role: str, act: Callable[[Intruder, Scene], None]) -> Fault:
    """Somebody with the key of a role, who does not behave."""

    def inject(scene: Scene) -> None:
        intruder = Intruder(scene.system, role)
        try:
            act(intruder, scene)
        finally:
            intruder.close()

    return inject


def replay_frames(intruder: Intruder, scene: Scene) -> None:
    """Segments that the run has had, sent again in any order by an actor that does not run them."""
    frames = record_segments(scene.system.folder, 50)
    scene.rng.shuffle(frames)
    intruder.send_segments(frames)


# --- all ----------------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[int, Fault]] = {
    "kill broker": (28, kill("broker")),
    "kill actor": (18, kill("actor")),
    "kill learner": (20, kill("learner")),
    "kill generator": (8, kill("generator")),
    "kill vLLM engine": (4, kill_engine),
    "kill scorer": (8, kill_scorer),
    "kill supervisor": (4, kill_supervisor),
    "freeze broker": (3, freeze("broker")),
    "freeze actor": (3, freeze("actor")),
    "freeze learner": (3, freeze("learner")),
    "freeze generator": (3, freeze("generator")),
    "freeze broker 2 s": (4, freeze("broker", 2.0)),
    "freeze learner 3 s": (4, freeze("learner", 3.0)),
    "network cut": (6, cut_network),
    "network cut one way": (6, cut_one_way),
    "network slow": (4, slow_network),
    "disk low": (4, fill_disk(32 << 20)),
    "disk full": (4, fill_disk(0)),
    "clock jumps": (4, jump_clock),
    "NaN rewards": (5, misbehave("nan")),
    "environment raises": (4, misbehave("raise")),
    "environment hangs": (3, misbehave("hang")),
    "weights truncated": (4, damage_weights(truncate=True)),
    "weights flipped": (4, damage_weights(truncate=False)),
    "junk connections": (8, junk_connections),
    "no key": (6, with_intruder("", Intruder.hello_in_vain)),
    "unknown key": (6, with_intruder("unknown", Intruder.hello_in_vain)),
    "key of another role": (6, with_intruder("actor", Intruder.pose_as_learner)),
    "malformed frames": (6, with_intruder("actor", Intruder.malformed)),
    "replayed frames": (6, with_intruder("actor", replay_frames)),
    "zombie learner": (8, with_intruder("learner", Intruder.zombie)),
    "NaN log-probabilities": (6, with_intruder("actor", Intruder.not_finite)),
}
"""Weight in a campaign, and what is done."""

"""The kinds of faults. Each one breaks something, and repairs what the system cannot repair itself."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tests.campaigns.faults import edges
from tests.campaigns.faults.edges import damage_journal, tear_journal
from tests.campaigns.faults.intruder import Intruder, record_segments
from tests.campaigns.faults.network import CUT_S, cut_network, cut_one_way, slow_network
from tests.campaigns.faults.scene import Fault, Flips, Scene, Swaps, Wire, alive
from tests.campaigns.faults.weights import (
    damage_weights,
    fill_memory,
    flipped,
    full,
    mixed,
    replaced,
    stopped,
    truncated,
)

FROZEN_S = 12.0
REPLACED_S = 60.0


def kill(role: str) -> Fault:
    """Return a fault that kills a process of a role (kill -9)."""

    def inject(scene: Scene) -> float:
        name = scene.name(role)
        return _killed(scene, name, scene.system.pid(name))

    return inject


def kill_engine(scene: Scene) -> float:
    """Kill vLLM's own process under a generator (kill -9), or the generator if vLLM's has not started yet."""
    name = scene.name("generator")
    pids = scene.system.descendants(name) or [scene.system.pid(name)]
    return _killed(scene, name, pids[0])


def _killed(scene: Scene, name: str, pid: int) -> float:
    """Kill a process and wait until the supervisor has replaced it. Return the time of the kill."""
    before, since = scene.system.pid(name), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    scene.system.until(lambda: scene.system.pid(name) != before, REPLACED_S, f"{name} is replaced")
    return since


def kill_scorer(scene: Scene) -> None:
    """Kill the child processes of an actor, in which its environment scores answers (kill -9)."""
    for pid in scene.system.descendants(scene.name("actor")):
        os.kill(pid, signal.SIGKILL)


def kill_supervisor(scene: Scene) -> None:
    """Kill `offbeat train` (kill -9), then start `offbeat train --resume`."""
    supervisor = scene.system.supervisor
    assert supervisor is not None
    supervisor.kill()
    supervisor.wait()
    scene.system.start(resume=True)


def freeze(role: str, seconds: float = FROZEN_S) -> Fault:
    """Return a fault that stops a process of a role (SIGSTOP): the supervisor has to find and replace it.

    If the process is still there after ``seconds``, it continues (SIGCONT).
    """

    def inject(scene: Scene) -> None:
        pid = scene.system.pid(scene.name(role))
        with stopped(pid):
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and alive(pid):
                time.sleep(0.1)

    return inject


def freeze_supervisor(scene: Scene) -> None:
    """Stop `offbeat train` (SIGSTOP) for a while. The roles run on. It must replace none when it wakes."""
    system = scene.system
    before = {name: pid for name in system.names() if alive(pid := system.pid(name))}
    assert system.supervisor is not None
    with stopped(system.supervisor.pid):
        time.sleep(FROZEN_S)
    time.sleep(1.0)
    after = {name: system.pid(name) for name in before}
    assert after == before, f"{before} were replaced by {after}"


def on_the_wire(act: Callable[[Wire, Scene], None]) -> Fault:
    """Return a fault that disturbs the connection between the broker and the actor behind the proxy."""

    def inject(scene: Scene) -> None:
        assert scene.wire is not None
        act(scene.wire, scene)

    return inject


# --- disk, clock, environment --------------------------------------------------------------------------


def fill_disk(leave: int, seconds: float = 5.0) -> Fault:
    """Return a fault that fills the run folder's file system for a while, except for ``leave`` bytes."""

    def inject(scene: Scene) -> None:
        with full(scene.system.dir / "ballast", leave):
            time.sleep(seconds)

    return inject


def jump_clock(scene: Scene) -> None:
    """Let the wall clocks of all processes jump two hours ahead or back, for four seconds."""
    scene.clock.write_text(scene.rng.choice(("7200", "-7200")))
    time.sleep(4.0)
    scene.clock.write_text("0")


def misbehave(how: str, seconds: float = 3.0) -> Fault:
    """Return a fault in which each step of the environment misbehaves for a while: NaN, exception or hang."""

    def inject(scene: Scene) -> None:
        flag = Path(scene.system.config["env"]["params"]["flag"])
        flag.write_text(how)
        try:
            time.sleep(seconds)
        finally:
            flag.unlink()

    return inject


# --- strangers --------------------------------------------------------------------------------------------------


def junk_connections(scene: Scene) -> None:
    """Open two hundred connections that do not speak ZeroMQ."""
    host, _, port = scene.system.config["broker"]["endpoint"].removeprefix("tcp://").rpartition(":")
    for _ in range(200):
        with socket.socket() as raw:
            raw.settimeout(2.0)
            try:
                raw.connect((host, int(port)))
                raw.sendall(scene.rng.randbytes(64))
            except OSError:
                pass


def with_intruder(role: str, act: Callable[[Intruder, Scene], None]) -> Fault:
    """Return a fault by an intruder that has the key of a role."""

    def inject(scene: Scene) -> None:
        intruder = Intruder(scene.system, role)
        try:
            act(intruder, scene)
        finally:
            intruder.close()

    return inject


def replay_frames(intruder: Intruder, scene: Scene) -> None:
    """Send old segments of the run again, in random order, from an actor that does not hold their leases."""
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
    "freeze supervisor": (2, freeze_supervisor),
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
    "weights truncated": (4, damage_weights(truncated)),
    "weights flipped": (4, damage_weights(flipped)),
    "weights replaced": (3, damage_weights(replaced)),
    "weights mixed": (3, damage_weights(mixed)),
    "shared memory full": (3, fill_memory()),
    "journal damaged": (1, damage_journal),
    "journal torn": (1, tear_journal),
    "bits flipped": (5, on_the_wire(lambda wire, scene: wire.mangled(Flips(scene.rng, 0.05), CUT_S))),
    "bytes swapped": (4, on_the_wire(lambda wire, scene: wire.mangled(Swaps(scene.rng, 0.05), CUT_S))),
    "connection reset": (5, on_the_wire(lambda wire, _: wire.reset(times=4))),
    "wire delayed": (4, on_the_wire(lambda wire, _: wire.slow(0.2, CUT_S))),
    "connection replayed": (4, on_the_wire(lambda wire, _: wire.replay(times=3))),
    "junk connections": (8, junk_connections),
    "no key": (6, with_intruder("", Intruder.hello_in_vain)),
    "unknown key": (6, with_intruder("unknown", Intruder.hello_in_vain)),
    "key of another role": (6, with_intruder("actor", Intruder.pose_as_learner)),
    "oversize message": (4, with_intruder("actor", Intruder.oversize)),
    "malformed frames": (6, with_intruder("actor", Intruder.malformed)),
    "replayed frames": (6, with_intruder("actor", replay_frames)),
    "zombie learner": (8, with_intruder("learner", Intruder.zombie)),
    "NaN log-probabilities": (6, with_intruder("actor", Intruder.not_finite)),
    "slow engine": (5, edges.slow_engine),
    "user code blocks": (5, edges.block_user_code),
    "journal cut": (2, edges.cut_journal),
    "journal missing": (2, edges.lose_journal),
    "shared memory names taken": (2, edges.squat_shared_memory),
    "peer name taken": (5, with_intruder("learner", edges.squat_peer_name)),
    "host comes and goes": (3, edges.host_comes_and_goes),
    "previous checkpoint": (2, edges.previous_checkpoint),
}
"""The faults by name: weight in the schedule of a campaign, and the function."""

"""Resources that faults need of the host: a second network namespace with an actor in it, and file systems to fill."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from learner.run_files import SHARED_MEMORY
from tests.campaigns.faults.scene import Scene, System

HOST, FAR, SPACE, LINK = "10.77.0.1", "10.77.0.2", "offbeat-faults", "offbeat-f0"
CUT_S = 6.0


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


def make_network() -> None:
    """Create a second network namespace, and a wire between it and ours."""
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
    """Start an actor of the same run in the other namespace."""
    role = [sys.executable, "-m", "launch.role", "actor", str(system.folder), "--name", "actor-far"]
    with open(system.folder / "logs" / "actor-far.log", "ab") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", SPACE, *role],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OFFBEAT_LOG_LEVEL": "debug", "OMP_NUM_THREADS": "1"},
        )


def cut_network(scene: Scene) -> None:
    """Take the wire down for `CUT_S` seconds. Then the far actor has to come back."""
    _ip("link", "set", LINK, "down")
    time.sleep(CUT_S)
    _ip("link", "set", LINK, "up")
    _far_is_back(scene)


def cut_one_way(scene: Scene) -> None:
    """Drop all answers to the far actor for `CUT_S` seconds, while its own messages arrive."""
    _ip("route", "add", "blackhole", f"{FAR}/32")
    time.sleep(CUT_S)
    _ip("route", "del", "blackhole", f"{FAR}/32")
    _far_is_back(scene)


def slow_network(scene: Scene) -> None:
    """Limit the wire to 256 kbit/s for `CUT_S` seconds."""
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


NEEDS_NETWORK = ("network cut", "network cut one way", "network slow")
NEEDS_TMPFS = ("disk low", "disk full")
NEEDS_MEMORY = ("shared memory full",)
NEEDS_WIRE = ("bits flipped", "bytes swapped", "connection reset", "wire delayed", "connection replayed")
TMPFS_BYTES, MEMORY_BYTES = 3 << 30, 1 << 30
CLONE_NEWNS = 0x0002_0000


@contextmanager
def stage(directory: Path, kinds: list[str]) -> Iterator[None]:
    """Set up what these kinds need: a wire to a second network namespace, and file systems to fill.

    Only this process and its children see the mounted file systems.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if needs(kinds, NEEDS_TMPFS + NEEDS_MEMORY):
        own_mounts()
    if needs(kinds, NEEDS_TMPFS):
        _mount_tmpfs(directory, TMPFS_BYTES)
    if needs(kinds, NEEDS_MEMORY):
        _mount_tmpfs(SHARED_MEMORY, MEMORY_BYTES)
    if needs(kinds, NEEDS_NETWORK):
        make_network()
    try:
        yield
    finally:
        if needs(kinds, NEEDS_NETWORK):
            remove_network()


def needs(kinds: list[str], of: tuple[str, ...]) -> bool:
    """Return whether any of ``kinds`` is in ``of``."""
    return any(kind in of for kind in kinds)


def own_mounts() -> None:
    """Enter a mount namespace of our own: only this process and its children see later mounts.

    The mounts end with these processes.

    Raises:
        OSError: the process is not allowed to, for example because it does not run as root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(
            ctypes.get_errno(), "mounts of our own: run as root, or leave out what fills file systems"
        )
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _mount_tmpfs(folder: Path, nbytes: int) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "offbeat-faults", str(folder)], check=True
    )

"""A second network namespace with an actor in it, and faults of the wire between the namespaces."""

import os
import subprocess
import sys
import time

from benchmarks.faults.scene import Scene
from benchmarks.faults.system import System

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

"""A campaign of faults against the real system, and the proof that nothing was lost and nothing trained twice.

    python -m benchmarks.faults [--faults 200] [--seed 0] [--kinds "kill broker" ...] [--dir DIR] [--out FILE.json]
                                [--deadline 120] [--keep DIR]
    python -m benchmarks.faults --table FILE.json

The main job runs throughout, on real vLLM, DeepSpeed and sockets, with an actor more in a network namespace of its own.
Faults come one after the other from a schedule that the seed fixes, each kind at least once if there are enough. After
each, broker, learner, actors and a generator have to be there, new processes where they were killed, and a further step
has to be committed, within the deadline; at the end all of them have to be there. Then the run is stopped, and its
actors' logs and its journal are read from outside. Needs root (namespaces, a tmpfs to fill); `--kinds` leaves out what
needs it.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fault_kinds import HOST, KINDS, Scene, far_actor, make_network, remove_network
from benchmarks.fault_proof import prove, summary
from benchmarks.fault_system import START_S, Deadlock, System
from launch.processes import free_port

NEEDS_NETWORK = ("network cut", "network cut one way", "network slow")
NEEDS_TMPFS = ("disk low", "disk full")
TMPFS_BYTES = 3 << 30


def schedule(kinds: list[str], count: int, seed: int) -> list[str]:
    """Which fault when: each kind once if there is room, the rest by weight, in random order.

    Example:
        >>> first = schedule(["kill broker", "kill actor"], 5, seed=1)
        >>> first == schedule(["kill broker", "kill actor"], 5, seed=1), len(first), len(set(first))
        (True, 5, 2)
    """
    rng = random.Random(seed)
    chosen = rng.sample(kinds, min(count, len(kinds)))
    weights = [KINDS[kind][0] for kind in kinds]
    chosen += rng.choices(kinds, weights, k=count - len(chosen))
    rng.shuffle(chosen)
    return chosen


@contextmanager
def stage(directory: Path, *, network: bool, tmpfs: bool) -> Iterator[None]:
    """A wire to another namespace, and a file system that can be filled."""
    directory.mkdir(parents=True, exist_ok=True)
    if tmpfs:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "offbeat-faults", str(directory)],
            check=True,
        )
    if network:
        make_network()
    try:
        yield
    finally:
        if network:
            remove_network()
        if tmpfs:
            subprocess.run(["umount", "-l", str(directory)], check=False)


def campaign(args: argparse.Namespace) -> dict[str, Any]:
    """Run it; returns what was found."""
    kinds = args.kinds or list(KINDS)
    network, tmpfs = any(k in NEEDS_NETWORK for k in kinds), any(k in NEEDS_TMPFS for k in kinds)
    with stage(args.dir, network=network, tmpfs=tmpfs):
        host = HOST if network else "127.0.0.1"
        clock = args.dir.resolve() / "clock"
        system = System(args.dir.resolve(), overrides(host, args.dir), environment(clock))
        found: dict[str, Any] = {"seed": args.seed, "kinds": kinds, "results": []}
        far = None
        try:
            system.start()
            system.until(lambda: (system.committed() or 0) > 0, START_S, "the first step is committed")
            far = far_actor(system) if network else None
            scene = Scene(system, random.Random(args.seed), clock)
            for number, kind in enumerate(schedule(kinds, args.faults, args.seed)):
                if far is not None and far.poll() is not None:
                    far = far_actor(system)
                found["results"].append(one(scene, number, kind, args.deadline))
            system.until(lambda: system.well(generators=2), START_S, "all of them are there at the end")
            found["exit_code"] = system.end()
        except (Deadlock, subprocess.TimeoutExpired) as error:
            found["deadlock"] = str(error)
            print(f"NOT RECOVERED: {error}", flush=True)
            print((args.dir / "train.log").read_text()[-4000:], flush=True)
        finally:
            for process in (far, system.supervisor):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()
        found["proof"] = asdict(prove(system.folder))
        if args.keep:
            shutil.copytree(system.folder, args.keep, dirs_exist_ok=True)
    return found


def one(scene: Scene, number: int, kind: str, deadline_s: float) -> dict[str, Any]:
    """Inject one fault and wait until the run goes on."""
    began = time.monotonic()
    try:
        since = KINDS[kind][1](scene) or time.monotonic()
    except Deadlock:
        raise
    except (AssertionError, OSError, LookupError, ValueError, subprocess.CalledProcessError) as error:
        print(f"{number:4d} {kind}: {error!r}", flush=True)
        return {"kind": kind, "seconds": 0.0, "recovered": False, "error": repr(error)}
    scene.system.goes_on(deadline_s)
    seconds = time.monotonic() - since
    print(f"{number:4d} {kind:24s} {seconds:6.1f} s  (in all {time.monotonic() - began:.1f} s)", flush=True)
    return {"kind": kind, "seconds": seconds, "recovered": True}


def overrides(host: str, directory: Path) -> list[str]:
    """Of the run file: addresses, and the file by which the environment is told to misbehave."""
    flag = directory.resolve() / "faults.flag"
    return [
        f"broker.endpoint=tcp://{host}:{free_port()}",
        f"broker.http=127.0.0.1:{free_port()}",
        f"generator.endpoint=tcp://{host}:0",
        f"env.params.flag={flag}",
    ]


def environment(clock: Path) -> dict[str, str]:
    """Of all processes: their wall clocks are off by as much as the file says."""
    clock.write_text("0")
    path = [str(Path(__file__).with_name("fault_clock")), os.environ.get("PYTHONPATH", "")]
    return {"OFFBEAT_FAULT_CLOCK": str(clock), "PYTHONPATH": os.pathsep.join(filter(None, path))}


def table(found: dict[str, Any]) -> str:
    """As docs/reliability.md shows it."""
    results = found["results"]
    rows = [["fault", "injected", "recovered", "median s", "worst s"], ["---"] * 5, *summary(results)]
    injected, recovered = len(results), sum(result["recovered"] for result in results)
    rows.append(["**all**", f"**{injected}**", f"**{recovered}**", "", ""])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", "| over the whole campaign | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in totals(found).items()]
    return "\n".join(lines)


def totals(found: dict[str, Any]) -> dict[str, str]:
    """What must be nothing, and of how much."""
    proof = found["proof"]
    return {
        "segments acknowledged to actors": f"{proof['acknowledged']:,}",
        "of these lost": str(len(proof["lost"])),
        "steps of the surviving line": f"{proof['steps']:,}",
        "units trained in it": f"{proof['units_trained']:,}",
        "of these trained twice": str(len(proof["trained_twice"])),
        "units given back after a learner was killed": f"{proof['rolled_back']:,}",
        "deadlocks": str(int("deadlock" in found)),
        "ledger violations": str(int(bool(proof["violation"]))),
        "segments by what became of them": ", ".join(f"{k} {v:,}" for k, v in proof["outcomes"].items()),
        "held at the end": f"{proof['held']:,}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS))
    parser.add_argument("--dir", type=Path, default=Path("build/faults"))
    parser.add_argument("--keep", type=Path, help="copy the run folder here at the end")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds to recover")
    parser.add_argument("--table", type=Path, help="print the table of a campaign's JSON, and no more")
    args = parser.parse_args()
    found = json.loads(args.table.read_text()) if args.table else campaign(args)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    print(table(found))
    proof = found["proof"]
    bad = proof["lost"] or proof["trained_twice"] or proof["violation"] or "deadlock" in found
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

"""Inject faults into the real system, and prove that nothing was lost and nothing was trained twice.

    python -m tests.campaigns.faults [--faults 200] [--seed 0] [--kinds "kill broker" ...] [--dir DIR]
                                [--out FILE.json] [--deadline 120] [--keep DIR] [--minutes 40] [--resume]
    python -m tests.campaigns.faults --table FILE.json

Each finished fault is one line of FILE.jsonl, from which `--table` can make a table too. `--minutes` ends the
campaign early. `--resume` continues after the last line, in a new run, and adds up the findings of both.

The main job runs throughout on real vLLM, DeepSpeed and sockets, with an additional actor in its own network
namespace and another one behind a proxy. Faults come one after the other. The seed fixes their schedule,
which has each kind at least once if there are enough faults. After each fault, within the deadline, broker,
learner, actors and one generator have to be up (new processes where some were killed), and a further step has
to be committed. At the end all processes have to be up. Then the campaign stops the run and checks its
actors' logs and its journal from outside.

A full campaign needs root, for network namespaces and for a tmpfs to fill. `--kinds` can leave out the faults
that need root.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import save_results
from launch.processes import free_ports
from tests.campaigns.faults.kinds import KINDS
from tests.campaigns.faults.network import HOST, NEEDS_NETWORK, NEEDS_WIRE, far_actor, needs, stage
from tests.campaigns.faults.proof import failures, lines_of, load, merged, prove, read_lines, table
from tests.campaigns.faults.scene import START_S, Deadlock, Scene, System, Wire


def schedule(kinds: list[str], count: int, seed: int) -> list[str]:
    """Return the faults in random order: each kind once if there is room, the rest drawn by weight.

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


def campaign(args: argparse.Namespace) -> dict[str, Any]:
    """Run a campaign. Return its findings."""
    kinds = args.kinds or list(KINDS)
    network = needs(kinds, NEEDS_NETWORK)
    with stage(args.dir, kinds):
        host = HOST if network else "127.0.0.1"
        clock = args.dir.resolve() / "clock"
        system = System(args.dir.resolve(), overrides(host, args.dir), environment(clock))
        found: dict[str, Any] = {"seed": args.seed, "kinds": kinds, "results": []}
        if args.resume:
            found["results"] = read_lines(lines_of(args.out))
        elif args.out:
            lines_of(args.out).unlink(missing_ok=True)
        begun = len(found["results"])
        planned = schedule(kinds, args.faults, args.seed)
        others = Others(system)
        try:
            system.start()
            system.until(lambda: (system.committed() or 0) > 0, START_S, "the first step is committed")
            others.start(kinds)
            inject(
                Scene(system, random.Random(args.seed + begun), clock, others.wire),
                planned,
                found,
                args,
                others,
            )
            system.until(lambda: system.well(generators=2), START_S, "all of them are there at the end")
            found["exit_code"] = system.end()
        except (Deadlock, subprocess.TimeoutExpired) as error:
            found["deadlock"] = str(error)
            show_deadlock(args, error, planned[: len(found["results"]) + 1])
        finally:
            others.close()
            if system.supervisor is not None and system.supervisor.poll() is None:
                system.supervisor.kill()
                system.supervisor.wait()
        found["proof"] = asdict(prove(system.folder, found["results"][begun:]))
        if args.keep:
            shutil.copytree(system.folder, args.keep, dirs_exist_ok=True)
    return found


def show_deadlock(args: argparse.Namespace, error: Exception, injected: list[str]) -> None:
    """Print what did not recover, the faults so far, and the end of the log."""
    print(f"NOT RECOVERED: {error}", flush=True)
    print(f"seed {args.seed}; the faults: {injected}", flush=True)
    print((args.dir / "train.log").read_text()[-4000:], flush=True)


class Others:
    """Actors that the supervisor does not know: one in another network namespace, one behind a proxy."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._far: subprocess.Popen[bytes] | None = None
        self.wire: Wire | None = None

    def start(self, kinds: list[str]) -> None:
        """Start the actors that these kinds of faults need."""
        if needs(kinds, NEEDS_NETWORK):
            self._far = far_actor(self._system)
        if needs(kinds, NEEDS_WIRE):
            self.wire = Wire(self._system)
            self.wire.start()

    def revive(self) -> None:
        """Start those actors again that have ended."""
        if self._far is not None and self._far.poll() is not None:
            self._far = far_actor(self._system)
        if self.wire is not None:
            self.wire.start()

    def close(self) -> None:
        if self._far is not None and self._far.poll() is None:
            self._far.kill()
            self._far.wait()
        if self.wire is not None:
            self.wire.close()


def inject(
    scene: Scene, planned: list[str], found: dict[str, Any], args: argparse.Namespace, others: Others
) -> None:
    """Inject one fault after the other, beginning with the first that has no result yet."""
    end = time.monotonic() + 60.0 * args.minutes
    for number in range(len(found["results"]), len(planned)):
        if time.monotonic() > end:
            return
        others.revive()
        found["results"].append(one(scene, number, planned[number], args.deadline))
        if args.out:
            with open(lines_of(args.out), "a") as lines:
                lines.write(json.dumps(found["results"][-1]) + "\n")


def one(scene: Scene, number: int, kind: str, deadline_s: float) -> dict[str, Any]:
    """Inject one fault and wait until the run has recovered. Return the result.

    Raises:
        Deadlock: the run did not recover within the deadline.
    """
    began, error = time.monotonic(), ""
    try:
        since = KINDS[kind][1](scene) or time.monotonic()
    except Deadlock:
        raise
    except (AssertionError, OSError, LookupError, ValueError, subprocess.CalledProcessError) as wrong:
        # Something that the fault expects did not happen.
        since, error = time.monotonic(), repr(wrong)
    scene.system.goes_on(deadline_s)
    seconds, in_all = time.monotonic() - since, time.monotonic() - began
    print(f"{number:4d} {kind:24s} {seconds:6.1f} s  (in all {in_all:.1f} s) {error}", flush=True)
    result: dict[str, Any] = {"kind": kind, "seconds": seconds, "recovered": not error}
    return result | ({"error": error} if error else {}) | {"log_bytes": log_bytes(scene.system.folder)}


def log_bytes(folder: Path) -> dict[str, int]:
    """Return the size of each actor's log, to tell later under which fault an acknowledgement was logged."""
    return {path.name: path.stat().st_size for path in sorted((folder / "logs").glob("actor*.log"))}


def overrides(host: str, directory: Path) -> list[str]:
    """Return overrides of the run file: addresses, and the file that makes the environment misbehave."""
    flag = directory.resolve() / "faults.flag"
    port, http_port = free_ports(2)
    return [
        f"broker.endpoint=tcp://{host}:{port}",
        f"broker.http=127.0.0.1:{http_port}",
        f"generator.endpoint=tcp://{host}:0",
        f"env.params.flag={flag}",
    ]


def environment(clock: Path) -> dict[str, str]:
    """Return environment variables that shift a process's wall clock by the seconds in the file ``clock``."""
    clock.write_text("0")
    path = [str(Path(__file__).with_name("clock")), os.environ.get("PYTHONPATH", "")]
    return {"OFFBEAT_FAULT_CLOCK": str(clock), "PYTHONPATH": os.pathsep.join(filter(None, path))}


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
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="inject no more faults after this long"
    )
    parser.add_argument("--resume", action="store_true", help="go on behind the last fault beside --out")
    parser.add_argument("--table", type=Path, help="print the table of a campaign's JSON, and no more")
    args = parser.parse_args()
    if args.resume and not args.out:
        parser.error("--resume goes on behind the lines beside --out FILE.json; name it")
    found = load(args.table) if args.table else campaign(args)
    if args.resume and args.out.exists():
        found = merged(load(args.out), found)
    if args.out:
        save_results(args.out, {"campaign": table(found)}, found)
    print(table(found))
    for wrong in failures(found):
        print(f"WRONG: {wrong}")
    sys.exit(1 if failures(found) else 0)

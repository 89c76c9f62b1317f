"""What `offbeat scale` and `offbeat drain` change: a pure plan of who starts and who leaves, and the file that says so.

Local supervisors start and drain what is beside the learner. The broker asks generators and actors of other hosts to
leave. Engines, such as Slurm, start further hosts.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import ConfigError
from launch.fleet import engines
from protocol.files import write_whole
from protocol.wanted import FILE, LARGEST, Leaving, Wanted, is_local, of_host, parse

KEPT_S = 24 * 3600.0
"""Age after which a wish that somebody leaves is removed from the file."""
PATIENCE_S = 600.0
"""Time after which the same advice is carried out again, if it still holds."""
_CHANGE = re.compile(r"(generators|actors)=([+-]?)(\d{1,4})")


@dataclass(frozen=True)
class RolePlan:
    """How many generators, or actors, there are and shall be, and who does it."""

    role: str
    before: int
    after: int
    local: int
    """Number beside the learner from now on."""
    leaving: tuple[str, ...] = ()
    """Peers of other hosts that are asked to leave, the youngest first."""
    engine: str = ""
    """Engine that starts what is missing; "": the supervisor of the head does."""

    def sentence(self) -> str:
        """Return what changes and who does it.

        Example:
            >>> RolePlan("generator", 3, 2, 1, ("generator-gpu7-0",)).sentence()
            'generators: 3 now, 2 wanted; the broker drains generator-gpu7-0'
        """
        here = self.after - self.before + len(self.leaving)
        parts = [f"{self.role}s: {self.before} now, {self.after} wanted"]
        if here > 0 and self.engine:
            parts.append(f"{self.engine} starts {here}")
        elif here > 0:
            parts.append(f"the supervisor of the head starts {here}")
        elif here < 0:
            parts.append(f"the supervisor of the head drains {-here}")
        if self.leaving:
            parts.append(f"the broker drains {', '.join(self.leaving)}")
        return "; ".join(parts)


def read_changes(words: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Read the words of `offbeat scale`: a sign ("" for none) and a number for each role.

    Raises:
        ConfigError: a word is no such change.

    Example:
        >>> read_changes(["generators=6", "actors=+2"])
        {'generator': ('', 6), 'actor': ('+', 2)}
    """
    changes = {}
    for word in words:
        match = _CHANGE.fullmatch(word)
        if match is None:
            raise ConfigError(f"{word!r}: write generators=N, actors=N, or +N and -N to change their number")
        changes[match[1].removesuffix("s")] = (match[2], int(match[3]))
    if not changes:
        raise ConfigError("nothing to change: write for example generators=6 or actors=+2")
    return changes


def target(change: tuple[str, int], before: int) -> int:
    """Return the number that a change asks for. Only "=0" asks for none at all.

    Example:
        >>> target(("", 6), 2), target(("+", 2), 2), target(("-", 5), 2), target(("", 0), 2)
        (6, 4, 1, 0)
    """
    sign, number = change
    if not sign:
        return number
    least = min(1, before)
    return min(LARGEST, max(least, before + number if sign == "+" else before - number))


def plan(
    role: str,
    change: tuple[str, int],
    peers: Sequence[Mapping[str, Any]],
    local: int,
    *,
    supervised: bool,
    engine: str = "",
) -> RolePlan:
    """Return who starts and who leaves, the youngest first.

    Args:
        peers: the broker's entries of all peers.
        local: number beside the learner that was wanted before.
        supervised: whether a supervisor runs on the head, which can start processes.
        engine: engine that has hosts to start; "": none.

    Raises:
        ConfigError: more are wanted, and nobody can start them.
    """
    hosted = [peer for peer in peers if peer["role"] == role and not is_local(peer["name"])]
    before = local + len(hosted)
    after = target(change, before)
    if after > before and engine:
        return RolePlan(role, before, after, local, engine=engine)
    if after > before and not supervised:
        raise ConfigError(
            f"{after} {role}s are wanted, there are {before}, and no supervisor runs on the head to start them; start "
            "a further host with `offbeat ticket` and `offbeat host`"
        )
    if after >= before:
        return RolePlan(role, before, after, local + after - before)
    own = [peer for peer in peers if peer["role"] == role and is_local(peer["name"])]
    # One that has not joined yet is younger than all that have.
    youngest = [None] * max(0, local - len(own)) + sorted(
        [*own, *hosted], key=lambda peer: peer["connected_s"]
    )
    gone = youngest[: before - after]
    leaving = tuple(peer["name"] for peer in gone if peer is not None and not is_local(peer["name"]))
    return RolePlan(role, before, after, local - (len(gone) - len(leaving)), leaving, engine)


def plan_all(
    folder: Path,
    changes: Mapping[str, tuple[str, int]],
    peers: Sequence[Mapping[str, Any]],
    started: Iterable[str],
    *,
    supervised: bool,
) -> list[RolePlan]:
    """Return the plans of several roles of a run.

    Args:
        changes: change of each role, as `read_changes` returns them.
        peers: the broker's entries of all peers.
        started: names of the processes that the supervisor of the head has.
        supervised: whether that supervisor runs.

    Raises:
        ConfigError: more are wanted, and nobody can start them.
    """
    now, engine = read(folder), "Slurm" if _slurm(folder) else ""
    peers = [peer for peer in peers if not peer.get("leaving")]
    asked = {"generator": now.generators, "actor": now.actors}
    plans = []
    for role, change in changes.items():
        before = asked[role]
        own = sum(is_local(name) and name.startswith(role) for name in started)
        local = own if before is None else before
        plans.append(plan(role, change, peers, local, supervised=supervised, engine=engine))
    return plans


def carry_out(folder: Path, plans: Sequence[RolePlan], say: Callable[[str], None]) -> None:
    """Ask an engine for its part of the plans, and write what is wanted of all others.

    Args:
        say: shows a sentence to the user.
    """
    if (slurm := _slurm(folder)) is not None:
        for one in plans:
            # Before somebody leaves, or Slurm would start the next task in its place.
            engines.throttle(slurm, one.role, one.after - one.local, say)
    write(folder, plans)


class Follower:
    """Carries out the broker's advice on a run with `fleet.auto`, by the file that `offbeat scale` writes.

    Args:
        folder: run folder of the head.
        roles: roles whose numbers may change.
        starts: whether the supervisor of the head may start processes; a head that only learns starts none.
        note: shows a sentence to the user.
    """

    def __init__(
        self, folder: Path, roles: Sequence[str], *, starts: bool, note: Callable[[str], None]
    ) -> None:
        self._folder, self._roles, self._starts, self._note = folder, roles, starts, note
        self._asked: dict[str, int] = {}
        """Numbers that were last asked for."""
        self._asked_at = -math.inf

    def look(self, status: Mapping[str, Any], started: Iterable[str], now: float) -> None:
        """Follow the advice in an answer of the broker, if it asks for other numbers than before.

        Args:
            started: names of the processes beside the learner.
        """
        advice = status.get("fleet", {}).get("wanted") or {"measured": False}
        if not advice["measured"]:
            return
        asked = {role: int(advice[f"{role}s"]) for role in self._roles}
        if asked == self._asked and now - self._asked_at < PATIENCE_S:
            # An engine may take its time to start what is missing.
            return
        changes = {role: ("", count) for role, count in asked.items()}
        plans = plan_all(self._folder, changes, status["peers"], started, supervised=True)
        plans = [one for one in plans if one.after != one.before]
        if not self._starts:
            plans = [one for one in plans if one.after < one.before or one.engine]
        self._asked, self._asked_at = asked, now
        if plans:
            for one in plans:
                self._note(f"{one.sentence()}: {advice['reason']}")
            carry_out(self._folder, plans, self._note)


def _slurm(folder: Path) -> engines.Launched | None:
    launched = engines.launched_of(folder)
    return launched if launched is not None and launched.engine == "slurm" else None


def members(name: str, peers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the peers that a name of `offbeat drain` means: one peer, or all of a host.

    Raises:
        ConfigError: nobody has this name; the text lists hosts that are there.
    """
    found = [peer["name"] for peer in peers if peer["name"] == name or of_host(peer["name"], name)]
    if not found or name == "learner":
        hosts = sorted({peer.get("on_host", "") for peer in peers} - {""})
        there = f"hosts are {', '.join(hosts)}" if hosts else "no host beside the learner's is there"
        raise ConfigError(f"{name!r} is neither a host nor a generator or actor of this run; {there}")
    if supervised := [peer for peer in found if is_local(peer)]:
        raise ConfigError(
            f"{supervised[0]} is supervised beside the learner, which would start it again; use `offbeat scale`"
        )
    return found


# --- the file ---------------------------------------------------------------------------------------------


def read(folder: Path) -> Wanted:
    """Return what is wanted of a run now; nothing if nobody has asked."""
    try:
        return parse((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Wanted()


def write(folder: Path, plans: Sequence[RolePlan], leaving: Sequence[str] = ()) -> None:
    """Add to what is wanted of a run.

    Args:
        leaving: further peers or hosts that are to leave.
    """
    before, now = read(folder), time.time()
    counts = {"generator": before.generators, "actor": before.actors} | {one.role: one.local for one in plans}
    names = [*leaving, *(name for one in plans for name in one.leaving)]
    kept = [one for one in before.leaving if one.at > now - KEPT_S]
    wanted = Wanted(counts["generator"], counts["actor"], (*kept, *(Leaving(name, now) for name in names)))
    write_whole(folder / FILE, wanted.to_json(), durable=False, shared=True)

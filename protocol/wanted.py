"""The file `wanted.json` of a run folder: how many generators and actors a user wants, and who is to leave.

`offbeat scale` and `offbeat drain` write it, by rename. The supervisor beside the learner reads the counts, the broker
the names of those who are to leave, each once a second.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "wanted.json"
MAX_BYTES = 1 << 20
MAX_LEAVING = 4_096
LARGEST = 4_096
"""Largest number of generators or of actors that may be wanted."""
HOSTED = ("generator", "actor")
"""Roles of the peers of a host."""


@dataclass(frozen=True)
class Leaving:
    """One wish that a peer, or all peers of a host, leave."""

    name: str
    at: float
    """Time of the wish, in seconds since 1970. Who joins later is not meant."""


@dataclass(frozen=True)
class Wanted:
    """What a user wants of a run now; None: as the run file says."""

    generators: int | None = None
    """Generators beside the learner."""
    actors: int | None = None
    """Actors beside the learner."""
    leaving: tuple[Leaving, ...] = field(default=())

    def to_json(self) -> str:
        """Return the content of the file.

        Example:
            >>> parse(Wanted(2, None, (Leaving("gpu7", 5.0),)).to_json())
            Wanted(generators=2, actors=None, leaving=(Leaving(name='gpu7', at=5.0),))
        """
        leaving = [{"name": one.name, "at": one.at} for one in self.leaving]
        return json.dumps(
            {"generators": self.generators, "actors": self.actors, "leaving": leaving}, indent=1
        )


def parse(text: str) -> Wanted:
    """Read the content of the file; what cannot be read is left out.

    Example:
        >>> parse("["), parse('{"generators": -1, "actors": true, "leaving": [{"name": 3}]}')
        (Wanted(generators=None, actors=None, leaving=()), Wanted(generators=None, actors=None, leaving=()))
    """
    try:
        content = json.loads(text)
    except ValueError:
        return Wanted()
    if not isinstance(content, dict):
        return Wanted()
    leaving = content.get("leaving", ())
    found = [_leaving(one) for one in leaving] if isinstance(leaving, list) else []
    return Wanted(
        _count(content.get("generators")),
        _count(content.get("actors")),
        tuple(one for one in found if one is not None)[-MAX_LEAVING:],
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _leaving(one: Any) -> Leaving | None:
    if not isinstance(one, dict):
        return None
    name, at = one.get("name"), one.get("at")
    if not isinstance(name, str) or isinstance(at, bool) or not isinstance(at, int | float):
        return None
    return Leaving(name, float(at))


def of_host(peer: str, host: str) -> bool:
    """Return whether a peer is of a host, by its name.

    Example:
        >>> of_host("actor-gpu7-0", "gpu7"), of_host("actor-gpu7-0", "gpu"), of_host("actor-0", "0")
        (True, False, False)
    """
    return any(
        peer.startswith(start) and peer[len(start) :].isdigit()
        for start in (f"{role}-{host}-" for role in HOSTED)
    )


def is_local(name: str) -> bool:
    """Return whether a generator or actor is supervised beside the learner, by its name.

    Example:
        >>> is_local("generator-3"), is_local("generator-gpu7-3")
        (True, False)
    """
    return re.fullmatch(rf"({'|'.join(HOSTED)})-\d+", name) is not None


class WantedFile:
    """Reads the file again when it has changed.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def changed(self) -> Wanted | None:
        """Return what is wanted, if the file has changed since the last call; else None."""
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_ino)
            if seen == self._seen or stat.st_size > MAX_BYTES:
                return None
            text = self._path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        self._seen = seen
        return parse(text)

"""The supervisor's record of its processes, for `offbeat status` where the broker does not answer."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from launch.supervise.posts import Post
from protocol.files import write_whole

STATE_FILE = "supervisor.json"


class StateFile:
    """Writes the record to the run folder, and remembers if it could not.

    Args:
        http: address at which the broker answers.
        note: function that shows a sentence to the user.
    """

    def __init__(self, folder: Path, http: str, note: Callable[[str], None]) -> None:
        self._path, self._http, self._note = folder / STATE_FILE, http, note
        self.unsaved = False
        """True if the newest record could not be written."""

    def save(self, posts: Iterable[Post]) -> None:
        """Write the processes of all posts. If the disk is full, say so once, and leave the former record."""
        state: dict[str, Any] = {"pid": os.getpid(), "http": self._http, "processes": {}}
        for post in posts:
            state["processes"][post.name] = {
                "pid": post.child.process.pid if post.child else 0,
                "log": str(post.child.log) if post.child else "",
                "restarts": post.backoff.total,
                "last_reason": post.backoff.reasons[-1] if post.backoff.reasons else "",
            }
        try:
            write_whole(self._path, json.dumps(state, indent=1), durable=False)
        except OSError as error:
            if not self.unsaved:
                self._note(f"{self._path}: {error}; `offbeat status` may name processes that are gone")
            self.unsaved = True
        else:
            self.unsaved = False


def read_state(folder: Path | None) -> dict[str, Any]:
    """Return the supervisor's record of its processes; empty without a run folder, or a supervisor."""
    try:
        return dict(json.loads((folder / STATE_FILE).read_text())) if folder else {}
    except (OSError, ValueError):
        return {}

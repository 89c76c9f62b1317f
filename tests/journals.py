"""Small journals for tests, and functions that read them."""

from contextlib import closing

from broker.journal.config import JournalConfig
from broker.journal.journal import Journal

DEADLINE_S = 120.0


class Closing(closing):
    """A journal that a `with` block closes; `close` closes it without a block."""

    def close(self):
        self.thing.close()


def small(**settings):
    return JournalConfig(**{"sync_interval_s": 0.05, "min_free_bytes": 0, **settings})


def begin(folder, config=None, **settings):
    """Open the journal of run "run" in ``folder``."""
    return Closing(Journal.open(folder, run="run", config=config or small(), **settings))


def contents(folder, **settings):
    """Return the payloads that a recovery reads."""
    with begin(folder, **settings) as journal:
        return [record.payload for record in journal.recovered()]


def files(folder):
    """Return the size in bytes of each file of the journal."""
    return {path.name: path.stat().st_size for path in folder.glob("journal-*.log")}

"""Journals for tests: small ones, and what they hold."""

from contextlib import closing

from broker.journal.config import JournalConfig
from broker.journal.journal import Journal

DEADLINE_S = 20.0


class Closing(closing):
    """A journal that is closed at the end of a block, and can be used without one."""

    def close(self):
        self.thing.close()


def small(**settings):
    return JournalConfig(**{"sync_interval_s": 0.05, "min_free_bytes": 0, **settings})


def begin(folder, config=None, **settings):
    """The journal of run "run" in that folder."""
    return Closing(Journal.open(folder, run="run", config=config or small(), **settings))


def contents(folder, **settings):
    """Payloads that are read again."""
    with begin(folder, **settings) as journal:
        return [record.payload for record in journal.recovered()]


def files(folder):
    """Bytes of each file of the journal."""
    return {path.name: path.stat().st_size for path in folder.glob("journal-*.log")}

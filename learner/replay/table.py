"""The replay table: rollouts that may be trained again.

The terms are those of Reverb (arXiv:2102.04736). A *selector* decides which items are drawn. *Removers*
decide which are evicted: by age in policy versions, by uses, and first in, first out at capacity. A *limiter*
decides how fast items are drawn. The table is pure: it reads no clock, and randomness comes from a generator
that the caller passes. At any moment ``inserted = held + evicted``.
"""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, get_args

import numpy as np

from learner.algorithms import replay
from learner.errors import ReplayStateError
from learner.replay.entry import Item, ReplayEntry, restored, stored
from learner.replay.file import (
    FORMAT,
    StoredTable,
    decode_table,
    encode_table,
)
from learner.replay.rules import (
    Columns,
    Limiter,
    Selector,
)
from learner.settings.replay import ReplayConfig
from protocol.files import write_whole

Cause = Literal["age", "uses", "capacity", "prompt", "stopped"]


@dataclass
class ReplayTable(Generic[Item]):
    """Replay table with items in the order of insertion; made by `learner.replay.from_config.make_table`.

    Example:
        >>> from learner.replay.from_config import make_table
        >>> from learner.units import Unit
        >>> table = make_table(ReplayConfig(rule="recent", max_policy_lag=2))
        >>> table.insert(Unit("u", "g", []), key="prompt", version=3)
        >>> [entry.key for entry in table.sample(1, step=0, version=4, rng=np.random.default_rng(0))]
        ['prompt']
        >>> table.sample(1, step=1, version=6, rng=np.random.default_rng(0)), table.evicted["age"]
        ([], 1)
    """

    config: ReplayConfig
    select: Selector
    limiter: Limiter
    per_key: int | None = None
    """Most items of one prompt, the newest ones; None: no limit."""
    entries: dict[int, ReplayEntry[Item]] = field(default_factory=dict)
    """Held items by `ReplayEntry.order`."""
    inserted: int = 0
    sampled: int = 0
    sampled_tokens: int = 0
    evicted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(Cause), 0))
    baselines: deque[float] = field(init=False)
    """Mean returns of recent groups, for the rule "advantage"."""
    _carry: float = 0.0

    def __post_init__(self) -> None:
        self.baselines = deque(maxlen=self.config.capacity_groups)

    def __len__(self) -> int:
        return len(self.entries)

    def insert(
        self,
        item: Item,
        *,
        key: str,
        version: int,
        return_: float = 0.0,
        advantage: float = 0.0,
        success_rate: float = 0.0,
        tokens: int = 0,
    ) -> None:
        """Insert an item, and evict the oldest items beyond the capacity."""
        self.entries[self.inserted] = ReplayEntry(
            item, key, version, return_, advantage, success_rate, tokens, order=self.inserted
        )
        self.inserted += 1
        self._trim(key)

    def sample(
        self, count: int, *, step: int, version: int, rng: np.random.Generator, key: str | None = None
    ) -> list[ReplayEntry[Item]]:
        """Draw items, each at most once; fewer than ``count`` if the table or the limiter allows no more.

        Args:
            count: number of items wanted.
            step: learner steps done; from `stop_at_step` on nothing is drawn.
            version: policy version about to be updated.
            rng: generator for the draw.
            key: draw items of this prompt only.

        Raises:
            ValueError: count is negative, or an item has a version that does not exist yet.
        """
        self.expire(step=step, version=version)
        held = [e for e in self.entries.values() if key is None or e.key == key]
        room = self.room()
        if not held or not min(count, room):
            return []
        logits = self.select(self._columns(held, version))
        drawn = [held[i] for i in replay.choose(logits, min(count, room), rng)]
        for entry in drawn:
            entry.uses += 1
            self.sampled += 1
            self.sampled_tokens += entry.tokens
            if entry.uses >= self.config.max_uses:
                self._evict(entry, "uses")
        return drawn

    def fire(self, *, step: int, version: int) -> list[ReplayEntry[Item]]:
        """Return all items that may be drawn, and empty the table, if they are at least `fire_at`; else none."""
        self.expire(step=step, version=version)
        held = list(self.entries.values())
        if not held or not self.room():
            return []
        drawn = [
            e
            for e, logit in zip(held, self.select(self._columns(held, version)), strict=True)
            if logit > -np.inf
        ]
        if len(drawn) < self.config.fire_at:
            return []
        for entry in drawn:
            entry.uses += 1
            self.sampled += 1
            self.sampled_tokens += entry.tokens
        for entry in held:
            self._evict(entry, "uses")
        return drawn

    def room(self) -> int:
        """Return the number of items that the limiter allows to be drawn now."""
        return self.limiter.room(inserted=self.inserted, held=len(self), sampled=self.sampled)

    def quota(self, fresh: int, *, step: int) -> int:
        """Return how many items to draw in addition to ``fresh`` ones; the share is exact in the long run.

        Items that could not be drawn are not drawn later instead, because batches would grow.
        """
        if self.stopped(step):
            return 0
        quota, self._carry = replay.replay_quota_beside(self.config.share, fresh, self._carry)
        return quota

    def stopped(self, step: int) -> bool:
        """Return whether replay has ended."""
        return 0 < self.config.stop_at_step <= step

    def expire(self, *, step: int, version: int) -> None:
        """Evict items that are too old for this policy version, and all items once replay has ended.

        Raises:
            ValueError: an item has a version that does not exist yet.
        """
        for entry in list(self.entries.values()):
            lag = version - entry.version
            if lag < 0:
                raise ValueError(
                    f"replay table: item {entry.order} is of version {entry.version}, the learner is at {version}; "
                    "the table belongs to another checkpoint"
                )
            if self.stopped(step):
                self._evict(entry, "stopped")
            elif lag > self.config.max_policy_lag:
                self._evict(entry, "age")

    def metrics(self) -> dict[str, float]:
        """Return the table's metrics for TensorBoard."""
        return {
            "replay/items": float(len(self)),
            "replay/inserted": float(self.inserted),
            "replay/sampled": float(self.sampled),
            "replay/evicted": float(sum(self.evicted.values())),
        }

    def state(self) -> bytes:
        """Return the whole table as bytes for `restore`."""
        return encode_table(
            StoredTable(
                format=FORMAT,
                rule=self.config.rule,
                inserted=self.inserted,
                sampled=self.sampled,
                sampled_tokens=self.sampled_tokens,
                evicted=self.evicted,
                carry=self._carry,
                baselines=list(self.baselines),
                entries=[stored(e) for e in self.entries.values()],
            )
        )

    def restore(self, data: bytes | memoryview) -> None:
        """Restore the table that `state` returned; items beyond the limits of the present settings are
        evicted.

        Raises:
            ReplayStateError: the data are damaged, or the table was filled with a different rule.
        """
        table = decode_table(data)
        if table.rule != self.config.rule:
            raise ReplayStateError(
                f"replay table: filled under learner.replay.rule = {table.rule!r}, this run has "
                f"{self.config.rule!r}; resume with the former, or delete the table's file to start with an empty one"
            )
        held, evicted = len(table.entries), sum(table.evicted.values())
        if table.inserted != held + evicted:
            raise ReplayStateError(
                f"replay table: {table.inserted} inserted, but {held} held and {evicted} evicted; the file is "
                "damaged, delete it to resume with an empty table"
            )
        self.entries = {e.order: restored(e) for e in table.entries}
        self.inserted, self.sampled = table.inserted, table.sampled
        self.sampled_tokens, self._carry = table.sampled_tokens, table.carry
        self.evicted = dict.fromkeys(get_args(Cause), 0) | table.evicted
        self.baselines = deque(table.baselines, maxlen=self.config.capacity_groups)
        for entry in list(self.entries.values()):
            if entry.uses >= self.config.max_uses:
                self._evict(entry, "uses")
        for key in {e.key for e in self.entries.values()}:
            self._trim(key)

    def save(self, path: Path) -> None:
        """Write the table to a file, which is replaced by one rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.state())

    def load(self, path: Path) -> None:
        """Restore the table in a file.

        Raises:
            ReplayStateError: the file is damaged, or the table was filled with a different rule.
            OSError: the file does not exist or cannot be read.
        """
        try:
            self.restore(path.read_bytes())
        except ReplayStateError as error:
            raise ReplayStateError(f"{path}: {error}") from None

    def _columns(self, entries: list[ReplayEntry[Item]], version: int) -> Columns:
        returns = np.array([e.return_ for e in entries])
        recalibrated = replay.advantage_recalibrated(returns, self.baselines) if self.baselines else returns
        return Columns(
            lag=np.array([version - e.version for e in entries], dtype=np.float64),
            return_=returns,
            advantage=np.array([e.advantage for e in entries]),
            recalibrated=recalibrated,
            success_rate=np.array([e.success_rate for e in entries]),
            order=np.array([e.order for e in entries], dtype=np.float64),
        )

    def _trim(self, key: str) -> None:
        same = [e for e in self.entries.values() if e.key == key]
        for entry in same[: -self.per_key] if self.per_key else []:
            self._evict(entry, "prompt")
        while len(self) > self.config.capacity_groups:
            self._evict(next(iter(self.entries.values())), "capacity")

    def _evict(self, entry: ReplayEntry[Item], cause: Cause) -> None:
        del self.entries[entry.order]
        self.evicted[cause] += 1

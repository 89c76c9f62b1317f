"""The replay table: its entries, the rules that choose among them, and how both are made from the settings."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, assert_never, get_args

import numpy as np

from learner.algorithms import replay
from learner.algorithms.replay import ROUNDING
from learner.errors import ReplayConfigError, ReplayStateError
from learner.replay.file import (
    FORMAT,
    StoredEntry,
    StoredTable,
    decode_item,
    decode_table,
    encode_item,
    encode_table,
)
from learner.settings.learner import RESCUE_RULES, LearnerConfig, ReplayConfig
from learner.trajectory import Trajectory, Unit
from protocol.arrays import Float64s
from protocol.files import write_whole

Item = TypeVar("Item", Unit, Trajectory)


@dataclass(eq=False)
class ReplayEntry(Generic[Item]):
    """An item and the numbers that the selectors use."""

    item: Item
    key: str
    """Key of the prompt; see `learner.replay.batch.prompt_key`."""
    version: int
    """Policy version of the item's newest token."""
    return_: float = 0.0
    """Return of the trajectory, or mean return of the group."""
    advantage: float = 0.0
    """Advantage at the time of insertion; 0 for groups and rescue rules."""
    success_rate: float = 0.0
    """Mean success of the item's trajectories, in [0, 1]: solved or not, else the return clipped to [0, 1]."""
    tokens: int = 0
    """Action tokens of the item."""
    order: int = 0
    """Number of items that were inserted before it; it names the item."""
    uses: int = 0
    """How often the item has been drawn."""


def stored(entry: ReplayEntry[Item]) -> StoredEntry:
    """Return an entry as it is in a file."""
    numbers = {name: value for name, value in vars(entry).items() if name != "item"}
    return StoredEntry(item=encode_item(entry.item), **numbers)


def restored(row: StoredEntry) -> ReplayEntry[Any]:
    """Return the entry that `stored` wrote."""
    values = {name: getattr(row, name) for name in StoredEntry.__struct_fields__ if name != "item"}
    return ReplayEntry(item=decode_item(row.item), **values)


SUCCESS_RETURN = {"success": 0.1, "per_prompt": 0.5}
"""Outcome above which a trajectory is a success; from ARPO (arXiv:2505.16282) and RAPO (arXiv:2509.24107)."""


class Columns(NamedTuple):
    """Input of a selector: arrays [M], one element for each item that may be drawn, oldest item first."""

    lag: Float64s
    """Policy lag of the item, in versions."""
    return_: Float64s
    advantage: Float64s
    recalibrated: Float64s
    """Return minus the median of recent groups' mean returns; the return itself while there are none."""
    success_rate: Float64s
    order: Float64s
    """Number of items that were inserted before the item."""


Selector = Callable[[Columns], Float64s]
"""Function that returns log-weights [M]; an item with -inf is never drawn."""


def make_selector(config: ReplayConfig) -> Selector:
    """Return the selector of the configured rule.

    Example:
        >>> import numpy as np
        >>> select = make_selector(ReplayConfig(rule="recent", max_policy_lag=2))
        >>> select(Columns(np.array([0.0, 3.0]), *[np.zeros(2)] * 5)).round(3).tolist()
        [1.099, -inf]
    """
    match config.rule:
        case "uniform":
            return lambda c: replay.uniform_logits(len(c.lag))
        case "recent":
            return lambda c: replay.recent_logits(c.lag, max_lag=config.max_policy_lag)
        case "difficulty":
            return lambda c: replay.difficulty_logits(
                c.success_rate, target=config.target_success, temperature=config.temperature
            )
        case "success":
            return lambda c: replay.success_logits(c.return_, threshold=SUCCESS_RETURN["success"])
        case "per_prompt":
            return lambda c: replay.last_success_logits(
                c.return_, c.order, threshold=SUCCESS_RETURN["per_prompt"]
            )
        case "advantage":
            return lambda c: replay.advantage_logits(c.advantage, c.recalibrated)
        case _:
            assert_never(config.rule)


def items_per_prompt(config: ReplayConfig) -> int | None:
    """Return the most items of one prompt that the table keeps, the newest ones; None: no limit.

    DOTS (arXiv:2506.05316) keeps one group, RAPO one trajectory, ARPO a few.
    """
    match config.rule:
        case "uniform" | "recent" | "advantage":
            return None
        case "difficulty" | "per_prompt":
            return 1
        case "success":
            return config.per_prompt_capacity
        case _:
            assert_never(config.rule)


@dataclass(frozen=True)
class Limiter:
    """Rate limiter that keeps samples in proportion to inserts, as in Reverb (arXiv:2102.04736).

    Unlike Reverb's it never blocks inserts, because the learner that inserts also samples, and would wait for
    itself.

    Example:
        >>> limiter = Limiter(min_size=2, samples_per_insert=1.5, error_buffer=2.0)
        >>> limiter.room(inserted=1, held=1, sampled=0), limiter.room(inserted=2, held=2, sampled=0)
        (0, 2)
        >>> limiter.room(inserted=4, held=4, sampled=2)
        3
    """

    min_size: int = 1
    """Items that the table must hold before the first is drawn."""
    samples_per_insert: float | None = None
    """Most samples per insert in the long run; None: no limit."""
    error_buffer: float = 1.0
    """Samples that may be drawn in excess of that ratio; at least the samples that one insert is worth."""

    def __post_init__(self) -> None:
        needed = max(1.0, self.samples_per_insert or 0.0)
        if self.error_buffer < needed:
            raise ReplayConfigError(
                f"error_buffer is {self.error_buffer:g}: the {needed:g} samples that one insert is worth could "
                f"not be taken when it comes; make it at least {needed:g}"
            )

    def room(self, *, inserted: int, held: int, sampled: int) -> int:
        """Return the number of samples that may be drawn now."""
        if held < self.min_size:
            return 0
        if self.samples_per_insert is None:
            return held
        paid = self.samples_per_insert * (inserted - self.min_size) + self.error_buffer
        return max(0, math.floor(paid - sampled + ROUNDING))


def make_limiter(config: ReplayConfig) -> Limiter:
    """Return the limiter of these settings; its buffer is the samples that one insert is worth.

    Raises:
        ReplayConfigError: nothing could ever be drawn, or less than `samples_per_insert`.
    """
    rate = config.samples_per_insert
    if config.min_size > config.capacity_groups:
        raise ReplayConfigError(
            f"learner.replay.min_size is {config.min_size}, but the table holds at most capacity_groups = "
            f"{config.capacity_groups}: nothing would ever be drawn; lower min_size or raise capacity_groups"
        )
    if rate is not None and rate > config.max_uses:
        raise ReplayConfigError(
            f"learner.replay.samples_per_insert is {rate:g}, but an item is used at most max_uses = "
            f"{config.max_uses} times; raise max_uses or lower samples_per_insert"
        )
    return Limiter(config.min_size, rate, error_buffer=max(1.0, rate or 0.0))


def check_share(config: ReplayConfig, *, fresh_items: int | None, publish_every: int) -> None:
    """Check that the share can be reached: items can be drawn often enough before they are evicted.

    The conditions are necessary, not sufficient: rollouts that are stale when they are trained, or that the
    rule does not keep, lower the share.

    Args:
        fresh_items: items inserted per learner step; None if unknown.
        publish_every: learner steps per policy version, >= 1.

    Raises:
        ReplayConfigError: the share, or `min_size`, cannot be reached.
    """
    # Most learner steps in which an item can be drawn before it is too old.
    lifetime = (config.max_policy_lag + 1) * publish_every - 1
    if fresh_items is not None and config.min_size > fresh_items * lifetime:
        raise ReplayConfigError(
            f"learner.replay.min_size is {config.min_size}, but {fresh_items} items per step that are kept for "
            f"{lifetime} steps (max_policy_lag = {config.max_policy_lag}) make {fresh_items * lifetime} at most: "
            "nothing would ever be drawn; lower min_size or raise max_policy_lag"
        )
    if config.fire_at > config.capacity_groups:
        raise ReplayConfigError(
            f"learner.replay.fire_at is {config.fire_at}, but the table holds at most capacity_groups = "
            f"{config.capacity_groups}: it would never fire; lower fire_at or raise capacity_groups"
        )
    if config.rule in RESCUE_RULES or config.fire_at:
        return
    needed = config.share / (1 - config.share)
    what = f"learner.replay.share = {config.share:g} draws every item {needed:.3g} times on average"
    if needed > config.max_uses + ROUNDING:
        raise ReplayConfigError(
            f"{what}, max_uses is {config.max_uses}; raise max_uses to {_above(needed)} or lower share"
        )
    if needed > lifetime + ROUNDING:
        raise ReplayConfigError(
            f"{what}, once per step at most, but an item is kept for {lifetime} steps (max_policy_lag = "
            f"{config.max_policy_lag}); raise max_policy_lag to {_above(needed / publish_every)} or lower share"
        )
    rate = config.samples_per_insert
    if rate is not None and needed > rate + ROUNDING:
        raise ReplayConfigError(
            f"{what}, samples_per_insert is {rate:g}; raise samples_per_insert to {needed:.3g} or lower share"
        )
    if fresh_items is not None and needed * fresh_items > config.capacity_groups + ROUNDING:
        raise ReplayConfigError(
            f"learner.replay.share = {config.share:g} draws {needed * fresh_items:.3g} items per step, but "
            f"capacity_groups is {config.capacity_groups}; raise capacity_groups to "
            f"{_above(needed * fresh_items)} or lower share"
        )


def _above(number: float) -> int:
    return math.ceil(number - ROUNDING)


Cause = Literal["age", "uses", "capacity", "prompt", "stopped"]


@dataclass
class ReplayTable(Generic[Item]):
    """Replay table with items in the order of insertion; made by `learner.replay.table.make_table`.

    Example:
        >>> from learner.replay.table import make_table
        >>> from learner.trajectory import Unit
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


def make_table(
    config: ReplayConfig, *, fresh_items: int | None = None, publish_every: int = 1
) -> ReplayTable[Any]:
    """Return an empty table, of groups for the rules uniform, recent and difficulty, else of trajectories.

    Args:
        config: settings of the table.
        fresh_items: items trained for the first time per learner step (groups, or trajectories for the rule
            "advantage"); None: unknown, and checks that need it are left out.
        publish_every: learner steps per policy version.

    Raises:
        ReplayConfigError: nothing, or less than the share, would be replayed with these settings.
    """
    limiter = make_limiter(config)
    check_share(config, fresh_items=fresh_items, publish_every=publish_every)
    return ReplayTable[Any](config, make_selector(config), limiter, items_per_prompt(config))


def replay_table(config: LearnerConfig) -> ReplayTable[Any] | None:
    """Return the empty table of a run; None for a run without replay.

    Raises:
        ReplayConfigError: see `make_table`.
    """
    replay = config.replay
    if replay is None:
        return None
    fresh: int | None = config.units_per_batch
    if replay.rule in RESCUE_RULES:
        fresh = None
    elif replay.rule == "advantage":
        fresh = config.fresh_trajectories
    return make_table(replay, fresh_items=fresh, publish_every=config.publish_every)

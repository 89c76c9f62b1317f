"""Functions made from the settings of a replay table: what is drawn, how fast, and checks. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from learner.algorithms import replay
from learner.algorithms.replay import ROUNDING
from learner.errors import ReplayConfigError
from learner.settings.replay import RESCUE_RULES, ReplayConfig
from protocol.arrays import Float64s

SUCCESS_RETURN = {"success": 0.1, "per_prompt": 0.5}
"""Return above which a trajectory is a success; from ARPO (arXiv:2505.16282) and RAPO (arXiv:2509.24107)."""


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

"""Makes the replay table of a run from its settings."""

from typing import Any

from learner.config import LearnerConfig
from learner.replay.rules import check_share, items_per_prompt, make_limiter, make_selector
from learner.replay.table import ReplayTable
from learner.settings.replay import RESCUE_RULES, ReplayConfig


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

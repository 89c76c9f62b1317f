"""`[learner.replay]`: the replay table."""

from typing import Literal

from pydantic import Field

from protocol.section import Section

RESCUE_RULES = ("success", "per_prompt")
"""Replay rules that replace members of a failed group instead of adding to the batch."""


class ReplayConfig(Section):
    """`[learner.replay]`: the replay table. A part of each batch is trajectories that were trained before.
    With the rules "uniform", "recent" and "difficulty", an item of the table is a rollout group (a single
    trajectory with learner.train_on = "trajectories"); with the other rules it is a trajectory."""

    rule: Literal["uniform", "recent", "success", "per_prompt", "advantage", "difficulty"] = "recent"
    """Items that are kept and drawn. "uniform": any group, with equal probability. "recent": any group,
    newer groups with higher probability (ReMix, arXiv:2507.06892). "difficulty": groups whose success rate is
    near `target_success` (DOTS, arXiv:2506.05316). "success": successful trajectories, each of which replaces
    a member of a group that failed completely (ARPO, arXiv:2505.16282). "per_prompt": the same replacement,
    with only the last successful trajectory of each prompt (RAPO, arXiv:2509.24107). "advantage":
    trajectories whose return is above the present baseline (SPEAR, arXiv:2509.22601)."""
    share: float = Field(0.4, gt=0, lt=1)
    """Share of each batch that is replayed. Above 0 and below 1. The rules "success" and "per_prompt" ignore
    it: they replace one member of each failed group."""
    capacity_groups: int = Field(512, ge=1)
    """Most items in the table; the oldest is evicted first. At least 1."""
    max_policy_lag: int = Field(2, ge=1)
    """Largest policy lag of an item, and of a replayed token that carries gradient, in versions; older items
    are evicted. The lag of an item is the lag of its newest token. At least 1."""
    max_uses: int = Field(4, ge=1)
    """How often an item is replayed before it is evicted. At least 1."""
    min_size: int = Field(1, ge=1)
    """Items that the table must hold before the first is drawn. At least 1, at most `capacity_groups`."""
    samples_per_insert: float | None = Field(None, gt=0)
    """Upper limit, in the long run, of items drawn per item inserted. Above 0, at most `max_uses`. Absent: no
    limit."""
    target_success: float = Field(0.5, ge=0, le=1)
    """Rule "difficulty": the success rate that is preferred. 0 to 1."""
    temperature: float = Field(0.1, gt=0)
    """Rule "difficulty": an item with success rate p has the weight
    exp(-|p - target_success| / temperature). Above 0."""
    outcome: str = Field("return", min_length=1)
    """Rules "success" and "per_prompt": value of a trajectory that decides whether it is a success and whether its
    group failed. "return": the return; any other word is the name of a reward, as the environment gave it, without
    weights."""
    per_prompt_capacity: int = Field(8, ge=1)
    """Rule "success": most trajectories kept of one prompt; the newest stay. At least 1."""
    warmup_steps: int = Field(0, ge=0)
    """Rule "advantage": learner steps in which the weight of replayed trajectories rises from 0 to 1. 0: the
    weight is always 1."""
    only_with: str = ""
    """Rule "advantage": name of a mark; a trajectory whose sum of it is not above 0 is not stored (SPEAR stores answers
    with calls of tools). Absent: all."""
    fire_at: int = Field(0, ge=0)
    """Rule "advantage": number of items that may be drawn at which all of them are replayed at once, and the table is
    emptied, as SPEAR does. At most `capacity_groups`; `share` has no effect then. 0: items are drawn by `share`."""
    stop_at_step: int = Field(0, ge=0)
    """Learner step from which on nothing is replayed. 0: replay never ends."""

"""Sums of a trajectory's rewards and marks by name, and the replacement of rewards."""

from learner.trajectory import Trajectory
from protocol.messages.episodes import Reward


def total_of(t: Trajectory, name: str) -> float:
    """Return the sum of a trajectory's rewards of one name, as the environment gave them; "return" sums all."""
    if name == "return":
        return t.return_
    return sum(reward.value for reward in t.rewards if reward.name == name)


def mark_total(t: Trajectory, name: str) -> float:
    """Return the sum of a mark over the turns of a trajectory; values that are text count nothing."""
    return sum(mark.value for mark in t.marks if mark.name == name and not isinstance(mark.value, str))


def replaced(t: Trajectory, name: str, value: float) -> list[Reward]:
    """Return the rewards with one value in place of all rewards of a name, at the last turn that had one."""
    turn = max((r.turn for r in t.rewards if r.name == name), default=last_turn(t))
    return [*(r for r in t.rewards if r.name != name), Reward(name, turn, value)]


def last_turn(t: Trajectory) -> int:
    """Return the index of the last turn in which the policy acted; 0 if there is none."""
    return max(t.action_turn_indices, default=0)

"""Rewards: from those that the environment gave to those that the policy is trained on. Everything here is pure.

The order is: the value of wrong answers, the reward of the group, rewards that are made here, such as the penalty on
long answers, gates and weights. Gates and group rewards look at sums without weights. A win rate over the return comes
last, because it compares what would be the return without it. At the end: names of rewards and marks that the settings
rely on.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from learner.algorithms.advantages import UNIFORM_SPREAD
from learner.formulas import Members, load_formula
from learner.settings.advantages import (
    VALUES,
    ComparedAdvantage,
    CoolingBonus,
    Coverage,
    FewestCalls,
    FlawedAnswer,
    Gate,
    ModesReward,
    OverlongPenalty,
    RewardConfig,
    StepReward,
    WinRate,
    WrongAnswer,
    values_of_parts,
)
from learner.settings.families import JudgeFamily, SolvedFamily, VerdictFamily
from learner.settings.formulas import OwnReward
from learner.settings.learner import LearnerConfig
from learner.trajectory import Trajectory, newest_version, turns_before
from protocol import names
from protocol.messages.episodes import Reward
from protocol.version_line import VersionLine


def total_of(t: Trajectory, name: str) -> float:
    """Return the sum of a trajectory's rewards of one name, as the environment gave them; "return" sums all."""
    if name == "return":
        return t.return_
    return sum(reward.value for reward in t.rewards if reward.name == name)


def is_right(t: Trajectory, reward: str) -> bool:
    """Return whether an answer is right: its sum of a reward is above 0, and the environment does not call it wrong.

    A reward alone does not say it: a task may give a part of it to wrong answers.
    """
    return t.correct is not False and total_of(t, reward) > 0


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


def with_wrong_answer(config: WrongAnswer, t: Trajectory) -> list[Reward]:
    """Return a trajectory's rewards; if its answer is wrong, the named reward is replaced.

    A trajectory that never got the reward has no answer, which is wrong, too.
    """
    if is_right(t, config.reward):
        return t.rewards
    value = min(config.highest, config.lowest + config.per_turn * (t.action_turns - 1))
    return replaced(t, config.reward, value)


def step_value(config: StepReward, t: Trajectory) -> float:
    r"""Return the value of an answer by what its calls brought.

    .. math::
        \max(1 - \rho, \tfrac{1}{2}) \quad \text{(right)}, \qquad
        c_1 \min(1, \Delta_S / C_S) + c_2 \min(1, \Delta_Q / C_Q) \quad \text{(wrong)}

    RAPO, arXiv:2509.24107, section 2.5: rho is the share of redundant calls, and each difference that of new and
    redundant ones. A wrong answer has no lower bound.
    """
    labels = [mark.value for mark in t.marks if mark.name == config.mark]
    kinds = (config.searches, config.redundant_searches, config.queries, config.redundant_queries)
    searches, again, queries, idle = (sum(label in kind for label in labels) for kind in kinds)
    if is_right(t, config.reward):
        calls = searches + again + queries + idle
        return max(1 - (again + idle) / calls, config.least) if calls else 1.0
    by_searches = config.search_share * min(1.0, (searches - again) / config.most_searches)
    return by_searches + config.query_share * min(1.0, (queries - idle) / config.most_queries)


WIN_RATE = "win_rate"
"""Name of the reward that is the win rate of the return."""


def has_win_rate_of_returns(config: RewardConfig) -> bool:
    """Return whether all rewards are replaced by the win rate of their sum."""
    return isinstance(config.group, WinRate) and config.group.reward == "return"


def group_rewards(config: RewardConfig, members: Sequence[Trajectory]) -> list[list[Reward] | None]:
    """Return the rewards of each member after the reward of the group; None where it does not act."""
    rule = config.group
    match rule:
        case None:
            return [None] * len(members)
        case FewestCalls(reward=name):
            right = [calls_of(rule, t) for t in members if is_right(t, name)]
            return [_by_calls(rule, t, min(right)) if right else None for t in members]
        case WinRate(reward="return"):
            return [None] * len(members)
        case WinRate(reward=name):
            rates = win_rates([total_of(t, name) for t in members])
            return [replaced(t, name, rate) for t, rate in zip(members, rates, strict=True)]
        case ModesReward():
            return _by_modes(rule, members)
        case _:
            assert_never(rule)


def _by_calls(rule: FewestCalls, t: Trajectory, fewest: int) -> list[Reward] | None:
    if not is_right(t, rule.reward):
        return None
    return _times(t, rule.reward, call_factor(calls_of(rule, t), fewest, smooth=rule.smooth))


def _times(t: Trajectory, name: str, factor: float) -> list[Reward]:
    return [Reward(r.name, r.turn, r.value * factor) if r.name == name else r for r in t.rewards]


def calls_of(config: FewestCalls, t: Trajectory) -> int:
    """Return the calls that a trajectory took."""
    if not config.calls:
        return max(0, t.action_turns - 1)
    return round(mark_total(t, config.calls))


def call_factor(calls: int, fewest: int, *, smooth: float = 1.0) -> float:
    r"""Return the factor of a right answer that took m calls, where n were the fewest, [0, 1].

    .. math::
        f = \frac{2nm}{n + m}, \qquad
        r = \sin\frac{\pi f}{2n}, \quad \text{and for } n = 0: \; r = \cos\frac{\pi m}{2m + c}

    OTC, arXiv:2504.14870. It is 1 at m = n. At m = n = 0 it is 1.

    Example:
        >>> [round(call_factor(m, 2), 4) for m in (1, 2, 3, 4)], round(call_factor(1, 0), 4)
        ([0.866, 1.0, 0.9511, 0.866], 0.5)
    """
    if fewest == 0:
        return 1.0 if calls == 0 else math.cos(math.pi * calls / (2 * calls + smooth))
    return math.sin(math.pi * calls / (fewest + calls))


def _by_modes(rule: ModesReward, members: Sequence[Trajectory]) -> list[list[Reward] | None]:
    factor = mode_factor(forced_right_share(rule, members), rule.power)
    return [_times(t, rule.reward, factor) if is_dear(rule, t) else None for t in members]


def mode_factor(right_share: float, power: float = 2.0) -> float:
    r"""Return the factor of a right answer that chose another mode than the cheap one, 0 to 1.

    .. math:: r_\text{adaptive} = 1 - p^\alpha

    A2FM, arXiv:2510.12838. p is the share of right answers where the mode was forced: 1 on an easy task.

    Example:
        >>> mode_factor(0.0), mode_factor(0.5), mode_factor(1.0)
        (1.0, 0.75, 0.0)
    """
    return 1.0 - float(right_share**power)


def mode_of(rule: ModesReward, t: Trajectory) -> str:
    """Return the mode in which a trajectory answers, as its environment says; "" if it says none."""
    turns = {mark.turn: mark.value for mark in t.marks if mark.name == rule.mark}
    return str(turns[min(turns)]) if turns else ""


def forced_mode(rule: ModesReward, t: Trajectory) -> str:
    """Return the mode into which a trajectory was forced; "" if it chose.

    The place in the group says it, and the environment has to agree: an actor before protocol 4.8 forces nothing.
    """
    task = names.training_task(names.task_of(t.trajectory_id))
    mode = "" if task is None else rule.of_member(task.member, t.group_size)
    return mode if mode and mode == mode_of(rule, t) else ""


def forced_right_share(rule: ModesReward, members: Sequence[Trajectory]) -> float:
    """Return the share of right answers among the members that were forced into a mode; 0 if there is none."""
    right = [is_right(t, rule.reward) for t in members if forced_mode(rule, t)]
    return sum(right) / max(1, len(right))


def is_dear(rule: ModesReward, t: Trajectory) -> bool:
    """Return whether a trajectory has chosen a mode that is paid less where the task is easy."""
    return not forced_mode(rule, t) and mode_of(rule, t) != rule.cheap


def mode_metrics(config: RewardConfig, arrived: Sequence[Trajectory]) -> dict[str, float]:
    """Return what the answers since the last step say of their modes; nothing if there are none."""
    rule = config.group
    if not isinstance(rule, ModesReward):
        return {}
    ended = [t for t in arrived if t.status != "failed"]
    forced = [t for t in ended if forced_mode(rule, t)]
    chosen = [t for t in ended if not forced_mode(rule, t)]
    found: dict[str, float] = {}
    if forced:
        found["modes/forced_right_share"] = sum(is_right(as_given(t), rule.reward) for t in forced) / len(
            forced
        )
    if chosen:
        less = [t.return_ < as_given(t).return_ for t in chosen if is_dear(rule, t)]
        found["modes/cheap_share"] = 1 - len(less) / len(chosen)
        found["modes/paid_less_share"] = sum(less) / len(chosen)
    return found


def win_rates(values: Sequence[float]) -> list[float]:
    r"""Return for each value the share of the others that it beats; a draw counts half.

    .. math:: r_i = \frac{1}{k - 1} \sum_{j \ne i} P(x_i \text{ beats } x_j)

    SPO, arXiv:2401.04056. The mean is 1/2. A lone member gets 1/2. Values that are equal up to rounding are a draw.

    Example:
        >>> win_rates([3.0, 1.0, 2.0]), win_rates([1.0, 1.0]), win_rates([7.0])
        ([1.0, 0.0, 0.5], [0.5, 0.5], [0.5])
        >>> win_rates([0.3, 0.1 + 0.2])
        [0.5, 0.5]
    """
    others = len(values) - 1
    if others < 1:
        return [0.5] * len(values)
    apart = UNIFORM_SPREAD * max(1.0, *map(abs, values))
    beaten = [sum(v - w > apart for w in values) for v in values]
    drawn = [sum(abs(v - w) <= apart for w in values) - 1 for v in values]
    return [(more + 0.5 * equal) / others for more, equal in zip(beaten, drawn, strict=True)]


OVERLONG = "overlong"
"""Name of the reward that is the penalty on long answers."""
BONUS = "bonus"
"""Name of the reward that is the bonus for calls."""
COVERAGE = "coverage"
"""Name of the reward for states that are new to a trajectory."""
FLAWED = "flawed"
"""Name of the reward that is the penalty on right answers by a flawed way."""


def made_rewards(config: RewardConfig) -> set[str]:
    """Return the names of rewards that are made here, and that no environment gives.

    Example:
        >>> sorted(made_rewards(RewardConfig(group={"kind": "win_rate"})))
        ['win_rate']
    """
    parts = {
        BONUS: config.bonus is not None,
        COVERAGE: config.coverage is not None,
        FLAWED: config.flawed is not None,
        OVERLONG: config.length is not None,
        WIN_RATE: has_win_rate_of_returns(config),
    }
    return {name for name, there in parts.items() if there}


def made_for(config: RewardConfig, t: Trajectory, updates: int) -> list[Reward]:
    """Return the rewards of a trajectory that no environment gives, before gates and weights."""
    made = [] if config.coverage is None else coverage_gains(config.coverage, t)
    if config.bonus is not None:
        calls = mark_total(t, config.bonus.mark)
        made.append(Reward(BONUS, last_turn(t), cooling_bonus(config.bonus, calls, updates)))
    if config.flawed is not None and is_flawed(config.flawed, t):
        made.append(Reward(FLAWED, last_turn(t), -config.flawed.penalty))
    if config.length is not None:
        penalty = overlong_penalty(config.length, int(t.learned_mask.sum()))
        made.append(Reward(OVERLONG, last_turn(t), penalty))
    return made


def overlong_penalty(config: OverlongPenalty, tokens: int) -> float:
    r"""Return the penalty for an answer of so many tokens, from -factor to 0.

    .. math:: -f \cdot \mathrm{clip}\left(\frac{n - (L_\max - L_\mathrm{buf})}{L_\mathrm{buf}}, 0, 1\right)

    DAPO, arXiv:2503.14476, section 3.4.

    Example:
        >>> config = OverlongPenalty(longest_tokens=20480, buffer_tokens=4096)
        >>> [overlong_penalty(config, n) for n in (16384, 18432, 20480, 99999)]
        [0.0, -0.5, -1.0, -1.0]
    """
    over = tokens - (config.longest_tokens - config.buffer_tokens)
    return -config.factor * min(1.0, over / config.buffer_tokens) if over > 0 else 0.0


def cooling_bonus(config: CoolingBonus, calls: float, updates: int) -> float:
    r"""Return the bonus for so many calls after so many published updates.

    .. math:: \frac{1 + \cos(\pi v / T)}{2} \min(0.1\, m, 1) \quad (v \le T), \qquad 0 \text{ after}

    SPEAR, arXiv:2509.22601, with T = 100.

    Example:
        >>> [round(cooling_bonus(CoolingBonus(), 5, v), 4) for v in (0, 50, 100, 999)]
        [0.5, 0.25, 0.0, 0.0]
    """
    share = (1 + math.cos(math.pi * min(1.0, max(0, updates) / config.until_version))) / 2
    return share * min(config.per_call * calls, config.most)


def coverage_gains(config: Coverage, t: Trajectory) -> list[Reward]:
    r"""Return the marginal gain of each turn that led to a new state.

    .. math:: g_t = F(S_t \cup \{s_{t+1}\}) - F(S_t), \qquad F(S) = c \, |S|

    SubPO, arXiv:2307.13372, section 3. A mark is the state that a turn was taken in, so the gain of a state belongs to
    the turn before it in its branch. The first state is no gain, and the state after the last turn is not known.
    """
    states = {mark.turn: mark.value for mark in t.marks if mark.name == config.mark}
    before, acts = turns_before(t.turns), set(t.action_turn_indices)
    led: dict[int | None, int | None] = {None: None}
    seen: set[str | float] = set()
    gains = []
    for turn in t.turns:
        index, cause = turn.index, led[before[turn.index]]
        led[index] = index if index in acts else cause
        if index not in acts or index not in states or states[index] in seen:
            continue
        seen.add(states[index])
        if cause is not None:
            gains.append(Reward(COVERAGE, cause, config.each))
    return gains


def is_flawed(config: FlawedAnswer, t: Trajectory) -> bool:
    """Return whether an answer is right and its way is not."""
    return is_right(t, config.reward) and total_of(t, config.needs) < config.least


def composed(
    config: RewardConfig, members: Sequence[Trajectory], *, group: bool = True, updates: int | None = None
) -> list[Trajectory]:
    """Return trajectories with the rewards that they are trained on; the given ones are kept beside them.

    Args:
        config: what to do with rewards.
        members: trajectories of one rollout group with the rewards that the environment gave, failed ones left out.
        group: whether they are a whole group; else the reward of the group does not act.
        updates: published updates by which the stage is chosen, see `updates_at`; by default the version of the
            newest token.

    Returns:
        The trajectories in the same order. One whose rewards stay what they are is the same object.
    """
    if not members:
        return []
    updates = newest_version(members) if updates is None else updates
    weights = weights_at(config, updates)
    of_groups: Sequence[list[Reward] | None] = [None] * len(members)
    if group:
        of_groups = group_rewards(config, members)
    lists = []
    for t, of_group in zip(members, of_groups, strict=True):
        rewards = t.rewards if config.wrong is None else with_wrong_answer(config.wrong, t)
        if config.steps is not None:
            rewards = replaced(t, config.steps.reward, step_value(config.steps, t))
        rewards = rewards if of_group is None else of_group
        if made := made_for(config, t, updates):
            rewards = [*rewards, *made]
        lists.append(_after_gates_and_weights(config, weights, t, rewards))
    if group and has_win_rate_of_returns(config):
        rates = win_rates([float(sum(r.value for r in rewards)) for rewards in lists])
        factor = weights.get(WIN_RATE, 1.0)
        turns = [
            max((r.turn for r in own), default=last_turn(t)) for t, own in zip(members, lists, strict=True)
        ]
        lists = [[Reward(WIN_RATE, turn, factor * rate)] for turn, rate in zip(turns, rates, strict=True)]
    if config.own is not None:
        so_far = [
            t if rewards is t.rewards else replace(t, rewards=rewards, given_rewards=t.rewards)
            for t, rewards in zip(members, lists, strict=True)
        ]
        lists = own_rewards(config.own, Members(so_far, group, updates))
    return [
        t if rewards is t.rewards else replace(t, rewards=rewards, given_rewards=t.rewards)
        for t, rewards in zip(members, lists, strict=True)
    ]


def own_rewards(config: OwnReward, members: Members) -> list[list[Reward]]:
    """Return the rewards of each member as a formula of the user's own composes them.

    Raises:
        FormulaError: it raised an exception, or returned something else than a list of rewards for each member.
    """
    formula = load_formula(config, "learner.reward.own")
    result = formula(members)
    count = len(members.trajectories)
    if not isinstance(result, list | tuple) or len(result) != count:
        what = f"{len(result)} lists" if isinstance(result, list | tuple) else type(result).__name__
        raise formula.refused(
            f"returned {what}; return a list with one list of rewards for each of {count} members"
        )
    for t, rewards in zip(members.trajectories, result, strict=True):
        turns = {turn.index for turn in t.turns}
        for reward in rewards if isinstance(rewards, list | tuple) else [None]:
            if not isinstance(reward, Reward):
                raise formula.refused(
                    f"returned {rewards!r:.200} for {t.trajectory_id}; return a list of Reward"
                )
            try:
                value = float(reward.value)
            except (TypeError, ValueError, RuntimeError):
                raise formula.refused(
                    f"gave {t.trajectory_id} the reward {reward.value!r:.200}; it has to be a number"
                ) from None
            if turns and reward.turn not in turns:
                raise formula.refused(
                    f"gave {t.trajectory_id} a reward in turn {reward.turn}, which it does not have (turns: "
                    f"{', '.join(map(str, sorted(turns)))})"
                )
            if not math.isfinite(value):
                raise formula.refused(f"gave {t.trajectory_id} the reward {value}; it has to be finite")
    # Numbers of numpy cannot be written to samples, to the replay table or to a checkpoint.
    return [[Reward(str(r.name), int(r.turn), float(r.value)) for r in rewards] for rewards in result]


def as_given(t: Trajectory) -> Trajectory:
    """Return a trajectory with the rewards that the environment gave, so that they can be composed again."""
    return t if t.given_rewards is None else replace(t, rewards=t.given_rewards, given_rewards=None)


def with_rewards(t: Trajectory, rewards: list[Reward]) -> Trajectory:
    """Return a trajectory with other rewards, beside which those stay that the environment gave."""
    return replace(t, rewards=rewards, given_rewards=as_given(t).rewards)


def is_open(gate: Gate, t: Trajectory) -> bool:
    """Return whether a trajectory got enough of what the gate needs."""
    return total_of(t, gate.needs) > gate.above


def _after_gates_and_weights(
    config: RewardConfig, weights: Mapping[str, float], t: Trajectory, rewards: list[Reward]
) -> list[Reward]:
    """Return rewards after gates and weights; the same list if neither acts."""
    closed = {gate.reward for gate in config.gates if not is_open(gate, t)}
    if not any(reward.name in weights or reward.name in closed for reward in rewards):
        return rewards
    return [
        Reward(r.name, r.turn, 0.0 if r.name in closed else r.value * weights.get(r.name, 1.0))
        for r in rewards
    ]


def weights_at(config: RewardConfig, updates: int) -> Mapping[str, float]:
    """Return the weights of rewards for tokens sampled after so many published updates.

    Example:
        >>> early = {"until_version": 10, "weights": {"format": 1.0}}
        >>> config = RewardConfig(weights={"format": 0.1}, stages=[early])
        >>> weights_at(config, 9), weights_at(config, 10)
        ({'format': 1.0}, {'format': 0.1})
    """
    for stage in config.stages:
        if updates < stage.until_version:
            return {**config.weights_in_force, **stage.weights}
    return config.weights_in_force


def updates_at(line: VersionLine, version: int) -> int:
    """Return the published updates before a version, without the numbers that restarts of the learner skipped.

    Args:
        line: where versions continued older ones.
        version: a version as `VersionLine.place` returns it, counted from the newest line.

    Example:
        >>> updates_at(VersionLine(), 7), updates_at(VersionLine([(10, 20), (21, 30)]), 33)
        (7, 14)
    """
    skipped = at = line.start
    for continued, number in reversed(line.forks):
        if at >= number:
            skipped -= at - number
            at = continued
    return version - (skipped - at)


def needed_rewards(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Yield field and name of each reward that the environment has to give.

    Example:
        >>> list(needed_rewards(LearnerConfig(reward={"gates": [{"reward": "short", "needs": "right"}]})))
        [('learner.reward.gates.0.reward', 'short'), ('learner.reward.gates.0.needs', 'right')]
    """
    made = made_rewards(learner.reward)
    for field, name in _rewards_with_weights(learner.reward):
        if name not in made:
            yield field, name
    reward, advantage = learner.reward, learner.algorithm.advantage
    for i, gate in enumerate(reward.gates):
        yield f"learner.reward.gates.{i}.needs", gate.needs
    if reward.flawed is not None:
        yield "learner.reward.flawed.reward", reward.flawed.reward
        yield "learner.reward.flawed.needs", reward.flawed.needs
    if reward.steps is not None:
        yield "learner.reward.steps.reward", reward.steps.reward
    if reward.wrong is not None:
        yield "learner.reward.wrong.reward", reward.wrong.reward
    if reward.group is not None and reward.group.reward != "return":
        yield "learner.reward.group.reward", reward.group.reward
    if learner.replay is not None and learner.replay.outcome not in ("correct", "return"):
        yield "learner.replay.outcome", learner.replay.outcome
    if isinstance(learner.family, SolvedFamily) and learner.family.reward:
        yield "learner.family.reward", learner.family.reward
    if isinstance(learner.family, JudgeFamily) and learner.family.reference != "return":
        yield "learner.family.reference", learner.family.reference
    if isinstance(learner.family, VerdictFamily) and learner.family.truth:
        yield "learner.family.truth", learner.family.truth
    if isinstance(advantage, ComparedAdvantage):
        for i, term in enumerate(advantage.terms):
            if term.value not in VALUES | made:
                yield f"learner.algorithm.advantage.terms.{i}.value", term.value
        for field, name in values_of_parts(advantage):
            if name not in made:
                yield field, name


def _rewards_with_weights(reward: RewardConfig) -> Iterator[tuple[str, str]]:
    """Yield field and name of each reward that has a weight or a gate; rewards that Offbeat makes may have them."""
    for name in reward.weights:
        yield f"learner.reward.weights.{name}", name
    for i, stage in enumerate(reward.stages):
        for name in stage.weights:
            yield f"learner.reward.stages.{i}.weights.{name}", name
    for i, gate in enumerate(reward.gates):
        yield f"learner.reward.gates.{i}.reward", gate.reward


def needed_marks(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Yield field and name of each mark that the environment has to give.

    Example:
        >>> calls = {"kind": "fewest_calls", "reward": "answer", "calls": "calls"}
        >>> list(needed_marks(LearnerConfig(reward={"group": calls})))
        [('learner.reward.group.calls', 'calls')]
    """
    group, advantage = learner.reward.group, learner.algorithm.advantage
    if isinstance(group, FewestCalls) and group.calls:
        yield "learner.reward.group.calls", group.calls
    if isinstance(group, ModesReward):
        yield "learner.reward.group.mark", group.mark
    if learner.reward.bonus is not None:
        yield "learner.reward.bonus.mark", learner.reward.bonus.mark
    if learner.replay is not None and learner.replay.only_with:
        yield "learner.replay.only_with", learner.replay.only_with
    if learner.reward.steps is not None:
        yield "learner.reward.steps.mark", learner.reward.steps.mark
    if learner.reward.coverage is not None:
        yield "learner.reward.coverage.mark", learner.reward.coverage.mark
    if isinstance(advantage, ComparedAdvantage):
        for i, term in enumerate(advantage.terms):
            if "anchor" in term.among:
                yield f"learner.algorithm.advantage.terms.{i}.among", "anchor"


def never_given(learner: LearnerConfig, arrived: Sequence[Trajectory]) -> Iterator[str]:
    """Yield a sentence for each reward and mark that the settings rely on and that none of the episodes has."""
    names = {name for trajectory in arrived for name in trajectory.reward_by_name}
    unknown = {place: name for place, name in needed_rewards(learner) if name not in names}
    for place, name in sorted(unknown.items()):
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        yield (
            f"{place}{'' if place.endswith(f'.{name}') else f' is {name!r}'}: none of the first {len(arrived)} "
            f"episodes has a reward of this name{f'; did you mean {near[0]!r}?' if near else ''} "
            f"(rewards: {', '.join(sorted(names))})"
        )
    marks = {mark.name for trajectory in arrived for mark in trajectory.marks}
    for place, name in needed_marks(learner):
        if name not in marks:
            yield (
                f"{place}: no turn of the first {len(arrived)} episodes has the mark {name!r}, which the "
                f"environment must give in StepResult.marks (marks: {', '.join(sorted(marks)) or 'none'})"
            )

"""Contradictions in replay and reincarnation: what the table cannot keep or give, each with the cure."""

from collections.abc import Iterator

from launch.run_file.objectives import compares_members
from learner.settings.advantages import GROUP_RELATIVE
from learner.settings.algorithm import BoundedSurrogate, KlConvex, KlPenalty
from learner.settings.learner import RESCUE_RULES, LearnerConfig, ReplayConfig
from learner.settings.rewards import WinRate


def replay_contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    yield from _replay(learner)
    yield from _reincarnation(learner)


def _replay(learner: LearnerConfig) -> Iterator[str]:
    replay = learner.replay
    if replay is None:
        return
    yield from _kept(learner, replay)
    yield from _outcomes(learner, replay)
    if replay.rule != "advantage" and (alone := [n for n in ("fire_at", "only_with") if getattr(replay, n)]):
        yield (
            f'learner.replay.{alone[0]} is set but learner.replay.rule is "{replay.rule}"; take it out, or use '
            'rule = "advantage"'
        )
    if learner.train_on == "groups" and replay.rule not in RESCUE_RULES and not replay.fire_at:
        fresh = learner.batch_trajectories / learner.group_size * (1 - replay.share)
        if fresh < 1:
            yield (
                f"learner.replay.share is {replay.share:g}: of a batch of {learner.batch_trajectories} trajectories "
                f"not one group of {learner.group_size} would be fresh; lower the share or raise batch_trajectories"
            )
    yield from _table(learner)


def _kept(learner: LearnerConfig, replay: ReplayConfig) -> Iterator[str]:
    """Yield the refusal of what a table cannot keep, or cannot rescue."""
    kind = learner.algorithm.advantage.kind
    if learner.algorithm.critic is not None or learner.train_on == "windows":
        yield (
            'learner.replay is set beside a critic or train_on = "windows": values and windows of stored '
            "rollouts are not kept; take [learner.replay] out"
        )
    elif replay.rule == "advantage" and kind not in GROUP_RELATIVE:
        yield (
            f'learner.replay.rule is "advantage" but learner.algorithm.advantage.kind is "{kind}", which cannot be '
            f"kept with one trajectory; use one of {', '.join(GROUP_RELATIVE)}, or another rule"
        )
    elif replay.rule == "advantage" and isinstance(learner.algorithm.surrogate, BoundedSurrogate):
        yield (
            'learner.replay.rule is "advantage" but learner.algorithm.surrogate.kind is "bounded", whose target comes '
            "from a group that a stored trajectory no longer has; use another rule"
        )
    elif replay.rule in RESCUE_RULES and not (compares_members(learner) or kind == "greedy"):
        yield (
            f'learner.replay.rule is "{replay.rule}", which rescues groups, but learner.algorithm.advantage.kind is '
            f'"{kind}"; use one of {", ".join(GROUP_RELATIVE)}, or another rule'
        )


def _outcomes(learner: LearnerConfig, replay: ReplayConfig) -> Iterator[str]:
    """Yield the refusal of an outcome that says nothing, or that nobody asks for."""
    if replay.outcome != "return" and replay.rule not in RESCUE_RULES:
        yield (
            f'learner.replay.outcome is "{replay.outcome}" but learner.replay.rule is "{replay.rule}", which asks '
            f"for none; take it out, or use one of {', '.join(RESCUE_RULES)}"
        )
    if (
        replay.outcome == "return"
        and replay.rule in RESCUE_RULES
        and isinstance(learner.reward.group, WinRate)
    ):
        yield (
            f'learner.replay.rule is "{replay.rule}" beside learner.reward.group.kind "win_rate": every win rate of a '
            "failed group is 1/2, so no return says that it failed; set learner.replay.outcome to the name of the "
            "reward that a success gets"
        )


def _table(learner: LearnerConfig) -> Iterator[str]:
    """Yield the mistake that the replay table itself finds: it would give nothing, or less than its share."""
    from learner.errors import ReplayConfigError
    from learner.replay.table import replay_table

    try:
        replay_table(learner)
    except ReplayConfigError as error:
        yield str(error)


def _reincarnation(learner: LearnerConfig) -> Iterator[str]:
    change, replay, kl = learner.algorithm.reincarnation, learner.replay, learner.algorithm.kl
    if change is None:
        return
    if replay is not None and replay.stop_at_step != change.step:
        yield (
            f"learner.algorithm.reincarnation.step is {change.step} but learner.replay.stop_at_step is "
            f"{replay.stop_at_step}: replay ends with the reincarnation; make them equal"
        )
    has_base = isinstance(kl, KlConvex) or (isinstance(kl, KlPenalty) and kl.to == "reference")
    if replay is None and not has_base:
        yield (
            "learner.algorithm.reincarnation is set, but there is neither a base policy to replace nor replay to "
            'end; add [learner.algorithm.kl] (kind "convex", or to = "reference") or [learner.replay]'
        )

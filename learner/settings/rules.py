"""Rules of `[learner]` that concern several of its sections: what cannot be together, does nothing, or misses a part.

What one section can say alone is said by its own `contradictions`, beside its fields. Each rule yields a line per
mistake, with field, value seen and cure. A setting without effect that a user must have chosen is a mistake, because no
recipe has it. What the defaults have, too, is a remark.
"""

from collections.abc import Iterator

from learner.settings.advantages import (
    GROUP_RELATIVE,
    VALUES,
    ComparedAdvantage,
    ModesReward,
    RiskAdvantage,
    WinRate,
    compares_members,
    comparisons_of,
    is_by_turn,
    judges_groups,
    values_of_parts,
)
from learner.settings.algorithm import KlConvex, KlPenalty, not_together
from learner.settings.budget import MOST_TASKS, SharedBudget
from learner.settings.families import (
    BranchFamily,
    DraftFamily,
    FamilyConfig,
    GuidedFamily,
    HintFamily,
    JudgeFamily,
    ProposeFamily,
    RefineFamily,
    RetryFamily,
    SteeredFamily,
    TaughtFamily,
    quoted_answers,
)
from learner.settings.learner import RESCUE_RULES, LearnerConfig, ReplayConfig
from learner.settings.selection import FailuresSelection, PopulationSelection, TaskList, ValueSelection
from learner.settings.surrogates import BoundedSurrogate, ClipSurrogate

ADAPTERS_LR = 1e-5
"""Learning rate below which adapters hardly learn: ten times the default, which is for full weights."""


def contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line per mistake between sections of `[learner]`: field, value seen, cure."""
    yield from _groups(learner)
    yield from _selection(learner)
    yield from _budget(learner)
    yield from _lane(learner)
    yield from _given(learner)
    yield from _updates(learner)
    yield from _origins(learner)
    yield from _taught(learner)
    yield from replay_contradictions(learner)
    yield from reward_contradictions(learner)
    yield from family_contradictions(learner)
    yield from taught_elsewhere(learner)


def _groups(learner: LearnerConfig) -> Iterator[str]:
    """Yield what the advantage and the units of a batch cannot give each other."""
    advantage, kind = learner.algorithm.advantage, learner.algorithm.advantage.kind
    if learner.train_on == "windows" and kind != "gae":
        yield (
            f'learner.train_on is "windows" but learner.algorithm.advantage.kind is "{kind}": an unfinished trajectory '
            'has no return yet; use kind "gae", with a critic'
        )
    needs = compares_members(advantage)
    teacher = learner.algorithm.distillation
    if needs and learner.group_size == 1 and (teacher is None or teacher.rewards):
        yield f'learner.group_size is 1: an advantage of kind "{kind}" is always zero then; use at least 2'
    if (needs or kind == "greedy") and learner.train_on == "trajectories":
        yield (
            f'learner.train_on is "trajectories" but an advantage of kind "{kind}" needs the whole group; '
            'use train_on = "groups", or kind "gae" with a critic, or "batch_mean"'
        )
    if learner.algorithm.scale_by_informative and learner.drops_uniform_groups:
        yield (
            "learner.algorithm.scale_by_informative is true, but learner.filter_uniform_groups drops the groups with "
            "equal returns before they are counted: the factor is always 1; set filter_uniform_groups = false"
        )
    if isinstance(advantage, RiskAdvantage):
        yield from _risk(learner, advantage)


def _selection(learner: LearnerConfig) -> Iterator[str]:
    """Yield the refusal of a choice by whole groups where the learner gets none."""
    selection = learner.selection
    if isinstance(selection, FailuresSelection | ValueSelection) and learner.train_on != "groups":
        yield (
            f'learner.selection.kind is "{selection.kind}", which goes by whole groups, but learner.train_on is '
            f'"{learner.train_on}"; use train_on = "groups", or selection kind "near"'
        )
    if isinstance(selection, PopulationSelection):
        other = learner.family is not None and not isinstance(learner.family, ProposeFamily)
        others = {"family": other, "taught": learner.taught is not None}
        yield from not_together('learner.selection of kind "population"', "learner", others)


def _budget(learner: LearnerConfig) -> Iterator[str]:
    """Yield the refusal of a budget that cannot be shared out."""
    budget, selection, name = learner.budget, learner.selection, "learner.budget"
    if not isinstance(budget, SharedBudget):
        return
    if not isinstance(selection, TaskList):
        yield (
            f'{name}.kind is "{budget.kind}" but learner.selection.kind is "{selection.kind}": each task comes once, '
            'so nothing is known of it; use selection kind "epochs" or "near"'
        )
    elif selection.tasks > MOST_TASKS:
        yield (
            f'{name}.kind is "{budget.kind}" but learner.selection.tasks is {selection.tasks}: answers are shared out '
            f"among at most {MOST_TASKS:,} tasks"
        )
    if learner.train_on != "groups":
        yield f'{name}.kind is "{budget.kind}" but learner.train_on is "{learner.train_on}"; use train_on = "groups"'
    if not budget.smallest <= learner.group_size <= budget.largest:
        yield (
            f"learner.group_size is {learner.group_size}, not between {name}.smallest {budget.smallest} and "
            f"{name}.largest {budget.largest}, of which it is the mean"
        )
    if learner.greedy_member is not None:
        yield f'{name}.kind is "{budget.kind}" beside an advantage of kind "greedy", whose groups have one size'
    if learner.family is not None and learner.family.kind not in ("hint", "guided"):
        yield (
            f'{name}.kind is "{budget.kind}" beside learner.family.kind "{learner.family.kind}", which divides a group '
            'of one size; use kind "hint" or "guided", or take one of them out'
        )


def _origins(learner: LearnerConfig) -> Iterator[str]:
    """Yield the refusal of a loss for tokens that no part of the run brings."""
    family = learner.family
    brings = {
        "own": learner.given is None or learner.given.share < 1,
        "replayed": learner.replay is not None,
        "guided": isinstance(family, SteeredFamily) or (isinstance(family, RetryFamily) and family.clean),
        "taught": learner.taught is not None or isinstance(family, TaughtFamily),
        "given": learner.given is not None,
    }
    cures = {
        "own": "lower learner.given.share",
        "replayed": "add [learner.replay]",
        "guided": 'add [learner.family] of kind "steered", or "retry" with clean = true',
        "taught": 'add [learner.taught], or [learner.family] of kind "taught"',
        "given": "add [learner.given]",
    }
    for place, loss in enumerate(learner.algorithm.by_origin):
        name = f"learner.algorithm.by_origin.{place}"
        if not brings.get(loss.origin):
            yield f'{name}.origin is "{loss.origin}", but nothing in this run brings such tokens; {cures[loss.origin]}'
        if loss.origin == "given" and learner.given is not None and learner.given.shaping is not None:
            yield f"{name} and learner.given.shaping both shape what is given; take one of them out"


def _taught(learner: LearnerConfig) -> Iterator[str]:
    """Yield what answers of teachers lack, or cannot be together with."""
    live = isinstance(learner.family, TaughtFamily)
    taught = learner.family if isinstance(learner.family, TaughtFamily) else learner.taught
    name = "learner.family" if live else "learner.taught"
    if taught is None:
        return
    if not any(loss.origin == "taught" and loss.only != "failure" for loss in learner.algorithm.by_origin):
        yield (
            f"{name} is set, but its tokens have no behaviour probability, and the policy's own surrogate has a "
            'ratio to it; add [[learner.algorithm.by_origin]] with origin = "taught" and surrogate = { kind = '
            '"shaped" }'
        )
    others = {
        "given": learner.given is not None,
        "replay": learner.replay is not None,
        ("taught" if live else "family"): (learner.taught if live else learner.family) is not None,
        "lane": learner.lane is not None,
        "reward.group": learner.reward.group is not None,
        "algorithm.critic": learner.algorithm.critic is not None,
    }
    yield from not_together(name, "learner", others)
    if not judges_groups(learner.algorithm.advantage) or learner.train_on != "groups":
        yield (
            f"{name} joins groups that nobody solved, so it needs whole groups and an advantage within them; "
            'use train_on = "groups" and an advantage such as kind "group"'
        )
    if taught.members >= learner.group_size:
        yield (
            f"{name}.members is {taught.members} but learner.group_size is {learner.group_size}: no answer "
            "of the policy would be left; lower members"
        )


def _lane(learner: LearnerConfig) -> Iterator[str]:
    """Yield what cannot be beside members of another temperature, whose tokens have no behaviour probability at 1."""
    if learner.lane is None:
        return
    algorithm = learner.algorithm
    beside = {
        f'learner.train_on is "{learner.train_on}"': learner.train_on != "groups",
        "learner.family is set": learner.family is not None,
        "learner.replay is set": learner.replay is not None,
        f'learner.budget.kind is "{learner.budget.kind}"': isinstance(learner.budget, SharedBudget),
        "learner.reward.group is set": learner.reward.group is not None,
        "learner.algorithm.critic is set": algorithm.critic is not None,
        "learner.algorithm.distillation is set": algorithm.distillation is not None,
        "learner.algorithm.optimal_baseline is true": algorithm.optimal_baseline,
        "learner.algorithm.covariance is set": algorithm.covariance is not None,
        f'learner.algorithm.advantage.kind is "{algorithm.advantage.kind}"': isinstance(
            algorithm.advantage, RiskAdvantage
        ),
        f'learner.algorithm.surrogate.kind is "{algorithm.surrogate.kind}"': not isinstance(
            algorithm.surrogate, ClipSurrogate
        ),
        'learner.algorithm.corrections has the level "group"': any(
            getattr(correction, "level", None) == "group" for correction in algorithm.corrections
        ),
    }
    for what in (what for what, there in beside.items() if there):
        yield (
            f"{what} beside [learner.lane], whose answers are trained by REINFORCE beside a plain clip of whole "
            "groups; change it, or take [learner.lane] out"
        )
    if learner.sampling.temperature != 1.0:
        yield (
            f"learner.sampling.temperature is {learner.sampling.temperature:g} beside [learner.lane], which trains at "
            "temperature 1; set it to 1.0, or take [learner.lane] out"
        )


def _given(learner: LearnerConfig) -> Iterator[str]:
    """Yield what cannot be beside conversations that somebody else wrote, which have no reward and no group."""
    if learner.given is None:
        return
    algorithm = learner.algorithm
    others = {
        "replay": learner.replay is not None,
        "family": learner.family is not None,
        "algorithm.critic": algorithm.critic is not None,
        "algorithm.imitation_coefficient": algorithm.imitation_coefficient > 0,
        "forced_lag": learner.forced_lag > 0,
    }
    yield from not_together("learner.given", "learner", others)
    if learner.train_on == "windows":
        yield 'learner.given needs whole trajectories; set learner.train_on = "groups" or "trajectories"'
    if learner.given.share < 1 and not learner.given_trajectories:
        yield (
            f"learner.given.share is {learner.given.share:g}, but a batch has a single group; raise "
            f"learner.batch_trajectories to at least {2 * learner.group_size}, or set the share to 1"
        )


def _risk(learner: LearnerConfig, advantage: RiskAdvantage) -> Iterator[str]:
    name, groups = "learner.algorithm.advantage", learner.units_per_batch
    if learner.train_on == "groups" and groups % advantage.bundle:
        yield (
            f"{name}.bundle is {advantage.bundle} but a batch has {groups} groups: the last bundle would be smaller; "
            "let learner.batch_trajectories / group_size be a multiple of it"
        )
    if learner.replay is not None:
        yield f'{name}.kind is "risk" beside learner.replay, whose groups belong to no bundle; take replay out'


def _updates(learner: LearnerConfig) -> Iterator[str]:
    room, units = learner.batch_trajectories, "trajectories" if learner.train_on != "windows" else "windows"
    if learner.train_on == "groups":
        room, units = learner.batch_trajectories // learner.group_size, "groups"
    for objective in learner.algorithm.objectives():
        name, updates = objective.name, objective.updates_per_batch
        if updates > max(1, room):
            yield f"{name}.updates_per_batch is {updates} but a batch has only {room} {units}; lower it"
    if learner.algorithm.proximal == "interpolated" and learner.publish_every > 1:
        yield (
            'learner.algorithm.proximal is "interpolated" but learner.publish_every is '
            f"{learner.publish_every}: it goes by lag, which counts versions, so tokens up to "
            f"{learner.publish_every - 1} updates old would not be corrected; use publish_every = 1 or proximal = "
            '"recomputed"'
        )


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
    if learner.train_on == "groups" and replay.rule not in RESCUE_RULES and not replay.fire_at:
        fresh = learner.batch_trajectories / learner.group_size * (1 - replay.share)
        if fresh < 1:
            yield (
                f"learner.replay.share is {replay.share:g}: of a batch of {learner.batch_trajectories} trajectories "
                f"not one group of {learner.group_size} would be fresh; lower the share or raise batch_trajectories"
            )


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
    elif replay.rule in RESCUE_RULES and not (
        compares_members(learner.algorithm.advantage) or kind == "greedy"
    ):
        yield (
            f'learner.replay.rule is "{replay.rule}", which rescues groups, but learner.algorithm.advantage.kind is '
            f'"{kind}"; use one of {", ".join(GROUP_RELATIVE)}, or another rule'
        )


def _outcomes(learner: LearnerConfig, replay: ReplayConfig) -> Iterator[str]:
    """Yield the refusal of an outcome that says nothing."""
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


def _modes(learner: LearnerConfig) -> Iterator[str]:
    """Yield what cannot be beside members that are forced into a mode, or leaves them without anybody that chooses."""
    rule = learner.reward.group
    if not isinstance(rule, ModesReward):
        return
    name = "learner.reward.group"
    if rule.forced >= learner.group_size:
        yield (
            f"{name} forces {rule.forced} members of a group, {rule.each} into each of {len(rule.openings)} modes, but "
            f"learner.group_size is {learner.group_size}: nobody would choose a mode; raise group_size to "
            f"{rule.forced + 1} or more, or lower {name}.each"
        )
    beside = {
        f'learner.budget.kind is "{learner.budget.kind}"': isinstance(learner.budget, SharedBudget),
        'learner.algorithm.advantage.kind is "greedy"': learner.algorithm.advantage.kind == "greedy",
        "learner.replay is set": learner.replay is not None,
        'learner.selection.kind is "population"': isinstance(learner.selection, PopulationSelection),
    }
    for what in (what for what, there in beside.items() if there):
        yield (
            f'{what} beside {name} of kind "modes", whose groups have equally many members in each mode; change it, '
            f"or take {name} out"
        )


def reward_contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line per mistake in rewards that cannot be formed with the other settings: field, value seen, cure."""
    reward, name = learner.reward, "learner.reward"
    if reward.group is not None and learner.train_on != "groups":
        yield (
            f'{name}.group.kind is "{reward.group.kind}" but learner.train_on is "{learner.train_on}": the reward '
            'needs the whole group; use train_on = "groups", or take it out'
        )
    yield from _modes(learner)
    parts = ("stages", "gates", "wrong", "steps", "coverage", "bonus", "flawed", "length")
    beside = [part for part in parts if getattr(reward, part)]
    if beside and learner.train_on == "windows":
        yield (
            f'{name}.{beside[0]} is set but learner.train_on is "windows": a trajectory that is still growing has no '
            f'such value yet; take {beside[0]} out, or use train_on = "trajectories"'
        )
    newest = (learner.steps - 1) // learner.publish_every
    # `offbeat eval` trains no step.
    for i, stage in enumerate(reward.stages if learner.steps else ()):
        if stage.until_version > newest:
            yield (
                f"{name}.stages.{i}.until_version is {stage.until_version}, but learner.steps {learner.steps} with "
                f"learner.publish_every {learner.publish_every} train on versions up to {newest}: the stage would "
                "never end; lower until_version, or raise steps"
            )
    most = learner.sampling.max_trajectory_tokens
    if reward.length is not None and reward.length.begins_at >= most:
        yield (
            f"learner.reward.length begins at {reward.length.begins_at} tokens, but "
            f"learner.sampling.max_trajectory_tokens is {most}: no answer is so long; lower longest_tokens"
        )


def family_contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    family = learner.family
    yield from _shared_prefix(learner)
    if family is None:
        return
    yield from _beside(learner, family)
    if isinstance(family, BranchFamily | RetryFamily):
        yield from _parts_of_a_group(learner, family)
    if isinstance(family, BranchFamily) or (isinstance(family, RetryFamily) and family.begin != "prompt"):
        yield from _branches(learner, family)
    if isinstance(family, JudgeFamily):
        yield from _judgements(learner, family)
    if isinstance(family, RefineFamily):
        yield from _refined(learner, family)
    if isinstance(family, SteeredFamily):
        yield from _steered(learner, family)
    if isinstance(family, ProposeFamily):
        yield from _proposals(learner)
    yield from _room(learner)


def _beside(learner: LearnerConfig, family: FamilyConfig) -> Iterator[str]:
    """Yield the refusal of what no family, or none whose answers are compared together, can be combined with."""
    what = f'[learner.family] of kind "{family.kind}"'
    if learner.train_on != "groups":
        yield (
            f'learner.train_on is "{learner.train_on}" with {what}, which has to see a whole group before it asks for '
            'the next one; use train_on = "groups", or take [learner.family] out'
        )
    if learner.replay is not None:
        yield (
            f"learner.replay is set with {what}: the table would take answers to a prompt with a note for answers to "
            "the prompt; take one of the two out"
        )
    if learner.algorithm.advantage.kind == "greedy":
        yield (
            f'learner.algorithm.advantage.kind is "greedy" with {what}, whose groups have no greedy member; use kind '
            '"group", or take [learner.family] out'
        )
    if learner.reward.group is not None:
        yield (
            f"learner.reward.group is set with {what}: the reward would compare each group of the family by itself; "
            "take one of the two out"
        )
    merged = isinstance(family, BranchFamily | RetryFamily | RefineFamily | SteeredFamily | TaughtFamily) or (
        isinstance(family, HintFamily) and family.members > 0
    )
    if merged and (learner.reward.stages or learner.reward.bonus is not None):
        yield (
            f"learner.reward.{'stages' if learner.reward.stages else 'bonus'} is set with {what}, which compares "
            "answers of several policy versions with each other: those of one family would be valued by two rules; "
            "take one of the two out"
        )


def _parts_of_a_group(learner: LearnerConfig, family: BranchFamily | RetryFamily) -> Iterator[str]:
    """Yield the refusal of a group that is all first episodes."""
    if family.rollouts >= learner.group_size:
        others = "branches" if isinstance(family, BranchFamily) else "retries"
        yield (
            f"learner.family.rollouts is {family.rollouts} but learner.group_size is {learner.group_size}, which "
            f"counts {others}, too: there would be none; lower rollouts, or raise group_size"
        )


def _branches(learner: LearnerConfig, family: BranchFamily | RetryFamily) -> Iterator[str]:
    """Yield what episodes that begin in the middle of others cannot be combined with."""
    reward, algorithm = learner.reward, learner.algorithm
    what, one = f'[learner.family] of kind "{family.kind}"', "branch" if family.kind == "branch" else "retry"
    counted = {
        "wrong": reward.wrong is not None and reward.wrong.per_turn > 0,
        "steps": reward.steps is not None,
        "coverage": reward.coverage is not None,
        "length": reward.length is not None,
    }
    for name in (name for name, counts in counted.items() if counts):
        yield (
            f"learner.reward.{name} is set with {what}: it counts turns, marks or tokens, and those before a {one} "
            f"begins are not the {one}'s; take one of the two out"
        )
    compared, critic = comparisons_of(algorithm.advantage), algorithm.critic
    by_value = family.kind == "branch" and critic is not None and critic.target == "success"
    if (algorithm.advantage.kind == "gae" and not by_value) or (
        compared is not None and is_by_turn(compared)
    ):
        yield (
            f'learner.algorithm.advantage.kind is "{algorithm.advantage.kind}" with {what}: a {one}\'s first turn '
            "would be credited with rewards of the turns before it; use an advantage of whole trajectories, such as "
            'kind "group"'
            + (', or learner.algorithm.critic.target "success"' if family.kind == "branch" else "")
        )


def _judgements(learner: LearnerConfig, family: JudgeFamily) -> Iterator[str]:
    """Yield what judgements, which read the answers of their group, cannot be combined with."""
    advantage, what = learner.algorithm.advantage, '[learner.family] of kind "judge"'
    if family.answers >= learner.group_size:
        yield (
            f"learner.family.answers is {family.answers} but learner.group_size is {learner.group_size}, which counts "
            "judgements, too: there would be none; lower answers, or raise group_size"
        )
    elif family.answers == learner.group_size - 1:
        yield (
            f"learner.family.answers is {family.answers} but learner.group_size is {learner.group_size}, which counts "
            "judgements, too: a lone one is compared with nobody, so that it never trains; lower answers, or raise "
            "group_size"
        )
    if not judges_groups(advantage):
        yield (
            f'learner.algorithm.advantage.kind is "{advantage.kind}" with {what}, whose answers must not be compared '
            'with judgements; use an advantage within groups, such as kind "group"'
        )
    if isinstance(advantage, ComparedAdvantage):
        named = [term.value for term in advantage.terms if term.value not in VALUES]
        if named:
            yield (
                f'learner.algorithm.advantage.terms compare the reward "{named[0]}" with {what}, whose judgements have '
                'the reward "agreement" alone; use value = "return"'
            )
        for field, name in values_of_parts(advantage):
            yield (
                f'{field} is "{name}" with {what}, whose judgements have the reward "agreement" alone; use value = '
                '"return"'
            )
    bound, longest = learner.sampling.context_setting, learner.sampling.context_tokens
    needed = (family.answers + 1) * learner.sampling.max_turn_tokens
    if longest <= needed:
        yield (
            f"learner.sampling.{bound} is {longest} with {what}: {family.answers} answers of max_turn_tokens "
            f"{learner.sampling.max_turn_tokens} in the prompt leave no room for a judgement; raise it above {needed}, "
            "or lower answers or max_turn_tokens"
        )


def _refined(learner: LearnerConfig, family: RefineFamily) -> Iterator[str]:
    """Yield what refined episodes, which read a plain one of their group, cannot be combined with."""
    advantage = learner.algorithm.advantage
    if family.rollouts >= learner.group_size:
        yield (
            f"learner.family.rollouts is {family.rollouts} but learner.group_size is {learner.group_size}, which "
            "counts refined episodes, too: there would be none; lower rollouts, or raise group_size"
        )
    elif family.rollouts == learner.group_size - 1:
        yield (
            f"learner.family.rollouts is {family.rollouts} but learner.group_size is {learner.group_size}, which "
            "counts refined episodes, too: a lone one never beats the mean of its own half, so that it never trains; "
            "lower rollouts, or raise group_size"
        )
    compared = comparisons_of(advantage)
    of_tokens = compared is not None and (is_by_turn(compared) or compared.whiten == "tokens")
    if not judges_groups(advantage) or of_tokens:
        yield (
            f'learner.algorithm.advantage.kind is "{advantage.kind}" with [learner.family] of kind "refine", whose '
            "refined episodes have an advantage of their own; use an advantage of whole trajectories within groups, "
            'such as kind "group"'
        )
    elif compared is not None and compared.whiten == "trajectories":
        yield (
            f'learner.algorithm.advantage.whiten is "{compared.whiten}" with [learner.family] of kind "refine": the '
            'returns of refined episodes would be in the deviation of plain ones; use whiten = "none"'
        )
    if compared is not None and compared.by_difficulty is not None:
        yield (
            'learner.algorithm.advantage.by_difficulty is set with [learner.family] of kind "refine": the returns of '
            "refined episodes would be in the weights of plain ones; take one of the two out"
        )


def _steered(learner: LearnerConfig, family: SteeredFamily) -> Iterator[str]:
    """Yield what answers behind a demonstration cannot be combined with, and a bonus that never falls."""
    if family.members > learner.group_size - 2:
        yield (
            f"learner.family.members is {family.members} but learner.group_size is {learner.group_size}, which counts "
            "answers behind a demonstration, too: fewer than two plain ones would be compared; lower members, or raise "
            "group_size"
        )
    kind = learner.algorithm.advantage.kind
    if not judges_groups(learner.algorithm.advantage):
        yield (
            f'learner.algorithm.advantage.kind is "{kind}" with [learner.family] of kind "steered", whose answers are '
            'compared with plain ones; use an advantage within groups, such as kind "group"'
        )


def _proposals(learner: LearnerConfig) -> Iterator[str]:
    """Yield the refusal of proposals that could never be used."""
    what, selection = '[learner.family] of kind "propose"', learner.selection
    if not isinstance(selection, PopulationSelection):
        yield (
            f'learner.selection.kind is "{selection.kind}" with {what}, which proposes instructions; use selection '
            'kind "population", or take [learner.family] out'
        )
    elif not selection.prune_every:
        yield (
            f"learner.selection.prune_every is 0 with {what}: a proposal takes the place of an instruction that is "
            "pruned, and none ever is; set prune_every, for example to 64"
        )
    # `offbeat eval` and `offbeat retrain` deal out nothing.
    if not learner.checkpoint_every and learner.steps:
        yield (
            f"learner.checkpoint_every is 0 with {what}: a proposal is drawn only once a checkpoint has it, so that a "
            "restart knows it again; set checkpoint_every, for example to 10"
        )


def _room(learner: LearnerConfig) -> Iterator[str]:
    """Yield the refusal of a note that would leave no room for an answer."""
    family, sampling = learner.family, learner.sampling
    answers = quoted_answers(family)
    match family:
        case DraftFamily():
            what = "a draft"
        case RetryFamily():
            what = "a reflection" if family.reflection else "an earlier answer"
        case GuidedFamily() | SteeredFamily():
            what = "an example" if answers == 1 else f"{answers} examples"
        case RefineFamily():
            what = "an earlier answer"
        case ProposeFamily():
            what = "an instruction and an answer, each"
        case _:
            return
    if not answers:
        return
    bound, longest = sampling.context_setting, sampling.context_tokens
    needed = (answers + 1) * sampling.max_turn_tokens
    if longest <= needed:
        yield (
            f'learner.sampling.{bound} is {longest} with [learner.family] of kind "{family.kind}": {what} of '
            f"max_turn_tokens {sampling.max_turn_tokens} in the prompt leaves no room for as long an answer; raise it "
            f"above {needed}, or lower max_turn_tokens"
        )


def _shared_prefix(learner: LearnerConfig) -> Iterator[str]:
    shared, advantage = learner.algorithm.shared_prefix, learner.algorithm.advantage
    if shared == "own":
        return
    if not isinstance(learner.family, BranchFamily):
        yield (
            f'learner.algorithm.shared_prefix is "{shared}" but no trajectory begins with tokens of another; add '
            '[learner.family] of kind "branch", or use "own"'
        )
    compared = comparisons_of(advantage)
    if advantage.kind == "risk" or (compared is not None and compared.whiten == "tokens"):
        yield (
            f'learner.algorithm.shared_prefix is "{shared}" but learner.algorithm.advantage of kind '
            f'"{advantage.kind}" is made for a whole batch, which it does not act on; use kind "group", or "own"'
        )
    if shared == "sum" and learner.algorithm.aggregation == "sequence_mean":
        yield (
            'learner.algorithm.shared_prefix is "sum" but learner.algorithm.aggregation is "sequence_mean", which '
            "weighs a token by the length of its own trajectory, so the sum is not that over copies; use aggregation "
            '"token_mean", or shared_prefix "mean"'
        )


def notes(learner: LearnerConfig, *, segment_tokens: int) -> Iterator[str]:
    """Yield a line for each part of the method that never acts, and for what is larger or smaller than it looks.

    Args:
        segment_tokens: `actor.segment_tokens`, the length of a window.
    """
    if learner.train_on == "windows" and segment_tokens >= learner.sampling.max_turn_tokens:
        yield (
            f"actor.segment_tokens is {segment_tokens}, not below learner.sampling.max_turn_tokens "
            f"{learner.sampling.max_turn_tokens}: windows end with their turn, so hardly any answer is trained before "
            "it ends; set segment_tokens to a third of the longest answer, for example"
        )
    yield from learner.algorithm.remarks("learner.algorithm")
    if learner.publish_every > 1:
        oldest = (learner.lag_bound + 1) * learner.publish_every - 1
        yield (
            f"learner.max_policy_lag is {learner.lag_bound} with learner.publish_every {learner.publish_every}: lag "
            f"counts versions, so a token that is trained may be {oldest} updates old; lower one of them if that is "
            "too old"
        )
    if learner.nodes > 1:
        yield (
            f"learner.nodes is {learner.nodes}: the learner waits at {learner.rendezvous} for its other hosts; on "
            f"each, run offbeat learner RUN_FILE --node N, with N from 1 to {learner.nodes - 1}"
        )
    yield from family_notes(learner)
    yield from _short_phases(learner)
    yield from _lora(learner)


LEAST_PHASE = 0.1
"""Share of a run's steps below which a part of the method that acts at its beginning hardly acts."""


def _short_phases(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line for each part that acts in a small share of the run's steps alone."""
    change, bonus, stages = learner.algorithm.reincarnation, learner.reward.bonus, learner.reward.stages
    ends = {
        "learner.algorithm.reincarnation.step": 0 if change is None else change.step,
        "learner.reward.bonus.until_version": 0
        if bonus is None
        else bonus.until_version * learner.publish_every,
        "learner.reward.stages": stages[-1].until_version * learner.publish_every if stages else 0,
    }
    for field, end in ends.items():
        if 0 < end < LEAST_PHASE * learner.steps:
            yield (
                f"{field} ends what comes before it after {end} of {learner.steps} steps, "
                f"{100 * end / learner.steps:.0f} % of the run: what the method is named for hardly acts; raise it in "
                "proportion to learner.steps"
            )


def family_notes(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line if the lag bound lets fewer families be under way than two batches need."""
    family = learner.family
    if family is not None and learner.lag_bound < 2 * family.stages + 1:
        yield (
            f"learner.max_policy_lag is {learner.lag_bound} with families of up to {family.stages + 1} groups in a "
            "row: less than two batches are under way, so the learner waits for every batch; raise it to "
            f"{2 * family.stages + 1} if it should not"
        )


def taught_elsewhere(learner: LearnerConfig) -> Iterator[str]:
    """Yield why a teacher behind a URL would be compared at another temperature than the policy's."""
    teacher, temperature = learner.algorithm.distillation, learner.sampling.temperature
    if teacher is not None and teacher.remote and temperature != 1.0:
        yield (
            f"learner.algorithm.distillation.teacher is a URL, which tells log-probabilities at temperature 1, but "
            f"learner.sampling.temperature is {temperature:g}; set it to 1.0, or name a folder as teacher"
        )


def _lora(learner: LearnerConfig) -> Iterator[str]:
    if learner.lora is None:
        return
    if learner.optimizer.lr < ADAPTERS_LR:
        yield (
            f"learner.optimizer.lr is {learner.optimizer.lr:g} with [learner.lora]: adapters take 10 to 100 times the "
            f"learning rate of full weights; try {ADAPTERS_LR:g} to {10 * ADAPTERS_LR:g}"
        )
    critic = learner.algorithm.critic
    if critic is not None and critic.model == "separate":
        yield (
            'learner.algorithm.critic.model is "separate" with [learner.lora]: the critic is a second model without '
            'adapters, of which all weights are trained; use model = "head" to save its memory'
        )

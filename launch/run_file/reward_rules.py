"""Contradictions in rewards, comparisons and `[learner.family]`: what they lack, and what cannot be together."""

from collections.abc import Iterator

from envs.base import SuiteFacts
from learner.rewards import VALUES, values_of_parts
from learner.settings.advantages import (
    ComparedAdvantage,
    Comparison,
    RiskAdvantage,
    comparisons_of,
    is_by_turn,
    judges_groups,
)
from learner.settings.families import (
    ATTEMPT,
    REFLECTION,
    BranchFamily,
    DraftFamily,
    FamilyConfig,
    GuidedFamily,
    HintFamily,
    JudgeFamily,
    RefineFamily,
    RetryFamily,
)
from learner.settings.learner import LearnerConfig
from learner.settings.rewards import OverlongPenalty, RewardConfig


def credit_contradictions(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    yield from _rewards(learner)
    yield from _untrained(learner.reward)
    advantage = learner.algorithm.advantage
    if isinstance(advantage, RiskAdvantage):
        yield from _risk(learner, advantage)
    if not isinstance(advantage, ComparedAdvantage):
        return
    name = "learner.algorithm.advantage"
    for i, term in enumerate(advantage.terms):
        yield from _term(f"{name}.terms.{i}", term)
    spread = [i for i, term in enumerate(advantage.terms) if term.weight == "spread"]
    if spread and advantage.combine == "mean":
        yield (
            f'{name}.combine is "mean" but terms.{spread[0]}.weight is "spread", which divides by a sum of its own; '
            'use combine = "sum"'
        )
    if advantage.whiten == "trajectories" and is_by_turn(advantage):
        yield f'{name}.whiten is "trajectories" but a term is of turns; use whiten = "tokens", or "none"'
    if advantage.novelty is not None and is_by_turn(advantage):
        yield f'{name}.novelty is of whole answers but a term is of turns; take it out, or set of = "trajectory"'
    if advantage.amplify is not None and is_by_turn(advantage):
        yield f'{name}.amplify is of whole episodes but a term is of turns; take it out, or set of = "trajectory"'
    if advantage.by_difficulty is not None and not all("group" in term.among for term in advantage.terms):
        yield f"{name}.by_difficulty weighs groups, but a term is not among the group; take by_difficulty out"


def _risk(learner: LearnerConfig, advantage: RiskAdvantage) -> Iterator[str]:
    name, groups = "learner.algorithm.advantage", learner.units_per_batch
    if advantage.levels[0] >= advantage.levels[1]:
        yield f"{name}.levels are {list(advantage.levels)}; the first must be below the second: swap them"
    if learner.train_on == "groups" and groups % advantage.bundle:
        yield (
            f"{name}.bundle is {advantage.bundle} but a batch has {groups} groups: the last bundle would be smaller; "
            "let learner.batch_trajectories / group_size be a multiple of it"
        )
    if learner.replay is not None:
        yield f'{name}.kind is "risk" beside learner.replay, whose groups belong to no bundle; take replay out'


def _rewards(learner: LearnerConfig) -> Iterator[str]:
    reward, name = learner.reward, "learner.reward"
    yield from _replacing(learner)
    parts = ("stages", "gates", "wrong", "steps", "coverage", "bonus", "flawed", "length")
    beside = [part for part in parts if getattr(reward, part)]
    if beside and learner.train_on == "windows":
        yield (
            f'{name}.{beside[0]} is set but learner.train_on is "windows": a trajectory that is still growing has no '
            f'such value yet; take {beside[0]} out, or use train_on = "trajectories"'
        )
    yield from _stages(learner)
    if (wrong := reward.wrong) is not None and wrong.highest < wrong.lowest:
        yield f"{name}.wrong.highest {wrong.highest:g} is below lowest {wrong.lowest:g}; raise highest"
    if reward.length is not None:
        yield from _length(reward.length, learner.sampling.max_trajectory_tokens)
    for i, gate in enumerate(reward.gates):
        if gate.reward == gate.needs:
            yield f'{name}.gates.{i} has reward and needs "{gate.needs}": nothing is its own condition; change one'


def _replacing(learner: LearnerConfig) -> Iterator[str]:
    """Yield the refusal of a reward of groups without groups, and of two parts that both replace rewards."""
    reward, name = learner.reward, "learner.reward"
    if reward.group is not None and learner.train_on != "groups":
        yield (
            f'{name}.group.kind is "{reward.group.kind}" but learner.train_on is "{learner.train_on}": the reward '
            'needs the whole group; use train_on = "groups", or take it out'
        )
    replacing = [part for part in ("wrong", "steps") if getattr(reward, part)]
    if reward.group is not None and replacing:
        yield (
            f'{name}.group.kind is "{reward.group.kind}" beside {name}.{replacing[0]}: both replace rewards, and the '
            "group would be compared without the other; take one of them out"
        )
    elif len(replacing) == 2:
        yield f"{name}.wrong and {name}.steps are both set, and both replace rewards; take one of them out"


def _stages(learner: LearnerConfig) -> Iterator[str]:
    """Yield the refusal of stages out of order, or of one that would never end."""
    name = "learner.reward"
    ends = [stage.until_version for stage in learner.reward.stages]
    if ends != sorted(set(ends)):
        yield f"{name}.stages end at versions {ends}; each must end later than the one before: put them in order"
    newest = (learner.steps - 1) // learner.publish_every
    # `offbeat eval` trains no step.
    for i, end in enumerate(ends if learner.steps else ()):
        if end > newest:
            yield (
                f"{name}.stages.{i}.until_version is {end}, but learner.steps {learner.steps} with "
                f"learner.publish_every {learner.publish_every} train on versions up to {newest}: the stage would "
                "never end; lower until_version, or raise steps"
            )


def _length(length: OverlongPenalty, most: int) -> Iterator[str]:
    """Yield the refusal of a bound of lengths that all answers pass, or none.

    Args:
        most: tokens that a trajectory may have.
    """
    if length.buffer_tokens > length.longest_tokens:
        yield (
            f"learner.reward.length.buffer_tokens is {length.buffer_tokens}, above longest_tokens "
            f"{length.longest_tokens}: every answer would be too long; lower buffer_tokens"
        )
    elif length.longest_tokens - length.buffer_tokens >= most:
        yield (
            f"learner.reward.length begins at {length.longest_tokens - length.buffer_tokens} tokens, but "
            f"learner.sampling.max_trajectory_tokens is {most}: no answer is so long; lower longest_tokens"
        )


def _untrained(reward: RewardConfig) -> Iterator[str]:
    """Yield the refusal of each weight of a reward that `flawed` leaves out of the return."""
    flawed = reward.flawed
    if flawed is None or flawed.trained:
        return
    weights = {"weights": reward.weights} | {
        f"stages.{i}.weights": stage.weights for i, stage in enumerate(reward.stages)
    }
    for field, named in weights.items():
        if weight := named.get(flawed.needs):
            yield (
                f"learner.reward.{field}.{flawed.needs} is {weight:g} but learner.reward.flawed.trained is false, "
                "which leaves this reward out of the return; take the weight out, or set trained = true"
            )


def _term(name: str, term: Comparison) -> Iterator[str]:
    among = set(term.among)
    if len(term.among) > len(among) or ("batch" in among and len(among) > 1):
        yield (
            f'{name}.among is {list(term.among)}: each word once, and "batch" by itself, because it is not within a '
            'group; use ["group"] or ["batch"]'
        )
    elif among and not among & {"group", "batch"}:
        yield f'{name}.among is {list(term.among)}: only members of one group are compared by it; add "group"'
    if term.of == "trajectory" and (turns := sorted(among & {"position", "anchor"})):
        yield f'{name}.among has "{turns[0]}", which turns have, but of is "trajectory"; set of = "turn"'
    if term.of == "trajectory" and term.value == "return_to_go":
        yield f'{name}.value is "return_to_go", which turns have, but of is "trajectory"; set of = "turn"'
    if term.discount != 1 and term.value != "return_to_go":
        yield f'{name}.discount is {term.discount:g} but value is "{term.value}"; only "return_to_go" is discounted'
    if term.history and "anchor" not in among:
        yield f'{name}.history is {term.history} but among has no "anchor", whose history it is; add "anchor"'
    if term.weight == "spread" and (not among or term.scale not in ("std", "sample_std", "mean_abs")):
        yield (
            f'{name}.weight is "spread" but scale "{term.scale}" among {list(term.among)} has no deviation; use scale '
            '"std", "sample_std" or "mean_abs" among the group'
        )


WHAT = '[learner.family] of kind "judge"'


def judge_contradictions(learner: LearnerConfig, family: JudgeFamily) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    advantage = learner.algorithm.advantage
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
            f'learner.algorithm.advantage.kind is "{advantage.kind}" with {WHAT}, whose answers must not be compared '
            'with judgements; use an advantage within groups, such as kind "group"'
        )
    if isinstance(advantage, ComparedAdvantage):
        named = [term.value for term in advantage.terms if term.value not in VALUES]
        if named:
            yield (
                f'learner.algorithm.advantage.terms compare the reward "{named[0]}" with {WHAT}, whose judgements have '
                'the reward "agreement" alone; use value = "return"'
            )
        for field, name in values_of_parts(advantage):
            yield (
                f'{field} is "{name}" with {WHAT}, whose judgements have the reward "agreement" alone; use value = '
                '"return"'
            )
    bound, longest = longest_context(learner)
    needed = (family.answers + 1) * learner.sampling.max_turn_tokens
    if longest <= needed:
        yield (
            f"learner.sampling.{bound} is {longest} with {WHAT}: {family.answers} answers of max_turn_tokens "
            f"{learner.sampling.max_turn_tokens} in the prompt leave no room for a judgement; raise it above {needed}, "
            "or lower answers or max_turn_tokens"
        )


def refine_contradictions(learner: LearnerConfig, family: RefineFamily) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
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


def longest_context(learner: LearnerConfig) -> tuple[str, int]:
    """Return the setting that bounds the tokens of a prompt with its answer, and its value."""
    sampling = learner.sampling
    if sampling.max_context_tokens:
        return "max_context_tokens", sampling.max_context_tokens
    return "max_trajectory_tokens", sampling.max_trajectory_tokens


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
        yield from judge_contradictions(learner, family)
    if isinstance(family, RefineFamily):
        yield from refine_contradictions(learner, family)
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
    merged = isinstance(family, BranchFamily | RetryFamily | RefineFamily) or (
        isinstance(family, HintFamily) and family.members > 0
    )
    if merged and (learner.reward.stages or learner.reward.bonus is not None):
        yield (
            f"learner.reward.{'stages' if learner.reward.stages else 'bonus'} is set with {what}, which compares "
            "answers of several policy versions with each other: those of one family would be valued by two rules; "
            "take one of the two out"
        )


def quoted_answers(family: FamilyConfig | None) -> int:
    """Return the least number of answers that stand in a prompt with a note.

    Example:
        >>> quoted_answers(GuidedFamily(examples=3)), quoted_answers(RetryFamily(begin="parting", note="", rollouts=2))
        (3, 0)
    """
    match family:
        case DraftFamily() | RefineFamily():
            return 1
        case RetryFamily():
            return max(family.reflection.count(ATTEMPT), sum(map(family.note.count, (ATTEMPT, REFLECTION))))
        case GuidedFamily():
            return family.examples
        case JudgeFamily():
            return family.answers
    return 0


def _room(learner: LearnerConfig) -> Iterator[str]:
    """Yield the refusal of a note that would leave no room for an answer."""
    family, sampling = learner.family, learner.sampling
    answers = quoted_answers(family)
    match family:
        case DraftFamily():
            what = "a draft"
        case RetryFamily():
            what = "a reflection" if family.reflection else "an earlier answer"
        case GuidedFamily():
            what = "an example" if answers == 1 else f"{answers} examples"
        case RefineFamily():
            what = "an earlier answer"
        case _:
            return
    if not answers:
        return
    bound, longest = longest_context(learner)
    needed = (answers + 1) * sampling.max_turn_tokens
    if longest <= needed:
        yield (
            f'learner.sampling.{bound} is {longest} with [learner.family] of kind "{family.kind}": {what} of '
            f"max_turn_tokens {sampling.max_turn_tokens} in the prompt leaves no room for as long an answer; raise it "
            f"above {needed}, or lower max_turn_tokens"
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
    compared = comparisons_of(algorithm.advantage)
    if algorithm.advantage.kind == "gae" or (compared is not None and is_by_turn(compared)):
        yield (
            f'learner.algorithm.advantage.kind is "{algorithm.advantage.kind}" with {what}: a {one}\'s first turn '
            "would be credited with rewards of the turns before it; use an advantage of whole trajectories, such as "
            'kind "group"'
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


def family_notes(learner: LearnerConfig) -> Iterator[str]:
    """Yield a line if the lag bound lets fewer families be under way than two batches need."""
    family = learner.family
    if family is not None and learner.lag_bound < 2 * family.stages + 1:
        yield (
            f"learner.max_policy_lag is {learner.lag_bound} with families of up to {family.stages + 1} groups in a "
            "row: less than two batches are under way, so the learner waits for every batch; raise it to "
            f"{2 * family.stages + 1} if it should not"
        )


def lacking(learner: LearnerConfig, facts: SuiteFacts) -> Iterator[str]:
    """Yield the refusal of a family that needs what the environment is known not to give."""
    family = learner.family
    if family is None:
        return
    if facts.own_prompts:
        yield (
            f'learner.family.kind is "{family.kind}", which needs a prompt of one growing conversation, but the '
            "environment writes every prompt itself; take [learner.family] out"
        )
    if isinstance(family, HintFamily) and facts.hints is False:
        yield (
            'learner.family.kind is "hint" but the environment gives no hints; add StepResult.hints '
            "(docs/extend/environments.md), which the suite rows does with env.params.hint = COLUMN and reasoning_gym "
            "with env.params.hints = true, or take [learner.family] out"
        )

"""Contradictions in rewards and comparisons: values that can never be formed, each with the cure."""

from collections.abc import Iterator

from learner.comparisons import is_by_turn
from learner.settings.advantages import ComparedAdvantage, Comparison, RiskAdvantage
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

"""The claims: which arm has to beat which one, on which task, in what, and by how much.

Bars were set before any run, from tabular probes of the same formulas: most are half of the effect that a probe had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launch.run_file.load import load
from launch.run_file.sections import RunConfig
from learner.settings.advantages import GroupAdvantage

TASKS = Path(__file__).with_name("tasks")
BudgetUnit = Literal["tokens", "steps"]
"""Unit of a budget: action tokens that were sampled, or steps of the environment that the policy chose."""


@dataclass(frozen=True)
class Budget:
    """How much a run may use up."""

    amount: int
    unit: BudgetUnit = "tokens"

    def __str__(self) -> str:
        return f"{self.amount:,} {self.unit}"


BUDGETS = {
    "several_rewards": Budget(40_000),
    "hops": Budget(30_000),
    "lake": Budget(40_000),
    "doors": Budget(60_000),
    "dials": Budget(160_000),
    "wide_lake": Budget(16_000, "steps"),
    "instructions": Budget(12_000),
    "modes": Budget(60_000),
    "lucky": Budget(100_000),
    "locks": Budget(240_000),
}
"""Budget of a run, by task."""

Measure = Literal["final", "area", "calls", "first", "cost", "flawed"]
"""Subject of a bar. "final": the share of solved trajectories in the last fifth of the budget; "area": this share
over all of it; "calls": the mean number of tool calls in the last fifth, of which less is better; "first": the share of
trajectories behind the first of several instructions, the one that helps, in the last fifth; "cost": the action tokens
per right answer in the last fifth, of which less is better; "flawed": the share of right answers in the last fifth that
were reached by a wrong way, of which less is better. Only trajectories from the task's own prompt count: none that was
given a hint or forced into a mode, and none that began in the middle of another one."""


@dataclass(frozen=True)
class Arm:
    """One way to train on a task: a shipped recipe's objective and rewards, with few changes."""

    name: str
    task: str
    recipe: str
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of rewards; 0 for one that does not act."""
    scale: Literal["std", "none"] | None = None
    """Scale of the group advantage, in place of the recipe's."""
    family: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `[learner.family]`, in place of the recipe's."""
    selection: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `[learner.selection]`, in place of the recipe's; none: tasks are chosen as the task says."""
    taught: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `[learner.taught]`, in place of the recipe's."""


@dataclass(frozen=True)
class Bar:
    """Bound on the difference of two arms."""

    measure: Measure
    over: str
    """Name of the arm that is the baseline."""
    least: float
    """Smallest median of the paired difference. Of "calls", "cost" and "flawed" it is the share that is saved."""
    better: bool = True
    """True if the interval of the difference must lie above 0; False: the arm only has to be as good."""
    reach: float | None = None
    """Smallest median of the arm itself; None: any."""
    below: float | None = None
    """The median of the baseline must be below this, so that there was something to gain; None: any."""


@dataclass(frozen=True)
class Claim:
    """One method on one task, with all bars that it has to pass."""

    name: str
    arm: str
    sentence: str
    bars: tuple[Bar, ...]
    page: str
    """Page of the recipe, below docs."""


_PLAIN = {"misleading": 0.0, "heavy": 0.0}
_MISLED, _HEAVY = {"heavy": 0.0}, {"misleading": 0.0}
_SIX = {"instructions": ("dgkn", "ahlp", "bejm", "cfio", "dfim", "bglo")}
"""Beginnings of combinations, of which the first is that of the lock."""
_ARMS = (
    Arm("sum", "several_rewards", "grpo", _PLAIN),
    Arm("gdpo", "several_rewards", "gdpo", _PLAIN),
    Arm("gdpo-misled", "several_rewards", "gdpo", _MISLED),
    Arm("dvao-misled", "several_rewards", "dvao", _MISLED),
    Arm("unscaled-heavy", "several_rewards", "grpo", _HEAVY, scale="none"),
    Arm("std-heavy", "several_rewards", "grpo", _HEAVY),
    Arm("g2rpo-heavy", "several_rewards", "g2rpo", _HEAVY),
    Arm("grpo-hops", "hops", "grpo"),
    Arm("otc", "hops", "otc"),
    Arm("grpo-lake", "lake", "grpo"),
    Arm("gigpo", "lake", "gigpo"),
    Arm("grpo-doors", "doors", "grpo"),
    Arm("gigpo-doors", "doors", "gigpo"),
    Arm("grpo-dials", "dials", "grpo"),
    Arm("ghpo", "dials", "ghpo", family={"note": "{hint}"}),
    Arm("grpo-wide", "wide_lake", "grpo"),
    Arm("branch-anywhere", "wide_lake", "arpo-branch", family={"rollouts": 4, "where": "anywhere"}),
    Arm("arpo-branch", "wide_lake", "arpo-branch", family={"rollouts": 4}),
    Arm("any-instruction", "instructions", "inspo", selection=_SIX | {"temperature": 1e9, "prune_every": 0}),
    Arm("grpo-modes", "modes", "grpo"),
    Arm("a2fm", "modes", "a2fm"),
    Arm("inspo", "instructions", "inspo", selection=_SIX),
    Arm("grpo-lucky", "lucky", "grpo", {"working": 0.0}),
    Arm("fapo", "lucky", "fapo", {"working": 0.0}, family={"truth": "working"}),
    Arm("grpo-locks", "locks", "grpo"),
    Arm("one-teacher", "locks", "ampo", taught={"file": str(TASKS / "one_teacher.jsonl")}),
    Arm("ampo", "locks", "ampo", taught={"file": str(TASKS / "three_teachers.jsonl")}),
)
ARMS = {arm.name: arm for arm in _ARMS}
"""All arms by name."""
CLAIMS = (
    Claim(
        "GDPO",
        "gdpo",
        "normalising each of three rewards meets all three more often than their sum",
        (Bar("final", "sum", 0.035),),
        "recipes/comparisons.md#gdpo",
    ),
    Claim(
        "DVAO",
        "dvao-misled",
        "a misleading reward of tiny spread does less harm than with GDPO",
        (Bar("final", "gdpo-misled", 0.2),),
        "recipes/comparisons.md#dvao",
    ),
    Claim(
        "G2RPO",
        "g2rpo-heavy",
        "ranks bear heavy tails that unscaled returns do not, and no worse than the deviation",
        (Bar("final", "unscaled-heavy", 0.2), Bar("final", "std-heavy", 0.0, better=False)),
        "recipes/comparisons.md#g2rpo",
    ),
    Claim(
        "OTC",
        "otc",
        "a quarter fewer tool calls at equal accuracy",
        (Bar("calls", "grpo-hops", 0.25), Bar("final", "grpo-hops", -0.01, better=False)),
        "recipes/rewards.md#otc",
    ),
    Claim(
        "GiGPO",
        "gigpo",
        "comparing turns of one state learns a sparse task sooner and better than GRPO",
        (Bar("final", "grpo-lake", 0.05), Bar("area", "grpo-lake", 0.1)),
        "recipes/comparisons.md#gigpo",
    ),
    Claim(
        "GiGPO-doors",
        "gigpo-doors",
        "comparing turns of one state learns a room with key and door sooner and better than GRPO",
        (Bar("final", "grpo-doors", 0.05), Bar("area", "grpo-doors", 0.1)),
        "recipes/comparisons.md#gigpo",
    ),
    Claim(
        "GHPO",
        "ghpo",
        "hints of growing length teach tasks that nobody solves without one",
        (Bar("final", "grpo-dials", 0.3, reach=0.5, below=0.2),),
        "recipes/families.md#ghpo",
    ),
    Claim(
        "ARPO-branch",
        "arpo-branch",
        "branches where the policy is unsure find a sparse reward in fewer steps, and branches anywhere are no better",
        (Bar("final", "grpo-wide", 0.08), Bar("final", "branch-anywhere", 0.0, better=False)),
        "recipes/families.md#arpo-branch",
    ),
    Claim(
        "INSPO",
        "inspo",
        "the one instruction of six that helps gets more than 0.8 of the groups",
        (Bar("first", "any-instruction", 0.6, reach=0.8),),
        "recipes/selection.md#inspo",
    ),
    Claim(
        "A2FM",
        "a2fm",
        "a right answer costs a fifth fewer tokens at equal accuracy",
        (Bar("cost", "grpo-modes", 0.2), Bar("final", "grpo-modes", -0.01, better=False)),
        "recipes/rewards.md#a2fm",
    ),
    Claim(
        "FAPO",
        "fapo",
        "a judge that learns from planted mistakes halves the right answers by a flawed way, at equal accuracy",
        (Bar("flawed", "grpo-lucky", 0.5), Bar("final", "grpo-lucky", -0.02, better=False)),
        "recipes/families.md#fapo",
    ),
    Claim(
        "AMPO",
        "ampo",
        "answers of three teachers, each of whom knows one lock, open locks that GRPO never does, and one opens fewer",
        (Bar("final", "grpo-locks", 0.34, reach=0.44, below=0.1), Bar("final", "one-teacher", 0.3)),
        "recipes/comparisons.md#ampo",
    ),
)


def arms_of(claims: Sequence[Claim]) -> list[Arm]:
    """Return the arms that some claims need, each once, those of one task together.

    Example:
        >>> [arm.name for arm in arms_of([c for c in CLAIMS if c.name == "OTC"])]
        ['grpo-hops', 'otc']
    """
    names = {name for claim in claims for name in (claim.arm, *(bar.over for bar in claim.bars))}
    return [arm for arm in _ARMS if arm.name in names]


def configured(arm: Arm) -> RunConfig:
    """Return the settings of an arm: those of its task with the recipe's objective, rewards and families."""
    config, theirs = load(TASKS / f"{arm.task}.toml"), load(Path(arm.recipe)).learner
    algorithm = theirs.algorithm
    if arm.scale is not None:
        algorithm = algorithm.model_copy(update={"advantage": GroupAdvantage(scale=arm.scale)})
    reward = theirs.reward.model_copy(update={"weights": dict(arm.weights)})
    family = None if theirs.family is None else theirs.family.model_copy(update=dict(arm.family))
    parts: dict[str, Any] = {"algorithm": algorithm, "reward": reward, "family": family}
    if arm.selection:
        parts["selection"] = theirs.selection.model_copy(update=dict(arm.selection))
    if theirs.taught is not None:
        parts["taught"] = theirs.taught.model_copy(update=dict(arm.taught))
    learner = config.learner.model_copy(update=parts)
    return config.model_copy(update={"learner": learner})

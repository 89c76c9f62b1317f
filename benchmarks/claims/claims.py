"""The claims: which arm has to beat which one, on which task, in what, and by how much.

Bars were set before any run, from tabular probes of the same formulas: most are half of the effect that a probe had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launch.run_file.load import load
from launch.run_file.sections import RunConfig
from learner.algorithm_config import GroupAdvantage

TASKS = Path(__file__).with_name("tasks")
TOKENS = {"several_rewards": 40_000, "hops": 30_000, "lake": 40_000}
"""Sampled action tokens of a run, by task."""

Measure = Literal["final", "area", "calls"]
"""What a bar is about. "final": the share of solved trajectories in the last fifth of the tokens; "area": this share
over all tokens; "calls": the mean number of tool calls in the last fifth, of which less is better."""


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


@dataclass(frozen=True)
class Bar:
    """What the difference of two arms has to be."""

    measure: Measure
    over: str
    """Name of the arm that is the baseline."""
    least: float
    """Smallest median of the paired difference. Of "calls" it is the share that is saved."""
    better: bool = True
    """Whether the interval of the difference must lie above 0; False: the arm only has to be as good."""


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
)
ARMS = {arm.name: arm for arm in _ARMS}
"""All arms by name."""
CLAIMS = (
    Claim(
        "GDPO",
        "gdpo",
        "normalising each of three rewards meets all three more often than their sum",
        (Bar("final", "sum", 0.035),),
        "recipes/credit/gdpo.md",
    ),
    Claim(
        "DVAO",
        "dvao-misled",
        "a misleading reward of tiny spread does less harm than with GDPO",
        (Bar("final", "gdpo-misled", 0.2),),
        "recipes/credit/dvao.md",
    ),
    Claim(
        "G2RPO",
        "g2rpo-heavy",
        "ranks bear heavy tails that unscaled returns do not, and no worse than the deviation",
        (Bar("final", "unscaled-heavy", 0.2), Bar("final", "std-heavy", 0.0, better=False)),
        "recipes/credit/g2rpo.md",
    ),
    Claim(
        "OTC",
        "otc",
        "a quarter fewer tool calls at equal accuracy",
        (Bar("calls", "grpo-hops", 0.25), Bar("final", "grpo-hops", -0.01, better=False)),
        "recipes/credit/otc.md",
    ),
    Claim(
        "GiGPO",
        "gigpo",
        "comparing turns of one state learns a sparse task sooner and better than GRPO",
        (Bar("final", "grpo-lake", 0.05), Bar("area", "grpo-lake", 0.1)),
        "recipes/credit/gigpo.md",
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
    """Return the settings of an arm: those of its task with the recipe's objective and rewards."""
    config, theirs = load(TASKS / f"{arm.task}.toml"), load(Path(arm.recipe)).learner
    algorithm = theirs.algorithm
    if arm.scale is not None:
        algorithm = algorithm.model_copy(update={"advantage": GroupAdvantage(scale=arm.scale)})
    reward = theirs.reward.model_copy(update={"weights": dict(arm.weights)})
    learner = config.learner.model_copy(update={"algorithm": algorithm, "reward": reward})
    return config.model_copy(update={"learner": learner})

"""`[learner.selection]`: which task comes next."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from protocol.messages.fields import MAX_TEXT
from protocol.section import Section


class SequentialSelection(Section):
    """Tasks are dealt in the order of their numbers: 0, 1, 2, and so on. Each is dealt once."""

    kind: Literal["sequential"] = "sequential"


class TaskList(Section):
    """The tasks 0 to `tasks` - 1."""

    tasks: int = Field(128, ge=1, le=1_000_000)
    """Tasks of the list. At least 1, at most 1,000,000."""


class EpochsSelection(TaskList):
    """The tasks 0 to `tasks` - 1 are dealt again and again. Each epoch deals every one of them once, in an order of its
    own, which the seed of the run decides."""

    kind: Literal["epochs"] = "epochs"


class ChosenSelection(TaskList):
    """The tasks 0 to `tasks` - 1, of which the next one is chosen by what the answers so far show. A task whose group
    is under way is not dealt again while there is another one."""

    half_life: float = Field(16.0, gt=0)
    """Answers to a task after which an earlier answer to it counts half. Above 0."""


Share = Annotated[float, Field(ge=0, le=1)]


class NearSelection(ChosenSelection):
    """Tasks whose success rate is near `target` (DOTS, arXiv:2506.05316): a task with the rate p has the weight
    exp(-|p - target| / temperature). A task without answers has the rate 0.5."""

    kind: Literal["near"] = "near"
    target: float = Field(0.5, ge=0, le=1)
    """Success rate that is preferred. 0 to 1."""
    temperature: float = Field(1e-3, gt=0)
    """How fast the weight falls with the distance. Above 0; 0.001 takes the nearest."""
    explore: Share = 0.25
    """Share of groups with the task that was dealt least, so that rates of far tasks are measured again. 0 to 1. The
    paper measures 256 tasks every 2 steps of 512."""


class FailuresSelection(ChosenSelection):
    """A task whose whole group failed comes again until its first success (DeepTravel, arXiv:2509.21842). How often is
    not in the paper."""

    kind: Literal["failures"] = "failures"
    again: Share = 0.5
    """Share of groups with a task that failed, where there is one. 0 to 1. The others have the task dealt least."""


class PruneSelection(ChosenSelection):
    """Epochs without the tasks that are solved often enough (RAPO, arXiv:2509.24107)."""

    kind: Literal["prune"] = "prune"
    solved: float = Field(0.9, gt=0, le=1)
    """Success rate from which on a task is left out. Above 0, at most 1."""


class FilterSelection(ChosenSelection):
    """A first pass deals each task, and later ones only those that were solved in it at least once (ARPO,
    arXiv:2505.16282)."""

    kind: Literal["filter"] = "filter"
    passes: int = Field(1, ge=1)
    """Groups of each task in the first pass. At least 1."""


class ValueSelection(ChosenSelection):
    """Tasks by the value of their last group, (max - mean) std of its returns: the probability is proportional to it
    (VSPO, arXiv:2512.07478). Each task is dealt once before."""

    kind: Literal["value"] = "value"
    explore: Share = 0.1
    """Share of groups with the task that was dealt least, so that values are measured again. 0 to 1; ours."""
    divide: bool = True
    """Divide the advantages of a group by how often its task is among the last `tasks` groups that were dealt. The
    paper says that repeated tasks are damped, and not how, so the rule is ours."""


Instruction = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class PopulationSelection(Section):
    """A population of instructions (INSPO, arXiv:2512.01945). Tasks are dealt in the order of their numbers, and one of
    the instructions stands behind the prompt of each group, drawn by what it brought so far. Evaluations have none."""

    kind: Literal["population"] = "population"
    instructions: tuple[Instruction, ...] = Field(
        (
            "Think step by step.",
            "Answer at once, without an explanation.",
            "Say first what is asked, then answer.",
            "Check your answer before you give it.",
        ),
        strict=False,
        min_length=2,
        max_length=256,
    )
    """The instructions, at least 2, all different. They are known by their places; a run that goes on may have further
    ones at the end. The default has four general ones."""
    temperature: float = Field(0.1, gt=0)
    """How strongly the reward decides, in units of the reward: an instruction whose mean return is w has the weight
    exp(w / temperature). Above 0."""
    half_life: float = Field(64.0, gt=0)
    """Answers to an instruction after which an earlier answer to it counts half. Above 0; ours."""
    prune_every: int = Field(64, ge=0)
    """Groups after which the instruction with the smallest mean return is left out; with `learner.train_on` other than
    "groups", trajectories. At least 0; 0: none is ever. The paper prunes now and then."""
    smallest: int = Field(2, ge=1)
    """Instructions that are always kept. At least 1."""

    @field_validator("instructions")
    @classmethod
    def _different(cls, instructions: tuple[str, ...]) -> tuple[str, ...]:
        twice = next((text for text in instructions if instructions.count(text) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is there twice; write each instruction once")
        return instructions


SelectionConfig = Annotated[
    SequentialSelection
    | EpochsSelection
    | NearSelection
    | FailuresSelection
    | PruneSelection
    | FilterSelection
    | ValueSelection
    | PopulationSelection,
    Field(discriminator="kind"),
]

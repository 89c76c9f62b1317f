"""The ways in which benchmarks/every_way/program.py runs a job. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

METHODS = Path(__file__).parents[2] / "recipes" / "methods"
ROOM = ("learner.sampling.max_trajectory_tokens=1024", "generator.max_model_len=1024")
"""Room for prompts in which other answers stand."""
TRIMMED = {
    "ppo": ("learner.algorithm.critic.warmup_steps=1",),
    "tppo": ("learner.algorithm.critic.warmup_steps=1", "actor.segment_tokens=8"),
    "remix": ("learner.algorithm.reincarnation.step=2", "learner.replay.stop_at_step=2"),
    "dapo-direct": ("learner.algorithm.critic.warmup_steps=1",),
    "fapo-judge": (
        "learner.reward.wrong.reward=answer",
        'learner.reward.flawed={reward = "answer", needs = "step", least = 0.35, trained = false}',
    ),
    "agent-r": ROOM,
    "dyna-mind": ROOM,
    "r3l": ROOM,
    "urpo": ROOM,
    "xrpo-seeding": ROOM,
    "riskpo": ("learner.algorithm.advantage.bundle=2",),
    "ghpo": ("env.params.hints=true",),
    "scaf-grpo": ("env.params.hints=true",),
    "prs": ("learner.reward.stages=[{until_version = 1, weights = {step = 1.0, answer = 0.0}}]",),
}
"""Overrides of methods whose parts act in later steps than the few of a case, need larger batches, hints or room."""
RUN_FILES = {
    **dict.fromkeys(("agent-r", "arpo-branch", "dyna-mind", "r3l"), "calculator"),
    **dict.fromkeys(
        ("fapo-judge", "fapo-rule", "gigpo", "grpo-tcr", "hgpo", "otc", "prs", "rapo"), "calculator"
    ),
    **dict.fromkeys(("spear", "subpo"), "calculator"),
}
"""Run files of methods that need several turns, marks, or rewards of certain names, which other jobs may not give."""
SHORT = (
    "learner.batch_trajectories=16",
    "learner.evaluation_tasks=0",
    "learner.checkpoint_every=1",
    "run.max_minutes=10",
)
"""Overrides of all cases. Each step has a checkpoint, so a fault costs one step at most."""


@dataclass(frozen=True)
class Case:
    """A way to run the job."""

    overrides: tuple[str, ...] = ()
    killed: str = ""
    """Process that gets SIGKILL after the first step; "" means none."""
    resumed: bool = False
    """Whether the run is resumed after its last step, for as many steps again."""
    exported: bool = False
    """Whether transformers and vLLM load the model that the run writes."""
    run_file: str = ""
    """Run file of this case; "": the one that the program was given."""


def method_cases() -> dict[str, Case]:
    """Return a case for each shipped method.

    Example:
        >>> method_cases()["gspo"].overrides
        ('method=gspo',)
    """
    names = sorted(path.stem for path in METHODS.rglob("*.toml"))
    return {
        name: Case((f"method={name}", *TRIMMED.get(name, ())), run_file=RUN_FILES.get(name, ""))
        for name in names
    }


WAYS = {
    "default": Case(exported=True),
    "second model as critic": Case(
        ("method=ppo", "learner.algorithm.critic.model=separate", *TRIMMED["ppo"])
    ),
    **{f"ZeRO {stage}": Case((f"learner.zero_stage={stage}",)) for stage in (0, 1, 2, 3)},
    **{
        f"two ranks, ZeRO {stage}": Case((f"learner.zero_stage={stage}", "learner.processes=2"))
        for stage in (0, 1, 2, 3)
    },
    "bfloat16": Case(("learner.dtype=bfloat16", "generator.dtype=bfloat16")),
    "LoRA": Case(("learner.lora={rank = 16}", "learner.optimizer.lr=2e-4"), exported=True),
    "LoRA, two ranks": Case(("learner.lora={rank = 16}", "learner.optimizer.lr=2e-4", "learner.processes=2")),
    "lockstep": Case(("run.mode=sync",)),
    **{f"kill -9 of {name}": Case(killed=name) for name in ("broker", "learner", "generator-0", "actor-0")},
    "resumed": Case(resumed=True),
}
"""All cases but those of the methods."""


def chosen(names: Sequence[str]) -> dict[str, Case]:
    """Return the cases of these names; all if there is none.

    Raises:
        KeyError: there is no such case.
    """
    every = WAYS | method_cases()
    return {name: every[name] for name in names} if names else every

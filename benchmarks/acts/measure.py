"""Take a learner step with a part of a method and one without it, on recorded episodes, and compare them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.acts.episodes import KeptStep, RecordedJob, job_of
from benchmarks.acts.parts import METHODS, Part, changed, given
from benchmarks.acts.table import FrozenTable, PolicyTable, TableEngine
from launch.run_file.load import load, run_files
from learner.comparisons import has_signal
from learner.retrain import RecordedBatches
from learner.rewards import is_right
from learner.settings.advantages import ComparedAdvantage, WinRate
from learner.settings.learner import LearnerConfig
from learner.trajectory import Trajectory, Unit
from learner.update import ranks
from learner.update.adaptive import AdaptiveState, first_state, reference_policies
from learner.update.critic import ValueMemory
from learner.update.engine import TrainingEngine
from learner.update.updater import Updater

MOVE = 0.05
"""Mean distance by which the first optimizer step moves the log-probabilities of its tokens, in nats. In runs of the
shipped jobs, tokens of lag 1 had moved by 0.03 to 0.1."""
BAR = 0.01
"""Least share of the step by which a part has to move it."""


@dataclass(frozen=True)
class Acted:
    """How a part of a recipe acted on its job."""

    recipe: str
    part: str
    share: float
    """Norm of the difference of the steps with and without the part, over the norm of the step."""
    touched: tuple[int, int] | None = None
    """Trajectories that the mechanism touched, of those that it could have touched."""
    rate: float = 0.0
    """Rate of the table's steps."""

    @property
    def acts(self) -> bool:
        """Whether the part moves the step by the bar."""
        return self.share >= BAR


class TableTrainer(TrainingEngine):
    """The learner's update on a table of recorded contexts, without DeepSpeed and without a model."""

    def __init__(
        self,
        config: LearnerConfig,
        step: KeptStep,
        trajectories: Sequence[Trajectory],
        state: AdaptiveState | None,
    ) -> None:
        critic = config.algorithm.critic
        self.config, self.rank, self.ranks = config, 0, 1
        self._others = ranks.OtherRanks(0)
        self.deepspeed = TableEngine(PolicyTable(trajectories, step.numbers, values=critic is not None), MOVE)
        self.critic = None
        self._values = ValueMemory()
        self._window_tokens = config.sampling.max_turn_tokens
        frozen = {
            name: FrozenTable(PolicyTable(trajectories, step.numbers, reference=name == "reference"))
            for name in reference_policies(config.algorithm)
        }
        self.updater = Updater(
            engine=self.deepspeed,
            critic=None,
            frozen=frozen,  # type: ignore[arg-type]
            config=config,
            total_steps=config.steps,
            seed=5,
            rank=0,
            ranks=1,
            state=state or first_state(config.algorithm),
        )
        self._step = step

    def change(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """Train on trajectories and return the change of the table."""
        policy = self.deepspeed.policy
        before = policy.table.detach().clone()
        batch = self._batch(trajectories, self._step.version)
        assert batch is not None
        self.updater.run(batch, step=self._step.step - 1, optimizer_step=10**6)
        change: Tensor = policy.table.detach() - before
        return change


def ready(config: LearnerConfig, step: KeptStep) -> list[Trajectory]:
    """Return the trajectories of a recorded step that the settings would train on, with their rewards composed."""
    batches = RecordedBatches(config)
    batches.load(step.recorded())
    units = batches.collect(step=step.step - 1, version=step.version)
    return [
        t
        for unit in units
        if _has_signal(config, unit)
        for t in unit.trajectories
        if t.trajectory_id in step.numbers
    ]


def _has_signal(config: LearnerConfig, unit: Unit) -> bool:
    return not config.drops_uniform_groups or has_signal(config.algorithm.advantage, unit.trajectories)


def of_tests(learner: LearnerConfig) -> LearnerConfig:
    """Return the settings of a recipe after the steps that train a critic alone, and without other ranks."""
    algorithm = learner.algorithm
    if algorithm.critic is not None:
        critic = algorithm.critic.model_copy(update={"warmup_steps": 0, "model": "head", "steps": 1})
        algorithm = algorithm.model_copy(update={"critic": critic})
    # Episodes are recorded whole, so a window is a whole episode.
    whole = "trajectories" if learner.train_on == "windows" else learner.train_on
    return learner.model_copy(update={"algorithm": algorithm, "train_on": whole})


def changes(
    learner: LearnerConfig, job: RecordedJob, rate: list[float] | None = None
) -> tuple[list[Tensor], list[float]]:
    """Return the change of the table in each recorded step, and the rates of the steps."""
    state, found, rates = None, [], []
    for i, step in enumerate(job.steps):
        every = ready(learner.model_copy(update={"filter_uniform_groups": False}), step)
        trainer = TableTrainer(learner, step, every, state)
        if rate is not None:
            trainer.deepspeed.rate = rate[i]
        trained = ready(learner, step)
        if not trained:
            found.append(torch.zeros_like(trainer.deepspeed.policy.table.detach()))
            rates.append(1.0)
            continue
        found.append(trainer.change(trained))
        rates.append(trainer.deepspeed.rate or 1.0)
        state = trainer.updater.state
    return found, rates


def share(with_part: Sequence[Tensor], without: Sequence[Tensor]) -> float:
    """Return the norm of the difference over the norm of the step, over all recorded steps together."""
    difference = math.sqrt(
        sum(float((a - b).square().sum()) for a, b in zip(with_part, without, strict=True))
    )
    norm = math.sqrt(sum(float(a.square().sum()) for a in with_part))
    return difference / norm if norm else 0.0


def measure(recipe: str, learner: LearnerConfig, job: RecordedJob) -> list[Acted]:
    """Return how each part of a recipe acts on recorded episodes of its job."""
    method = METHODS[recipe]
    learner = of_tests(learner)
    whole, rates = changes(learner, job)
    found = []
    for part in method.parts:
        other, _ = changes(of_tests(changed(learner, part.without)), job, rates)
        found.append(Acted(recipe, part.name, share(whole, other), _touched(part, learner, job), rates[0]))
    return found


def wrong_called_right(recipe: str) -> tuple[int, int] | None:
    """Return how many answers the recipe calls right that the environment calls wrong, of those that it calls right.

    None if the recipe asks for no right answers.
    """
    config = load(run_files()[recipe])
    right = right_of(config.learner)
    if right is None:
        return None
    plain = config.learner.model_copy(update={"filter_uniform_groups": False})
    answers = [t for step in job_of(recipe, config).steps for t in ready(plain, step) if right(given(t))]
    return sum(t.correct is False for t in answers), len(answers)


def right_of(learner: LearnerConfig) -> Callable[[Trajectory], bool] | None:
    """Return what a recipe takes for a right answer; None if it asks for none."""
    reward, advantage = learner.reward, learner.algorithm.advantage
    for rule in (reward.group, reward.wrong, reward.steps, reward.flawed):
        if rule is not None and not isinstance(rule, WinRate):
            return partial(_named, rule.reward)
    if isinstance(advantage, ComparedAdvantage) and advantage.novelty is not None:
        return lambda t: t.correct is not False and (t.correct is True or t.return_ > 0)
    return None


def _named(reward: str, t: Trajectory) -> bool:
    return is_right(t, reward)


def _touched(part: Part, learner: LearnerConfig, job: RecordedJob) -> tuple[int, int] | None:
    if part.touched is None:
        return None
    plain = learner.model_copy(update={"filter_uniform_groups": False})
    counts = [part.touched(learner, ready(plain, step)) for step in job.steps]
    return sum(a for a, _ in counts), sum(b for _, b in counts)

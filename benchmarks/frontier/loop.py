"""One cell: the learner's own steps on batches that a plain sampler draws from the last versions, in one process.

`learner.trainer.Trainer` does the steps, with the engine, the objective and the optimizer of every run. In place of
broker, actors and generators stand two small parts: versions are kept in memory, and the batch of step s is sampled,
when it is asked for, by version s - lag. Nothing else is different, and `tests/integration/benchmarks/test_frontier.py`
compares the two systems.
"""

import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.render import Renderer
from benchmarks.frontier.sampler import PlainModel, Shape, drawn
from envs.base import Suite
from learner.intake.intake import Intake
from learner.replay.table import replay_table
from learner.retrain import OwnsEveryTask, Unpublished
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig
from learner.trainer import Trainer
from learner.trajectory import Trajectory, Unit
from learner.update.engine import TrainingEngine
from learner.update.micro_batches import MiniBatch
from learner.update.ranks import OptimizerStep
from learner.update.report import TokenRecorder, UpdateReport
from learner.update.updater import Updater
from learner.weight_copy import OutgoingWeights
from protocol.messages.episodes import Reward, Turn
from protocol.messages.peers import PublishWeights

SAMPLER_LIMIT = 5e-4
"""Largest mean difference between the log-probabilities of sampler and learner in the first batch, in nats."""
PROBES = (0.5, 0.7, 0.9)
"""Places in a run, as shares of its steps, at which the gradient is compared with a fresh one."""
EARLY = (0.1, 0.2, 0.3, 0.4)
"""Further places, at which rows still learn: where the first batches of a lag have most of their effect."""
FRESH_BATCHES = 4
"""Batches of the fresh gradient, because one alone is as noisy as what it is compared with."""
EVALUATED = 128
"""Sampled responses of an evaluation."""
SCORED = (13 / 16, 14 / 16, 15 / 16, 1.0)
"""Places in a run at which it is evaluated, as shares of its steps. With a large lag the reward may swing, and one
evaluation at the end would tell where in the swing the run has ended."""
NUMBERS = {
    "learner/effective_sample_size": "ess",
    "learner/entropy_nats": "entropy",
    "learner/clip_fraction": "clipped",
    "learner/truncated_fraction": "cut",
    "learner/correction_mean": "weight",
    "learner/gradient_norm": "gradient_norm",
    "learner/kl_proximal_behaviour_nats": "moved",
    "learner/acted_fraction": "acted",
}
"""Metrics that a result has the mean of, over the second half of the run, and their names there."""

T = TypeVar("T")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of an environment that waits for nothing.

    Raises:
        RuntimeError: it waits.

    Example:
        >>> async def answer() -> int:
        ...     return 42
        >>> at_once(answer())
        42
    """
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise RuntimeError(
        "the environment waits for something; the loop in one process has nothing to wait with"
    )


@dataclass
class _Row:
    """An episode that is being played."""

    episode: Any
    group: str
    group_size: int
    temperature: float
    turns: list[Turn] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    correct: bool | None = None


class _Tokens:
    """Tokens of all rows. Those up to ``length`` are known, those up to ``fed`` went through the model.

    Args:
        rows: number of rows.
        positions: longest row, in tokens.
    """

    def __init__(self, rows: int, positions: int) -> None:
        self.ids = np.zeros((rows, positions), dtype=np.int64)
        self.logp = np.zeros((rows, positions), dtype=np.float32)
        self.action = np.zeros((rows, positions), dtype=np.bool_)
        self.length, self.fed, self.began = (np.zeros(rows, dtype=np.int64) for _ in range(3))
        self.done = np.zeros(rows, dtype=np.bool_)
        self.every = np.arange(rows)

    def observe(self, row: int, tokens: Sequence[int]) -> Turn:
        """Add an observation to a row, and return its place without a number."""
        start, end = int(self.length[row]), int(self.length[row]) + len(tokens)
        self.ids[row, start:end] = tokens
        self.length[row] = self.began[row] = end
        return Turn(0, start, end, False)

    def feed(self) -> tuple[Tensor, Tensor]:
        """Return the next token of each row and its place. A row that is done repeats its last one."""
        at = np.minimum(self.fed, self.length - 1)
        self.fed = at + 1
        return torch.from_numpy(self.ids[self.every, at]), torch.from_numpy(at)

    def take(self, tokens: Tensor, logp: Tensor) -> NDArray[np.int64]:
        """Add a sampled token to each row that waits for one, and return these rows."""
        waiting = np.flatnonzero((self.fed == self.length) & ~self.done)
        at = self.length[waiting]
        self.ids[waiting, at] = tokens.numpy()[waiting]
        self.logp[waiting, at] = logp.numpy()[waiting]
        self.action[waiting, at] = True
        self.length[waiting] += 1
        return waiting


class Player:
    """Plays episodes of a task with one version, all at once.

    Args:
        suite: the environment's tasks.
        config: settings of the learner; lengths and temperature count.
        model: folder of the first model, for its tokenizer and its sizes.
    """

    def __init__(self, suite: Suite, config: LearnerConfig, model: Path) -> None:
        self._suite, self._sampling = suite, config.sampling
        self._renderer = Renderer(model)
        self._ends = list(self._renderer.eos_ids)
        self.shape = Shape.of_folder(model)
        self.positions = config.sampling.max_trajectory_tokens
        self._prompts: dict[str, list[int]] = {}

    def model(self, weights: Mapping[str, Tensor]) -> PlainModel:
        """Return a version that can be sampled from."""
        return PlainModel(self.shape, weights, self.positions)

    @torch.inference_mode()
    def play(
        self,
        model: PlainModel,
        version: int,
        *,
        indices: Sequence[int],
        members: int,
        greedy: bool = False,
        split: str = "train",
        seed: Sequence[int],
    ) -> list[Trajectory]:
        """Play a group of episodes of each task.

        Args:
            version: number of the version, which the tokens carry.
            indices: numbers of the tasks.
            members: trajectories of a group.
            greedy: whether one more member of each group is greedy.
            seed: seed of the sampling.
        """
        generator = torch.Generator().manual_seed(
            int(np.random.SeedSequence(list(seed)).generate_state(1)[0])
        )
        places = [(index, member) for index in indices for member in range(members + greedy)]
        tokens = _Tokens(len(places), self.positions)
        rows = [
            self._row(tokens, number, index, members, split, greedy=member == members)
            for number, (index, member) in enumerate(places)
        ]
        cache = model.cache(len(rows))
        temperature = torch.tensor([row.temperature or 1.0 for row in rows])[:, None]
        coldest = torch.tensor([not row.temperature for row in rows])
        while not tokens.done.all():
            logits = model.step(*tokens.feed(), cache)
            if not ((tokens.fed == tokens.length) & ~tokens.done).any():
                continue
            logp = torch.log_softmax(logits / temperature, dim=1)
            sampled = drawn(logp, torch.rand(len(rows), 1, generator=generator))
            if greedy:
                sampled = torch.where(coldest, logits.argmax(1), sampled)
            taken = tokens.take(sampled, logp.gather(1, sampled[:, None])[:, 0])
            ended = np.isin(tokens.ids[taken, tokens.length[taken] - 1], self._ends)
            ended |= tokens.length[taken] - tokens.began[taken] >= self._sampling.max_turn_tokens
            ended |= tokens.length[taken] >= self.positions
            for number in taken[ended].tolist():
                self._end_turn(tokens, rows[number], number)
        return [self._trajectory(tokens, row, number, version) for number, row in enumerate(rows)]

    def _row(
        self, tokens: _Tokens, number: int, index: int, members: int, split: str, *, greedy: bool
    ) -> _Row:
        row = _Row(
            self._suite.episode(),
            group=f"1g{index}",
            group_size=members,
            temperature=0.0 if greedy else self._sampling.temperature,
        )
        messages = at_once(row.episode.reset({"index": index, "split": split}))
        key = repr(messages)
        if key not in self._prompts:
            self._prompts[key] = self._renderer.prompt(messages)
        row.turns.append(tokens.observe(number, self._prompts[key]))
        return row

    def _end_turn(self, tokens: _Tokens, row: _Row, number: int) -> None:
        """Let the environment answer a turn."""
        turn, start, end = len(row.turns), int(tokens.began[number]), int(tokens.length[number])
        row.turns.append(Turn(turn, start, end, True))
        sampled = tokens.ids[number, start:end].tolist()
        result = at_once(row.episode.step(self._renderer.decode(sampled)))
        row.rewards += [Reward(name, turn, value) for name, value in result.rewards.items()]
        row.correct = result.correct
        tokens.done[number] = result.done
        if result.done:
            return
        added = self._renderer.observation(result.messages(), sampled)
        if end + len(added) >= self.positions:
            tokens.done[number] = True
            return
        row.turns.append(msgspec.structs.replace(tokens.observe(number, added), index=turn + 1))

    def _trajectory(self, tokens: _Tokens, row: _Row, number: int, version: int) -> Trajectory:
        end = tokens.length[number]
        action = tokens.action[number, :end]
        return Trajectory(
            trajectory_id=f"{row.group}m{number}",
            group_id=row.group,
            group_size=row.group_size,
            env="loop",
            status="finished",
            purpose="train",
            token_ids=tokens.ids[number, :end].astype(np.int32),
            action_mask=action,
            # A greedy member has no behaviour distribution.
            logp_behaviour=tokens.logp[number, :end] if row.temperature else np.zeros(end, np.float32),
            policy_version=np.where(action, version, -1).astype(np.int32),
            turns=row.turns,
            rewards=row.rewards,
            temperature=row.temperature,
            correct=row.correct,
        )


class MemoryVersions(Unpublished):
    """`learner.trainer.Versions` that keeps the newest versions in memory.

    Args:
        player: makes a version of the tensors.
        keep: number of versions that are kept.
    """

    def __init__(self, player: Player, keep: int) -> None:
        super().__init__()
        self._player, self._keep = player, keep
        self.models: dict[int, PlainModel] = {}

    def publish(
        self,
        version: int,
        weights: OutgoingWeights,
        *,
        announce: Callable[[PublishWeights], None],
        line: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.models[version] = self._player.model({name: t.detach() for name, t in weights.tensors})
        self.models.pop(version - self._keep, None)
        self.announced = version


class SampledBatches:
    """`learner.trainer.Batches` that samples a batch when it is asked for one.

    Args:
        player: plays the episodes.
        versions: the versions that are kept.
        config: settings of the learner.
        seed: seed of tasks and sampling.
        fresh_groups: rollout groups of a batch that do not lag.
    """

    in_step = awaits_versions = False
    version_before = 0

    def __init__(
        self,
        player: Player,
        versions: MemoryVersions,
        config: LearnerConfig,
        seed: Sequence[int],
        fresh_groups: int = 0,
    ) -> None:
        self._player, self._versions, self._config, self._seed = player, versions, config, tuple(seed)
        self._fresh_groups = fresh_groups
        self.intake = Intake(OwnsEveryTask("", config), filter_uniform=False)
        self._next_index = seed[0] * 1000
        self.returns: list[float] = []
        """Mean return of the batch of each step."""

    def collect(self, *, step: int, version: int) -> list[Unit]:
        """Sample the batch of a step from the version that lags as the settings force it to."""
        sampler = max(0, version - self._config.forced_lag)
        config = self._config
        indices = range(self._next_index, self._next_index + config.units_per_batch)
        self._next_index = indices.stop
        lagging = len(indices) - self._fresh_groups
        trajectories = self.play(sampler, indices[:lagging], seed=(*self._seed, step))
        if self._fresh_groups:
            trajectories += self.play(version, indices[lagging:], seed=(*self._seed, step, 1))
        self.returns.append(statistics.fmean(t.return_ for t in trajectories if not t.baseline))
        composed = self.intake.compose_rewards
        units = []
        for index in indices:
            members = [t for t in trajectories if t.group_id == f"1g{index}"]
            units.append(Unit(f"1g{index}", f"1g{index}", list(composed(config.reward, members))))
        return units

    def play(
        self, version: int, indices: Sequence[int], *, seed: Sequence[int], split: str = "train"
    ) -> list[Trajectory]:
        """Return episodes of some tasks, played by one version."""
        config = self._config
        return self._player.play(
            self._versions.models[version],
            version,
            indices=indices,
            members=config.group_size,
            greedy=config.greedy_member is not None,
            split=split,
            seed=seed,
        )

    def commit(
        self, trained: Sequence[Unit], *, step: int, version: int = -1, replayed_tokens: int = 0
    ) -> None:
        """Commit nothing: no broker waits."""

    def trained(self, *, update_s: float, step_s: float) -> None:
        """Note nothing: no work is under way."""

    def refill(self, *, step: int, version: int) -> None:
        """Put no tasks: batches are sampled when they are asked for."""

    def announce(self, message: PublishWeights) -> None:
        """Announce nothing: no generator listens."""


@dataclass
class ProbingUpdater(Updater):
    """An updater that can add up the gradient of a batch without a step."""

    probing: bool = field(default=False, init=False)
    found: list[Tensor] = field(default_factory=list, init=False)

    def gradient(self, batch: Any, *, step: int, optimizer_step: int) -> Tensor:
        """Return the gradient of the policy's loss on a batch, all mini-batches at the present weights."""
        state, self.probing, self.found = self.state, True, []
        try:
            self.run(batch, step=step, optimizer_step=optimizer_step)
        finally:
            self.probing, self.state = False, state
        return torch.stack(self.found).sum(0)

    def _finish(
        self, mini_batch: MiniBatch, recorder: TokenRecorder, algorithm: AlgorithmConfig, optimizer_step: int
    ) -> None:
        if not self.probing:
            super()._finish(mini_batch, recorder, algorithm, optimizer_step)
            return
        lm = self.engine.module.lm
        self.found.append(
            torch.cat([p.grad.flatten().clone() for p in lm.parameters() if p.grad is not None])
        )
        self.engine.zero_grad()
        recorder.end_step(OptimizerStep(True, 0.0), 0.0)


class ProbingEngine(TrainingEngine):
    """The learner's engine, which can also tell a gradient without training on it."""

    def _make_updater(self, *args: Any, **kwargs: Any) -> Updater:
        made = super()._make_updater(*args, **kwargs)
        return ProbingUpdater(**{f.name: getattr(made, f.name) for f in fields(made) if f.init})

    def gradient(self, trajectories: Sequence[Trajectory], *, current_version: int) -> Tensor:
        """Return the gradient of the objective on trajectories, at the present weights."""
        assert isinstance(self.updater, ProbingUpdater)
        batch = self._batch(trajectories, current_version)
        if batch is None:
            raise ValueError("the critic's estimates are not finite")
        return self.updater.gradient(batch, step=self.updates, optimizer_step=self.optimizer_steps)

    def slow_down(self, divisor: float) -> None:
        """Divide the learning rate of the settings for the next update."""
        optimizer = self.config.optimizer
        slower = optimizer.model_copy(update={"lr": optimizer.lr / divisor})
        self.updater.config = self.config.model_copy(update={"optimizer": slower})


class LoopTrainer(Trainer):
    """A trainer that keeps its numbers instead of writing them."""

    numbers: list[dict[str, float]]
    lags: list[set[int]]

    def record(
        self, report: UpdateReport, trained: Sequence[Trajectory], updated: int, waited: float, wall: float
    ) -> None:
        self.numbers.append(
            {name: report.metrics[key] for key, name in NUMBERS.items() if key in report.metrics}
        )
        fresh = [t for t in trained if not t.replayed and not t.baseline]
        self.lags.append(
            {int(lag) for t in fresh for lag in np.unique(updated - t.policy_version[t.action_mask]).tolist()}
        )


@dataclass(frozen=True)
class CellResult:
    """What came of one cell."""

    score: float
    """Mean over `SCORED` of the mean return of `EVALUATED` sampled responses."""
    scores: dict[int, float]
    """The same of shorter runs with which this one began, by their steps."""
    last: float
    """Mean return of `EVALUATED` sampled responses under the last version."""
    start: float
    """Mean return of the first batch, which the first version sampled."""
    curve: list[float]
    """Mean return of the batches, in at most sixteen parts of the run."""
    numbers: dict[str, float]
    """Means over the second half of the run, see `NUMBERS`."""
    entropies: list[float]
    """Entropy of the trained tokens, in nats, in the quarters of the run."""
    course: list[dict[str, float]]
    """The same numbers between one place of `EARLY` and `PROBES` and the next, with the two cosines at its end."""
    cosine: float | None
    """Cosine of a batch's gradient with a fresh one, mean over `PROBES`; None where a gradient was zero."""
    turned: float | None
    """Cosine of the gradients of two consecutive batches at the same weights, mean over `PROBES`."""
    exact: bool
    """Whether each token of the batch of step s lagged min(s, forced lag) versions."""
    optimizer_steps: int


def run_cell(
    config: LearnerConfig,
    suite: Suite,
    model: Path,
    *,
    seed: int,
    again: int = 0,
    folder: Path,
    probes: bool = True,
    also_after: Sequence[int] = (),
    rate_by_lag: float = 0.0,
    fresh_groups: int = 0,
) -> CellResult:
    """Train one cell from the first weights to the last step.

    Args:
        config: settings of the learner, forced lag included.
        suite: the environment's tasks.
        model: folder of the first weights.
        seed: seed of tasks, sampling and mini-batches.
        again: a further seed of the sampling alone, to run the same cell twice.
        folder: scratch folder, for batches that are not finite.
        probes: whether gradients are compared, too.
        also_after: steps of shorter runs that are scored, too.
        rate_by_lag: c of a learning rate divided by 1 + c times the lag of the batch.
        fresh_groups: rollout groups of a batch that do not lag.

    Raises:
        SamplerDiffers: the plain sampler does not compute what the learner computes.
    """
    engine = ProbingEngine(config, model=str(model), total_steps=config.steps, seed=seed)
    try:
        player = Player(suite, config, model)
        versions = MemoryVersions(player, keep=config.forced_lag + 1)
        batches = SampledBatches(player, versions, config, (seed, again), fresh_groups)
        trainer = LoopTrainer(
            config, folder, engine, batches, versions, None, replay=replay_table(config), seed=seed,  # type: ignore[arg-type]
            sampler_limit=SAMPLER_LIMIT,
        )  # fmt: skip
        trainer.numbers, trainer.lags = [], []
        trainer.publish()
        wanted = {steps: [round(part * steps) for part in SCORED] for steps in (*also_after, config.steps)}
        evaluations: dict[int, float] = {}
        found: dict[int, tuple[float | None, float | None]] = {}
        due = {round(share * config.steps) for share in (*EARLY, *PROBES)} if probes else set()
        while trainer.step < config.steps:
            if trainer.step in due:
                found[trainer.step] = probe(engine, batches, trainer.version, seed, trainer.step)
            engine.slow_down(1 + rate_by_lag * min(trainer.version, config.forced_lag))
            trainer.learn()
            if any(trainer.step in steps for steps in wanted.values()):
                evaluations[trainer.step] = evaluate(batches, trainer.version, seed)
    finally:
        engine.release()
    critic = config.algorithm.critic
    still = critic.warmup_steps if critic is not None else 0
    fresh = {0} if fresh_groups else set()
    expected = [{min(max(0, step - still), config.forced_lag)} | fresh for step in range(config.steps)]
    late = [found[at] for share in PROBES if (at := round(share * config.steps)) in found]
    scores = {steps: statistics.fmean(evaluations[at] for at in places) for steps, places in wanted.items()}
    half = trainer.numbers[len(trainer.numbers) // 2 :]
    return CellResult(
        score=scores.pop(config.steps),
        scores=scores,
        last=evaluations[config.steps],
        start=batches.returns[0],
        curve=[
            round(float(part.mean()), 4) for part in np.array_split(batches.returns, min(16, config.steps))
        ],
        numbers=means(half),
        course=course(trainer.numbers, found),
        entropies=quarters([step["entropy"] for step in trainer.numbers if "entropy" in step]),
        cosine=_mean([cosine for cosine, _ in late]),
        turned=_mean([turned for _, turned in late]),
        exact=trainer.lags == expected,
        optimizer_steps=engine.optimizer_steps,
    )


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the steps that have it.

    Example:
        >>> means([{"ess": 1.0}, {"ess": 0.5, "entropy": 2.0}])
        {'ess': 0.75, 'entropy': 2.0}
    """
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.fmean(step[name] for step in steps if name in step) for name in names}


def course(
    numbers: Sequence[Mapping[str, float]], probes: Mapping[int, tuple[float | None, float | None]]
) -> list[dict[str, float]]:
    """Return the numbers of a run from place to place, with the cosines that are known at the end of each part.

    Args:
        numbers: numbers of each step.
        probes: what `probe` found, by the step before which it looked.

    Example:
        >>> course([{"ess": 1.0}, {"ess": 0.5}, {"ess": 0.1}], {2: (0.25, None)})
        [{'step': 2, 'ess': 0.75, 'cosine': 0.25}]
    """
    parts, begin = [], 0
    for end, cosines in sorted(probes.items()):
        known = {name: c for name, c in zip(("cosine", "turned"), cosines, strict=True) if c is not None}
        parts.append({"step": end, **means(numbers[begin:end]), **known})
        begin = end
    return parts


def quarters(values: Sequence[float]) -> list[float]:
    """Return the mean of each quarter.

    Example:
        >>> quarters([1, 3, 5, 5, 0, 2, 7, 7])
        [2.0, 5.0, 1.0, 7.0]
    """
    return [float(part.mean()) for part in np.array_split(np.array(values, dtype=np.float64), 4)]


def evaluate(batches: SampledBatches, version: int, seed: int) -> float:
    """Return the mean return of sampled responses to held-out tasks."""
    config = batches.intake.curriculum.config
    indices = range(max(1, EVALUATED // config.group_size))
    played = batches.play(version, indices, seed=(seed, 7, 10**6 + version), split="heldout")
    return statistics.fmean(t.return_ for t in played if not t.baseline)


def probe(
    engine: ProbingEngine, batches: SampledBatches, version: int, seed: int, step: int
) -> tuple[float | None, float | None]:
    """Compare gradients at the present weights.

    Returns:
        Cosine of a batch that lags as forced with a fresh batch, which is `FRESH_BATCHES` times as large, and cosine of
        two batches that lag as forced.
    """
    config = engine.config
    sampler = max(0, version - config.forced_lag)

    def gradient(by: int, groups: int, salt: int) -> Tensor:
        indices = range(salt * 1000, salt * 1000 + groups)
        return engine.gradient(batches.play(by, indices, seed=(seed, 8, step, salt)), current_version=version)

    lagging, other = (gradient(sampler, config.units_per_batch, salt) for salt in (1, 2))
    fresh = gradient(version, FRESH_BATCHES * config.units_per_batch, 3)
    return _cosine(lagging, fresh), _cosine(lagging, other)


def _cosine(a: Tensor, b: Tensor) -> float | None:
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms > 0 and np.isfinite(norms) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None

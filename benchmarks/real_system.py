"""The real system for benchmarks that train: one broker, generator and actor, and many learners in turn.

Broker, generator and actor are processes, as in `offbeat train`. The learners run in this process. Each
learner is a new epoch that publishes its own first weights and trains in lockstep with a forced lag. Curricula
evaluate by sampling and limit tokens; the session counts the lag of each token, to prove that it was forced.
"""

import gc
import json
import shutil
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.report import measured
from envs.base import Split
from launch import run_folder
from launch.conversations import given_of
from launch.processes import Child, command_of_role, spawn, stop
from launch.run_file.sections import RunConfig
from launch.supervise.health import BROKER
from launch.supervise.posts import environment, posts
from learner.curriculum import Curriculum
from learner.given import taught_answers
from learner.intake.session import TIME_LIMIT, BrokerSession
from learner.intake.waiting_families import waiting_families
from learner.metrics import Report
from learner.process import join
from learner.publisher import Publisher
from learner.replay.table import replay_table
from learner.run import TrainingRun
from learner.run_files import next_epoch
from learner.settings.learner import EvaluationConfig, LearnerConfig
from learner.trainer import Trainer
from learner.trajectory import Unit
from learner.update.engine import TrainingEngine
from protocol.messages.episodes import Task
from protocol.session import Progress
from protocol.sockets import BlockingLink


class SampledCurriculum(Curriculum):
    """A curriculum that evaluates by sampling, because training raises the mean return of samples."""

    def evaluation(self, tag: str, version: int, of: EvaluationConfig) -> list[Task]:
        sampling = self._sampling(temperature=self.config.sampling.temperature)
        tasks = super().evaluation(tag, version, of)
        return [msgspec.structs.replace(task, sampling=sampling) for task in tasks]


class BudgetedCurriculum(SampledCurriculum):
    """A curriculum with a token limit per task: the task fixes the lengths, whatever the policy learns."""

    budget: Callable[[int, Split], int] | None = None
    """Function from a task's index and split to a response's token limit. None: the limit of the settings."""

    def refill(self, **room: Any) -> list[Task]:
        return [self._budgeted(task) for task in super().refill(**room)]

    def evaluation(self, tag: str, version: int, of: EvaluationConfig) -> list[Task]:
        return [self._budgeted(task) for task in super().evaluation(tag, version, of)]

    def _budgeted(self, task: Task) -> Task:
        if self.budget is None:
            return task
        tokens = self.budget(task.data["index"], task.data["split"])
        sampling = msgspec.structs.replace(task.sampling, max_turn_tokens=tokens)
        return msgspec.structs.replace(task, sampling=sampling)


class CountingSession(BrokerSession):
    """A session that counts the lag of each action token of each batch, to prove that the lag was forced.

    Replayed tokens are not counted, because they do not come through the session.
    """

    def collect(self, *, step: int, version: int) -> list[Unit]:
        groups = super().collect(step=step, version=version)
        lags: Counter[int] = Counter()
        for trajectory in (t for group in groups for t in group.trajectories):
            lags.update((version - trajectory.policy_version[trajectory.action_mask > 0]).tolist())
        self.lags_by_step[step] = lags
        return groups

    @cached_property
    def lags_by_step(self) -> dict[int, Counter[int]]:
        return {}


def lag_is_exact(
    lags_by_step: Mapping[int, Counter[int]], lag: int, steps: int, *, warmup_steps: int = 0
) -> bool:
    """Return whether each step has tokens, and each token lags by the versions so far, at most ``lag``.

    In the first ``warmup_steps`` only a critic learns, and the version does not change.

    Example:
        >>> lag_is_exact({0: Counter({0: 9}), 1: Counter({1: 9}), 2: Counter({1: 9})}, lag=1, steps=3)
        True
        >>> lag_is_exact({0: Counter({0: 9}), 1: Counter({1: 9}), 2: Counter({1: 8, 2: 1})}, lag=1, steps=3)
        False
    """
    return set(lags_by_step) == set(range(steps)) and all(
        set(lags) == {min(max(0, step - warmup_steps), lag)} for step, lags in lags_by_step.items()
    )


SessionT = TypeVar("SessionT", bound="CountingSession")
START_S = 120.0


@dataclass(frozen=True)
class System:
    """The running roles, their settings and their folder."""

    config: RunConfig
    folder: Path
    model: str
    children: list[Child]

    def stop_reason(self, deadline: float = float("inf")) -> str:
        """Return why a learner has to end (its time is up), or "" if it can go on.

        Raises:
            RuntimeError: a role has ended. Nobody starts it again, so a learner would wait for it forever.
        """
        for child in self.children:
            if not child.running:
                raise RuntimeError(f"{child.name} has ended:\n{child.tail()}")
        return TIME_LIMIT if time.monotonic() > deadline else ""


@dataclass(frozen=True)
class Outcome:
    """Results of one learner."""

    score: float
    """Mean return of sampled responses under the last version."""
    start: float
    """Mean return of sampled responses under the first version."""
    curve: list[float]
    """Mean return of the trajectories that arrived in each step."""
    tokens_by_lag: dict[int, int]
    exact: bool
    """True if each action token of the batch of step s lagged min(s, forced lag) versions at collection.

    While only a critic learns, the number of versions counts instead of s (see `lag_is_exact`).
    """
    diagnostics: dict[str, list[float]]
    seconds: float


@contextmanager
def running(config: RunConfig) -> Iterator[System]:
    """Start broker, generator and actor. Stop them at the end."""
    from launch.model import prepare

    folder = run_folder.create(config, resume=False)
    config = run_folder.with_ports(config)
    # All roles run on one host as one user, and the learner in this process joins without keys.
    config = config.model_copy(update={"security": config.security.model_copy(update={"encrypt": False})})
    run_folder.save_config(config, folder / run_folder.CONFIG)
    model = str(prepare(config))
    children: list[Child] = []
    try:
        for post in posts(config):
            if post.name not in (BROKER, "generator-0", "actor-0"):
                continue
            command = command_of_role(post.name.partition("-")[0], folder, *post.arguments)
            log = folder / "logs" / f"{post.name}.log"
            children.append(spawn(post.name, command, log=log, env=environment(config, post.threads)))
            if post.name == BROKER:
                _await_broker(config, children[0])
        yield System(config, folder, model, children)
    finally:
        stop(children, patience_s=15.0)


def _await_broker(config: RunConfig, broker: Child) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://{config.broker.http}/status", timeout=2) as answer:
                json.load(answer)
            return
        except (urllib.error.URLError, ConnectionError):
            if not broker.running or time.monotonic() > deadline:
                raise RuntimeError(f"the broker did not start:\n{broker.tail()}") from None
            time.sleep(0.1)


@contextmanager
def learning(
    system: System, config: RunConfig, seed: int, *, session_class: type[SessionT]
) -> Iterator[tuple[TrainingRun, SessionT]]:
    """Make one run with weights and a session of its own, and publish its first weights.

    Args:
        system: the roles that are running.
        config: settings of this learner, of which `[learner]` and the lengths of segments count.
        seed: seed of the learner. It also chooses the tasks, so equal seeds have equal tasks.
        session_class: what counts the batches.
    """
    learner_config = config.learner.model_copy(update={"max_policy_lag": config.max_policy_lag})
    engine = TrainingEngine(
        learner_config,
        model=system.model,
        total_steps=learner_config.steps,
        seed=seed,
        segment_tokens=config.actor.segment_tokens,
    )
    epoch = next_epoch(system.folder)
    folder = system.folder / f"learner-{epoch}"
    folder.mkdir()
    link = join(
        learner_config, system.config.broker.endpoint, system.folder.name, epoch=epoch, progress=Progress
    )
    report = Report(folder)
    publisher = Publisher(system.folder.name, folder, epoch=epoch, keep=learner_config.keep_versions)
    try:
        session = _session(system, learner_config, link, epoch, seed, session_class)
        trainer = Trainer(
            learner_config,
            folder,
            engine,
            session,
            publisher,
            report,
            replay=replay_table(learner_config),
            seed=seed,
        )
        trainer.taught = taught_answers(learner_config, partial(given_of, config, system.model))
        trainer.take_over(always=True)
        yield TrainingRun(trainer, session), session
    finally:
        link.close("done")
        report.close()
        publisher.close()
        engine.release()
        del engine
        gc.collect()


def _session(
    system: System,
    config: LearnerConfig,
    link: BlockingLink,
    epoch: int,
    seed: int,
    session_class: type[SessionT],
) -> SessionT:
    """Return a session in lockstep, over tasks that depend on the seed alone."""
    curriculum = SampledCurriculum(system.config.env.name, config, epoch, next_index=seed * 1000)
    session = session_class(link, curriculum, config, lockstep=True, stop_reason=system.stop_reason)
    session.intake.families = waiting_families(config, curriculum, system.model, seed=seed)
    return session


def train(system: System, config: RunConfig, seed: int) -> Outcome:
    """Run one learner from the first weights to the last step."""
    started, learner_config = time.monotonic(), config.learner
    with learning(system, config, seed, session_class=CountingSession) as (run, session):
        run.evaluate("before")
        while run.trainer.step < learner_config.steps:
            run.learn()
        run.evaluate("after")
    critic = learner_config.algorithm.critic
    still = critic.warmup_steps if critic is not None else 0
    exact = lag_is_exact(
        session.lags_by_step, learner_config.forced_lag, learner_config.steps, warmup_steps=still
    )
    outcome = _outcome(run, run.trainer.run_dir, exact, time.monotonic() - started)
    shutil.rmtree(run.trainer.run_dir)
    return outcome


def _outcome(run: TrainingRun, folder: Path, exact: bool, seconds: float) -> Outcome:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = (
        "learner/entropy_nats", "learner/effective_sample_size", "learner/clip_fraction",
        "learner/truncated_fraction", "learner/ratio_proximal_behaviour_max", "learner/gradient_norm",
    )  # fmt: skip
    return Outcome(
        score=measured(run.evaluations.records[-1], "return_mean"),
        start=measured(run.evaluations.records[0], "return_mean"),
        curve=[line["rollout/return_mean"] for line in lines if "rollout/return_mean" in line],
        tokens_by_lag={int(lag): count for lag, count in run.trainer.totals.lag_counts.items()},
        exact=exact,
        diagnostics={name: [line[name] for line in lines if name in line][::5] for name in names},
        seconds=seconds,
    )

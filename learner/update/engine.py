"""The learner's engine: trajectories in, updated weights out, on one process or several.

Rank 0 calls `update`, `weights`, `save`, `load`, `save_pretrained`, `release` and `close`. Every other rank
constructs the same TrainingEngine and calls `follow`, which returns when rank 0 releases or closes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import torch
from msgspec.structs import replace

from learner.checkpoints import checkpoint_files
from learner.config import LearnerConfig
from learner.credit.bundles import risk_advantages
from learner.model.operations import mean_length
from learner.publishing.weight_copy import OutgoingWeights, register, rounded_shapes
from learner.settings.advantages import RiskAdvantage
from learner.trajectory import RouteLayers, Trajectory
from learner.update import gathering, ranks
from learner.update.batching.batch import Batch, make_batch
from learner.update.credit_assignment import TokenAdvantages, assign_credit
from learner.update.estimates import ValueMemory, everything, scatter_estimates
from learner.update.pretrained import save_pretrained
from learner.update.rank_engine import RankEngine
from learner.update.report import UpdateReport, make_report

__all__ = ["TrainingEngine", "UpdateReport"]

VALUES_FILE = "values.msgpack"
"""File in a checkpoint: values that the critic gave to windows when they were trained."""


def nothing_trained(started: float) -> dict[str, float]:
    """Return the metrics of an update that ended before its first step."""
    return {"learner/trained_tokens": 0.0, "learner/step_seconds": time.perf_counter() - started}


class TrainingEngine:
    """Policy, optimizer and the ranks they are spread over.

    It needs a process of its own, because it sets torch to ``config.threads_used`` threads, makes the process keep
    freed memory, and replaces the attention of models (`learner.update.device.cpu`).

    Args:
        config: settings of the learner.
        model: Hugging Face name or folder.
        total_steps: learner steps of the whole run, for the learning-rate schedule.
        seed: seed of torch, and of the dealing of trajectories to mini-batches.
        segment_tokens: ``actor.segment_tokens``, the tokens of a window if the learner trains on windows;
            None: a window ends with its turn only.

    Raises:
        RuntimeError: ``config.ranks`` does not agree with how this process was started.
        ValueError: DeepSpeed would train wrongly with these settings.
        GpuUnusable: torch cannot compute on the GPU that this rank was given.
        LoraError: the adapters of ``config.lora`` cannot be put into the model.
        RoutesUnknown: the model's choice of experts is to be replayed, and cannot be.
    """

    def __init__(
        self,
        config: LearnerConfig,
        *,
        model: str,
        total_steps: int,
        seed: int,
        segment_tokens: int | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self._own = RankEngine(config, model=model, total_steps=total_steps, seed=seed)
        self.rank, self.ranks = self._own.rank, self._own.ranks
        self.parameters = self._own.parameters
        """Trained and all parameters of the policy, its value head included."""
        self._values = ValueMemory()
        # A window ends with its turn at the latest.
        turn = config.sampling.max_turn_tokens
        self._window_tokens = turn if segment_tokens is None else min(turn, segment_tokens)

    @property
    def updates(self) -> int:
        """Updates run so far, over restarts, without those that ended because estimates were not finite."""
        return self._own.updates

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps applied so far, over restarts."""
        return self._own.optimizer_steps

    @property
    def route_layers(self) -> RouteLayers | None:
        """Layers whose experts are replayed as the generators chose them; None: none are."""
        routes = self._own.updater.routes
        return None if routes is None else routes.layers

    # --- rank 0 -----------------------------------------------------------------------------------------

    def update(self, trajectories: Sequence[Trajectory], *, current_version: int) -> UpdateReport:
        """Train on a batch of trajectories.

        Tokens that lag more than their bound behind ``current_version`` carry no gradient. If a loss or
        gradient is not finite on some rank, all ranks skip the optimizer step, and the update ends.

        Raises:
            ValueError: there are no trajectories, or a return is not finite.
            StaleTokens: tokens of a version after ``current_version``.
        """
        started = time.perf_counter()
        if not trajectories:
            raise ValueError("update needs at least one trajectory")
        batch = self._batch(trajectories, current_version)
        if batch is None:
            return UpdateReport(applied=False, nonfinite=True, metrics=nothing_trained(started))
        if self.ranks > 1:
            ranks.send(*ranks.encode_batch(ranks.RunUpdate, batch))
        outcome = self._own.run(batch)
        seconds = time.perf_counter() - started
        report = make_report(trajectories, batch, outcome, current_version=current_version, seconds=seconds)
        report.metrics.update(self._device_metrics(trajectories, outcome.filled, seconds))
        return report

    def _device_metrics(
        self, trajectories: Sequence[Trajectory], computed: int, seconds: float
    ) -> dict[str, float]:
        """Return the metrics of an update's devices.

        Args:
            computed: tokens that all ranks have computed, without padding.
        """
        metrics = dict(self._own.memory)
        if (operations := self._own.operations) is not None:
            work = operations.of(computed, mean_length([len(t.token_ids) for t in trajectories]))
            metrics["learner/tflops_per_rank"] = work / seconds / self.ranks / 1e12
        return metrics

    def _batch(self, trajectories: Sequence[Trajectory], current_version: int) -> Batch | None:
        """Assign credit and lay out the batch. Return None if the critic's estimates are not finite."""
        algorithm = self.config.algorithm
        lay_out = partial(
            make_batch,
            trajectories,
            current_version=current_version,
            max_policy_lag=self.config.lag_bound,
            max_replay_lag=self.config.replay.max_policy_lag if self.config.replay else 0,
            imitate_from=algorithm.imitation_return if algorithm.imitation_coefficient else None,
            with_routes=algorithm.routes == "behaviour",
        )
        if isinstance(algorithm.advantage, RiskAdvantage):
            state = self._own.updater.state
            by_risk, quantiles = risk_advantages(algorithm.advantage, trajectories, state.quantiles)
            self._own.updater.state = replace(state, quantiles=quantiles)
            return lay_out(TokenAdvantages.of_trajectories(by_risk, by_risk, trajectories))
        if algorithm.critic is None:
            return lay_out(assign_credit(algorithm, trajectories))
        unknown = lay_out(everything(trajectories))
        if self.ranks > 1:
            ranks.send(*ranks.encode_batch(ranks.RunEstimate, unknown))
        estimates = scatter_estimates(unknown, self._own.updater.estimate(unknown))
        if (
            not np.isfinite(estimates.value).all()
            or not np.isfinite(estimates.ratio_proximal_behaviour).all()
        ):
            return None
        fresh = unknown.columns["fresh"] > 0
        credit = assign_credit(algorithm, trajectories, estimates, fresh, window_tokens=self._window_tokens)
        batch = lay_out(credit)
        batch.columns["value_before"] = self._values.recall(trajectories, estimates.value)
        return batch

    def weights(self) -> OutgoingWeights:
        """Return the weights to publish.

        Names are Hugging Face's; tied tensors appear once; adapters are merged into their layers. If you take the
        tensors, take all of them before any other call to the engine.
        """
        shapes = gathering.weight_shapes(self._own.deepspeed)
        if self.config.publish_dtype == "bfloat16":
            shapes = rounded_shapes(shapes)
        return OutgoingWeights(shapes, self._gathered(), self._own.copies)

    @property
    def register(self) -> Callable[[memoryview], Callable[[], None]] | None:
        """Function that prepares memory for copies of the weights; None if the weights are on the CPU."""
        return None if self._own.copies is None else register

    def save(
        self, folder: Path, client_state: dict[str, Any], also: Callable[[Path], None] = lambda _: None
    ) -> None:
        """Write a checkpoint, which is valid once all of it is on disk. The last two are kept.

        Args:
            client_state: `load` returns it; JSON types only.
            also: writes more files into the checkpoint's folder.
        """

        def write(name: str) -> None:
            if self.ranks > 1:
                ranks.send(ranks.SaveCheckpoint(str(folder), name))
            self._own.save(folder, name, client_state)
            (folder / name / VALUES_FILE).write_bytes(self._values.encode())
            also(folder / name)

        checkpoint_files.write_whole(folder, self.optimizer_steps, write)

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from the newest checkpoint, and return the ``client_state`` that `save` was given.

        The number of ranks and the ZeRO stage may differ from those with which it was written.

        Raises:
            CheckpointError: there is none, or it was written with a different dtype, adapters, or weights below the
                adapters, or for a different model.
        """
        name = checkpoint_files.latest_name(folder)
        # Reject a bad checkpoint before the other ranks get the command.
        self._own.read_state(folder, name)
        if self.ranks > 1:
            ranks.send(ranks.LoadCheckpoint(str(folder), name))
        self._values.restore((folder / name / VALUES_FILE).read_bytes())
        return self._own.load(folder, name)

    def save_pretrained(self, folder: Path) -> None:
        """Write the model, adapters merged, as a Hugging Face folder, with the tokenizer's files."""
        save_pretrained(self._own.deepspeed.module.lm, self._gathered(), folder, source=self.model)

    def release(self) -> None:
        """End `follow` on the other ranks and free the model. The process group stays for the next engine."""
        if self.ranks > 1:
            ranks.send(ranks.Finish(leave=False))
        self._own.free()

    def close(self) -> None:
        """End `follow` on the other ranks, free the model, and leave the process group.

        With several ranks, end the process by ``os._exit`` soon after, because interpreter shutdown races
        with the threads of the collectives.
        """
        if self.ranks > 1:
            ranks.send(ranks.Finish(leave=True))
        self._own.free()
        self._own.leave()

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.ranks > 1 and self.config.zero_stage_used == 3:
            ranks.send(ranks.GatherWeights())
        yield from gathering.gathered_weights(self._own.deepspeed)

    # --- other ranks ------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Carry out the commands of rank 0 until it releases or closes the engine."""
        while True:
            command, body = ranks.receive()
            match command:
                case ranks.RunUpdate():
                    self._own.run(ranks.decode_batch(command, body))
                case ranks.RunEstimate():
                    self._own.updater.estimate(ranks.decode_batch(command, body))
                case ranks.GatherWeights():
                    for _ in gathering.gathered_weights(self._own.deepspeed):
                        pass
                case ranks.SaveCheckpoint(folder=folder, name=name):
                    self._own.save(Path(folder), name, {})
                case ranks.LoadCheckpoint(folder=folder, name=name):
                    self._own.load(Path(folder), name)
                case ranks.Finish(leave=leave):
                    self._own.free()
                    if leave:
                        self._own.leave()
                    return
                case _:
                    assert_never(command)

"""One update on this rank: mini-batches of micro-batches, forward and backward, step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from learner.batching import Batch, MicroBatch, deal_mini_batches, make_micro_batches
from learner.config import LearnerConfig
from learner.objective import Diagnostics, Tokens, make_objective
from learner.schedule import learning_rate
from learner.zero import StepResult, accumulation, finish_step

ROWS = ("seen", "logp_current", "logp_proximal", "entropy", "loss", "clipped", "truncated")
"""What is recorded of every trained token."""


@dataclass
class Outcome:
    """What an update did, over all ranks."""

    tokens: dict[str, NDArray[np.float32]]
    """One array [M] for each of ROWS, in the batch's order of trained tokens; only where ``seen`` is 1."""
    steps: list[StepResult] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    filled: int = 0
    computed: int = 0

    @property
    def applied(self) -> int:
        """Optimizer steps that moved the weights."""
        return sum(step.applied for step in self.steps)

    @property
    def nonfinite(self) -> bool:
        """A step was skipped for a loss or gradient that is not finite; the rest of the batch was left
        alone."""
        return self.applied < len(self.steps)


@dataclass(frozen=True)
class Updater:
    """Runs updates on one rank. All ranks must call `run` with the same arguments, in the same order."""

    engine: Any
    """DeepSpeed's."""
    config: LearnerConfig
    total_steps: int
    """Optimizer steps of the whole run, for the schedule."""
    seed: int
    rank: int
    ranks: int

    def run(self, batch: Batch, *, update: int, optimizer_step: int) -> Outcome:
        """Train on one batch.

        Args:
            update: counts updates; decides how trajectories are dealt to mini-batches.
            optimizer_step: optimizer steps applied so far.
        """
        algorithm = self.config.algorithm
        members = deal_mini_batches(len(batch.lengths), algorithm.updates_per_batch, [self.seed, update])
        mini_batches = [self._micro_batches(batch, part) for part in members]
        mini_batches = [micro_batches for micro_batches in mini_batches if micro_batches]
        # With one step the weights before it are the current ones: the forward pass of the update gives both.
        recompute = algorithm.proximal == "recomputed" and len(mini_batches) > 1
        proximal = [self._score(m) if recompute else [None] * len(m) for m in mini_batches]
        recorded = torch.zeros(len(ROWS), int(batch.trained.sum()))
        outcome = Outcome({})
        for micro_batches, logps in zip(mini_batches, proximal, strict=True):
            lr = learning_rate(self.config.optimizer, optimizer_step + outcome.applied, self.total_steps)
            self._accumulate(micro_batches, logps, recorded)
            outcome.learning_rates.append(lr)
            outcome.steps.append(finish_step(self.engine, lr))
            if not outcome.steps[-1].applied:
                break
        counts = torch.tensor(_positions(mini_batches))
        if self.ranks > 1:  # each token was seen by one rank, the others hold zeros
            dist.all_reduce(recorded)
            dist.all_reduce(counts)
        outcome.tokens = dict(zip(ROWS, recorded.numpy(), strict=True))
        outcome.filled, outcome.computed = counts.tolist()
        return outcome

    def _micro_batches(self, batch: Batch, members: NDArray[np.int64]) -> list[MicroBatch]:
        return make_micro_batches(
            batch,
            members,
            aggregation=self.config.algorithm.aggregation,
            budget=self.config.micro_batch_tokens,
            rank=self.rank,
            ranks=self.ranks,
        )

    @torch.no_grad()
    def _score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Log-probabilities under the weights as they are."""
        return [self._forward(micro_batch)[0] for micro_batch in micro_batches]

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logp, entropy = self.engine(
            self._tensor(micro_batch.token_ids),
            self._tensor(micro_batch.position),
            self._tensor(micro_batch.target),
            self._tensor(micro_batch.temperature),
            entropy_gradient=self.config.algorithm.entropy_coefficient > 0,
        )
        return logp, entropy

    def _accumulate(
        self, micro_batches: Sequence[MicroBatch], proximal: Sequence[Tensor | None], recorded: Tensor
    ) -> None:
        """Gradient of one mini-batch."""
        objective = make_objective(self.config.algorithm)
        with accumulation(self.engine, self.ranks) as backward:
            for i, (micro_batch, logp_proximal) in enumerate(zip(micro_batches, proximal, strict=True)):
                logp, entropy = self._forward(micro_batch)
                tokens = Tokens(
                    logp_behaviour=self._tensor(micro_batch.logp_behaviour),
                    advantage=self._tensor(micro_batch.advantage),
                    weight=self._tensor(micro_batch.weight),
                    logp_proximal=logp_proximal,
                )
                loss, diagnostics = objective(tokens, logp, entropy)
                if not math.isfinite(loss.item()):
                    loss = logp.sum() * math.nan  # whatever the loss was, no rank may take this step
                backward(loss, i == len(micro_batches) - 1)
                _record(recorded, micro_batch, diagnostics)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.engine.device)


def _record(recorded: Tensor, micro_batch: MicroBatch, diagnostics: Diagnostics) -> None:
    if micro_batch.token[0] < 0:  # a dummy
        return
    seen = torch.ones_like(diagnostics.loss)
    values = [seen, *(getattr(diagnostics, row).float() for row in ROWS[1:])]
    recorded[:, torch.from_numpy(micro_batch.token)] = torch.stack(values).cpu()


def _positions(mini_batches: Sequence[Sequence[MicroBatch]]) -> list[int]:
    """Input positions that are not padding, and all of them."""
    micro_batches = [micro_batch for part in mini_batches for micro_batch in part]
    return [sum(m.filled for m in micro_batches), sum(m.token_ids.size for m in micro_batches)]

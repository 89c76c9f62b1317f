"""The outcome of an update, token by token: recorded on each rank, summed over all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.clipping import BalancedBounds
from learner.algorithms.ratios import importance_ratio
from learner.settings.surrogates import Centre
from learner.update.batching.micro_batch import MicroBatch
from learner.update.deepspeed_zero import OptimizerStep, sum_over_ranks
from learner.update.objective.adaptive import AdaptiveState
from learner.update.objective.tokens import Adaptive, Diagnostics

DIAGNOSTICS = (
    "logp_current", "logp_proximal", "logp_behaviour", "entropy", "loss", "clipped", "truncated", "correction",
)  # fmt: skip
ROWS = ("seen", *DIAGNOSTICS, "value")
"""Names of the numbers recorded for every token; ``seen`` is 1 where the policy's objective was formed."""


@dataclass
class UpdateOutcome:
    """Outcome of an update, over all ranks."""

    tokens: dict[str, NDArray[np.float32]]
    """One array [M] for each of ROWS, in the batch's order of seen tokens."""
    steps: list[OptimizerStep] = field(default_factory=list)
    critic_steps: list[OptimizerStep] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    adaptive: list[Adaptive] = field(default_factory=list)
    bounds: list[BalancedBounds] = field(default_factory=list)
    filled: int = 0
    computed: int = 0
    """Positions that were computed, padding included; ``filled`` of them held a token."""
    inputs: int = 0
    """Input tokens of all trajectories. Shared ones count for each trajectory, and once in ``filled``."""
    mini_batches: float = 1.0
    """Mini-batches of one pass, because ``tokens`` holds the numbers of the last pass only."""
    critic_only: bool = False
    """True if only the critic learns in this step, so that the policy must not move."""
    state: AdaptiveState | None = None
    routes: float = 0.0
    """Choices of an expert that were replayed, see `learner.model.routes`; the router chose others for ``rerouted``."""
    rerouted: float = 0.0
    routed_inputs: float = 0.0
    """Input tokens with experts of the generator, of ``route_inputs`` in all."""
    route_inputs: float = 0.0

    def take_routes(self, counts: Tensor) -> None:
        """Take over the counts of `learner.model.routes.RouteReplay.end`, summed over the ranks."""
        self.routes, self.rerouted, self.routed_inputs, self.route_inputs = counts.tolist()

    @property
    def applied(self) -> int:
        """Number of optimizer steps that moved the weights."""
        return sum(step.applied for step in self.steps)

    @property
    def nonfinite(self) -> bool:
        """Whether a step of the policy or of a critic was skipped because its loss or gradient was not
        finite. The rest of the batch was then not trained."""
        return any(not step.applied for step in (*self.steps, *self.critic_steps))

    def mean(self, row: str) -> float:
        """Return the mean of a row over the tokens of the policy's objective."""
        return float(self.tokens[row][self.tokens["seen"] > 0].mean())


class TokenRecorder:
    """Recorder of numbers per token on this rank.

    Args:
        tokens: number of seen tokens of the batch.
        ranks: number of ranks. One rank records each token; the others hold zeros for it.
    """

    def __init__(self, tokens: int, ranks: int) -> None:
        self._table = torch.zeros(len(ROWS), tokens)
        self._waiting: list[tuple[list[int], NDArray[np.int64], Tensor]] = []
        """Rows, tokens and numbers that may still be on their way from a GPU."""
        self._ranks = ranks
        self._pass_index = 0
        self._step_tokens: list[NDArray[np.int64]] = []
        self.steps: list[OptimizerStep] = []
        self.critic_steps: list[OptimizerStep] = []
        self._learning_rates: list[float] = []
        self._adaptive: list[Adaptive] = []
        self._bounds: list[BalancedBounds] = []

    @property
    def applied(self) -> int:
        return sum(step.applied for step in self.steps)

    @property
    def nonfinite(self) -> bool:
        return any(not step.applied for step in (*self.steps, *self.critic_steps))

    def begin(self, pass_index: int, numbers: Adaptive, bounds: BalancedBounds | None) -> None:
        """Begin an optimizer step in this pass over the batch."""
        # Invariant: one rank holds the numbers of a token, because `gathered` sums over ranks. In a new pass
        # it may be a different rank.
        if pass_index != self._pass_index:
            self._waiting = []
            self._table.zero_()
            self._pass_index = pass_index
        self._step_tokens = []
        self._adaptive.append(numbers)
        if bounds is not None:
            self._bounds.append(bounds)

    def put(self, micro_batch: MicroBatch, rows: Mapping[str, Tensor]) -> None:
        """Record rows of all targets of a micro-batch."""
        if micro_batch.token[0] >= 0:
            for name, values in rows.items():
                numbers = values.detach().float()[None]
                self._waiting.append(([ROWS.index(name)], micro_batch.token, numbers))

    def policy(self, micro_batch: MicroBatch, diagnostics: Diagnostics) -> None:
        """Record the objective's diagnostics for the targets that carry policy gradient."""
        if micro_batch.token[0] < 0:
            return
        token = micro_batch.token[micro_batch.policy]
        values = [getattr(diagnostics, name).float() for name in DIAGNOSTICS]
        numbers = torch.stack([torch.ones_like(values[0]), *values])
        self._waiting.append((list(range(len(numbers))), token, numbers))
        self._step_tokens.append(token)

    @property
    def _rows(self) -> Tensor:
        """All rows, [rows, M]. Whoever reads them waits for a GPU that computes them, so nobody does between passes."""
        for rows, token, numbers in self._waiting:
            self._table[torch.tensor(rows)[:, None], torch.from_numpy(token)] = numbers.cpu()
        self._waiting = []
        return self._table

    def end_step(self, result: OptimizerStep, lr: float) -> None:
        """Record the result and the learning rate of the policy's optimizer step."""
        self.steps.append(result)
        self._learning_rates.append(lr)

    def step_effective_sample_share(self) -> float:
        """Return the effective sample share (ESS / N) of the present step's tokens on all ranks.

        The weights are the ratios proximal / behaviour. Without tokens the share is 1.
        """
        weights = self._step_ratio("logp_proximal").double()
        sums = torch.tensor([weights.sum(), weights.square().sum(), float(len(weights))], dtype=torch.float64)
        total, squares, count = sum_over_ranks(sums, self._ranks).tolist()
        return total * total / (count * squares) if squares else 1.0

    def step_mean_square(self, centre: Centre = "behaviour") -> float:
        """Return the mean of (current / centre - 1)² over the present step's tokens on all ranks.

        Without tokens it is 0.
        """
        below = "logp_behaviour" if centre == "behaviour" else "logp_proximal"
        distance = (self._step_ratio("logp_current", below) - 1).double()
        sums = torch.tensor([distance.square().sum(), float(len(distance))], dtype=torch.float64)
        total, count = sum_over_ranks(sums, self._ranks).tolist()
        return total / count if count else 0.0

    def _step_ratio(self, above: str, below: str = "logp_behaviour") -> Tensor:
        tokens = np.concatenate(self._step_tokens) if self._step_tokens else np.zeros(0, dtype=np.int64)
        rows = self._rows[:, torch.from_numpy(tokens)]
        return importance_ratio(rows[ROWS.index(above)], rows[ROWS.index(below)])

    def gathered(self, *rows: str) -> dict[str, NDArray[Any]]:
        """Return the named rows, summed over all ranks. This is a collective call."""
        chosen = sum_over_ranks(self._rows[[ROWS.index(name) for name in rows]], self._ranks)
        return dict(zip(rows, chosen.numpy(), strict=True))

    def finish(self, mini_batches: Sequence[Sequence[MicroBatch]], *, passes: int) -> UpdateOutcome:
        """Return the outcome of the update, over all ranks. This is a collective call."""
        micro_batches = [micro_batch for part in mini_batches for micro_batch in part]
        sizes = [
            sum(size)
            for size in zip(*((m.filled, m.token_ids.size, m.inputs) for m in micro_batches), strict=True)
        ] or [0, 0, 0]
        filled, computed, inputs = sum_over_ranks(torch.tensor(sizes), self._ranks).tolist()
        return UpdateOutcome(
            self.gathered(*ROWS),
            steps=self.steps,
            critic_steps=self.critic_steps,
            learning_rates=self._learning_rates,
            adaptive=self._adaptive,
            bounds=self._bounds,
            filled=int(filled),
            computed=int(computed),
            inputs=int(inputs),
            mini_batches=max(1.0, len(mini_batches) / passes),
        )

"""A policy that is a table: a row of logits, and a value, for each context in which a recorded token was sampled.

Its probabilities of the recorded tokens and its entropies are those that the learner had, so ratios, clips and masks
act as they did in the run. Contexts share nothing: a step on one moves no other.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.acts.episodes import TokenNumbers
from learner.trajectory import Trajectory
from learner.update.batch import Batch
from learner.update.micro_batches import MicroBatch
from learner.update.policy import Outputs

MOST_OTHERS = 32
"""Most tokens of a context that stand for those that were not sampled."""
LEAST_LOGIT = -60.0
"""Logit of a place of the table that stands for no token."""
SHRINKAGE = 2.0
"""Weight of the mean return beside those of the trajectories through a context, in the value of the context."""


class PolicyTable(nn.Module):
    """Rows of logits and values by context.

    Args:
        trajectories: recorded trajectories.
        numbers: numbers of their action tokens, by trajectory.
        reference: whether the probabilities are those of the model that the run began with.
        values: whether there is a value for each context.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        numbers: Mapping[str, TokenNumbers],
        *,
        reference: bool = False,
        values: bool = False,
    ) -> None:
        super().__init__()
        self.rows: dict[bytes, int] = {}
        self.columns: list[dict[int, int]] = []
        entropies: list[float] = []
        logps: list[list[float]] = []
        returns: list[list[float]] = []
        # A greedy answer has no distribution, and is not trained.
        for t in (t for t in trajectories if not t.baseline):
            logp, entropy, base = numbers[t.trajectory_id].arrays()
            ids = t.token_ids.astype(np.int64)
            for n, place in enumerate(np.flatnonzero(t.learned_mask)):
                row = self.rows.setdefault(ids[:place].tobytes(), len(self.rows))
                if row == len(logps):
                    logps.append([])
                    entropies.append(float(entropy[n]))
                    returns.append([])
                    self.columns.append({})
                if int(ids[place]) not in self.columns[row]:
                    self.columns[row][int(ids[place])] = len(logps[row])
                    logps[row].append(float(base[n] if reference else logp[n]))
                returns[row].append(t.return_)
        whole = [filled(own, entropy) for own, entropy in zip(logps, entropies, strict=True)]
        table = torch.full((len(whole), max(map(len, whole))), LEAST_LOGIT)
        for i, own in enumerate(whole):
            table[i, : len(own)] = torch.tensor(own)
        self.table = nn.Parameter(table)
        mean = float(np.mean([t.return_ for t in trajectories]))
        estimates = [(sum(own) + SHRINKAGE * mean) / (len(own) + SHRINKAGE) for own in returns]
        self.values = nn.Parameter(torch.tensor(estimates)) if values else None

    def forward(
        self, token_ids: Tensor, position: Tensor, target: Tensor, entropy_gradient: bool = False, **_: Any
    ) -> Outputs:
        """Return the outputs for targets, see `learner.update.policy.PolicyModule.forward`."""
        ids, width = token_ids.numpy(), token_ids.shape[1]
        wanted, places = position.numpy(), target.numpy()
        rows = [self.rows[ids[p // width, : p % width + 1].astype(np.int64).tobytes()] for p in wanted]
        columns = [self.columns[row][int(token)] for row, token in zip(rows, places, strict=True)]
        every = self.table[rows].log_softmax(-1)
        logp = every.gather(1, torch.tensor(columns)[:, None])[:, 0]
        entropy = -(every.exp() * every).sum(-1)
        value = None if self.values is None else self.values[rows]
        return Outputs(logp, entropy if entropy_gradient else entropy.detach(), value)


def filled(logp: Sequence[float], entropy: float) -> list[float]:
    """Return log-probabilities that begin with the given ones, add up to 1, and come near an entropy.

    The rest of the probability is spread evenly over as many further tokens as bring the entropy nearest.

    Example:
        >>> import math
        >>> found = filled([math.log(0.5)], 1.04)
        >>> len(found), round(sum(map(math.exp, found)), 6)
        (3, 1.0)
    """
    known = [min(x, -1e-7) for x in logp]
    rest = max(1e-7, 1.0 - sum(map(math.exp, known)))
    missing = entropy + sum(math.exp(x) * x for x in known)
    # n tokens of probability rest / n have the entropy rest (log n - log rest).
    others = math.exp(min(10.0, missing / rest + math.log(rest)))
    count = max(1, min(MOST_OTHERS, round(others)))
    return [*known, *[math.log(rest / count)] * count]


class _Holder(nn.Module):
    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm


class TableEngine:
    """A table behind the methods that the updater calls of a DeepSpeed engine; it steps along the gradient.

    Args:
        policy: the table.
        move: mean distance by which the first step moves the log-probabilities of its tokens, in nats. Later steps
            have the same rate.
    """

    device = torch.device("cpu")

    def __init__(self, policy: PolicyTable, move: float) -> None:
        self.policy = policy
        self.module = _Holder(policy)
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        self.rate: float | None = None
        self._move = move
        self.gradient: Tensor | None = None

    def __call__(self, value_gradient: bool = True, **inputs: Any) -> Outputs:
        return self.policy(**inputs)  # type: ignore[no-any-return]

    def zero_optimization_stage(self) -> int:
        return 0

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        """Take note of nothing: gradients are added up until `step`."""

    def backward(self, loss: Tensor, scale_wrt_gas: bool = False) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        self.policy.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Move the logits against the gradient, and forget it."""
        gradient = self.policy.table.grad
        if gradient is not None:
            if self.gradient is None:
                self.gradient = gradient.clone()
            if self.rate is None and gradient.norm() > 0:
                touched = gradient.abs().sum(1) > 0
                before = self.policy.table[touched].log_softmax(-1)
                weight = before.exp()
                # The rate at which the mean distance, weighed by probability, is as wanted to first order.
                slope = gradient[touched] - (weight * gradient[touched]).sum(1, keepdim=True)
                self.rate = self._move / float((weight * slope.abs()).sum(1).mean())
            if self.rate is not None:
                self.policy.table.sub_(gradient, alpha=self.rate)
        self.zero_grad()

    def destroy(self) -> None:
        """Free nothing."""


class FrozenTable:
    """A table that never learns, behind the methods of `learner.update.policy.FrozenPolicy`."""

    def __init__(self, policy: PolicyTable) -> None:
        self.policy = policy

    @torch.no_grad()
    def score(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the targets of each micro-batch."""
        return [
            self.policy(
                torch.from_numpy(m.token_ids), torch.from_numpy(m.position), torch.from_numpy(m.target)
            ).logp
            for m in micro_batches
        ]

    @torch.no_grad()
    def replace(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new weights into the table."""
        for name, tensor in weights:
            if name == "table":
                self.policy.table.data = tensor.clone()

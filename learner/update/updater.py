"""One update on this rank: score the batch, then run each mini-batch forward and backward, and step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.clipping import BalancedBounds, balance_path, balance_sums, choose_bounds
from learner.algorithms.ratios import importance_ratio, learning_rate_factor
from learner.algorithms.values import value_loss
from learner.config import LearnerConfig
from learner.model.routes import RouteReplay
from learner.publishing.weight_copy import CopyStream
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.surrogates import BalancedSurrogate, RatioVarianceSurrogate
from learner.update.batching.batch import Batch
from learner.update.batching.cutting import make_micro_batches
from learner.update.batching.micro_batch import MicroBatch
from learner.update.batching.packing import ON_CPU, ON_GPU, deal_mini_batches
from learner.update.critic import critic_inputs
from learner.update.deepspeed_zero import accumulation, finish_step, sum_over_ranks
from learner.update.frozen import FrozenPolicy
from learner.update.objective.adaptive import (
    AdaptiveState,
    adaptive,
    after_optimizer_step,
    after_update,
    algorithm_at,
    has_entropy_gradient,
    learning_rate,
    optimizer_steps_per_update,
    state_at,
    total_optimizer_steps,
)
from learner.update.objective.corrections import make_corrections
from learner.update.objective.objective import Objective, make_objective, proximal_logp
from learner.update.objective.scores import Scores, score_mini_batches
from learner.update.objective.tokens import Adaptive, Tokens
from learner.update.outcome import TokenRecorder, UpdateOutcome
from learner.update.policy import Outputs, micro_batch_inputs

Chosen = Tensor | slice
"""Index that selects targets of a micro-batch."""


@dataclass(frozen=True)
class MiniBatch:
    """Tokens of one optimizer step. All ranks agree whether there is anything to learn from them."""

    pass_index: int
    """Pass over the batch to which the mini-batch belongs."""
    micro_batches: list[MicroBatch]
    """Micro-batches of this rank."""
    policy: bool
    """True if some tokens carry policy gradient or are imitated."""
    values: bool
    """True if the critic learns from some tokens."""


@dataclass
class Updater:
    """Updates on one rank.

    All ranks must call the same methods with the same arguments, in the same order.
    """

    engine: Any
    """DeepSpeed engine of the policy."""
    critic: Any
    """DeepSpeed engine of a separate critic; None without one."""
    frozen: dict[str, FrozenPolicy]
    config: LearnerConfig
    total_steps: int
    """Learner steps of the whole run."""
    seed: int
    rank: int
    ranks: int
    state: AdaptiveState
    sharing: int = 0
    """Width of the model if trajectories of a group share rows; 0 if they do not."""
    copies: CopyStream | None = None
    """Stream of the copies of published weights, for which an optimizer step waits; None on a CPU."""
    routes: RouteReplay | None = None
    """Replay of the policy's choice of experts; None if each pass chooses its own."""
    _step: int = field(default=0, init=False)
    """Learner step in progress."""

    def run(self, batch: Batch, *, step: int, optimizer_step: int) -> UpdateOutcome:
        """Train on one batch.

        Args:
            step: learner steps before this one. It decides how trajectories are dealt to mini-batches.
            optimizer_step: optimizer steps applied so far.
        """
        self._step = step
        algorithm = algorithm_at(self.config.algorithm, step)
        self.state = state_at(self.config.algorithm, self.state, step)
        mini_batches = self._mini_batches(batch, algorithm)
        # With a single step the current policy is the proximal one, and so are its routes.
        routes = self.routes if len(mini_batches) > 1 else None
        if routes is not None:
            routes.begin(len(batch.token_ids))
        scores = score_mini_batches(
            self.forward,
            self.frozen,
            batch,
            [m.micro_batches for m in mini_batches],
            algorithm,
            first_pass=sum(m.pass_index == 0 for m in mini_batches),
            ranks=self.ranks,
            device=self.device,
        )
        if routes is not None:
            # In a further pass, another rank may have the trajectory.
            shared = self.ranks > 1 and algorithm.passes > 1
            over_ranks = partial(sum_over_ranks, ranks=self.ranks) if shared else None
            routes.seal(over_ranks, rank=self.rank, ranks=self.ranks)
        objective = make_objective(algorithm)
        recorder = TokenRecorder(int(batch.seen_mask.sum()), self.ranks)
        for mini_batch, scored in zip(mini_batches, scores, strict=True):
            bounds = self._balance(mini_batch.micro_batches, scored, algorithm)
            numbers = adaptive(algorithm, self.state, step=step, steps=self.total_steps, bounds=bounds)
            recorder.begin(mini_batch.pass_index, numbers, bounds)
            self._accumulate(mini_batch, scored, objective, numbers, recorder)
            self._finish(mini_batch, recorder, algorithm, optimizer_step)
            if recorder.nonfinite:
                break
        outcome = recorder.finish([m.micro_batches for m in mini_batches], passes=algorithm.passes)
        outcome.critic_only = self._warming_up
        if routes is not None:
            outcome.routes, outcome.rerouted = sum_over_ranks(routes.end(), self.ranks).tolist()
        if outcome.tokens["seen"].any() and not outcome.nonfinite:
            self.state = after_update(algorithm, self.state, entropy=outcome.mean("entropy"))
        outcome.state = self.state
        return outcome

    @torch.no_grad()
    def estimate(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return values and log-probabilities of the batch's seen tokens under the present weights.

        The log-probabilities are 0 where a separate critic does not need them.
        """
        recorder = TokenRecorder(int(batch.seen_mask.sum()), self.ranks)
        for micro_batch in self._micro_batches(batch, torch.arange(len(batch.lengths)).numpy()):
            if self.critic is not None:
                values = self.critic(**critic_inputs(micro_batch, self.device))
                logp = self.forward(micro_batch).logp if self._vtrace else torch.zeros_like(values)
            else:
                logp, _, head = self.forward(micro_batch)
                assert head is not None
                values = head
            recorder.put(micro_batch, {"value": values, "logp_current": logp})
        return recorder.gathered("value", "logp_current")

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        device: torch.device = self.engine.device
        return device

    @property
    def _vtrace(self) -> bool:
        critic = self.config.algorithm.critic
        return critic is not None and critic.target == "vtrace"

    @property
    def _warming_up(self) -> bool:
        """Whether only the critic learns in this step."""
        critic = self.config.algorithm.critic
        return critic is not None and self._step < critic.warmup_steps

    def forward(self, micro_batch: MicroBatch) -> Outputs:
        """Return the policy's outputs for a micro-batch."""
        if self.routes is not None:
            self.routes.prepare(micro_batch, self.device)
        outputs: Outputs = self.engine(
            **micro_batch_inputs(micro_batch, self.device),
            entropy_gradient=has_entropy_gradient(self.config.algorithm),
            value_gradient=not self._warming_up,
        )
        if self.routes is not None:
            self.routes.record(micro_batch)
        return outputs

    def _mini_batches(self, batch: Batch, algorithm: AlgorithmConfig) -> list[MiniBatch]:
        """Return the mini-batches of all passes, without empty ones."""
        valued, imitated = batch.columns["value_mask"] > 0, batch.columns["imitation_mask"] > 0
        members = [
            (pass_index, part)
            for pass_index in range(algorithm.passes)
            for part in deal_mini_batches(
                len(batch.lengths), algorithm.updates_per_batch, [self.seed, self._step, pass_index]
            )
        ]
        return [
            MiniBatch(
                pass_index,
                micro_batches,
                policy=bool((batch.trained + batch.count(imitated))[part].any()),
                values=bool(batch.count(valued)[part].any()),
            )
            for pass_index, part in members
            if (micro_batches := self._micro_batches(batch, part))
        ]

    def _micro_batches(self, batch: Batch, members: NDArray[Any]) -> list[MicroBatch]:
        return make_micro_batches(
            batch,
            members,
            aggregation=self.config.algorithm.aggregation,
            budget=self.config.micro_batch_tokens,
            rule=ON_CPU if self.device.type == "cpu" else ON_GPU,
            rank=self.rank,
            ranks=self.ranks,
            width=self.sharing,
        )

    @torch.no_grad()
    def _balance(
        self, micro_batches: Sequence[MicroBatch], scores: Sequence[Scores], algorithm: AlgorithmConfig
    ) -> BalancedBounds | None:
        """Choose clip bounds for the mini-batch under the present weights. Every rank chooses the same."""
        surrogate = algorithm.surrogate
        if not isinstance(surrogate, BalancedSurrogate):
            return None
        path = balance_path(
            low=(surrogate.low_start, surrogate.low_stop),
            high=(surrogate.high_start, surrogate.high_stop),
            low_step=surrogate.low_step,
            high_step=surrogate.high_step,
            order=surrogate.order,
        )
        correct = make_corrections(algorithm.corrections)
        sums = torch.zeros(len(path), 2, dtype=torch.float64)
        for micro_batch, scored in zip(micro_batches, scores, strict=True):
            # Invariant: all ranks make the same forward calls, because these are collective. A dummy runs, too.
            current = self.forward(micro_batch).logp
            if micro_batch.token[0] < 0:
                continue
            policy = self._policy(micro_batch)
            columns = {name: self._tensor(column) for name, column in micro_batch.columns.items()}
            tokens = _tokens(micro_batch, columns, scored, policy)
            proximal = proximal_logp(algorithm, tokens, current[policy])
            centre = tokens.logp_behaviour if surrogate.centre == "behaviour" else proximal
            weight, _ = correct(tokens, proximal)
            if surrogate.weight == "behaviour_probability":
                weight = weight * tokens.logp_behaviour.exp()
            ratio = importance_ratio(current[policy], centre)
            sums += balance_sums(ratio, tokens.advantage, weight, path, measure=surrogate.measure).cpu()
        return choose_bounds(sum_over_ranks(sums, self.ranks), path, target=surrogate.target)

    def _accumulate(
        self,
        mini_batch: MiniBatch,
        scores: Sequence[Scores],
        objective: Objective,
        numbers: Adaptive,
        recorder: TokenRecorder,
    ) -> None:
        """Accumulate the gradients of one mini-batch, for the policy and for a separate critic."""
        micro_batches = mini_batch.micro_batches
        if self._trains_critic(mini_batch):
            with accumulation(self.critic, self.ranks) as backward:
                for i, micro_batch in enumerate(micro_batches):
                    values = self.critic(**critic_inputs(micro_batch, self.device))
                    loss = self._value_loss(micro_batch, values)
                    recorder.put(micro_batch, {"value": values})
                    backward(loss, i == len(micro_batches) - 1)
        if not self._trains_policy(mini_batch):
            return
        with accumulation(self.engine, self.ranks) as backward:
            for i, (micro_batch, scored) in enumerate(zip(micro_batches, scores, strict=True)):
                loss = self._policy_loss(micro_batch, scored, objective, numbers, recorder)
                backward(loss, i == len(micro_batches) - 1)

    def _trains_critic(self, mini_batch: MiniBatch) -> bool:
        """Return whether a separate critic has a gradient.

        Without a gradient it must not step, because momentum would still move it.
        """
        return self.critic is not None and mini_batch.values

    def _trains_policy(self, mini_batch: MiniBatch) -> bool:
        """Return whether the policy's engine, its value head included, has a gradient."""
        if self.critic is not None:
            return mini_batch.policy and not self._warming_up
        return mini_batch.policy or mini_batch.values

    def _policy_loss(
        self,
        micro_batch: MicroBatch,
        scored: Scores,
        objective: Objective,
        numbers: Adaptive,
        recorder: TokenRecorder,
    ) -> Tensor:
        """Compute the loss of a micro-batch: surrogate, imitation, and the value head's part."""
        outputs = self.forward(micro_batch)
        columns = {name: self._tensor(column) for name, column in micro_batch.columns.items()}
        policy = self._policy(micro_batch)
        loss = outputs.logp.sum() * 0.0
        if not self._warming_up and micro_batch.policy.any():
            tokens = _tokens(micro_batch, columns, scored, policy)
            part, diagnostics = objective(tokens, numbers, outputs.logp[policy], outputs.entropy[policy])
            loss = loss + part
            recorder.policy(micro_batch, diagnostics)
        coefficient = self.config.algorithm.imitation_coefficient
        if coefficient and not self._warming_up:
            loss = loss - coefficient * (columns["imitation_weight"] * outputs.logp).sum()
        critic = self.config.algorithm.critic
        if outputs.value is not None and critic is not None:
            loss = loss + critic.coefficient * self._value_loss(micro_batch, outputs.value)
            recorder.put(micro_batch, {"value": outputs.value.detach()})
        if not math.isfinite(loss.item()):
            # Invariant: all ranks skip a step together. A NaN in the gradient reaches every rank, whichever way
            # the loss was not finite.
            loss = outputs.logp.sum() * math.nan
        return loss

    def _value_loss(self, micro_batch: MicroBatch, values: Tensor) -> Tensor:
        critic = self.config.algorithm.critic
        assert critic is not None
        clipped = bool(critic.clip_low or critic.clip_high) and "value_before" in micro_batch.columns
        per_token = value_loss(
            values,
            self._tensor(micro_batch.columns["value_target"]),
            self._tensor(micro_batch.columns["value_before"]) if clipped else None,
            clip_low=critic.clip_low,
            clip_high=critic.clip_high,
        )
        return (self._tensor(micro_batch.columns["value_weight"]) * per_token).sum()

    def _finish(
        self, mini_batch: MiniBatch, recorder: TokenRecorder, algorithm: AlgorithmConfig, optimizer_step: int
    ) -> None:
        """Step the optimizers that have a gradient, then update the dual variable."""
        lr, critic_lr = self._learning_rates(optimizer_step + recorder.applied)
        if self._trains_critic(mini_batch):
            recorder.critic_steps.append(finish_step(self.critic, critic_lr, critic_lr))
        if not self._trains_policy(mini_batch):
            return
        if algorithm.lr_by_ess != "none":
            share = recorder.step_effective_sample_share()
            # A share that is not finite means that the step will be skipped.
            if math.isfinite(share):
                lr *= learning_rate_factor(share, rule=algorithm.lr_by_ess)
        if self.copies is not None:
            self.copies.hold()
        recorder.end_step(finish_step(self.engine, 0.0 if self._warming_up else lr, critic_lr), lr)
        if isinstance(algorithm.surrogate, RatioVarianceSurrogate):
            mean_square = recorder.step_mean_square(algorithm.surrogate.centre)
            if recorder.steps[-1].applied and math.isfinite(mean_square):
                self.state = after_optimizer_step(algorithm.surrogate, self.state, mean_square=mean_square)

    def _learning_rates(self, done: int) -> tuple[float, float]:
        """Return the learning rates of the policy and of the critic.

        ``done`` counts the optimizer steps of the policy's engine. The policy's schedule begins when the
        policy begins to learn.
        """
        algorithm, optimizer = self.config.algorithm, self.config.optimizer
        critic_only = 0
        if algorithm.critic is not None and algorithm.critic.model == "head":
            critic_only = algorithm.critic.warmup_steps * optimizer_steps_per_update(algorithm)
        total = total_optimizer_steps(algorithm, self.total_steps)
        lr = learning_rate(optimizer, max(0, done - critic_only), max(1, total - critic_only))
        if algorithm.critic is None:
            return lr, 0.0
        progress = learning_rate(optimizer, done, total) / optimizer.lr
        return lr, algorithm.critic.lr * (1.0 if self._warming_up else progress)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _policy(self, micro_batch: MicroBatch) -> Chosen:
        """Return the index of the targets that carry policy gradient.

        If all targets carry it, the index is a slice, which copies nothing.
        """
        return slice(None) if micro_batch.policy.all() else self._tensor(micro_batch.policy)


def _tokens(micro_batch: MicroBatch, columns: dict[str, Tensor], scored: Scores, policy: Chosen) -> Tokens:
    """Select the tokens of a micro-batch that carry policy gradient."""

    def chosen(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[policy]

    turn = columns["turn"].long()
    sequence = torch.from_numpy(micro_batch.sequence).to(turn.device)
    return Tokens(
        logp_behaviour=columns["logp_behaviour"][policy],
        advantage=columns["advantage"][policy],
        weight=columns["weight"][policy],
        lag=columns["lag"][policy],
        sequence=sequence[policy],
        turn=(sequence * (turn.max() + 2) + turn + 1)[policy],
        logp_proximal=chosen(scored.logp_proximal),
        median_advantage=columns["median_advantage"][policy],
        entropy_signal=chosen(scored.entropy_signal),
        entropy_multiplier=chosen(scored.entropy_multiplier),
        kept=chosen(scored.kept),
        logp_reference=chosen(scored.logp_reference),
        logp_predecessor=chosen(scored.logp_predecessor),
        group_ratio=chosen(scored.group_ratio),
    )

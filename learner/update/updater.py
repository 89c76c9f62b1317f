"""One update on this rank: score the batch, then run each mini-batch forward and backward, and step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from learner.advantages import Quantiles
from learner.algorithms.ratios import learning_rate_factor
from learner.algorithms.surrogates import shaped_imitation
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig
from learner.trajectory import RouteLayers
from learner.update.adaptive import (
    AVERAGE,
    AdaptiveState,
    Scores,
    adaptive,
    after_optimizer_step,
    after_update,
    algorithm_at,
    balanced_bounds,
    chosen_tokens,
    columns_on_device,
    has_entropy_gradient,
    learning_rates,
    policy_targets,
    score_mini_batches,
    state_at,
    step_threshold,
)
from learner.update.alignment import GradientAlignment
from learner.update.batch import Batch
from learner.update.critic import as_values, critic_inputs, critic_loss, estimate_tokens
from learner.update.micro_batches import (
    ON_CPU,
    ON_GPU,
    CutRule,
    MicroBatch,
    MiniBatch,
    make_micro_batches,
    make_mini_batches,
)
from learner.update.objective import Adaptive, Objective, make_objective
from learner.update.policy import FrozenPolicy, Outputs, micro_batch_inputs
from learner.update.ranks import accumulation, finish_step, sum_over_ranks, trained_weights
from learner.update.report import TokenRecorder, UpdateOutcome
from learner.update.routed_experts import ForcedRoutes
from learner.update.siblings import AveragePolicy
from learner.update.teacher import RemoteTeacher
from learner.weight_copy import CopyStream


@dataclass
class Updater:
    """Updates on one rank.

    All ranks must call the same methods with the same arguments, in the same order.
    """

    engine: Any
    """DeepSpeed engine of the policy."""
    critic: Any
    """DeepSpeed engine of a separate critic; None without one."""
    frozen: dict[str, FrozenPolicy | RemoteTeacher]
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
    routes: ForcedRoutes | None = None
    """Replay of the policy's choice of experts; None if each pass chooses its own."""
    _step: int = field(default=0, init=False)
    """Learner step in progress."""

    def __post_init__(self) -> None:
        ceiling = self.config.algorithm.gradient_alignment
        self._alignment = None if ceiling is None else GradientAlignment(ceiling)

    def run(self, batch: Batch, *, step: int, optimizer_step: int) -> UpdateOutcome:
        """Train on one batch.

        Args:
            step: learner steps before this one. It decides how trajectories are dealt to mini-batches.
            optimizer_step: optimizer steps applied so far.
        """
        self._step = step
        self._renew_reference(step)
        predecessor = self._snapshot() if "predecessor" in self.frozen else []
        algorithm = algorithm_at(self.config.algorithm, step)
        self.state = state_at(self.config.algorithm, self.state, step)
        mini_batches = self._mini_batches(batch, algorithm)
        # With a single step the current policy is the proximal one, and so are its routes.
        routes = self.routes if len(mini_batches) > 1 or (self.routes and self.routes.given) else None
        scores = self._scores(batch, mini_batches, algorithm, routes)
        objective = make_objective(algorithm)
        recorder = TokenRecorder(int(batch.seen_mask.sum()), self.ranks)
        for mini_batch, scored in zip(mini_batches, scores, strict=True):
            bounds = balanced_bounds(
                self.forward,
                mini_batch.micro_batches,
                scored,
                algorithm,
                ranks=self.ranks,
                device=self.device,
                version=batch.version,
            )
            threshold = step_threshold(
                self.forward,
                mini_batch.micro_batches,
                scored,
                algorithm,
                batch,
                ranks=self.ranks,
                device=self.device,
            )
            numbers = adaptive(
                algorithm,
                self.state,
                step=step,
                steps=self.total_steps,
                bounds=bounds,
                version=batch.version,
                threshold=threshold,
            )
            recorder.begin_step(mini_batch.pass_index, numbers, bounds)
            self._accumulate(mini_batch, scored, objective, numbers, recorder)
            self._finish(mini_batch, recorder, algorithm, optimizer_step)
            if recorder.nonfinite:
                break
        outcome = recorder.finish([m.micro_batches for m in mini_batches], passes=algorithm.passes)
        outcome.critic_only = self._warming_up
        outcome.taught = algorithm.distillation is not None
        if routes is not None:
            outcome.take_routes(sum_over_ranks(routes.end_batch(), self.ranks))
        if outcome.tokens["seen"].any() and not outcome.nonfinite:
            self.state = after_update(algorithm, self.state, entropy=outcome.mean("entropy"))
        outcome.state = self.state
        if predecessor and outcome.applied:
            self._copy("predecessor").replace(predecessor)
        siblings, average = algorithm.siblings, self.frozen.get(AVERAGE)
        if siblings is not None and isinstance(average, AveragePolicy) and outcome.applied:
            average.approach(trained_weights(self.engine), siblings.average)
        return outcome

    def _renew_reference(self, step: int) -> None:
        """Make the present policy the reference policy, if the objective changes with this step."""
        change = self.config.algorithm.reincarnation
        if change is not None and step == change.step and "reference" in self.frozen:
            self._copy("reference").replace(trained_weights(self.engine))

    def _copy(self, name: str) -> FrozenPolicy:
        """Return a frozen copy of the model."""
        policy = self.frozen[name]
        assert not isinstance(policy, RemoteTeacher)
        return policy

    def _snapshot(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor.clone()) for name, tensor in trained_weights(self.engine)]

    def remember_quantiles(self, quantiles: Quantiles) -> None:
        """Pass the running quantiles of RiskPO on to the next step."""
        self.state = replace(self.state, quantiles=quantiles)

    def restore(self, state: AdaptiveState) -> None:
        """Continue with the state of a checkpoint."""
        self.state = state

    @property
    def route_layers(self) -> RouteLayers | None:
        """Layers whose experts are forced to those that the generators chose; None: none are."""
        return None if self.routes is None else self.routes.layers

    def _scores(
        self,
        batch: Batch,
        mini_batches: Sequence[MiniBatch],
        algorithm: AlgorithmConfig,
        routes: ForcedRoutes | None,
    ) -> list[list[Scores]]:
        """Score all mini-batches, and record the routes of the pass that scores them, if they are to be replayed."""
        if routes is not None:
            routes.begin_batch(len(batch.token_ids), batch.routes)
        scores = score_mini_batches(
            self.forward,
            self.frozen,
            batch,
            [m.micro_batches for m in mini_batches],
            algorithm,
            first_pass=sum(m.pass_index == 0 for m in mini_batches),
            ranks=self.ranks,
            device=self.device,
            taught=partial(self._taught_by_siblings, batch),
        )
        if routes is not None:
            # In a further pass, another rank may have the trajectory.
            shared = self.ranks > 1 and algorithm.passes > 1
            over_ranks = partial(sum_over_ranks, ranks=self.ranks) if shared else None
            routes.end_recording(over_ranks, rank=self.rank, ranks=self.ranks)
        return scores

    def _taught_by_siblings(
        self, batch: Batch, micro_batches: Sequence[MicroBatch]
    ) -> dict[str, list[Tensor]]:
        config, average = self.config.algorithm.siblings, self.frozen.get(AVERAGE)
        if config is None:
            return {}
        assert isinstance(average, AveragePolicy)
        budget, rule = self.config.micro_batch_tokens, self._cut_rule
        return average.teach(batch, micro_batches, config, budget=budget, rule=rule)

    @property
    def _cut_rule(self) -> CutRule:
        return ON_CPU if self.device.type == "cpu" else ON_GPU

    def estimate(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return values and log-probabilities of the batch's seen tokens: see `estimates.estimate_tokens`."""
        critic = self.config.algorithm.critic
        if self.routes is not None and self.routes.given:
            self.routes.begin_batch(len(batch.token_ids), batch.routes)
        return estimate_tokens(
            self.forward,
            self.critic,
            self._micro_batches(batch, torch.arange(len(batch.lengths)).numpy()),
            TokenRecorder(int(batch.seen_mask.sum()), self.ranks),
            device=self.device,
            config=critic,
        )

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        device: torch.device = self.engine.device
        return device

    @property
    def _warming_up(self) -> bool:
        """Whether only the critic learns in this step."""
        critic = self.config.algorithm.critic
        return critic is not None and self._step < critic.warmup_steps

    def forward(self, micro_batch: MicroBatch) -> Outputs:
        """Return the policy's outputs for a micro-batch."""
        if self.routes is not None:
            self.routes.force_next_pass(micro_batch, self.device)
        outputs: Outputs = self.engine(
            **micro_batch_inputs(micro_batch, self.device),
            entropy_gradient=has_entropy_gradient(self.config.algorithm),
            value_gradient=not self._warming_up,
        )
        if self.routes is not None:
            self.routes.record_pass(micro_batch)
        return outputs

    def _mini_batches(self, batch: Batch, algorithm: AlgorithmConfig) -> list[MiniBatch]:
        """Return the mini-batches of all passes, without empty ones."""
        return make_mini_batches(
            batch,
            partial(self._micro_batches, batch),
            passes=algorithm.passes,
            parts=algorithm.updates_per_batch,
            seed=[self.seed, self._step],
        )

    def _micro_batches(self, batch: Batch, members: NDArray[Any]) -> list[MicroBatch]:
        return make_micro_batches(
            batch,
            members,
            aggregation=self.config.algorithm.aggregation,
            budget=self.config.micro_batch_tokens,
            rule=self._cut_rule,
            rank=self.rank,
            ranks=self.ranks,
            width=self.sharing,
        )

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
            self._accumulate_critic(mini_batch, recorder)
        if not self._trains_policy(mini_batch):
            return
        with accumulation(self.engine, self.ranks) as backward:
            for i, (micro_batch, scored) in enumerate(zip(micro_batches, scores, strict=True)):
                loss = self._policy_loss(micro_batch, scored, objective, numbers, recorder)
                backward(loss, i == len(micro_batches) - 1)

    def _accumulate_critic(self, mini_batch: MiniBatch, recorder: TokenRecorder | None) -> None:
        """Accumulate the gradients of one mini-batch for a separate critic, and record its values, if asked to."""
        micro_batches = mini_batch.micro_batches
        with accumulation(self.critic, self.ranks) as backward:
            for i, micro_batch in enumerate(micro_batches):
                said = self.critic(**critic_inputs(micro_batch, self.device))
                loss = self._value_loss(micro_batch, said)
                if recorder is not None:
                    values = as_values(self.config.algorithm.critic, said)
                    recorder.record_rows(micro_batch, {"value": values})
                backward(loss, i == len(micro_batches) - 1)

    def _trains_critic(self, mini_batch: MiniBatch) -> bool:
        """Return whether a separate critic has a gradient; without one it must not step, as momentum would move it."""
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
        columns = columns_on_device(micro_batch, self.device)
        policy = policy_targets(micro_batch, self.device)
        loss = outputs.logp.sum() * 0.0
        if self.config.given is not None:
            recorder.record_rows(micro_batch, {"logp_current": outputs.logp})
        if not self._warming_up and micro_batch.policy.any():
            tokens = chosen_tokens(micro_batch, columns, scored, policy)
            logp = outputs.logp[policy]
            part, diagnostics = objective(tokens, numbers, logp, outputs.entropy[policy])
            loss = loss + part
            recorder.record_diagnostics(micro_batch, diagnostics)
            recorder.watch(micro_batch, logp, tokens.advantage, tokens.weight * self.ranks)
        coefficient, shaping = self.config.given_loss
        if coefficient and not self._warming_up:
            imitated = outputs.logp if shaping is None else shaped_imitation(outputs.logp, shaping=shaping)
            loss = loss - coefficient * (columns["imitation_weight"] * imitated).sum()
        critic = self.config.algorithm.critic
        if outputs.value is not None and critic is not None:
            loss = loss + critic.coefficient * self._value_loss(micro_batch, outputs.value)
            recorder.record_rows(micro_batch, {"value": as_values(critic, outputs.value)})
        # Invariant: all ranks skip a step together. A NaN in the gradient reaches every rank, whichever way the loss
        # was not finite. The host reads no number here, so that passes are queued while a GPU computes.
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def _value_loss(self, micro_batch: MicroBatch, said: Tensor) -> Tensor:
        critic = self.config.algorithm.critic
        assert critic is not None
        return critic_loss(critic, micro_batch, said, self.device)

    def _finish(
        self, mini_batch: MiniBatch, recorder: TokenRecorder, algorithm: AlgorithmConfig, optimizer_step: int
    ) -> None:
        """Step the optimizers that have a gradient, then update the dual variable."""
        lr, critic_lr = learning_rates(
            self.config.algorithm,
            self.config.optimizer,
            optimizer_step + recorder.applied,
            steps=self.total_steps,
            warming_up=self._warming_up,
        )
        if self._trains_critic(mini_batch):
            critic = self.config.algorithm.critic
            assert critic is not None
            recorder.critic_steps.append(finish_step(self.critic, critic_lr, critic_lr))
            for _ in range(critic.steps - 1):
                self._accumulate_critic(mini_batch, None)
                recorder.critic_steps.append(finish_step(self.critic, critic_lr, critic_lr))
        if not self._trains_policy(mini_batch):
            return
        if algorithm.lr_by_ess != "none":
            share = recorder.step_effective_sample_share()
            # A share that is not finite means that the step will be skipped.
            if math.isfinite(share):
                lr *= learning_rate_factor(share, rule=algorithm.lr_by_ess)
        if self._alignment is not None and not self._warming_up:
            recorder.cosines.append(self._alignment.bound(self.engine.module.parameters()))
        if self.copies is not None:
            self.copies.hold()
        recorder.end_step(finish_step(self.engine, 0.0 if self._warming_up else lr, critic_lr), lr)
        if (surrogate := algorithm.ratio_variance) is not None:
            mean_square = recorder.step_mean_square(surrogate.centre)
            if recorder.steps[-1].applied and math.isfinite(mean_square):
                self.state = after_optimizer_step(surrogate, self.state, mean_square=mean_square)

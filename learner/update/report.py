"""Numbers of an update: those recorded for each token, the metrics made of them, and the check of the generators.

The check compares the generators' log-probabilities with the learner's, before anything is learned from them. Both
compute the same model with other kernels. If one of them leaves a term out, the run trains on a policy that nobody
samples from, and no metric of a method says so. The comparison finds that for any architecture, on the first batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.entropy import entropy_change, entropy_quadrants
from learner.algorithms.ratios import effective_sample_size, importance_ratio
from learner.algorithms.regularisers import kl_k3
from learner.algorithms.surrogates import BalancedBounds
from learner.algorithms.values import explained_variance
from learner.errors import SamplerDiffers
from learner.settings.surrogates import Centre
from learner.trajectory import FOREIGN, Origin, Trajectory
from learner.update.adaptive import AdaptiveState
from learner.update.batch import Batch
from learner.update.micro_batches import MicroBatch, padding_fraction
from learner.update.objective import Adaptive, Diagnostics
from learner.update.ranks import OptimizerStep, sum_over_ranks
from learner.update.token_numbers import TokenNumbers
from protocol.arrays import Float32s

FloatType = Literal["float32", "bfloat16", "float16"]
ROUNDING: dict[FloatType, float] = {"float32": 5e-4, "float16": 0.02, "bfloat16": 0.1}
"""Largest mean of |learner's - generator's log-probability| that rounding explains, in nats, by the coarser float type.

Kernels that compute the same differ by 1e-6 to 1e-5 in float32 and by 0.005 to 0.03 in bfloat16, in the mean over the
tokens of a batch. The limits leave room for mixtures of experts, where a tie may choose another expert.
"""
LEAST_TOKENS = 16
"""Tokens below which a mean says nothing."""


@dataclass(frozen=True)
class SamplerGap:
    """Difference between the learner's and the generators' log-probabilities of tokens without lag."""

    tokens: int
    """Number of tokens compared."""
    mean: float
    """Mean of the absolute difference, in nats."""
    worst: float
    """Largest absolute difference, in nats."""
    where: str
    """The token with the largest difference: trajectory, place and id."""
    learner: float
    """The learner's log-probability of that token."""
    generator: float
    """The generator's log-probability of that token."""


def sampler_gap(
    trajectories: Sequence[Trajectory],
    token: NDArray[np.int64],
    *,
    learner: Float32s,
    generator: Float32s,
) -> SamplerGap | None:
    """Compare two log-probabilities of sampled tokens. Return None if they are copies, or too few to say anything.

    Args:
        trajectories: those of the batch, one behind the other.
        token: index of each compared token among the tokens of all trajectories, [N].
        learner: log-probabilities of the policy version that sampled them, computed by the learner, [N], in nats.
        generator: log-probabilities that came with the tokens, [N], in nats.

    Example:
        >>> sampler_gap([], np.zeros(0, dtype=np.int64), learner=np.zeros(0, "f4"), generator=np.zeros(0, "f4"))
    """
    # Equal numbers were copied and not computed, as with algorithm.proximal = "behaviour".
    if len(token) < LEAST_TOKENS or np.array_equal(learner, generator):
        return None
    # Differences of infinite or missing numbers are not rounding, whatever the limit is.
    difference = np.nan_to_num(np.abs(learner.astype(np.float64) - generator), nan=np.inf)
    at = int(difference.argmax())
    starts = np.cumsum([0, *(len(t.token_ids) for t in trajectories)])
    owner = int(np.searchsorted(starts, token[at], side="right")) - 1
    place = int(token[at] - starts[owner])
    return SamplerGap(
        tokens=len(token),
        mean=float(difference.mean()),
        worst=float(difference[at]),
        where=f"token {place} (id {int(trajectories[owner].token_ids[place])}) of {trajectories[owner].trajectory_id}",
        learner=float(learner[at]),
        generator=float(generator[at]),
    )


def is_comparable(t: Trajectory) -> bool:
    """Return whether the generators' log-probabilities are those of the tokens as the learner sees them.

    Those of a stored trajectory are of an older policy, those of a clean retry were sampled behind a note, and those of
    a lane at another temperature.
    """
    return t.origin == "own" and not t.lane


def check_sampler(gap: SamplerGap, limit: float) -> None:
    """Refuse to train if the generators sample from another policy than the learner computes.

    Args:
        gap: difference in the first batch.
        limit: largest mean that is accepted, in nats.

    Raises:
        SamplerDiffers: the mean difference is above the limit, or is not a number.
    """
    if gap.mean <= limit:
        return
    raise SamplerDiffers(
        f"the generators sample from another policy than the learner computes: over {gap.tokens} tokens of the first "
        f"batch their log-probabilities differ by {gap.mean:.2g} nats in the mean, and rounding explains {limit:.2g}. "
        f"The largest difference is {gap.worst:.2g}, at {gap.where}: {gap.learner:.4f} in the learner, "
        f"{gap.generator:.4f} from the generator. Nothing was trained. Look for what only one side computes: a cap or "
        "a window of the attention, a scale of the rotary embedding, quantised weights, another version of the model "
        "on a server. If the difference is wanted, for example with quantised generators, set learner.sampler_gap to "
        "the mean in nats that you accept"
    )


def limit_of(setting: float | Literal["auto"], learner: FloatType, generator: FloatType) -> float:
    """Return the largest mean difference that `learner.sampler_gap` accepts, in nats.

    Args:
        setting: the setting; "auto" takes what rounding explains.
        learner: float type in which the learner computes.
        generator: float type in which generators compute.

    Example:
        >>> limit_of("auto", "float32", "bfloat16"), limit_of(0.3, "float32", "float32")
        (0.1, 0.3)
    """
    return max(ROUNDING[learner], ROUNDING[generator]) if setting == "auto" else setting


DIAGNOSTICS = (
    "logp_current", "logp_proximal", "logp_behaviour", "entropy", "loss", "clipped", "truncated", "correction",
    "advantage", "weight", "teacher_distance",
)  # fmt: skip
ROWS = ("seen", *DIAGNOSTICS, "value", "acted")
"""Names of the numbers recorded for every token; ``seen`` is 1 where the policy's objective was formed, ``acted`` where
its gradient is not that of REINFORCE with weight 1."""
ACTED = 0.01
"""Share of a token's plain gradient by which its gradient has to differ, so that the objective acted on it."""


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
    cosines: list[float] = field(default_factory=list)
    """Cosines of the gradients with those before, where they are compared; NaN for the first one."""
    filled: int = 0
    computed: int = 0
    """Positions that were computed, padding included; ``filled`` of them held a token."""
    inputs: int = 0
    """Input tokens of all trajectories. Shared ones count for each trajectory, and once in ``filled``."""
    mini_batches: float = 1.0
    """Mini-batches of one pass, because ``tokens`` holds the numbers of the last pass only."""
    critic_only: bool = False
    """True if only the critic learns in this step, so that the policy must not move."""
    taught: bool = False
    """Whether a teacher has scored the tokens."""
    state: AdaptiveState | None = None
    routes: float = 0.0
    """Choices of an expert that were replayed, see `learner.update.routed_experts`.

    The router chose others for ``rerouted`` of them."""
    rerouted: float = 0.0
    routed_inputs: float = 0.0
    """Input tokens with experts of the generator, of ``route_inputs`` in all."""
    route_inputs: float = 0.0

    def take_routes(self, counts: Tensor) -> None:
        """Take over the counts of `learner.update.routed_experts.ForcedRoutes.end`, summed over the ranks."""
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
        self.cosines: list[float] = []

    @property
    def applied(self) -> int:
        return sum(step.applied for step in self.steps)

    @property
    def nonfinite(self) -> bool:
        return any(not step.applied for step in (*self.steps, *self.critic_steps))

    def begin_step(self, pass_index: int, numbers: Adaptive, bounds: BalancedBounds | None) -> None:
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

    def record_rows(self, micro_batch: MicroBatch, rows: Mapping[str, Tensor]) -> None:
        """Record rows of all targets of a micro-batch."""
        if micro_batch.token[0] >= 0:
            for name, values in rows.items():
                numbers = values.detach().float()[None]
                self._waiting.append(([ROWS.index(name)], micro_batch.token, numbers))

    def record_diagnostics(self, micro_batch: MicroBatch, diagnostics: Diagnostics) -> None:
        """Record the objective's diagnostics for the targets that carry policy gradient."""
        if micro_batch.token[0] < 0:
            return
        token = micro_batch.token[micro_batch.policy]
        values = [getattr(diagnostics, name).float() for name in DIAGNOSTICS]
        numbers = torch.stack([torch.ones_like(values[0]), *values])
        self._waiting.append((list(range(len(numbers))), token, numbers))
        self._step_tokens.append(token)

    def watch(self, micro_batch: MicroBatch, logp: Tensor, advantage: Tensor, weight: Tensor) -> None:
        """Record, when gradients come back, which tokens have another one than REINFORCE with weight 1 would give them.

        Args:
            micro_batch: its targets that carry policy gradient are the tokens.
            logp: log-probabilities [N] of these tokens, from which the objective was computed and nothing else.
            advantage: [N], as the environment and the baseline gave it.
            weight: [N], share of each token in the loss, as it is sent backward.
        """
        if micro_batch.token[0] < 0 or not logp.requires_grad:
            return
        token = micro_batch.token[micro_batch.policy]

        def record(gradient: Tensor) -> None:
            plain = -weight * advantage
            acted = (gradient - plain).abs() > ACTED * torch.maximum(plain.abs(), gradient.abs())
            self._waiting.append(([ROWS.index("acted")], token, acted.float()[None]))

        logp.register_hook(record)  # type: ignore[no-untyped-call]

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
            cosines=self.cosines,
            filled=int(filled),
            computed=int(computed),
            inputs=int(inputs),
            mini_batches=max(1.0, len(mini_batches) / passes),
        )


LEAST_KNOWN = 0.5
"""Share of input tokens with experts of their generators below which some process does not send them."""


@dataclass(frozen=True)
class UpdateReport:
    """Report of one update."""

    applied: bool
    """True if the policy's weights moved."""
    metrics: dict[str, float] = field(default_factory=dict)
    """TensorBoard tag -> number; numbers that are not finite are left out."""
    histograms: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Name -> numbers: one per trained token, or per trajectory for lengths."""
    nonfinite: bool = False
    """True if a step was skipped because an estimate, a loss or a gradient was not finite."""
    replayed_tokens: int = 0
    """Number of trained tokens that come from replayed trajectories."""
    given_tokens: int = 0
    """Number of tokens that somebody else wrote, and that the policy imitated."""
    taught_tokens: int = 0
    """Number of trained tokens that a teacher wrote."""
    sampler: SamplerGap | None = None
    """How far the generators' log-probabilities are from the learner's, for tokens without lag."""
    advantages: NDArray[np.float64] | None = None
    """Mean advantage of each trajectory's tokens that carry policy gradient, [S]; NaN where none does."""
    tokens: TokenNumbers | None = None
    """What the update made of each token; None if it ended before it computed anything."""


def make_report(
    trajectories: Sequence[Trajectory],
    batch: Batch,
    outcome: UpdateOutcome,
    *,
    current_version: int,
    seconds: float,
) -> UpdateReport:
    """Compute the metrics and histograms of one update."""
    seen = outcome.tokens["seen"] > 0
    columns = {name: column[batch.seen_mask] for name, column in batch.columns.items()}
    lags = columns["lag"][seen]

    def written(origin: Origin) -> NDArray[np.bool_]:
        return np.repeat([t.origin == origin for t in trajectories], batch.lengths)[batch.seen_mask]

    replayed, taught = written("replayed")[seen], written("taught")[seen]
    own = (t for t in trajectories if t.origin not in FOREIGN and not t.unused)
    offered = sum(int(t.learned_mask[t.window_start :].sum()) for t in own)
    metrics = {
        "learner/trained_tokens": float(seen.sum()),
        "learner/replayed_tokens": float(replayed.sum()),
        "learner/padding_fraction": padding_fraction(outcome.filled, outcome.computed),
        "learner/shared_fraction": padding_fraction(outcome.filled, outcome.inputs),
        "learner/step_seconds": seconds,
    }
    if offered:
        metrics["learner/stale_token_fraction"] = 1 - float(batch.columns["fresh"].sum()) / offered
    histograms: dict[str, NDArray[Any]] = {
        "policy_lag_versions": lags[~(replayed | taught)],
        "length_trained_tokens": batch.trained[batch.trained > 0],
    }
    origins = {t.origin for t in trajectories}
    if "guided" in origins:
        metrics["learner/guided_tokens"] = float(written("guided")[seen].sum())
    if "taught" in origins:
        metrics["learner/taught_tokens"] = float(taught.sum())
    given = written("given")
    if given.any():
        metrics["learner/given_tokens"] = float(given.sum())
        metrics["learner/given_loss_nats"] = -float(
            outcome.tokens["logp_current"][given].mean(dtype=np.float64)
        )
    metrics |= _step_metrics(outcome)
    if "lane" in columns and seen.any():
        metrics["learner/lane_share"] = float(columns["lane"][seen].mean())
        metrics["learner/lane_temperature"] = float(np.mean([t.temperature for t in trajectories if t.lane]))
    if "sibling" in columns and seen.any():
        metrics["learner/distilled_share"] = float((columns["sibling"][seen] >= 0).mean())
    if seen.any():
        metrics["learner/loss"] = float(outcome.tokens["loss"].sum(dtype=np.float64)) / outcome.mini_batches
        metrics |= _lag_metrics(lags)
        tokens = {name: torch.from_numpy(row[seen]) for name, row in outcome.tokens.items()}
        numbers, ratios = _token_metrics(tokens)
        metrics |= numbers | _clip_metrics(tokens, torch.from_numpy(columns["advantage"][seen]))
        histograms |= ratios
        if outcome.taught:
            metrics["learner/kl_proximal_teacher_nats"] = float(tokens["teacher_distance"].mean())
    metrics |= _critic_metrics(outcome, columns)
    newest = (outcome.tokens["seen"] > 0) & (columns["lag"] == 0)
    newest &= np.repeat([is_comparable(t) for t in trajectories], batch.lengths)[batch.seen_mask]
    return UpdateReport(
        applied=outcome.applied > 0 and not outcome.critic_only,
        metrics={name: value for name, value in metrics.items() if np.isfinite(value)},
        histograms=histograms,
        nonfinite=outcome.nonfinite,
        replayed_tokens=int(replayed.sum()),
        given_tokens=int(given.sum()),
        taught_tokens=int(taught.sum()),
        sampler=sampler_gap(
            trajectories,
            np.flatnonzero(batch.seen_mask)[newest],
            # Either was computed before the first optimizer step; a proximal policy that is copied tells nothing.
            learner=outcome.tokens["logp_current" if len(outcome.steps) == 1 else "logp_proximal"][newest],
            generator=outcome.tokens["logp_behaviour"][newest],
        ),
        advantages=mean_advantages(batch),
        tokens=TokenNumbers(batch, outcome.tokens),
    )


def missing_routes(metrics: Mapping[str, float]) -> str:
    """Return a warning if fewer than half of the input tokens came with experts of their generators, else "".

    Example:
        >>> missing_routes({"learner/routes_known_share": 0.98}), missing_routes({})
        ('', '')
    """
    share = metrics.get("learner/routes_known_share", 1.0)
    if share >= LEAST_KNOWN:
        return ""
    return (
        f'learner.algorithm.routes is "behaviour", but only {share:.0%} of the input tokens of this batch have experts '
        "that a generator sent (learner/routes_known_share). The others are trained with the experts that the routers "
        "choose now, as without replay. Actors and generators of an earlier version send none, nor does a generator "
        "with generator.routes = false: give all of them this installation and this run file"
    )


def mean_advantages(batch: Batch) -> NDArray[np.float64]:
    """Return the mean advantage of each trajectory's tokens that carry policy gradient, [S]; NaN without any."""
    rows = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[batch.loss_mask]
    sums = np.bincount(
        rows, weights=batch.columns["advantage"][batch.loss_mask], minlength=len(batch.lengths)
    )
    return np.where(batch.trained > 0, sums / np.maximum(1, batch.trained), np.nan)


def _step_metrics(outcome: UpdateOutcome) -> dict[str, float]:
    """Compute means over the optimizer steps of the update."""
    metrics: dict[str, float] = {}
    if outcome.steps:
        metrics["learner/gradient_norm"] = float(np.mean([step.gradient_norm for step in outcome.steps]))
        metrics["learner/learning_rate"] = outcome.learning_rates[-1]
    if outcome.bounds:
        metrics |= {
            "learner/clip_low": float(np.mean([b.low for b in outcome.bounds])),
            "learner/clip_high": float(np.mean([b.high for b in outcome.bounds])),
            "learner/positive_share": float(np.mean([b.share for b in outcome.bounds])),
            "learner/clip_moves": float(np.mean([b.moves for b in outcome.bounds])),
        }
    if known := [cosine for cosine in outcome.cosines if math.isfinite(cosine)]:
        metrics["learner/gradient_cosine"] = float(np.mean(known))
    if outcome.routes:
        metrics["learner/rerouted_share"] = outcome.rerouted / outcome.routes
    if outcome.route_inputs:
        metrics["learner/routes_known_share"] = outcome.routed_inputs / outcome.route_inputs
    if outcome.state is not None:
        metrics["learner/dual_variable"] = outcome.state.dual
        metrics["learner/entropy_coefficient"] = outcome.state.entropy_coefficient
    return metrics


def _lag_metrics(lags: NDArray[Any]) -> dict[str, float]:
    return {
        "learner/policy_lag_mean_versions": float(lags.mean()),
        "learner/policy_lag_max_versions": float(lags.max()),
    }


def _token_metrics(tokens: dict[str, torch.Tensor]) -> tuple[dict[str, float], dict[str, NDArray[Any]]]:
    """Compute means over trained tokens, and the ratios themselves."""
    current, proximal, behaviour = (
        tokens["logp_current"],
        tokens["logp_proximal"],
        tokens["logp_behaviour"],
    )
    ratios = {
        "ratio_current_proximal": importance_ratio(current, proximal),
        "ratio_proximal_behaviour": importance_ratio(proximal, behaviour),
    }
    metrics = {
        "learner/entropy_nats": float(tokens["entropy"].mean()),
        "learner/kl_current_proximal_nats": float(kl_k3(current, proximal).mean()),
        # In this direction the estimate is unbiased, because the behaviour policy sampled the tokens.
        "learner/kl_proximal_behaviour_nats": float(kl_k3(behaviour, proximal).mean()),
        "learner/clip_fraction": float(tokens["clipped"].mean()),
        "learner/acted_fraction": float(tokens["acted"].mean()),
        "learner/truncated_fraction": float(tokens["truncated"].mean()),
        "learner/correction_mean": float(tokens["correction"].mean()),
        "learner/effective_sample_size": float(effective_sample_size(ratios["ratio_proximal_behaviour"])),
        "learner/ratio_variance": float((importance_ratio(current, behaviour) - 1).square().mean()),
    }
    for name, ratio in ratios.items():
        metrics[f"learner/{name}_mean"] = float(ratio.mean())
        metrics[f"learner/{name}_max"] = float(ratio.max())
        metrics[f"learner/{name}_min"] = float(ratio.min())
    return metrics, {name: ratio.numpy() for name, ratio in ratios.items()}


def _clip_metrics(tokens: dict[str, torch.Tensor], advantage: torch.Tensor) -> dict[str, float]:
    """Predict what the unclipped tokens do to the entropy (BAPO, arXiv:2510.18927, entropy-clip rule)."""
    active = (tokens["clipped"] == 0) & (tokens["correction"] != 0)
    logp = tokens["logp_current"]
    metrics = {"learner/entropy_change": float(entropy_change(logp, advantage, active))}
    for name, value in entropy_quadrants(logp, advantage, active)._asdict().items():
        metrics[f"learner/entropy_change_{name}"] = float(value)
    return metrics


def _critic_metrics(outcome: UpdateOutcome, columns: dict[str, NDArray[Any]]) -> dict[str, float]:
    learned = columns["value_mask"] > 0
    if not learned.any():
        return {}
    targets, values = columns["value_target"][learned], outcome.tokens["value"][learned]
    metrics = {
        "critic/loss": float(np.mean((values - targets) ** 2) / 2),
        "critic/value_mean": float(values.mean()),
        "critic/explained_variance": explained_variance(targets, values),
        "critic/tokens": float(learned.sum()),
    }
    if outcome.critic_steps:
        metrics["critic/gradient_norm"] = float(np.mean([s.gradient_norm for s in outcome.critic_steps]))
    return metrics


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which the configurations of mixtures have the number of a layer's experts."""


@dataclass(frozen=True)
class TokenOperations:
    """Operations of a forward and a backward pass over one token."""

    weights: float
    """Parameters that a token is multiplied with: of experts those that it goes through, and no table of inputs."""
    trained: float
    """Number of parameters that are trained."""
    attention: int
    """Layers x heads x width of a head."""

    def for_tokens(self, tokens: int, mean_length: float) -> float:
        r"""Return the operations of both passes over tokens of one batch, without what is computed twice.

        .. math:: (4 N + 2 N_\text{trained}) \cdot \text{tokens}
                  + 6 \cdot \text{layers} \cdot \text{heads} \cdot d_h \cdot \bar{L} \cdot \text{tokens}

        (PaLM, arXiv:2204.02311, appendix B, with half of its attention, because it is causal. Its 6 N are 2 N forward,
        2 N for the gradient of the inputs, and 2 N for that of the weights.)

        Args:
            mean_length: length of the row in which a token is, on average over the tokens; see `mean_length`.

        Example:
            >>> TokenOperations(weights=100, trained=100, attention=8).for_tokens(tokens=6, mean_length=6.0)
            5328.0
        """
        return float(
            (4 * self.weights + 2 * self.trained) * tokens + 6 * self.attention * mean_length * tokens
        )


def mean_length(lengths: Sequence[int]) -> float:
    """Return the mean over all tokens of the length of the row that a token is in.

    Example:
        >>> mean_length([1, 3]), mean_length([])
        (2.5, 0.0)
    """
    return sum(length * length for length in lengths) / max(1, sum(lengths))


def token_operations(lm: Any) -> TokenOperations | None:
    """Return the operations of a causal language model of transformers; None if its configuration does not tell.

    Where DeepSpeed has cut a parameter, it keeps the number of the whole for itself.
    """
    config = lm.config.get_text_config()
    layers, heads, width = (
        getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if layers is None or heads is None or width is None:
        return None
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), 0)
    share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
    inputs, output = lm.get_input_embeddings(), lm.get_output_embeddings()
    looked_up = None if output is None or output.weight is inputs.weight else inputs.weight
    weights = trained = 0.0
    for name, parameter in lm.named_parameters():
        if parameter is looked_up:
            continue
        count = getattr(parameter, "ds_numel", parameter.numel()) * (share if ".experts." in name else 1.0)
        weights += count
        trained += count if parameter.requires_grad else 0.0
    head = getattr(config, "head_dim", None) or width // heads
    return TokenOperations(weights, trained, layers * heads * head)

"""Choice of clip bounds for a mini-batch (BAPO), under the present weights."""

from collections.abc import Sequence

import torch

from learner.algorithms.clipping import BalancedBounds, balance_path, balance_sums, choose_bounds
from learner.algorithms.ratios import importance_ratio
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.surrogates import BalancedSurrogate
from learner.update.batching.micro_batch import MicroBatch
from learner.update.deepspeed_zero import sum_over_ranks
from learner.update.objective.corrections import make_corrections
from learner.update.objective.objective import proximal_logp
from learner.update.objective.scores import Forward, Scores
from learner.update.objective.selection import chosen_tokens, columns_on_device, policy_targets


@torch.no_grad()
def balanced_bounds(
    forward: Forward,
    micro_batches: Sequence[MicroBatch],
    scores: Sequence[Scores],
    algorithm: AlgorithmConfig,
    *,
    ranks: int,
    device: torch.device,
) -> BalancedBounds | None:
    """Choose clip bounds for the mini-batch under the present weights. Every rank chooses the same.

    This is a collective call. Without a `BalancedSurrogate` there is nothing to choose, and the result is None.
    """
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
        current = forward(micro_batch).logp
        if micro_batch.token[0] < 0:
            continue
        policy = policy_targets(micro_batch, device)
        columns = columns_on_device(micro_batch, device)
        tokens = chosen_tokens(micro_batch, columns, scored, policy)
        proximal = proximal_logp(algorithm, tokens, current[policy])
        centre = tokens.logp_behaviour if surrogate.centre == "behaviour" else proximal
        weight, _ = correct(tokens, proximal)
        if surrogate.weight == "behaviour_probability":
            weight = weight * tokens.logp_behaviour.exp()
        ratio = importance_ratio(current[policy], centre)
        sums += balance_sums(ratio, tokens.advantage, weight, path, measure=surrogate.measure).cpu()
    return choose_bounds(sum_over_ranks(sums, ranks), path, target=surrogate.target)

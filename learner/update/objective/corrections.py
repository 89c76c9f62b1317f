"""Corrections of staleness: weights of tokens by the ratio proximal / behaviour, made from the config."""

from collections.abc import Callable, Sequence
from typing import assert_never

import torch
from torch import Tensor

from learner.algorithms.corrections import interval_correction, truncated_correction
from learner.algorithms.ratios import level_ratio, product_ratio
from learner.settings.corrections import CorrectionConfig, IntervalCorrection, TruncatedCorrection
from learner.update.objective.tokens import Tokens

Correction = Callable[[Tokens, Tensor], tuple[Tensor, Tensor]]


def make_corrections(configs: Sequence[CorrectionConfig]) -> Correction:
    """Make the function of (tokens, logp_proximal) that returns (product of all weights, where any was cut).

    Both results are [N].
    """
    parts = [_make_correction(config) for config in configs]

    def correct(tokens: Tokens, logp_proximal: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.ones_like(logp_proximal)
        cut = torch.zeros_like(logp_proximal, dtype=torch.bool)
        for part in parts:
            factor, where = part(tokens, logp_proximal)
            weight, cut = weight * factor, cut | where
        return weight, cut

    return correct


def _make_correction(config: CorrectionConfig) -> Correction:
    level = config.level

    def ratio(tokens: Tokens, logp_proximal: Tensor) -> Tensor:
        if level == "group":
            assert tokens.group_ratio is not None
            return tokens.group_ratio
        if level == "product":
            return product_ratio(logp_proximal, tokens.logp_behaviour, tokens.sequence)
        return level_ratio(
            logp_proximal,
            tokens.logp_behaviour,
            level=level,
            sequence=tokens.sequence,
            turn=tokens.turn,
        )

    match config:
        case TruncatedCorrection(ceiling=ceiling):
            return lambda tokens, logp: truncated_correction(ratio(tokens, logp), ceiling=ceiling)
        case IntervalCorrection(low=low, high=high, weight=weight):
            return lambda tokens, logp: interval_correction(
                ratio(tokens, logp), low=low, high=high, keep_weight=weight
            )
        case _:
            assert_never(config)

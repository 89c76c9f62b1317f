"""Routers of a mixture of experts: which layers choose experts, and how they weigh them."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from learner.algorithms.routes import Score, replayed_weights
from learner.errors import RoutesUnknown

PROBE_TOKENS = 8
"""Tokens of the short pass that finds out how a model's routers work."""
SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
"""Names under which routers keep a factor of all weights."""

Weigh = Callable[[Tensor, Tensor], Tensor]
"""Function of (logits, experts) that returns the weights which a router gives these experts."""


class AnswerPlaces(NamedTuple):
    """AnswerPlaces of logits [n, E], weights [n, K] and chosen experts [n, K] in a router's answer."""

    logits: int
    weights: int
    chosen: int

    def of(self, answer: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and chosen experts of an answer."""
        return answer[self.logits], answer[self.weights], answer[self.chosen]


class Router(NamedTuple):
    """A layer that chooses experts."""

    name: str
    module: nn.Module
    places: AnswerPlaces
    weigh: Weigh
    experts: int
    chosen: int

    @property
    def layer(self) -> int | None:
        """Number of the layer in the whole model, by the router's name; None if the name does not tell."""
        found = re.search(r"\b(?:layers|h|blocks)\.(\d+)\.", self.name)
        return None if found is None else int(found[1])


def find_routers(lm: Any) -> list[Router]:
    """Return the routers of a model, in the order in which it computes them."""
    answers: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: answers.update({name: output})

    named = {name: module for name, module in lm.named_modules() if "router" in type(module).__name__.lower()}
    handles = [module.register_forward_hook(keep(name)) for name, module in named.items()]
    try:
        _probe(lm)
    finally:
        for handle in handles:
            handle.remove()
    if not answers:
        raise RoutesUnknown(
            "learner.algorithm.routes is set, but no layer of the model is known to choose experts; set it to "
            '"current"'
        )
    return [_understand(name, named[name], output) for name, output in answers.items()]


def _understand(name: str, module: nn.Module, answer: Any) -> Router:
    """Return what a router's answer to the probe says about it.

    Raises:
        RoutesUnknown: its weights are no softmax and no sigmoid of its logits, or may be either.
    """
    places = _places(answer)
    if places is not None:
        logits, weights, chosen = places.of(answer)
        best = _nearest(_ways(module), logits, weights, chosen)
        if best and _agree(best, logits, chosen):
            return Router(name, module, places, best[0], logits.shape[1], chosen.shape[1])
        if best:
            raise RoutesUnknown(
                f"learner.algorithm.routes is set, but {name} gives all experts equal numbers, so nobody can "
                'tell how it weighs them; train the model first, or set routes to "current"'
            )
    raise RoutesUnknown(
        f"learner.algorithm.routes is set, but {name} does not weigh experts by a softmax or sigmoid of its "
        'logits, which is all that can be replayed; set it to "current"'
    )


def _places(answer: Any) -> AnswerPlaces | None:
    """Return the places of a router's answer; None if it is not made of logits, weights and experts."""
    if not isinstance(answer, tuple) or [getattr(part, "ndim", 0) for part in answer] != [2, 2, 2]:
        return None
    for logits, chosen in ((0, 2), (2, 0)):
        whole = not answer[chosen].is_floating_point() and answer[logits].is_floating_point()
        if whole and answer[chosen].shape == answer[1].shape and len(answer[logits]) == len(answer[1]):
            return AnswerPlaces(logits, 1, chosen)
    return None


def _ways(module: nn.Module) -> list[Weigh]:
    """Return the ways in which a router may weigh experts, the usual ones first."""
    factors = [getattr(module, name, 1.0) for name in SCALES]
    scales = dict.fromkeys([1.0, *(float(factor) for factor in factors if isinstance(factor, int | float))])
    return [
        partial(replayed_weights, score=score, normalised=normalised, scale=scale)
        for scale in scales
        for score in get_args(Score)
        for normalised in (True, False)
    ]


def _nearest(ways: list[Weigh], logits: Tensor, weights: Tensor, chosen: Tensor) -> list[Weigh]:
    """Return the ways that come nearest to a router's weights; none if all differ by more than rounding."""
    errors = [(weigh(logits, chosen).to(weights.dtype) - weights).abs() for weigh in ways]
    near = [
        (float(error.sum()), weigh)
        for error, weigh in zip(errors, ways, strict=True)
        if (error <= 1e-6 + 1e-2 * weights.abs()).all()
    ]
    least = min((error for error, _ in near), default=0.0)
    return [weigh for error, weigh in near if error == least]


def _agree(ways: list[Weigh], logits: Tensor, chosen: Tensor) -> bool:
    """Return whether several ways weigh experts alike, whatever the logits are: with one expert, most ways do."""
    spread = torch.linspace(-2, 2, logits.numel(), device=logits.device).view_as(logits)
    return all(torch.allclose(weigh(spread, chosen), ways[0](spread, chosen)) for weigh in ways)


@torch.no_grad()
def _probe(lm: Any) -> None:
    """Let the model compute a few tokens."""
    training, device = lm.training, next(lm.parameters()).device
    ids = torch.arange(PROBE_TOKENS, device=device)[None] % int(lm.config.get_text_config().vocab_size)
    lm.eval()
    lm(input_ids=ids, use_cache=False)
    lm.train(training)

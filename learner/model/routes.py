"""Routing replay: all optimizer steps on a batch use the experts that the weights before the update choose.

In a mixture of experts each token goes through a few experts of each layer. A small change of the weights may choose
others, and then the ratio current / proximal of the token jumps. With replay (R2 in arXiv:2512.01374, "vanilla routing
replay") the chosen experts stay those of the proximal policy. Their weights are computed anew, see
`learner.algorithms.routes`, so gradient still reaches the routers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learner.algorithms.routes import Score, replayed_weights
from learner.errors import RoutesUnknown
from protocol.arrays import Int64s

PROBE_TOKENS = 8
"""Tokens of the short pass that finds out how a model's routers work."""
SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
"""Names under which routers keep a factor of all weights."""
SMALL = 256
"""Experts of a layer up to which the number of one fits a byte."""


class Routed(Protocol):
    """The part of `learner.update.batching` `MicroBatch` that says which tokens of the batch are computed where."""

    @property
    def token_ids(self) -> Int64s: ...

    @property
    def input_token(self) -> Int64s: ...

    @property
    def input_place(self) -> Int64s: ...


Weigh = Callable[[Tensor, Tensor], Tensor]
"""Function of (logits, experts) that returns the weights which a router gives these experts."""


class _Places(NamedTuple):
    """Places of logits [n, E], weights [n, K] and chosen experts [n, K] in a router's answer."""

    logits: int
    weights: int
    chosen: int

    def of(self, answer: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and chosen experts of an answer."""
        return answer[self.logits], answer[self.weights], answer[self.chosen]


class _Router(NamedTuple):
    """A layer that chooses experts."""

    module: nn.Module
    places: _Places
    weigh: Weigh
    experts: int
    chosen: int


class RouteReplay:
    """The experts that a model chose for each token of a batch, and the hooks that make it choose them again.

    Call `begin` before the passes that are recorded, `seal` behind them, and `end` when the batch is done. Call
    `prepare` before every pass of the model, and `record` after it. From `prepare` on until the next one, the model
    computes with the recorded experts, also when gradient checkpointing computes a layer again.

    Where DeepSpeed has cut the model, making this is a collective call.

    Args:
        lm: a causal language model of transformers, where it computes.

    Raises:
        RoutesUnknown: the model has no routers, or they do not weigh experts as `replayed_weights` can.
    """

    def __init__(self, lm: Any) -> None:
        self._routers = _find_routers(lm)
        for index, router in enumerate(self._routers):
            router.module.register_forward_hook(self._hook(index, router))
        self._chosen = self._routers[0].chosen
        self._dtype = np.uint8 if self._routers[0].experts <= SMALL else np.int32
        self._table: NDArray[Any] | None = None
        self._known = np.zeros(0, dtype=np.bool_)
        self._recording = False
        self._seen: dict[int, Tensor] = {}
        self._forced: Tensor | None = None
        self._real: Tensor | None = None
        self._replayed, self._changed = 0, torch.zeros((), dtype=torch.int64)

    def begin(self, tokens: int) -> None:
        """Record the experts of all passes from now on, for a batch with this number of tokens."""
        self._table = np.zeros((tokens, len(self._routers), self._chosen), dtype=self._dtype)
        self._known = np.zeros(tokens, dtype=np.bool_)
        self._recording, self._forced = True, None
        self._replayed, self._changed = 0, torch.zeros((), dtype=torch.int64)

    def prepare(self, micro_batch: Routed, device: torch.device) -> None:
        """Let the next pass, over this micro-batch, compute with the recorded experts, if there are any."""
        if self._table is None or self._recording:
            return
        # Padding goes through the first experts: nothing reads what comes out.
        routes = np.empty((micro_batch.token_ids.size, len(self._routers), self._chosen), dtype=np.int64)
        routes[:] = np.arange(self._chosen)
        routes[micro_batch.input_place] = self._table[micro_batch.input_token]
        self._forced = torch.from_numpy(np.ascontiguousarray(routes.transpose(1, 0, 2))).to(device)
        self._real = torch.from_numpy(np.unique(micro_batch.input_place)).to(device)

    def record(self, micro_batch: Routed) -> None:
        """Note the experts of the pass that has just been made, if they are recorded now."""
        if self._table is not None and self._recording:
            taken = torch.stack([self._seen[index] for index in range(len(self._routers))], dim=1)
            self._table[micro_batch.input_token] = taken.cpu().numpy()[micro_batch.input_place]
            self._known[micro_batch.input_token] = True
            self._seen = {}

    def seal(
        self, over_ranks: Callable[[Tensor], Tensor] | None = None, *, rank: int = 0, ranks: int = 1
    ) -> None:
        """End the recording; later passes compute with what was recorded.

        Args:
            over_ranks: function that sums a tensor over ranks, if a rank may replay what another one recorded.
            rank: this rank.
            ranks: number of ranks.
        """
        assert self._table is not None
        if over_ranks is not None:
            # Branches of one trajectory may be on several ranks, which then recorded the turns that they share.
            known = torch.zeros((ranks, len(self._known)), dtype=torch.uint8)
            known[rank] = torch.from_numpy(self._known)
            first = over_ranks(known).numpy().argmax(axis=0)
            self._table[first != rank] = 0
            self._table = over_ranks(torch.from_numpy(self._table)).numpy()
        self._recording = False

    def end(self) -> Tensor:
        """Forget the batch. Return the replayed choices, and those that the routers would not make now, float64 [2]."""
        self._table = self._forced = self._real = None
        return torch.tensor([self._replayed, int(self._changed)], dtype=torch.float64)

    def _hook(self, index: int, router: _Router) -> Callable[..., Any]:
        def after(_module: nn.Module, _inputs: Any, answer: Any) -> Any:
            logits, weights, own = router.places.of(answer)
            if self._recording:
                self._seen[index] = own
            if self._forced is None or self._real is None:
                return None
            routes = self._forced[index]
            stays = (own[self._real, :, None] == routes[self._real, None, :]).any(dim=1)
            self._replayed += stays.numel()
            # The sum stays on the device, which would otherwise be waited for in every layer.
            self._changed = self._changed.to(stays.device) + (~stays).sum()
            replayed = list(answer)
            replayed[router.places.weights] = router.weigh(logits, routes).to(weights.dtype)
            replayed[router.places.chosen] = routes.to(own.dtype)
            return tuple(replayed)

        return after


def _find_routers(lm: Any) -> list[_Router]:
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
            'learner.algorithm.routes is "proximal", but no layer of the model is known to choose experts; set it to '
            '"current"'
        )
    return [_understand(name, named[name], output) for name, output in answers.items()]


def _understand(name: str, module: nn.Module, answer: Any) -> _Router:
    """Return what a router's answer to the probe says about it.

    Raises:
        RoutesUnknown: its weights are no softmax and no sigmoid of its logits, or may be either.
    """
    places = _places(answer)
    if places is not None:
        logits, weights, chosen = places.of(answer)
        best = _nearest(_ways(module), logits, weights, chosen)
        if best and _agree(best, logits, chosen):
            return _Router(module, places, best[0], logits.shape[1], chosen.shape[1])
        if best:
            raise RoutesUnknown(
                f'learner.algorithm.routes is "proximal", but {name} gives all experts equal numbers, so nobody can '
                'tell how it weighs them; train the model first, or set routes to "current"'
            )
    raise RoutesUnknown(
        f'learner.algorithm.routes is "proximal", but {name} does not weigh experts by a softmax or sigmoid of its '
        'logits, which is all that can be replayed; set it to "current"'
    )


def _places(answer: Any) -> _Places | None:
    """Return the places of a router's answer; None if it is not made of logits, weights and experts."""
    if not isinstance(answer, tuple) or [getattr(part, "ndim", 0) for part in answer] != [2, 2, 2]:
        return None
    for logits, chosen in ((0, 2), (2, 0)):
        whole = not answer[chosen].is_floating_point() and answer[logits].is_floating_point()
        if whole and answer[chosen].shape == answer[1].shape and len(answer[logits]) == len(answer[1]):
            return _Places(logits, 1, chosen)
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

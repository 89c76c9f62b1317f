"""Weights of experts that were chosen earlier, from the router's present numbers."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learner.errors import RoutesUnknown
from learner.trajectory import RouteLayers
from protocol.arrays import Experts, Int64s

Score = Literal["softmax", "sigmoid"]
"""Function of a router's logits from which it forms the experts' weights."""


def replayed_weights(
    logits: Tensor, routes: Tensor, *, normalised: bool, score: Score = "softmax", scale: float = 1.0
) -> Tensor:
    r"""Compute the weights of given experts, with gradient to the router.

    .. math:: g_i = \frac{c\, s_i}{\sum_{j \in R} s_j} \text{ if normalised, else } c\, s_i, \qquad i \in R

    (Routing replay, arXiv:2512.01374, which writes it for the normalised softmax: s = exp z and c = 1.) R are experts
    that an earlier policy chose, z the router's logits under the present one. The scores s are the softmax of z over
    all experts, or the sigmoid of z (DeepSeek V3, arXiv:2412.19437). If R are the experts that the router chooses now,
    these are its own weights: bit for bit, if it takes the score of all experts first.

    Args:
        logits: z, [n, E].
        routes: R, int64 [n, K], different experts in each row.
        normalised: whether the weights of the chosen experts add up to c.
        score: how s follows from z.
        scale: c, above 0.

    Returns:
        g, float32 [n, K], each in [0, c].

    Raises:
        ValueError: the numbers of rows differ.

    Example:
        >>> z = torch.tensor([[0.0, 1.0, 2.0]]).log1p()
        >>> replayed_weights(z, torch.tensor([[0, 2]]), normalised=True)
        tensor([[0.2500, 0.7500]])
        >>> replayed_weights(z, torch.tensor([[0, 2]]), normalised=False)
        tensor([[0.1667, 0.5000]])
        >>> replayed_weights(z, torch.tensor([[0, 2]]), normalised=False, score="sigmoid", scale=2.0)
        tensor([[1.0000, 1.5000]])
    """
    if len(logits) != len(routes):
        raise ValueError(
            f"one row of experts for each row of logits, got {tuple(routes.shape)} and {tuple(logits.shape)}"
        )
    scores = (
        torch.softmax(logits, dim=-1, dtype=torch.float) if score == "softmax" else logits.float().sigmoid()
    )
    weights = scores.gather(1, routes)
    return scale * (weights / weights.sum(dim=-1, keepdim=True) if normalised else weights)


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

    def read_from(self, answer: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
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
        logits, weights, chosen = places.read_from(answer)
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


class GivenRoutes(Protocol):
    """The part of `learner.update.batching` `BatchRoutes`: rows of experts, and the token of each."""

    @property
    def token(self) -> NDArray[np.int32]: ...

    @property
    def experts(self) -> Experts: ...


class ForcedRoutes:
    """The experts that were chosen for each token of a batch, and the hooks that make the model choose them again.

    Call `begin_batch` before the first pass over a batch, `end_recording` behind those that may be recorded, and
    `end_batch` when the batch is done. Call `force_next_pass` before every pass of the model, and `record_pass` after
    it. From `force_next_pass` on until the next one, the model computes with the experts that are known, also when
    gradient checkpointing computes a layer again. A token whose experts are not known goes through those that the
    routers choose now.

    Where DeepSpeed has cut the model, making this is a collective call.

    Args:
        lm: a causal language model of transformers, where it computes.
        kind: whose experts are forced. "proximal": those of the passes between `begin_batch` and `end_recording`;
            "behaviour": those that `begin_batch` is given.

    Raises:
        RoutesUnknown: the model has no routers, they do not weigh experts as `replayed_weights` can, or nobody can tell
            which layer of the generator's model each one is.
    """

    def __init__(self, lm: Any, kind: Literal["proximal", "behaviour"] = "proximal") -> None:
        self._routers = find_routers(lm)
        for index, router in enumerate(self._routers):
            router.module.register_forward_hook(self._force_after(index, router))
        self.given = kind == "behaviour"
        """True if the experts are those of the generators."""
        self._layers = _layers(self._routers) if self.given else []
        self._chosen = self._routers[0].chosen
        self._dtype = np.uint8 if self._routers[0].experts <= SMALL else np.int32
        self._table: NDArray[Any] | None = None
        self._known = np.zeros(0, dtype=np.bool_)
        self._recording = False
        self._seen: dict[int, Tensor] = {}
        self._forced: Tensor | None = None
        self._takes: Tensor | None = None
        """Mask of the positions that take what is forced upon them; None: all do."""
        self._real: Tensor | None = None
        self._reset()

    @property
    def layers(self) -> RouteLayers | None:
        """Layers whose given experts are forced; None if none are given."""
        return RouteLayers(self._layers, self._chosen) if self.given else None

    def _reset(self) -> None:
        self._forced = self._takes = self._real = None
        self._choices, self._changed = 0, torch.zeros((), dtype=torch.int64)
        self._inputs = self._known_inputs = 0

    def begin_batch(self, tokens: int, routes: GivenRoutes | None = None) -> None:
        """Begin a batch with this number of tokens.

        Args:
            routes: experts that the generators chose; they count for the kind "behaviour" only.

        Raises:
            RoutesUnknown: the experts are not those of this model.
        """
        self._reset()
        self._recording = not self.given
        self._table = np.zeros((tokens, len(self._routers), self._chosen), dtype=self._dtype)
        self._known = np.zeros(tokens, dtype=np.bool_)
        if self.given and routes is not None:
            self._table[routes.token] = self._fitting(routes)
            self._known[routes.token] = True

    def _fitting(self, routes: GivenRoutes) -> NDArray[Any]:
        """Return given experts by token and router, [n, routers, K]."""
        width, layers = len(routes.experts) // len(routes.token), max(self._layers) + 1
        if width % self._chosen or width < layers * self._chosen:
            raise RoutesUnknown(
                f"a generator sent {width} experts for a token, and this model needs {self._chosen} for each of at "
                f"least {layers} layers; give generators and learner one model"
            )
        rows = routes.experts.reshape(len(routes.token), -1, self._chosen)[:, self._layers]
        for index, router in enumerate(self._routers):
            if int(rows[:, index].max()) >= router.experts:
                raise RoutesUnknown(
                    f"a generator sent expert {rows[:, index].max()} of {router.name}, which has {router.experts}; "
                    "give generators and learner one model"
                )
        return rows

    def force_next_pass(self, micro_batch: Routed, device: torch.device) -> None:
        """Let the next pass, over this micro-batch, compute with the experts that are known, if there are any."""
        if self._table is None or self._recording:
            return
        place, token = micro_batch.input_place, micro_batch.input_token
        known = self._known[token]
        # Recorded padding goes through the first experts: nothing reads what comes out.
        routes = np.empty((micro_batch.token_ids.size, len(self._routers), self._chosen), dtype=np.int64)
        routes[:] = np.arange(self._chosen)
        routes[place[known]] = self._table[token[known]]
        real, takes = np.unique(place[known]), np.full(len(routes), not self.given)
        takes[real] = True
        self._inputs += len(np.unique(place))
        self._known_inputs += len(real)
        if not len(real):
            self._forced = None
            return
        self._forced = torch.from_numpy(np.ascontiguousarray(routes.transpose(1, 0, 2))).to(device)
        self._takes = None if takes.all() else torch.from_numpy(takes[:, None]).to(device)
        self._real = torch.from_numpy(real).to(device)

    def record_pass(self, micro_batch: Routed) -> None:
        """Note the experts of the pass that has just been made, if they are recorded now."""
        if self._table is not None and self._recording:
            taken = torch.stack([self._seen[index] for index in range(len(self._routers))], dim=1)
            self._table[micro_batch.input_token] = taken.cpu().numpy()[micro_batch.input_place]
            self._known[micro_batch.input_token] = True
            self._seen = {}

    def end_recording(
        self, over_ranks: Callable[[Tensor], Tensor] | None = None, *, rank: int = 0, ranks: int = 1
    ) -> None:
        """End the recording, if there is one; later passes compute with what was recorded.

        Args:
            over_ranks: function that sums a tensor over ranks, if a rank may be forced to what another one recorded.
            rank: this rank.
            ranks: number of ranks.
        """
        assert self._table is not None
        if not self._recording:
            return
        if over_ranks is not None:
            # Branches of one trajectory may be on several ranks, which then recorded the turns that they share.
            known = torch.zeros((ranks, len(self._known)), dtype=torch.uint8)
            known[rank] = torch.from_numpy(self._known)
            known = over_ranks(known)
            self._table[known.numpy().argmax(axis=0) != rank] = 0
            self._table = over_ranks(torch.from_numpy(self._table)).numpy()
            self._known = known.numpy().max(axis=0).astype(np.bool_)
        self._recording = False

    def end_batch(self) -> Tensor:
        """Forget the batch. Return counts, float64 [4].

        They are: forced choices; those of them that the routers would not make now; input tokens whose experts the
        generators have told; input tokens. The last two are 0 for the kind "proximal".
        """
        counts = [
            self._choices,
            int(self._changed),
            self.given * self._known_inputs,
            self.given * self._inputs,
        ]
        self._table = None
        self._reset()
        return torch.tensor(counts, dtype=torch.float64)

    def _force_after(self, index: int, router: Router) -> Callable[..., Any]:
        def after(_module: nn.Module, _inputs: Any, answer: Any) -> Any:
            logits, weights, own = router.places.read_from(answer)
            if self._recording:
                self._seen[index] = own
            if self._forced is None or self._real is None:
                return None
            routes = self._forced[index]
            stays = (own[self._real, :, None] == routes[self._real, None, :]).any(dim=1)
            self._choices += stays.numel()
            # The sum stays on the device, which would otherwise be waited for in every layer.
            self._changed = self._changed.to(stays.device) + (~stays).sum()
            anew, experts = router.weigh(logits, routes).to(weights.dtype), routes.to(own.dtype)
            if self._takes is not None:
                anew, experts = (
                    torch.where(self._takes, anew, weights),
                    torch.where(self._takes, experts, own),
                )
            forced = list(answer)
            forced[router.places.weights], forced[router.places.chosen] = anew, experts
            return tuple(forced)

        return after


def _layers(routers: list[Router]) -> list[int]:
    """Return the number of each router's layer in the whole model, as generators count them.

    Raises:
        RoutesUnknown: a name does not tell, or two routers have one layer.
    """
    layers = [router.layer for router in routers]
    told = [layer for layer in layers if layer is not None]
    if (
        len(told) < len(layers)
        or len(set(told)) < len(told)
        or len({router.chosen for router in routers}) > 1
    ):
        raise RoutesUnknown(
            'learner.algorithm.routes is "behaviour", but the names of the routers '
            f"({', '.join(router.name for router in routers[:3])}, ...) do not tell which layer of the generator's "
            'model each one is; set it to "proximal"'
        )
    return told

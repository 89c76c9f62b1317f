"""Routing replay: the policy is trained with experts that were chosen earlier.

In a mixture of experts each token goes through a few experts of each layer. A small change of the weights may choose
others, and then the ratio current / proximal of the token jumps. Two kinds of experts can be replayed
(arXiv:2512.01374): those that the proximal policy chooses (R2, "vanilla routing replay"), or those that the generator
chose when it sampled (R3, "rollout routing replay", arXiv:2510.11370). Their weights are computed anew, see
`learner.algorithms.routes`, so gradient still reaches the routers.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learner.errors import RoutesUnknown
from learner.model.routers import Router, find_routers
from learner.trajectory import RouteLayers
from protocol.arrays import Experts, Int64s

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


class RouteReplay:
    """The experts that were chosen for each token of a batch, and the hooks that make the model choose them again.

    Call `begin` before the first pass over a batch, `seal` behind those that may be recorded, and `end` when the batch
    is done. Call `prepare` before every pass of the model, and `record` after it. From `prepare` on until the next one,
    the model computes with the experts that are known, also when gradient checkpointing computes a layer again. A token
    whose experts are not known goes through those that the routers choose now.

    Where DeepSpeed has cut the model, making this is a collective call.

    Args:
        lm: a causal language model of transformers, where it computes.
        kind: whose experts are replayed. "proximal": those of the passes between `begin` and `seal`; "behaviour": those
            that `begin` is given.

    Raises:
        RoutesUnknown: the model has no routers, they do not weigh experts as `replayed_weights` can, or nobody can tell
            which layer of the generator's model each one is.
    """

    def __init__(self, lm: Any, kind: Literal["proximal", "behaviour"] = "proximal") -> None:
        self._routers = find_routers(lm)
        for index, router in enumerate(self._routers):
            router.module.register_forward_hook(self._hook(index, router))
        self.given = kind == "behaviour"
        """Whether the experts are those of the generators."""
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
        """Layers whose given experts are replayed; None if none are given."""
        return RouteLayers(self._layers, self._chosen) if self.given else None

    def _reset(self) -> None:
        self._forced = self._takes = self._real = None
        self._replayed, self._changed = 0, torch.zeros((), dtype=torch.int64)
        self._inputs = self._known_inputs = 0

    def begin(self, tokens: int, routes: GivenRoutes | None = None) -> None:
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

    def prepare(self, micro_batch: Routed, device: torch.device) -> None:
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
        """End the recording, if there is one; later passes compute with what was recorded.

        Args:
            over_ranks: function that sums a tensor over ranks, if a rank may replay what another one recorded.
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

    def end(self) -> Tensor:
        """Forget the batch. Return counts, float64 [4].

        They are: replayed choices; those of them that the routers would not make now; input tokens whose experts the
        generators have told; input tokens. The last two are 0 for the kind "proximal".
        """
        counts = [
            self._replayed,
            int(self._changed),
            self.given * self._known_inputs,
            self.given * self._inputs,
        ]
        self._table = None
        self._reset()
        return torch.tensor(counts, dtype=torch.float64)

    def _hook(self, index: int, router: Router) -> Callable[..., Any]:
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
            anew, experts = router.weigh(logits, routes).to(weights.dtype), routes.to(own.dtype)
            if self._takes is not None:
                anew, experts = (
                    torch.where(self._takes, anew, weights),
                    torch.where(self._takes, experts, own),
                )
            replayed = list(answer)
            replayed[router.places.weights], replayed[router.places.chosen] = anew, experts
            return tuple(replayed)

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

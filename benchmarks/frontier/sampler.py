"""A plain sampler of tiny Qwen3 models: all rows of a batch go forward one token at a time.

It computes what vLLM computes for these models, from the tensors that the learner publishes. For models of some
100,000 parameters it is faster, because nothing is scheduled and nothing leaves the process.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    tied: bool

    @classmethod
    def of_folder(cls, folder: Path) -> "Shape":
        """Read the sizes from a model folder.

        Raises:
            ValueError: the model is not a Qwen3, which is all that is computed here.
        """
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] != "qwen3":
            raise ValueError(
                f"{folder} has model_type {config['model_type']!r}; the plain sampler computes qwen3"
            )
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            eps=config["rms_norm_eps"],
            theta=config.get("rope_theta") or config["rope_parameters"]["rope_theta"],
            tied=config["tie_word_embeddings"],
        )


class Layer(NamedTuple):
    """Weights of one layer, those of one input side by side."""

    before_attention: Tensor
    qkv: Tensor
    query_norm: Tensor
    key_norm: Tensor
    out: Tensor
    before_mlp: Tensor
    gate_up: Tensor
    down: Tensor


class PlainModel:
    """One version of the weights.

    Args:
        shape: sizes of the model.
        weights: tensors by their name in the model's folder. They are copied.
        positions: longest row, in tokens.
    """

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor], positions: int) -> None:
        self.shape, self._positions = shape, positions
        self._embedding = weights["model.embed_tokens.weight"].clone()
        head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
        self._head = weights[head].clone()
        self._norm = weights["model.norm.weight"].clone()
        self._layers = [self._layer(weights, f"model.layers.{i}.") for i in range(shape.layers)]
        half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(positions), shape.theta**-half)
        angles = torch.cat([angles, angles], dim=1)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._places = torch.arange(positions)

    @staticmethod
    def _layer(weights: Mapping[str, Tensor], name: str) -> Layer:
        def of(*parts: str) -> Tensor:
            return torch.cat([weights[f"{name}{part}.weight"] for part in parts]).clone()

        return Layer(
            of("input_layernorm"),
            of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            of("self_attn.q_norm"),
            of("self_attn.k_norm"),
            of("self_attn.o_proj"),
            of("post_attention_layernorm"),
            of("mlp.gate_proj", "mlp.up_proj"),
            of("mlp.down_proj"),
        )

    def cache(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Return empty keys and values, [rows, heads, positions, head_dim] for each layer."""
        size = (rows, self.shape.kv_heads, self._positions, self.shape.head_dim)
        return [(torch.zeros(size), torch.zeros(size)) for _ in self._layers]

    def step(self, token: Tensor, at: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the logits [B, V] behind one more token of each row, and put it into the cache.

        Args:
            token: [B] int64.
            at: [B] int64, place of the token in its row.
        """
        shape, rows = self.shape, torch.arange(len(token))
        query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        state = self._embedding[token]
        cos, sin = self._cos[at][:, None], self._sin[at][:, None]
        behind = (self._places > at[:, None])[:, None, None]
        for layer, (keys, values) in zip(self._layers, cache, strict=True):
            inputs = rms_norm(state, (shape.hidden,), layer.before_attention, shape.eps) @ layer.qkv.T
            query, key, value = torch.split(inputs, [query_width, kv_width, kv_width], dim=1)
            query = self._turned(query.view(len(token), shape.heads, -1), layer.query_norm, cos, sin)
            key = self._turned(key.view(len(token), shape.kv_heads, -1), layer.key_norm, cos, sin)
            keys[rows, :, at] = key
            values[rows, :, at] = value.view(len(token), shape.kv_heads, -1)
            query = query.view(len(token), shape.kv_heads, -1, shape.head_dim)
            scores = query @ keys.transpose(2, 3) * shape.head_dim**-0.5
            attended = scores.masked_fill(behind, -torch.inf).softmax(-1) @ values
            state = state + attended.reshape(len(token), query_width) @ layer.out.T
            inputs = rms_norm(state, (shape.hidden,), layer.before_mlp, shape.eps) @ layer.gate_up.T
            gate, up = inputs.chunk(2, dim=1)
            state = state + (silu(gate) * up) @ layer.down.T
        return rms_norm(state, (shape.hidden,), self._norm, shape.eps) @ self._head.T

    def _turned(self, x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normalise queries or keys [B, H, D] and turn them by their position."""
        x = rms_norm(x, (self.shape.head_dim,), norm, self.shape.eps)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin


def drawn(logp: Tensor, uniform: Tensor) -> Tensor:
    """Return a token [B] of each row's distribution, by the inverse of its cumulative probabilities.

    Args:
        logp: [B, V], normalised.
        uniform: [B, 1], in [0, 1).

    Example:
        >>> drawn(torch.tensor([[0.25, 0.75]]).log().expand(3, 2), torch.tensor([[0.2], [0.3], [0.99]]))
        tensor([0, 1, 1])
    """
    summed = logp.exp().cumsum(1)
    # The sum may end a little beside 1.
    return torch.searchsorted(summed, uniform * summed[:, -1:], right=True)[:, 0].clamp_(
        max=logp.shape[1] - 1
    )

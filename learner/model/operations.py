"""Floating-point operations of a policy for a token, by which its speed is compared with that of its device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which the configurations of mixtures have the number of a layer's experts."""


@dataclass(frozen=True)
class TokenOperations:
    """What a forward and a backward pass over one token take."""

    weights: float
    """Parameters that a token is multiplied with: of experts those that it goes through, and no table of inputs."""
    trained: float
    """Those of them that are trained."""
    attention: int
    """Layers x heads x width of a head."""

    def of(self, tokens: int, mean_length: float) -> float:
        r"""Return the operations of both passes over tokens of one batch, without what is computed twice.

        .. math:: (4 N + 2 N_\text{trained}) \cdot \text{tokens}
                  + 6 \cdot \text{layers} \cdot \text{heads} \cdot d_h \cdot \bar{L} \cdot \text{tokens}

        (PaLM, arXiv:2204.02311, appendix B, with half of its attention, because it is causal. Its 6 N are 2 N forward,
        2 N for the gradient of the inputs, and 2 N for that of the weights.)

        Args:
            mean_length: length of the row in which a token is, on average over the tokens; see `mean_length`.

        Example:
            >>> TokenOperations(weights=100, trained=100, attention=8).of(tokens=6, mean_length=6.0)
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

"""Operations of a token, counted by torch itself over both passes of tiny models."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from learner.update.report import mean_length, token_operations
from tests.integration.learner.tiny_mixture import tiny_mixture
from tests.integration.learner.tiny_qwen3 import tiny_model

ROWS, LENGTH = 2, 16


def counted(model):
    """Return the operations that torch counts for both passes; it counts attention if that is made of products."""
    model.set_attn_implementation("eager")
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % model.config.vocab_size
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model_takes_six_operations_for_each_weight(tied):
    model = tiny_model(tied=tied, seed=0)
    operations = token_operations(model)
    tokens = ROWS * LENGTH
    # Torch counts all pairs of positions, which are twice what causal attention needs. Norms are no products.
    products = 6 * sum(p.numel() for p in model.parameters() if p.ndim == 2) * tokens
    if not tied:
        products -= 6 * model.get_input_embeddings().weight.numel() * tokens
    attention = 2 * 6 * operations.attention * LENGTH * tokens
    assert counted(model) == pytest.approx(products + attention, rel=0.02)
    found = operations.for_tokens(tokens, mean_length([LENGTH] * ROWS))
    assert found == pytest.approx(products + attention / 2, rel=0.02)


def test_only_the_experts_that_a_token_goes_through_count():
    model = tiny_mixture(seed=0)
    config = model.config
    dense = {name: p for name, p in model.named_parameters() if ".experts." not in name}
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    expected = (
        sum(p.numel() for p in dense.values()) + experts * config.num_experts_per_tok / config.num_experts
    )
    if not config.tie_word_embeddings:
        expected -= model.get_input_embeddings().weight.numel()
    assert token_operations(model).weights == pytest.approx(expected)


def test_frozen_weights_have_no_gradient_of_their_own():
    model = tiny_model(tied=True, seed=0)
    whole = token_operations(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = token_operations(model)
    assert (frozen.weights, frozen.trained) == (whole.weights, 0)
    assert frozen.for_tokens(10, 0.0) == pytest.approx(whole.for_tokens(10, 0.0) * 4 / 6)


def test_a_model_that_does_not_tell_its_heads_is_not_counted():
    model, silent = tiny_model(tied=True, seed=0), SimpleNamespace(num_hidden_layers=2, hidden_size=8)
    model.config = SimpleNamespace(get_text_config=lambda: silent)
    assert token_operations(model) is None

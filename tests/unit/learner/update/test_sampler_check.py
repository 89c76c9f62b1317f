"""The learner's log-probabilities against the generators' before anything is learned."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from learner.errors import SamplerDiffers
from learner.update.policy import without_dropout
from learner.update.report import LEAST_TOKENS, ROUNDING, check_sampler, limit_of, sampler_gap

N = 24


@pytest.fixture
def two():
    return [
        SimpleNamespace(trajectory_id=name, token_ids=np.arange(n)) for name, n in (("g.0", 10), ("g.1", 20))
    ]


def gap_of(trajectories, difference, token=None):
    token = np.arange(N) if token is None else token
    logp = np.full(len(token), -2.0, dtype=np.float32)
    return sampler_gap(
        trajectories, token, learner=logp + np.asarray(difference, dtype=np.float32), generator=logp
    )


def test_the_worst_token_is_named(two):
    difference = np.zeros(N)
    difference[13] = -0.5
    gap = gap_of(two, difference)
    assert (gap.tokens, gap.worst) == (N, 0.5)
    assert gap.mean == pytest.approx(0.5 / N)
    assert gap.where == "token 3 (id 3) of g.1"
    assert (gap.learner, gap.generator) == (-2.5, -2.0)


def test_few_tokens_say_nothing(two):
    few = np.arange(LEAST_TOKENS - 1)
    assert gap_of(two, np.full(len(few), 9.0), few) is None


def test_a_gap_within_rounding_passes_and_a_larger_one_is_refused(two):
    limit = limit_of("auto", "float32", "float32")
    check_sampler(gap_of(two, np.full(N, 0.9 * limit)), limit)
    with pytest.raises(
        SamplerDiffers, match=r"over 24 tokens .* token 0 \(id 0\) of g\.0: .*learner\.sampler_gap"
    ):
        check_sampler(gap_of(two, np.full(N, 1.1 * limit)), limit)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_at_every_limit(two, bad):
    difference = np.zeros(N)
    difference[0] = bad
    with pytest.raises(SamplerDiffers):
        check_sampler(gap_of(two, difference), 1e6)


def test_the_coarser_float_type_decides():
    assert (
        limit_of("auto", "bfloat16", "float32")
        == limit_of("auto", "float32", "bfloat16")
        == ROUNDING["bfloat16"]
    )
    assert limit_of("auto", "float32", "float32") == ROUNDING["float32"]
    assert limit_of(0.25, "float32", "float32") == 0.25


def test_a_cap_on_the_scores_of_attention_is_computed(tmp_path):
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "gemma2", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32, attn_logit_softcapping=1.0, initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    ids = torch.randint(3, 64, (1, 48))

    def logp(model):
        with torch.no_grad():
            return torch.log_softmax(model.eval()(ids).logits, -1)[0, :-1].gather(1, ids[0, 1:, None])

    ours = logp(without_dropout(str(tmp_path), torch.float32, None))
    eager = logp(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"))
    # torch's own attention has no such cap. Newer versions of transformers refuse it for this model.
    capless = logp(AutoModelForCausalLM.from_pretrained(tmp_path, attn_logit_softcapping=None))
    assert torch.equal(ours, eager)
    assert (ours - capless).abs().mean() > ROUNDING["float32"], "the comparison would find it"

"""Log-probabilities and entropies of chosen targets are exact for any padding, chunks and temperature."""

import copy

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PhimoeConfig, PhimoeForCausalLM

from learner.errors import NoisyModel
from learner.update import target_logp as chunks_file
from learner.update.micro_batches import make_micro_batches
from learner.update.policy import PolicyModule, is_noisy, load_policy
from learner.update.target_logp import logits_after_head
from tests.integration.learner.tiny_qwen3 import VOCAB, tiny_model
from tests.trajectories import batch_of, make_batch_of_groups

TRAJECTORIES = make_batch_of_groups(2, 3)


@pytest.fixture(scope="module")
def lm():
    return tiny_model(tied=True, seed=1)


def run(module, *, budget=10_000, temperature=1.0, entropy_gradient=False):
    """Return the log-probability and entropy of every trained token of TRAJECTORIES, in their order."""
    batch = batch_of(TRAJECTORIES)
    logps = torch.zeros(int(batch.loss_mask.sum()))
    entropies = torch.zeros_like(logps)
    members = np.arange(len(TRAJECTORIES))
    for m in make_micro_batches(batch, members, aggregation="token_mean", budget=budget):
        tau = torch.full((len(m.target),), temperature)
        inputs = [torch.from_numpy(a) for a in (m.token_ids, m.position, m.target)]
        logp, entropy, _ = module(*inputs, tau, entropy_gradient)
        logps = logps.index_put((torch.from_numpy(m.token),), logp)
        entropies = entropies.index_put((torch.from_numpy(m.token),), entropy)
    return logps, entropies


@torch.no_grad()
def one_by_one(lm, temperature=1.0):
    """Return the log-probabilities and entropies from full logits, one trajectory at a time."""
    logps, entropies = [], []
    for t in TRAJECTORIES:
        ids = torch.from_numpy(t.token_ids).long()[None]
        rows = (lm(input_ids=ids).logits[0, :-1].double() / temperature).log_softmax(-1)
        rows = rows[torch.from_numpy(t.action_mask[1:])]
        chosen = ids[0, 1:][torch.from_numpy(t.action_mask[1:])]
        logps.append(rows.gather(1, chosen[:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
    return torch.cat(logps).float(), torch.cat(entropies).float()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("budget", [16, 10_000])
@pytest.mark.parametrize("known_head", [True, False])
def test_equal_to_one_trajectory_at_a_time(lm, temperature, budget, known_head):
    module = PolicyModule(lm, after_head=logits_after_head(lm) if known_head else None)
    with torch.no_grad():
        logps, entropies = run(module, budget=budget, temperature=temperature)
    expected_logps, expected_entropies = one_by_one(lm, temperature)
    torch.testing.assert_close(logps, expected_logps, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, expected_entropies, atol=2e-5, rtol=0)


def test_chunks_change_nothing(lm, monkeypatch):
    module = PolicyModule(lm, after_head=logits_after_head(lm))

    def gradients():
        lm.zero_grad()
        logps, entropies = run(module, entropy_gradient=True)
        (logps.sum() + entropies.sum()).backward()
        return logps.detach(), {name: p.grad.clone() for name, p in lm.named_parameters()}

    whole_logps, whole = gradients()
    monkeypatch.setattr(chunks_file, "CHUNK_ELEMENTS", 5 * VOCAB)
    chunked_logps, chunked = gradients()
    torch.testing.assert_close(chunked_logps, whole_logps)
    for name, gradient in whole.items():
        torch.testing.assert_close(chunked[name], gradient, msg=name, atol=1e-4, rtol=1e-4)


def test_entropy_carries_gradient_only_when_asked(lm):
    module = PolicyModule(lm, after_head=logits_after_head(lm))
    assert run(module, entropy_gradient=True)[1].requires_grad
    assert not run(module, entropy_gradient=False)[1].requires_grad


def test_what_follows_the_last_target_and_other_rows_do_not_matter(lm):
    """Padding is arbitrary: different token ids there give exactly equal numbers."""
    module = PolicyModule(lm, after_head=logits_after_head(lm))
    token_ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    other = torch.tensor([[1, 2, 3, 4], [5, 6, 40, 41]])
    position, target = torch.tensor([0, 2, 5]), torch.tensor([2, 9, 7])
    with torch.no_grad():
        first = module(token_ids, position, target, torch.ones(3))[0]
        second = module(other, position, target, torch.ones(3))[0]
    assert torch.equal(first, second)


class Altered(torch.nn.Module):
    """A model that alters its logits, and may say so in its config."""

    def __init__(self, lm, alter, **settings):
        super().__init__()
        self.inner, self.alter = lm, alter
        self.config = copy.deepcopy(lm.config)
        for name, value in settings.items():
            setattr(self.config, name, value)
        self.get_decoder, self.get_output_embeddings = lm.get_decoder, lm.get_output_embeddings

    def forward(self, **inputs):
        output = self.inner(**inputs)
        output.logits = self.alter(output.logits)
        return output


ALTERED = {
    "capped": (lambda z: (z / 3).tanh() * 3, {"final_logit_softcapping": 3.0}),
    "multiplied": (lambda z: z * 0.25, {"logit_scale": 0.25}),
    "divided": (lambda z: z / 8, {"logits_scaling": 8.0}),
}


@pytest.mark.parametrize("kind", ALTERED)
def test_logits_that_are_scaled_or_capped_are_formed_for_targets_only(lm, kind):
    alter, settings = ALTERED[kind]
    model = Altered(lm, alter, **settings)
    after_head = logits_after_head(model)
    assert after_head is not None
    with torch.no_grad():
        logps, entropies = run(PolicyModule(model, after_head=after_head))
    expected_logps, expected_entropies = one_by_one(model)
    torch.testing.assert_close(logps, expected_logps, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, expected_entropies, atol=2e-5, rtol=0)


def test_a_model_that_alters_its_logits_in_an_unknown_way_is_found_out(lm):
    assert logits_after_head(lm) is not None
    assert logits_after_head(Altered(lm, torch.tanh)) is None
    # The setting has no effect on the logits.
    assert logits_after_head(Altered(lm, lambda z: z, logit_scale=0.5)) is not None


def test_the_model_runs_once_to_find_out_what_it_does_to_its_logits(lm):
    passes = []
    handle = lm.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    assert logits_after_head(lm) is not None
    handle.remove()
    assert len(passes) == 1


def test_a_loaded_policy_knows_its_shortcuts_once_it_has_looked_for_them(tmp_path):
    tiny_model(tied=False, seed=0).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), dtype=torch.float32)
    assert (policy.after_head, policy.sharing) == (None, 0)
    policy.find_shortcuts()
    assert policy.after_head is not None
    assert policy.sharing == 128
    assert policy.lm.training


def test_dropout_is_off_after_loading(tmp_path):
    model = tiny_model(tied=False, seed=0)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), dtype=torch.float32)
    assert policy.training
    with torch.no_grad():
        first, second = run(policy)[0], run(policy)[0]
    assert torch.equal(first, second)


MIXTURE = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2,
}  # fmt: skip


def test_the_noise_of_routers_is_off_after_loading(tmp_path):
    torch.manual_seed(0)
    config = MixtralConfig(**MIXTURE, router_jitter_noise=0.5)
    lm = MixtralForCausalLM(config).float()
    assert is_noisy(lm)
    lm.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), dtype=torch.float32)
    policy.find_shortcuts()
    assert not is_noisy(policy.lm)


def test_a_model_that_draws_experts_while_it_trains_is_refused(tmp_path):
    """Phi-3.5-MoE draws among experts with nearly equal logits while it trains; here those within a half count."""
    torch.manual_seed(0)
    PhimoeForCausalLM(PhimoeConfig(**MIXTURE, router_jitter_noise=0.25)).float().save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), dtype=torch.float32)
    with pytest.raises(NoisyModel, match="PhimoeForCausalLM computes other numbers in training mode"):
        policy.find_shortcuts()

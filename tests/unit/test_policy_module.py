"""Log-probabilities and entropies of chosen targets: exact for any padding, chunks and temperature."""

import numpy as np
import pytest
import torch

from learner import policy as policy_file
from learner.batching import make_micro_batches
from learner.policy import PolicyModule, _has_plain_head, load_policy
from tests.integration.tiny_qwen3 import VOCAB, tiny_model
from tests.trajectories import batch_of, make_batch_of_groups

TRAJECTORIES = make_batch_of_groups(2, 3)


@pytest.fixture(scope="module")
def lm():
    return tiny_model(tied=True, seed=1)


def run(module, *, budget=10_000, temperature=1.0, entropy_gradient=False):
    """Log-probability and entropy of every trained token of TRAJECTORIES, in their order."""
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
    """The same from full logits, one trajectory at a time."""
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
@pytest.mark.parametrize("plain_head", [True, False])
def test_equal_to_one_trajectory_at_a_time(lm, temperature, budget, plain_head):
    module = PolicyModule(lm, plain_head=plain_head)
    with torch.no_grad():
        logps, entropies = run(module, budget=budget, temperature=temperature)
    expected_logps, expected_entropies = one_by_one(lm, temperature)
    torch.testing.assert_close(logps, expected_logps, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, expected_entropies, atol=2e-5, rtol=0)


def test_chunks_change_nothing(lm, monkeypatch):
    module = PolicyModule(lm, plain_head=True)

    def gradients():
        lm.zero_grad()
        logps, entropies = run(module, entropy_gradient=True)
        (logps.sum() + entropies.sum()).backward()
        return logps.detach(), {name: p.grad.clone() for name, p in lm.named_parameters()}

    whole_logps, whole = gradients()
    monkeypatch.setattr(policy_file, "CHUNK_ELEMENTS", 5 * VOCAB)
    chunked_logps, chunked = gradients()
    torch.testing.assert_close(chunked_logps, whole_logps)
    for name, gradient in whole.items():
        torch.testing.assert_close(chunked[name], gradient, msg=name, atol=1e-4, rtol=1e-4)


def test_entropy_carries_gradient_only_when_asked(lm):
    module = PolicyModule(lm, plain_head=True)
    assert run(module, entropy_gradient=True)[1].requires_grad
    assert not run(module, entropy_gradient=False)[1].requires_grad


def test_what_follows_the_last_target_and_other_rows_do_not_matter(lm):
    """Padding is arbitrary: other token ids there give the very same numbers."""
    module = PolicyModule(lm, plain_head=True)
    token_ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    other = torch.tensor([[1, 2, 3, 4], [5, 6, 40, 41]])
    position, target = torch.tensor([0, 2, 5]), torch.tensor([2, 9, 7])
    with torch.no_grad():
        first = module(token_ids, position, target, torch.ones(3))[0]
        second = module(other, position, target, torch.ones(3))[0]
    assert torch.equal(first, second)


def test_a_model_that_alters_its_logits_is_found_out(lm):
    assert _has_plain_head(lm)

    class Capped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.config = lm, lm.config
            self.get_decoder, self.get_output_embeddings = lm.get_decoder, lm.get_output_embeddings

        def forward(self, **inputs):
            output = self.inner(**inputs)
            output.logits = output.logits.tanh()
            return output

    assert not _has_plain_head(Capped())


def test_dropout_is_off_after_loading(tmp_path):
    model = tiny_model(tied=False, seed=0)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), dtype=torch.float32)
    assert policy.training
    with torch.no_grad():
        first, second = run(policy)[0], run(policy)[0]
    assert torch.equal(first, second)

"""Failures learn, in the real engine, from the average of the policy that has read a solved sibling."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from tests.trajectories import make_trajectory


@pytest.fixture
def start(model, engines):
    def make(lr=0.05, passes=1, **siblings):
        config = LearnerConfig.model_validate(
            {
                "algorithm": {"siblings": siblings, "passes": passes, "advantage": {"scale": "none"}},
                "optimizer": OptimizerConfig(lr=lr),
                "micro_batch_tokens": 40,
                "max_policy_lag": 4,
            }
        )
        engines.append(TrainingEngine(config, model=model, total_steps=100, seed=5))
        return engines[-1]

    return make


def group(name="g", returns=(0.0, 1.0, 0.0, 0.0)):
    return [
        make_trajectory(f"{name}.{n}", group=name, actions=3 + n, reward=r) for n, r in enumerate(returns)
    ]


@torch.no_grad()
def read_behind(lm, sibling, t):
    """Return log-probabilities and entropies of the answer of t behind the whole sibling."""
    ids = torch.from_numpy(np.concatenate([sibling.token_ids, t.token_ids]).astype(np.int64))[None]
    logp = lm(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    of = logp.gather(1, ids[0, 1:, None])[:, 0].numpy()
    entropy = -(logp.exp() * logp).sum(-1).numpy()
    answer = slice(len(sibling) + int(t.action_mask.argmax()) - 1, None)
    return of[answer], entropy[answer]


@torch.no_grad()
def plain(lm, t):
    ids = torch.from_numpy(t.token_ids.astype(np.int64))[None]
    logp = lm(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0].numpy()[int(t.action_mask.argmax()) - 1 :]


@pytest.mark.parametrize("passes", [1, 2])
def test_the_engine_reads_the_sibling_and_then_the_failure(start, model, passes):
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    own = [*group(), *group("h", (0.0, 0.0))]
    report = start(beta=1.0, limit=99.0, passes=passes).update(own, current_version=0)
    failures = [own[0], own[2], own[3]]
    read = [read_behind(lm, own[1], t) for t in failures]
    u = np.exp(-np.concatenate([entropy for _, entropy in read]))
    weights = np.split(u / u.mean(), np.cumsum([len(logp) for logp, _ in read])[:-1])
    expected = {
        id(t): w * (logp - plain(lm, t)) for t, w, (logp, _) in zip(failures, weights, read, strict=True)
    }
    found = np.zeros(sum(map(len, own)))
    found[report.tokens.place] = report.tokens.trained("advantage")
    for t, part in zip(own, np.split(found, np.cumsum([len(t) for t in own])[:-1]), strict=True):
        by_reward = t.return_ - 0.25 if t.group_id == "g" else 0.0
        wanted = expected.get(id(t), np.full(t.action_tokens, by_reward))
        np.testing.assert_allclose(part[t.action_mask], wanted, atol=1e-4)
    tokens = [t.action_tokens for t in own]
    share = (tokens[0] + tokens[2] + tokens[3]) / sum(tokens)
    assert report.metrics["learner/distilled_share"] == pytest.approx(share)


def weights_in(folder):
    (path,) = folder.rglob("average.safetensors")
    return load_file(path)


def test_the_average_follows_the_policy_and_a_run_goes_on_with_it(start, tmp_path):
    engine = start(average=0.25)
    before = {name: p.detach().clone() for name, p in engine.deepspeed.module.lm.named_parameters()}
    engine.update(group(), current_version=0)
    after = {name: p.detach().clone() for name, p in engine.deepspeed.module.lm.named_parameters()}
    engine.save(tmp_path, {"step": 1})
    kept = weights_in(tmp_path)
    moved = 0.0
    for name, average in kept.items():
        expected = 0.75 * before[name] + 0.25 * after[name]
        torch.testing.assert_close(average, expected)
        moved = max(moved, float((after[name] - before[name]).abs().max()))
    assert moved > 1e-3
    expected = engine.update(group(), current_version=0).metrics
    again = start(average=0.25)
    assert again.load(tmp_path) == {"step": 1}
    assert again.update(group(), current_version=0).metrics["learner/loss"] == expected["learner/loss"]

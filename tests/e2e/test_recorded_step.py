"""A learner step of the main job, recorded in a run with SmolLM2, equals the step of plain PyTorch with AdamW.

The episodes are real: vLLM sampled them for step 8 of `offbeat train smollm2`, and the broker's journal kept them. They
are trained by the model that the run began with, so that the weights current / behaviour are far from 1. The twin below
knows nothing of the learner: one sequence at a time through transformers, the objective written out, torch's AdamW.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.acts.episodes import load_job
from launch.model import prepare
from launch.run_file.load import load, run_files
from learner.retrain import RecordedBatches
from learner.update.engine import TrainingEngine

RECORDED = Path(__file__).parents[1] / "fixtures" / "steps" / "smollm2.job"


@pytest.fixture(scope="module")
def job():
    return load_job(RECORDED)


@pytest.fixture(scope="module")
def config():
    return load(run_files()["smollm2"])


def ours(config, model, step):
    """Return the weights after the learner's step on the recorded episodes, and these episodes."""
    settings = config.learner.model_copy(update={"filter_uniform_groups": False, "max_policy_lag": 10})
    batches = RecordedBatches(settings)
    batches.load(step.recorded())
    trajectories = [
        t for unit in batches.collect(step=step.step, version=step.version) for t in unit.trajectories
    ]
    engine = TrainingEngine(settings, model=model, total_steps=settings.steps, seed=config.run.seed)
    try:
        engine.update(trajectories, current_version=step.version)
        return {name: tensor.detach().clone() for name, tensor in engine.weights().tensors}, trajectories
    finally:
        engine.close()


def plain(model, trajectories, config):
    """Return the weights before and after one step of AdamW on the clipped, weighted policy gradient."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    optimizer = config.learner.optimizer
    adam = torch.optim.AdamW(
        policy.parameters(),
        lr=optimizer.lr / optimizer.warmup_steps,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
    groups = {}
    for t in trajectories:
        groups.setdefault(t.group_id, []).append(sum(r.value for r in t.rewards))
    tokens = sum(int(t.action_mask.sum()) for t in trajectories)
    for t in trajectories:
        returns = np.array(groups[t.group_id])
        advantage = (sum(r.value for r in t.rewards) - returns.mean()) / (returns.std() + 1e-6)
        ids = torch.from_numpy(t.token_ids.astype(np.int64))[None]
        logits = policy(ids).logits[0, :-1] / config.learner.sampling.temperature
        logp = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.from_numpy(t.action_mask[1:])
        ratio = (logp - torch.from_numpy(t.logp_behaviour[1:])).exp()
        objective = ratio.detach().clamp(max=2.0) * advantage * logp
        (-(objective * mask).sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), optimizer.max_grad_norm)
    adam.step()
    return before, dict(policy.named_parameters())


def test_a_recorded_step_equals_plain_pytorch(job, config):
    model = str(prepare(config))
    after, trajectories = ours(config, model, job.steps[0])
    assert {t.correct for t in trajectories} == {True, False}
    before, twin = plain(model, trajectories, config)
    dot = ours2 = twin2 = 0.0
    for name, start in before.items():
        a, b = (
            (after[name].double() - start.double()).flatten(),
            (twin[name].detach().double() - start).flatten(),
        )
        dot, ours2, twin2 = dot + float(a @ b), ours2 + float(a @ a), twin2 + float(b @ b)
    assert twin2 > 0
    assert dot / (ours2 * twin2) ** 0.5 > 0.999999
    assert (ours2 / twin2) ** 0.5 == pytest.approx(1, abs=1e-5)

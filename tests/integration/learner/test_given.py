"""Supervised training on given conversations, alone and beside reinforcement learning, against plain PyTorch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.given import Conversation, as_trajectory
from learner.settings.advantages import GroupAdvantage
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.given import GivenConfig
from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.settings.origins import OriginLoss
from learner.settings.surrogates import ShapedSurrogate
from learner.update.engine import TrainingEngine
from protocol.messages.episodes import Reward
from tests.integration.learner.published import assert_weights_close, weights_of
from tests.integration.learner.tiny_qwen3 import VOCAB
from tests.trajectories import make_batch_of_groups

# eps is far above a gradient's rounding error. With 1e-8, Adam would turn a rounding error into a step of lr.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, max_grad_norm=0.5, weight_decay=0.01)


@pytest.fixture
def start(model, engines):
    """Return a function that makes engines."""

    def make(*, coefficient=1.0, share=1.0, shaping=None, **settings):
        config = LearnerConfig(
            optimizer=OPTIMIZER,
            micro_batch_tokens=40,
            given=GivenConfig(coefficient=coefficient, share=share, shaping=shaping),
            **settings,
        )
        engines.append(TrainingEngine(config, model=model, total_steps=10, seed=5))
        return engines[-1]

    return make


def talks(count, seed=0):
    """Return conversations of unequal length with two answers each."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(count):
        learnt = np.repeat([False, True, False, True], [3, 2 + n % 4, 2, 1 + n % 3])
        ids = rng.integers(0, VOCAB, len(learnt)).astype(np.int32)
        made.append(as_trajectory(Conversation(f"talks.jsonl:{n}", ids, learnt), f"given-0.{n}"))
    return made


class PlainLoop:
    """The reference: the mean negative log-probability of the answers' tokens, one conversation at a time."""

    def __init__(self, model):
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.01
        )

    def loss(self, conversations):
        tokens = sum(int(t.action_mask.sum()) for t in conversations)
        total = torch.zeros(())
        for t in conversations:
            ids = torch.from_numpy(t.token_ids).long()[None]
            logp = self.lm(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            total = total - logp[torch.from_numpy(t.action_mask[1:])].sum()
        return total / tokens

    def step(self, conversations):
        self.optimizer.zero_grad()
        loss = self.loss(conversations)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.lm.parameters(), OPTIMIZER.max_grad_norm)
        self.optimizer.step()
        return loss.item(), float(norm)


@pytest.mark.parametrize("stage", [0, 2])
def test_supervised_steps_equal_a_plain_loop(start, model, stage):
    engine, plain, batch = start(zero_stage=stage), PlainLoop(model), talks(6)
    for version in range(3):
        report = engine.update(batch, current_version=version)
        loss, norm = plain.step(batch)
        assert report.applied
        assert report.metrics["learner/given_loss_nats"] == pytest.approx(loss, abs=1e-6)
        assert report.metrics["learner/gradient_norm"] == pytest.approx(norm, rel=1e-4)
        assert report.given_tokens == sum(int(t.action_mask.sum()) for t in batch)
        # Nothing was sampled: what was not measured has no number.
        assert report.metrics["learner/trained_tokens"] == 0
        sampled = {"learner/loss", "learner/entropy_nats", "learner/stale_token_fraction"}
        assert not sampled & set(report.metrics)
    assert_weights_close(
        weights_of(engine), {n: p.detach() for n, p in plain.lm.named_parameters()}, atol=1e-5
    )


def test_a_given_part_adds_its_loss_and_changes_nothing_of_the_other(start, model):
    own, given = make_batch_of_groups(2, 4), talks(5)
    moved = {}
    for name, batch in {"own": own, "given": given, "both": [*own, *given]}.items():
        engine = start(coefficient=0.5, share=0.5, algorithm=AlgorithmConfig())
        report = engine.update(batch, current_version=0)
        moved[name] = report.metrics
    assert moved["both"]["learner/loss"] == pytest.approx(moved["own"]["learner/loss"], abs=1e-6)
    assert moved["both"]["learner/given_loss_nats"] == pytest.approx(
        moved["given"]["learner/given_loss_nats"], abs=1e-6
    )
    assert moved["both"]["learner/stale_token_fraction"] == moved["own"]["learner/stale_token_fraction"]
    assert moved["both"]["learner/trained_tokens"] == moved["own"]["learner/trained_tokens"]
    loss, norm = PlainLoop(model).step(given)
    assert moved["given"]["learner/given_loss_nats"] == pytest.approx(loss, abs=1e-6)
    assert moved["given"]["learner/gradient_norm"] == pytest.approx(0.5 * norm, rel=1e-4)
    assert moved["both"]["learner/gradient_norm"] != pytest.approx(
        moved["own"]["learner/gradient_norm"], rel=1e-3
    )


def test_a_shaped_step_equals_a_plain_loop(start, model):
    engine, plain, batch = start(shaping=0.1), PlainLoop(model), talks(6)
    report = engine.update(batch, current_version=0)
    tokens = sum(int(t.action_mask.sum()) for t in batch)
    value = torch.zeros(())
    for t in batch:
        ids = torch.from_numpy(t.token_ids).long()[None]
        p = plain.lm(input_ids=ids).logits[0, :-1].softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        p = p[torch.from_numpy(t.action_mask[1:])]
        value = value + (p / (p + 0.1)).sum()
    (-value / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.lm.parameters(), OPTIMIZER.max_grad_norm)
    assert report.metrics["learner/gradient_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_a_step_with_taught_answers_equals_a_plain_loop(model, engines):
    """Own tokens go by the ratio, which is 1 here, and taught ones by p / (p + 0.1); all count alike in the mean."""
    plain = PlainLoop(model)
    own = [with_logp(plain.lm, t) for t in make_batch_of_groups(2, 4)]
    group = own[0].group_id
    taught = [
        replace(t, origin="taught", group_id=group, rewards=[Reward("score", 1, 1.0)]) for t in talks(2)
    ]
    rule = OriginLoss(origin="taught", surrogate=ShapedSurrogate(shaping=0.1), weight=2.0)
    algorithm = AlgorithmConfig(advantage=GroupAdvantage(scale="none"), by_origin=(rule,))
    config = LearnerConfig(optimizer=OPTIMIZER, micro_batch_tokens=40, algorithm=algorithm)
    engines.append(TrainingEngine(config, model=model, total_steps=10, seed=5))
    batch = [*own, *taught]
    report = engines[-1].update(batch, current_version=0)
    loss, tokens = torch.zeros(()), 0
    for t in batch:
        mean = np.mean([each.return_ for each in batch if each.group_id == t.group_id])
        logp = logp_of(plain.lm, t)[torch.from_numpy(t.action_mask[1:])]
        p = logp.exp()
        objective = 2.0 * p / (p + 0.1) if t.origin == "taught" else logp
        loss, tokens = loss - (t.return_ - mean) * objective.sum(), tokens + len(logp)
    (loss / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.lm.parameters(), OPTIMIZER.max_grad_norm)
    assert report.metrics["learner/gradient_norm"] == pytest.approx(float(norm), rel=1e-3)
    written = sum(int(t.action_mask.sum()) for t in taught)
    assert (report.taught_tokens, report.metrics["learner/taught_tokens"]) == (written, written)
    assert report.metrics["learner/trained_tokens"] == tokens
    # A teacher's tokens have no age, and no distance from a behaviour policy.
    assert len(report.histograms["policy_lag_versions"]) == tokens - written
    assert report.metrics["learner/kl_proximal_behaviour_nats"] == pytest.approx(0.0, abs=1e-6)


def test_the_likelihood_of_an_answer_is_the_mean_over_its_tokens(model, engines):
    engines.append(TrainingEngine(LearnerConfig(micro_batch_tokens=40), model=model, total_steps=10, seed=5))
    plain, batch = PlainLoop(model), talks(5)
    with torch.no_grad():
        expected = [float(logp_of(plain.lm, t)[torch.from_numpy(t.action_mask[1:])].mean()) for t in batch]
    assert engines[-1].mean_logp(batch) == pytest.approx(expected, abs=1e-5)


def logp_of(lm, t):
    ids = torch.from_numpy(t.token_ids).long()[None]
    return lm(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def with_logp(lm, t):
    """Return a trajectory whose behaviour policy is the model."""
    with torch.no_grad():
        logp = np.concatenate([[0.0], logp_of(lm, t).numpy()]) * t.action_mask
    return replace(t, logp_behaviour=logp.astype(np.float32))

"""Several passes over a batch, in several mini-batches each, on several ranks: scores belong to their tokens."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.settings.learner import LearnerConfig
from learner.update.engine import TrainingEngine
from tests.integration.learner.published import weights_of
from tests.integration.learner.start_ranks import run_two_ranks
from tests.integration.learner.two_ranks import OPTIMIZER, method_batches, method_settings
from tests.methods import COMPARED, METHODS, method

SEED = 5
STEPS = ("1x1", "1x2", "2x2", "3x2", "2x3")
"""Updates per batch x passes. From two of both on, a trajectory changes its rank between two passes."""
CASES = [
    *(f"1-float32-{name}+{steps}" for name in COMPARED for steps in STEPS),
    *(f"1-float32-{name}+2x2" for name in ("hapo", "group_level", "mix", "convex", "mdpo", "bapo", "r2vpo")),
    *(f"2-float32-{name}+2x2" for name in (*COMPARED, "hapo", "group_level")),
]


@pytest.fixture
def start(model, engines):
    """Return a function that makes engines of one rank."""

    def make(name):
        config = LearnerConfig(**method_settings(name, 1))
        engines.append(TrainingEngine(config, model=model, total_steps=10, seed=SEED))
        return engines[-1]

    return make


@pytest.fixture(scope="module")
def out(model, tmp_path_factory):
    """Return the folder with two ranks' results of all cases; one start serves all."""
    return run_two_ranks(model, tmp_path_factory.mktemp("out"), CASES, timeout_s=900)


def assert_close(found, expected):
    """Check that weights agree but for rounding. Scores counted twice moved them by 2e-3."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_over_several_passes(start, out, case):
    engine = start(case.split("-")[2])
    found = json.loads((out / case / "result.json").read_text())
    for batch, metrics in zip(method_batches(), found, strict=True):
        expected = engine.update(batch, current_version=2).metrics
        for key in ("learner/loss", "learner/correction_mean", "learner/clip_fraction"):
            assert metrics[key] == pytest.approx(expected[key], rel=2e-3, abs=2e-4), key
    assert_close(load_file(out / case / "trained.safetensors"), weights_of(engine))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", COMPARED)
def test_one_rank_equals_a_slow_twin(start, model, name, steps):
    engine, twin = start(f"{name}+{steps}"), SlowTwin(model, name, steps)
    for batch in method_batches():
        assert engine.update(batch, current_version=2).applied
        twin.update(batch)
    assert_close(weights_of(engine), twin.weights())


@pytest.mark.parametrize(("steps", "scoring"), [("1x1", 0), ("2x1", 1), ("2x2", 1), ("3x4", 1)])
def test_a_token_is_scored_once_whatever_the_number_of_passes(start, monkeypatch, steps, scoring):
    """Count the tokens of forward passes: one pass scores, and each pass of the update is one more."""
    engine, seen = start(f"dual_clip+{steps}"), []
    forward = engine.updater.forward
    monkeypatch.setattr(engine.updater, "forward", lambda m: seen.append(len(m.token)) or forward(m))
    batch = method_batches()[0]
    engine.update(batch, current_version=2)
    assert sum(seen) == (scoring + method(f"dual_clip+{steps}").passes) * sum(t.action_tokens for t in batch)


class SlowTwin:
    """The learner by loops over trajectories and tokens, from the formulas of HAPO and ReMix in docs/recipes.

    It has whole logits, one trajectory at a time, plain AdamW, and no ranks.
    """

    def __init__(self, model, name, steps):
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.base, self.predecessor = copy.deepcopy(self.lm), copy.deepcopy(self.lm)
        self.level = name.removeprefix("compared_")
        self.updates, self.passes = (int(n) for n in steps.split("x"))
        self.step = 0
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.0
        )

    def weights(self):
        return {name: p.detach() for name, p in self.lm.named_parameters()}

    def update(self, batch):
        before = copy.deepcopy(self.lm)
        with torch.no_grad():
            proximal = [policy(self.lm, t) for t in batch]
            base = [policy(self.base, t)[0] for t in batch]
            predecessor = [policy(self.predecessor, t)[0] for t in batch]
        signal = entropy_signals([entropy for _, entropy in proximal])
        weights = self.corrections(batch, [logp for logp, _ in proximal])
        advantages = group_advantages(batch)
        share = max(1 - 0.1 * self.step, 0.5)
        for pass_index in range(self.passes):
            order = np.random.default_rng([SEED, self.step, pass_index]).permutation(len(batch))
            for part in range(self.updates):
                members = order[part :: self.updates]
                total = sum(batch[i].action_tokens for i in members)
                self.optimizer.zero_grad()
                for i in members:
                    current, _ = policy(self.lm, batch[i])
                    ratio = (current - proximal[i][0]).exp()
                    for t in range(len(current)):
                        value = hapo(ratio[t], advantages[i], float(signal[i][t]))
                        kl = share * k3(current[t], base[i][t]) + (1 - share) * k3(
                            current[t], predecessor[i][t]
                        )
                        loss = (-weights[i][t] * value + 0.1 * kl) / total
                        loss.backward(retain_graph=True)
                torch.nn.utils.clip_grad_norm_(self.lm.parameters(), OPTIMIZER.max_grad_norm)
                self.optimizer.step()
        self.predecessor = before
        self.step += 1

    def corrections(self, batch, proximal):
        """Return min(2, geometric mean or product of proximal / behaviour), by trajectory and token."""
        logs = [
            (p - torch.from_numpy(t.logp_behaviour[t.action_mask])).tolist()
            for p, t in zip(proximal, batch, strict=True)
        ]
        result = []
        for i, t in enumerate(batch):
            row = []
            for own in logs[i]:
                if self.level == "token":
                    members = [own]
                elif self.level == "group":
                    members = [x for j, u in enumerate(batch) if u.group_id == t.group_id for x in logs[j]]
                else:
                    # These trajectories have one turn.
                    members = logs[i]
                size = 1 if self.level == "product" else len(members)
                row.append(min(2.0, math.exp(sum(members) / size)))
            result.append(row)
        return result


def policy(lm, t):
    """Return log-probabilities and entropies of the action tokens."""
    ids = torch.from_numpy(t.token_ids).long()[None]
    rows = lm(input_ids=ids).logits[0, :-1].log_softmax(-1)[torch.from_numpy(t.action_mask[1:])]
    targets = ids[0, 1:][torch.from_numpy(t.action_mask[1:])]
    return rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)


def entropy_signals(entropies):
    """Return h of each token: log entropy less its 0.8-quantile over the batch, scaled to [-1, 1]."""
    logs = [[math.log(max(e, 1e-8)) for e in row.tolist()] for row in entropies]
    everything = sorted(e for row in logs for e in row)
    centre = everything[round(0.8 * (len(everything) - 1))]
    top, bottom = everything[-1] - centre, centre - everything[0]
    return [[(e - centre) / (top if e > centre else bottom) for e in row] for row in logs]


def group_advantages(batch):
    result = []
    for t in batch:
        returns = [u.return_ for u in batch if u.group_id == t.group_id]
        result.append((t.return_ - np.mean(returns)) / (np.std(returns) + 1e-6))
    return result


def hapo(ratio, advantage, h):
    low, high = (0.2 * (1 - h), 0.28) if h <= 0 else (0.2, 0.28 * (1 + h))
    inside = 1 - low / 2 <= ratio.item() <= 1 + high / 2
    if (h > 0 and not inside) or (h <= 0 and inside):
        advantage *= 1 + h
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return value if advantage > 0 else value.clamp(min=10 * advantage)


def k3(current, other):
    return ((other - current).exp() - 1 - (other - current)).clamp(max=10)


def test_every_named_method_is_one_of_the_settings():
    assert not METHODS.keys() & COMPARED.keys()

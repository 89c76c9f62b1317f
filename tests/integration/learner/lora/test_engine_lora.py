"""Test the real engine with adapters, at every ZeRO stage, against plain PyTorch."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from learner.errors import CheckpointError, LoraError
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig, LoraConfig, OptimizerConfig
from learner.settings.surrogates import ClipSurrogate
from learner.update import ranks as zero
from learner.update.engine import TrainingEngine
from learner.update.lora import adapters, published_name
from learner.update.ranks import trained_weights
from protocol.weights.format import ADAPTER_DOWN, ADAPTER_UP, adapter_shapes
from tests.integration.learner.published import assert_weights_close, resumed, weights_of
from tests.integration.learner.tiny_qwen3 import save, tiny_model
from tests.methods import method
from tests.trajectories import make_batch_of_groups

STAGES = [0, 1, 2, 3]
# eps is far above a gradient's rounding error. With 1e-8, Adam would turn a rounding error into a step of lr.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-5, max_grad_norm=0.05, weight_decay=0.01)
LORA = LoraConfig(rank=4, alpha=6.0)


@pytest.fixture
def start(model, engines):
    """Return a function that makes engines."""

    def make(path=model, **settings):
        settings = {
            "algorithm": AlgorithmConfig(surrogate=ClipSurrogate()),
            "optimizer": OPTIMIZER,
            "micro_batch_tokens": 40,
            "max_policy_lag": 4,
            "lora": LORA,
        } | settings
        engines.append(TrainingEngine(LearnerConfig(**settings), model=path, total_steps=10, seed=5))
        return engines[-1]

    return make


def factors_of(engine):
    """Return the adapters: names in the module, and copies."""
    return {name: tensor.clone() for name, tensor in trained_weights(engine.deepspeed)}


def frozen_of(engine):
    """Return the weights below the adapters, under the names of the model without adapters."""
    import deepspeed

    lm = engine.deepspeed.module.lm
    named = [(name, p) for name, p in lm.named_parameters() if not p.requires_grad]
    with deepspeed.zero.GatheredParameters([p for _, p in named if hasattr(p, "ds_id")]):
        return {published_name(name): p.detach().clone() for name, p in named}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class Sum(torch.nn.Module):
    """W + scale · B A, as a parametrization of torch: no part of PEFT is in it."""

    def __init__(self, down, up, scale):
        super().__init__()
        self.down, self.up = torch.nn.Parameter(down), torch.nn.Parameter(up)
        self.scale = scale

    def forward(self, weight):
        return weight + self.scale * self.up @ self.down


class PlainTorch:
    """Reference for the engine: one trajectory at a time, full logits, no DeepSpeed, no PEFT.

    The factors begin with those of the engine, because A is random.
    """

    def __init__(self, model, factors, scale):
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
        self.sums = {}
        for name, down in factors.items():
            path, found, _ = name.partition(".lora_A.")
            if found:
                up = factors[name.replace(".lora_A.", ".lora_B.")]
                self.sums[path] = Sum(down.clone(), up.clone(), scale)
                parametrize.register_parametrization(
                    self.lm.get_submodule(path), "weight", self.sums[path], unsafe=True
                )
        self.trained = [p for s in self.sums.values() for p in (s.down, s.up)]
        assert {id(p) for p in self.lm.parameters() if p.requires_grad} == {id(p) for p in self.trained}
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.01
        )

    def step(self, trajectories, ceiling=2.0, low=0.2, high=0.28):
        total = sum(t.action_tokens for t in trajectories)
        self.optimizer.zero_grad()
        loss_sum = 0.0
        for t in trajectories:
            returns = np.array([u.return_ for u in trajectories if u.group_id == t.group_id])
            advantage = (t.return_ - returns.mean()) / (returns.std() + 1e-6)
            logp = log_probabilities(self.lm, t)
            behaviour = torch.from_numpy(t.logp_behaviour[t.action_mask])
            weight = (logp.detach() - behaviour).exp().clamp(max=ceiling)
            ratio = (logp - logp.detach()).exp()
            value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            loss = -(weight * value).sum() / total
            loss.backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, OPTIMIZER.max_grad_norm)
        self.optimizer.step()
        return loss_sum, float(norm)

    def factors(self):
        found = {}
        for path, s in self.sums.items():
            found[f"{path}.lora_A.default.weight"] = s.down.detach()
            found[f"{path}.lora_B.default.weight"] = s.up.detach()
        return found

    def weights(self, names):
        """Return the model's weights with the sums in place of the matrices."""
        layers = {f"{path}.weight": self.lm.get_submodule(path) for path in self.sums}
        return {
            name: (layers[name].weight if name in layers else self.lm.get_parameter(name)).detach()
            for name in names
        }


def log_probabilities(lm, t):
    """Return the log-probabilities of a trajectory's actions."""
    ids = torch.from_numpy(t.token_ids).long()[None]
    rows = lm(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, ids[0, 1:, None])[:, 0][torch.from_numpy(t.action_mask[1:])]


@pytest.mark.parametrize("stage", STAGES)
def test_two_steps_equal_plain_torch(start, model, stage):
    """Gradients are clipped, B begins at zero, and A gets a gradient from the second step on."""
    engine = start(zero_stage=stage)
    plain = PlainTorch(model, factors_of(engine), scale=1.5)
    trajectories = make_batch_of_groups(4, 4)
    for _ in range(2):
        report = engine.update(trajectories, current_version=0)
        loss, norm = plain.step(trajectories)
        assert report.applied
        assert report.metrics["learner/loss"] == pytest.approx(loss, abs=1e-5)
        assert report.metrics["learner/gradient_norm"] == pytest.approx(norm, rel=1e-4)
        assert norm > OPTIMIZER.max_grad_norm
    assert_weights_close(factors_of(engine), plain.factors(), atol=2e-5)
    found = weights_of(engine)
    assert_weights_close(found, plain.weights(found), atol=2e-5)
    assert_equal(frozen_of(engine), load_file(f"{model}/model.safetensors"))


@pytest.mark.parametrize("stage", STAGES)
def test_published_weights_are_those_of_the_model_before_the_first_step(start, model, stage):
    expected = load_file(f"{model}/model.safetensors")
    engine = start(zero_stage=stage)
    assert_equal(weights_of(engine), expected)
    assert engine.parameters.trained == 2 * 4 * (2 * 256 + 2 * 192 + 3 * 320)
    assert engine.parameters.whole == engine.parameters.trained + sum(t.numel() for t in expected.values())


def test_shards_are_gathered_with_their_adapters(start, monkeypatch):
    """By default ZeRO keeps tensors as small as these whole on every rank, and gathers many of them at a time."""
    whole = start(zero_stage=0)
    settings_of = zero.deepspeed_config

    def all_sharded(config, ranks):
        settings = settings_of(config, ranks)
        settings["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": 0,
        }
        return settings

    monkeypatch.setattr(zero, "deepspeed_config", all_sharded)
    monkeypatch.setattr(zero, "GATHER_BYTES", 50_000)
    sharded = start(zero_stage=3)
    for engine in (whole, sharded):
        for _ in range(2):
            assert engine.update(make_batch_of_groups(), current_version=0).applied
    assert all(p.numel() == 0 for p in sharded.deepspeed.module.lm.parameters())
    assert_weights_close(weights_of(sharded), weights_of(whole), atol=1e-5)
    assert_equal(frozen_of(sharded), frozen_of(whole))


def test_published_weights_compute_what_the_adapters_compute(start, model):
    engine = start()
    trajectories = make_batch_of_groups(2, 4)
    for _ in range(3):
        engine.update(trajectories, current_version=0)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain.load_state_dict(weights_of(engine), strict=False)
    moved = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm = engine.deepspeed.module.lm
    with torch.no_grad():
        for t in trajectories:
            expected = log_probabilities(lm, t)
            torch.testing.assert_close(log_probabilities(plain, t), expected, atol=2e-5, rtol=0)
            assert (log_probabilities(moved, t) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("stage", [1, 3])
def test_final_model_is_a_hugging_face_folder_without_adapters(start, tmp_path, stage):
    engine = start(zero_stage=stage)
    engine.update(make_batch_of_groups(), current_version=0)
    engine.save_pretrained(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    assert_equal(dict(loaded.named_parameters()), weights_of(engine))
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert not list((tmp_path / "final").glob("adapter_*"))


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16")]
)
def test_resume_is_bit_equal(start, tmp_path, stage, dtype):
    first, second = resumed(start, tmp_path, {"step": 1}, lr=1e-2, zero_stage=stage, dtype=dtype)
    assert_equal(factors_of(second), factors_of(first))
    assert_equal(weights_of(second), weights_of(first))


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_no_frozen_weight(start, tmp_path, stage):
    engine = start(zero_stage=stage, lora=LoraConfig(rank=1, targets=["v_proj"]))
    engine.update(make_batch_of_groups(), current_version=0)
    engine.save(tmp_path, {})
    trained = 12 * engine.parameters.trained
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    # The rest is states of random generators and names. All weights alone would be a megabyte.
    assert trained < size < trained + 150_000 < 4 * engine.parameters.whole


def test_a_checkpoint_is_refused_where_it_does_not_fit(start, model, tmp_path):
    start().save(tmp_path, {})
    with pytest.raises(
        CheckpointError, match=r"was written with .*rank 4, alpha 6, .*: none; resume with the former"
    ):
        start(lora=None).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank 4, alpha 6, .*; this run has: rank 4, alpha 8"):
        start(lora=LoraConfig(rank=4)).load(tmp_path)
    assert start().load(tmp_path) == {}
    other = tmp_path / "other"
    save(tiny_model(tied=True, seed=3), other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"holds adapters only, .* resume with the model that the run began with"
    ):
        start(str(other)).load(tmp_path)


def test_a_checkpoint_of_full_weights_is_refused(start, tmp_path):
    start(lora=None).save(tmp_path, {})
    with pytest.raises(CheckpointError, match=r"learner\.lora: none; this run has: rank 4"):
        start().load(tmp_path)


def test_a_rank_above_a_layer_is_refused_before_training(start):
    with pytest.raises(LoraError, match="rank is 65"):
        start(lora=LoraConfig(rank=65))


@pytest.mark.parametrize("stage", STAGES)
def test_nan_skips_the_step(start, stage):
    engine = start(zero_stage=stage)
    bad = make_batch_of_groups(4, 4)
    poisoned = bad[5].logp_behaviour.copy()
    poisoned[-1] = np.nan
    bad[5] = dataclasses.replace(bad[5], logp_behaviour=poisoned)
    before = factors_of(engine)
    report = engine.update(bad, current_version=0)
    assert (report.applied, report.nonfinite) == (False, True)
    assert_equal(factors_of(engine), before)
    assert all(math.isfinite(value) for value in report.metrics.values())


def test_rewarded_actions_become_likelier(start, model):
    trajectories = make_batch_of_groups(1, 4)
    engine = start(algorithm=AlgorithmConfig(corrections=()))
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.no_grad()
    def scores():
        lm.load_state_dict(weights_of(engine), strict=False)
        return np.array([log_probabilities(lm, t).mean().item() for t in trajectories])

    before = scores()
    for _ in range(5):
        assert engine.update(trajectories, current_version=0).applied
    gain = scores() - before
    returns = [t.return_ for t in trajectories]
    assert gain[np.argmax(returns)] > 0.05 > -0.05 > gain[np.argmin(returns)]


@pytest.mark.parametrize("setting", [{"gradient_checkpointing": True}, {"micro_batch_tokens": 100_000}])
@pytest.mark.parametrize("stage", [1, 3])
def test_how_it_is_computed_changes_nothing(start, stage, setting):
    trajectories = make_batch_of_groups()
    plain, other = start(zero_stage=stage), start(zero_stage=stage, **setting)
    for engine in (plain, other):
        for _ in range(2):
            engine.update(trajectories, current_version=0)
    assert_weights_close(factors_of(other), factors_of(plain), atol=1e-5)


def test_shared_beginnings_change_nothing(start):
    """The members of a group begin with one prompt, which is computed once for all of them."""
    trajectories = make_batch_of_groups(2, 4)
    for t in trajectories:
        first = next(u for u in trajectories if u.group_id == t.group_id)
        t.token_ids[: t.prompt_tokens] = first.token_ids[: t.prompt_tokens]
    shared, alone = start(share_prefixes=True), start(share_prefixes=False)
    for _ in range(2):
        fraction = shared.update(trajectories, current_version=0).metrics["learner/shared_fraction"]
        assert (
            alone.update(trajectories, current_version=0).metrics["learner/shared_fraction"] == 0 < fraction
        )
    assert_weights_close(factors_of(shared), factors_of(alone), atol=1e-5)


def test_the_reference_is_the_model_without_adapters(start, model):
    engine = start(algorithm=method("reference"))
    trajectories = make_batch_of_groups(1, 4)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for _ in range(2):
        assert engine.update(trajectories, current_version=0).applied
        for scores in scores_of(engine, trajectories):
            with torch.no_grad():
                expected = torch.cat([log_probabilities(lm, t) for t in trajectories])
            torch.testing.assert_close(scores.sort()[0], expected.sort()[0], atol=2e-5, rtol=0)


def scores_of(engine, trajectories):
    """Return the log-probabilities under each frozen policy."""
    updater, batch = engine.updater, engine._batch(trajectories, 0)
    micro_batches = updater._micro_batches(batch, np.arange(len(trajectories)))
    return [torch.cat(frozen.score(batch, micro_batches)) for frozen in updater.frozen.values()]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_predecessor_has_the_adapters_before_the_update(start, stage):
    """Merged weights would be rounded, and the penalty on the distance would see that."""
    engine = start(zero_stage=stage, algorithm=method("convex"))
    for _ in range(2):
        before = factors_of(engine)
        assert engine.update(make_batch_of_groups(), current_version=0).applied
        predecessor = dict(engine.updater.frozen["predecessor"]._module.lm.named_parameters())
        assert_equal({name: predecessor[name] for name in before}, before)


def test_a_reincarnation_makes_the_present_adapters_the_reference(start):
    algorithm = AlgorithmConfig.model_validate(
        {"kl": {"kind": "penalty", "coefficient": 0.1}, "reincarnation": {"step": 1}}
    )
    engine = start(algorithm=algorithm)
    engine.update(make_batch_of_groups(), current_version=0)
    expected = factors_of(engine)
    engine.update(make_batch_of_groups(), current_version=0)
    reference = dict(engine.updater.frozen["reference"]._module.lm.named_parameters())
    assert_equal({name: reference[name] for name in expected}, expected)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["value_head", "critic"])
def test_a_critic_is_trained_whole_beside_adapters(start, model, stage, name):
    engine = start(zero_stage=stage, algorithm=method(name))
    before = factors_of(engine)
    for _ in range(2):
        report = engine.update(make_batch_of_groups(), current_version=0)
        assert report.applied
    assert report.metrics["critic/value_mean"] != 0
    moved = factors_of(engine)
    assert all(not torch.equal(moved[n], tensor) for n, tensor in before.items())
    assert_equal(frozen_of(engine), load_file(f"{model}/model.safetensors"))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["convex", "value_head", "critic"])
def test_resume_restores_frozen_policies_and_critics(start, tmp_path, stage, name):
    settings = {"zero_stage": stage, "algorithm": method(name)}
    first, second = start(**settings), start(**settings)
    first.update(make_batch_of_groups(), current_version=0)
    first.save(tmp_path, {})
    second.update(make_batch_of_groups(2, 4), current_version=0)
    second.load(tmp_path)
    for engine in (first, second):
        engine.update(make_batch_of_groups(), current_version=0)
    assert_equal(factors_of(second), factors_of(first))
    if name == "convex":
        assert (tmp_path / "step00000002" / "predecessor.safetensors").stat().st_size < 100_000


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_alone_are_published_and_make_the_merged_weights(start, stage):
    engine = start(zero_stage=stage, lora=LORA.model_copy(update={"publish": "adapter"}))
    assert engine.update(make_batch_of_groups(2, 3), current_version=0).applied
    factors = factors_of(engine)
    published = weights_of(engine)
    frozen = frozen_of(engine)
    shapes = {name: ("F32", tuple(tensor.shape)) for name, tensor in frozen.items()}
    layers = [name.removesuffix(ADAPTER_DOWN) for name in published if name.endswith(ADAPTER_DOWN)]
    assert engine.weights().shapes == adapter_shapes(layers, shapes, 4, "F32")
    for path in layers:
        assert torch.equal(published[path + ADAPTER_DOWN], factors[f"{path}.lora_A.default.weight"])
        assert torch.equal(published[path + ADAPTER_UP], 1.5 * factors[f"{path}.lora_B.default.weight"])
    engine.config = engine.config.model_copy(update={"lora": LORA})
    merged = weights_of(engine)
    assert sum(t.nbytes for t in published.values()) < sum(t.nbytes for t in merged.values()) / 2
    for path in layers:
        expected = frozen[f"{path}.weight"] + published[path + ADAPTER_UP] @ published[path + ADAPTER_DOWN]
        torch.testing.assert_close(merged[f"{path}.weight"], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "layers.1.mlp.up_proj"]])
def test_an_export_has_the_adapters_beside_it_for_peft_and_vllm(start, model, tmp_path, targets):
    import peft

    engine = start(lora=LORA.model_copy(update={"targets": targets}))
    assert engine.update(make_batch_of_groups(2, 3), current_version=0).applied
    engine.save_pretrained(tmp_path / "out")
    folder = tmp_path / "out" / "adapter"
    assert sorted(path.name for path in folder.iterdir() if path.name != "README.md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    ids = torch.tensor([[3, 4, 5, 6]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain = base(ids).logits.detach().clone()
    adapted = peft.PeftModel.from_pretrained(base, str(folder))
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=0)
    assert (adapted(ids).logits - plain).abs().max() > 1e-4
    assert adapted.peft_config["default"].base_model_name_or_path == Path(model).name
    for file in (tmp_path / "out").rglob("*.json"):
        assert str(Path(model).parent) not in file.read_text(), (
            f"{file.name} tells where the base lay on this machine"
        )

    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=None)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    found = LoRAModel.from_local_checkpoint(str(folder), names, helper, lora_model_id=1, device="cpu")
    layers = {name for name in adapters(engine.deepspeed.module.lm)}
    assert {f"{path}.base_layer.weight" for path in found.loras} == layers
    assert helper.vllm_lora_scaling_factor == 1.5

"""Test that a mixture of experts is published under the names of its folder, at every ZeRO stage.

transformers keeps all experts of a layer in one tensor; folders and vLLM have a tensor for each expert.
"""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from protocol.weights.format import check_names
from tests.integration.learner.published import weights_of
from tests.integration.learner.tiny_mixture import save_mixture
from tests.trajectories import make_batch_of_groups


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_mixture(tmp_path_factory.mktemp("experts"), seed=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_versions_and_the_final_model_have_the_names_of_the_folder(model, tmp_path, stage):
    config = LearnerConfig(
        zero_stage=stage, optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=40, max_policy_lag=4
    )
    engine = TrainingEngine(config, model=str(model), total_steps=10, seed=0)
    try:
        first = load_file(model / "model.safetensors")
        check_names(engine.weights().shapes, model)
        same = weights_of(engine)
        assert {name: tensor.tolist() for name, tensor in same.items()} == {
            name: tensor.tolist() for name, tensor in first.items()
        }
        assert engine.update(make_batch_of_groups(4, 4), current_version=0).applied
        trained = weights_of(engine)
        moved = [name for name in first if not torch.equal(first[name], trained[name])]
        assert any(".experts." in name for name in moved)
        engine.save_pretrained(tmp_path / "out")
    finally:
        engine.close()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == first.keys()
    assert all(torch.equal(written[name], trained[name]) for name in written)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    fused = again["model.layers.0.mlp.experts.gate_up_proj"]
    gate = trained["model.layers.0.mlp.experts.1.gate_proj.weight"]
    assert torch.equal(fused[1, : gate.shape[0]], gate)

"""A teacher behind a real server of vLLM says of each token what a teacher in a folder says."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.model import make_tokenizer, save_tokenizer
from learner.settings.learner import LearnerConfig
from learner.update.engine import TrainingEngine
from learner.update.teacher import RemoteTeacher
from learner.warmstart import make_tiny_model
from tests.integration.vllm_server import serving
from tests.trajectories import batch_of, make_batch_of_groups

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KL = "learner/kl_proximal_teacher_nats"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the folders of a policy and of a teacher with the same tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    save_tokenizer(make_tokenizer(list("abcdefghij")), folder, max_length=512)
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    for seed, name in enumerate(("policy", "teacher")):
        make_tiny_model(folder / name, files, layers=2, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        with torch.no_grad():
            # Far from uniform, so that each token has a log-probability of its own.
            model.get_input_embeddings().weight.mul_(10.0)
        model.save_pretrained(folder / name)
    return folder / "policy", folder / "teacher"


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    with serving(models[1], log, "--served-model-name", "big") as url:
        yield f"{url}/v1"


def config(**teacher):
    return LearnerConfig.model_validate(
        {"algorithm": {"distillation": teacher}, "micro_batch_tokens": 400, "max_policy_lag": 4}
    )


def computed(folder, batch):
    """Return what transformers computes for each token of a batch."""
    lm, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for start, end in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[start:end].astype(np.int64))
        with torch.no_grad():
            logp = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found += [np.zeros(1), logp.numpy()]
    return np.concatenate(found)


def told(server, name, batch):
    """Return what a model of the server says of each token of a batch that has a target."""
    remote = RemoteTeacher(config(teacher=server, model=name).algorithm.distillation, torch.device("cpu"))
    return remote._of_places(batch, np.flatnonzero(batch.seen_mask))


def test_each_token_has_the_log_probability_that_the_teacher_itself_computes(models, server):
    batch = batch_of(make_batch_of_groups(3, 4))
    expected = computed(models[1], batch)
    assert np.ptp(expected) > 1.0
    np.testing.assert_allclose(told(server, "big", batch), expected, atol=2e-4)


def test_an_update_is_the_one_of_a_teacher_in_a_folder(models, server, engines):
    batch, metrics = make_batch_of_groups(3, 4), []
    for teacher in ({"teacher": str(models[1])}, {"teacher": server, "model": "big"}):
        engine = TrainingEngine(config(**teacher), model=str(models[0]), total_steps=10, seed=5)
        engines.append(engine)
        metrics.append(engine.update(batch, current_version=0).metrics)
    local, remote = metrics
    assert abs(local[KL]) > 0.1
    for name in (KL, "learner/loss", "learner/gradient_norm"):
        assert remote[name] == pytest.approx(local[name], rel=1e-3, abs=1e-5)

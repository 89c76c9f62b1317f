"""Test the estimate of a run's memory: sizes from the model's files, shares by role, what cannot fit."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.errors import ConfigError
from launch.preflight.memory import (
    ModelSize,
    estimate,
    estimate_beside_gpus,
    host_gb,
    model_size,
    shares,
    tokens_at_once,
    total_gb,
    version_bytes,
    versions_at_once,
)
from launch.run_file.load import check

SIZE = ModelSize(parameters=100_000_000, hidden=500, inner=1500, layers=10)


def config(**sections):
    data = {"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": {}, "generator": {}, "run": {}}
    return check({name: table | sections.get(name, {}) for name, table in data.items()}, "run.toml")


def test_the_sizes_come_from_the_models_files(tmp_path):
    assert model_size(tmp_path) is None
    shape = {"hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape}))
    assert model_size(tmp_path) is None, "no weights"
    save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "one.safetensors", {"format": "pt"})
    save_file({"b": np.zeros(5, np.float16), "c": np.zeros((), np.float32)}, tmp_path / "two.safetensors")
    assert model_size(tmp_path) == ModelSize(12 + 5 + 1, 8, 24, 2)
    (tmp_path / "two.safetensors").write_bytes(b"short")
    assert model_size(tmp_path) is None


def test_a_learner_holds_weights_state_versions_and_activations():
    plain = config(learner={"micro_batch_tokens": 1024})
    assert tokens_at_once(plain) == 1024
    by_role = {share.role: share for share in shares(plain, SIZE, tokens=1024)}
    # 21 bytes for each parameter, four versions of 4 bytes, and 1,024 * 10 layers * 4 * (8 * 500 + 4 * 1500) bytes.
    assert by_role["learner"].each_gb == pytest.approx(0.7 + 2.1 + 1.6 + 0.4096)
    assert by_role["generator"].each_gb == pytest.approx(1.6 + 2 * 0.4 + 128 * 2**20 / 1e9)
    assert shares(plain, SIZE, tokens=0)[0].each_gb == pytest.approx(0.7 + 2.1 + 1.6)


def test_more_ranks_share_the_optimizer_whose_state_is_float32_in_half_precision_too():
    one = config(learner={"zero_stage": 1})
    two = config(learner={"processes": 2})
    first, second = (shares(it, SIZE, tokens=0)[0] for it in (one, two))
    assert first.each_gb == pytest.approx(0.7 + 3.2 + 1.6)
    assert (second.processes, second.each_gb) == (2, pytest.approx(0.7 + 2.5 + 0.8))
    half = config(learner={"dtype": "bfloat16"}, generator={"dtype": "bfloat16"})
    assert shares(half, SIZE, tokens=0)[0].each_gb == pytest.approx(0.7 + 2.8 + 0.8)


def test_frozen_weights_have_no_gradients_and_no_optimizer():
    adapters = config(learner={"lora": {"rank": 4}})
    assert shares(adapters, SIZE, tokens=0)[0].each_gb == pytest.approx(0.7 + 0.4 + 1.6)
    with_reference = config(learner={"algorithm": {"kl": {"kind": "penalty"}}})
    assert shares(with_reference, SIZE, tokens=0)[0].each_gb == pytest.approx(0.7 + 2.1 + 0.4 + 1.6)


def test_a_server_of_others_takes_none_of_this_hosts_memory():
    there = config(generator={"backend": "http", "url": "http://h:1"})
    assert [share.role for share in shares(there, SIZE, tokens=0)] == ["learner", "actor", "broker"]


def test_what_cannot_fit_is_refused_and_what_may_not_fit_is_said():
    run = config(learner={"micro_batch_tokens": 8192})
    least = total_gb(shares(run, SIZE, tokens=0))
    with pytest.raises(ConfigError, match=rf"takes at least {least:.1f} GB.*this host has 2.0 GB"):
        estimate(run, SIZE, 2.0)
    assert "lower learner.micro_batch_tokens, which lets 8192 tokens" in estimate(run, SIZE, least + 1.0)
    fits = estimate(run, SIZE, 100.0)
    assert fits.startswith("memory: at most about ")
    assert "lower" not in fits


def test_the_memory_of_the_host_is_the_limit_of_its_container_if_there_is_one(tmp_path):
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    assert host_gb(meminfo, limit) is None
    meminfo.write_text("MemFree: 1 kB\nMemTotal:       8000000 kB\n")
    assert host_gb(meminfo, limit) == pytest.approx(8.192)
    limit.write_text("max\n")
    assert host_gb(meminfo, limit) == pytest.approx(8.192)
    limit.write_text("4000000000\n")
    assert host_gb(meminfo, limit) == pytest.approx(4.0)


def test_the_index_of_a_model_that_is_not_downloaded_tells_its_size(tmp_path):
    shape = {"hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 400}}))
    assert model_size(tmp_path) == ModelSize(200, 8, 24, 2)
    index.write_text(json.dumps({"metadata": {"total_size": 400, "total_parameters": 190}}))
    assert model_size(tmp_path) == ModelSize(190, 8, 24, 2)
    index.write_text(json.dumps({"metadata": []}))
    assert model_size(tmp_path) is None


def test_versions_in_shared_memory_are_those_kept_and_one_more():
    assert versions_at_once(config()) == 4
    assert versions_at_once(config(learner={"keep_versions": 2, "steps": 30, "publish_every": 10})) == 3
    assert versions_at_once(config(learner={"steps": 1})) == 1
    assert version_bytes(config(), SIZE) == 400_000_000
    assert version_bytes(config(learner={"publish_dtype": "bfloat16"}), SIZE) == 200_000_000


def test_beside_gpus_the_host_keeps_versions_and_loads_weights():
    run = config(learner={"dtype": "bfloat16", "processes": 2})
    said = estimate_beside_gpus(run, SIZE, 100.0)
    # Four versions of 0.2 GB; two ranks load 0.2 GB each; three processes on GPUs, two actors, a broker.
    assert said.startswith("memory: about 10.5 GB of memory beside the GPUs (policy versions 0.8 GB")
    assert "runs short" in estimate_beside_gpus(run, SIZE, 9.0)
    with pytest.raises(ConfigError, match=r"this host has 1\.0 GB; lower learner\.keep_versions"):
        estimate_beside_gpus(run, SIZE, 1.0)


def test_beside_gpus_the_host_keeps_the_weights_of_engines_that_sleep():
    run = config(run={"mode": "sync"}, generator={"dtype": "bfloat16", "sleep_in_updates": True, "count": 2})
    assert "weights of sleeping engines 0.4 GB, libraries" in estimate_beside_gpus(run, SIZE, 100.0)
    with pytest.raises(ConfigError, match=r"set generator\.sleep_in_updates to false"):
        estimate_beside_gpus(run, SIZE, 2.0)
    assert "sleeping" not in estimate_beside_gpus(config(), SIZE, 100.0)


def test_beside_gpus_the_host_keeps_an_offloaded_optimizer():
    plain = {"dtype": "bfloat16", "zero_stage": 2, "processes": 2}
    away = config(learner=plain | {"offload": "optimizer"})
    said = estimate_beside_gpus(away, SIZE, 100.0)
    # Two ranks share 20 bytes for each parameter. They load 0.2 GB each before that.
    assert "offloaded optimizer 2.0 GB" in said
    assert "offloaded" not in estimate_beside_gpus(config(learner=plain), SIZE, 100.0)
    with pytest.raises(ConfigError, match=r"leave out learner\.offload"):
        estimate_beside_gpus(away, SIZE, 2.5)
    assert "runs short" in estimate_beside_gpus(config(learner=plain), SIZE, 2.5)

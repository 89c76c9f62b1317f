"""Test the estimate of a run's memory: sizes from the model's files, shares by role, what cannot fit."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.errors import ConfigError
from launch.preflight.memory import ModelSize, estimate, host_gb, model_size, shares, tokens_at_once, total_gb
from launch.run_file.load import check

SIZE = ModelSize(parameters=100_000_000, hidden=500, inner=1500, layers=10)


def config(**sections):
    data = {"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": {}, "generator": {}}
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
    # 21 bytes for each parameter, two versions of 4 bytes, and 1,024 * 10 layers * 4 * (8 * 500 + 4 * 1500) bytes.
    assert by_role["learner"].each_gb == pytest.approx(0.7 + 2.1 + 0.8 + 0.4096)
    assert by_role["generator"].each_gb == pytest.approx(1.6 + 2 * 0.4 + 128 * 2**20 / 1e9)
    assert shares(plain, SIZE, tokens=0)[0].each_gb == pytest.approx(0.7 + 2.1 + 0.8)


def test_more_ranks_share_the_optimizer_and_half_precision_halves_the_state():
    one = config(learner={"zero_stage": 1})
    two = config(learner={"processes": 2})
    first, second = (shares(it, SIZE, tokens=0)[0] for it in (one, two))
    assert first.each_gb == pytest.approx(0.7 + 2.7 + 0.8)
    assert (second.processes, second.each_gb) == (2, pytest.approx(0.7 + 2.0 + 0.4))
    half = config(learner={"dtype": "bfloat16"}, generator={"dtype": "bfloat16"})
    assert shares(half, SIZE, tokens=0)[0].each_gb == pytest.approx(0.7 + 1.35 + 0.4)


def test_frozen_weights_have_no_gradients_and_no_optimizer():
    adapters = config(learner={"lora": {"rank": 4}})
    assert shares(adapters, SIZE, tokens=0)[0].each_gb == pytest.approx(0.7 + 0.4 + 0.8)
    with_reference = config(learner={"algorithm": {"kl": {"kind": "penalty"}}})
    assert shares(with_reference, SIZE, tokens=0)[0].each_gb == pytest.approx(0.7 + 2.1 + 0.4 + 0.8)


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

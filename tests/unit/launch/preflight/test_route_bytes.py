"""A run is refused whose groups could not be delivered with their experts, and hears of a queue that is too short."""

import pytest

from broker.core.records import StoredSegment, Unit
from launch.preflight.model_limits import token_bytes, too_many_experts
from launch.run_file.load import check

QWEN3_30B = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
MIXTRAL = {"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}


def config(tokens, *, size=16, batch=16, lag=0, **sections):
    learner = sections.pop("learner", {})
    algorithm = {"routes": "behaviour", **learner.pop("algorithm", {})}
    return check(
        {
            "model": {"path": "m"},
            "env": {"name": "calculator"},
            "generator": {"max_model_len": tokens},
            "learner": {
                "group_size": size,
                "batch_trajectories": batch,
                "max_policy_lag": lag or 1,
                "micro_batch_tokens": tokens,
                "sampling": {"max_trajectory_tokens": tokens},
                "algorithm": algorithm,
                **learner,
            },
            **sections,
        },
        "run.toml",
    )


def test_a_token_has_a_number_for_each_expert_of_each_layer():
    assert token_bytes(QWEN3_30B) == 13 + 4 + 48 * 8
    assert token_bytes({"text_config": MIXTRAL}) == 13 + 4 + 32 * 2
    assert token_bytes({**QWEN3_30B, "num_experts": 257}) == 13 + 4 + 48 * 8 * 2
    assert token_bytes({"num_hidden_layers": 4, "num_experts": 8}) is None
    assert token_bytes({}) is None


def test_a_group_that_fits_into_no_message_is_refused_with_the_longest_that_does():
    (line,), tight = too_many_experts(config(48_000), QWEN3_30B)
    assert "tokens of this model have 401 bytes each, so a group of 16 of 48000 tokens" in line
    assert (
        "(learner.sampling.max_trajectory_tokens) has 294 MiB; the broker drops what has more than 256"
        in line
    )
    assert (
        "Lower learner.sampling.max_trajectory_tokens to 41828 or learner.group_size, or set routes" in line
    )
    assert tight == []
    assert too_many_experts(config(41_828, broker={"max_queued_bytes": 1 << 30}), QWEN3_30B)[0] == []
    assert len(too_many_experts(config(41_829), QWEN3_30B)[0]) == 1
    assert fits(41_828, 401)
    assert not fits(41_829, 401)
    assert too_many_experts(config(48_000), MIXTRAL) == ([], [])


def fits(tokens, each):
    segments = [StoredSegment((f"t{i}", 0), tokens, tokens, 0, tokens * each) for i in range(16)]
    return Unit("g", "g", "train", segments, 16, complete=True).fits


@pytest.mark.parametrize("algorithm", [{"routes": "current"}, {"routes": "proximal", "updates_per_batch": 2}])
def test_without_experts_of_generators_nothing_is_said(algorithm):
    learner = {"algorithm": algorithm}
    assert too_many_experts(config(48_000, batch=32, learner=learner), QWEN3_30B) == ([], [])
    assert too_many_experts(config(48_000), {}) == ([], [])


def test_single_trajectories_and_windows_have_their_own_length():
    critic = {"critic": {}, "advantage": {"kind": "gae"}}
    alone = {"train_on": "trajectories", "algorithm": critic}
    assert too_many_experts(config(48_000, batch=2, learner=dict(alone)), QWEN3_30B) == ([], [])
    (line,), _ = too_many_experts(config(700_000, batch=2, learner=dict(alone)), QWEN3_30B)
    assert "so a trajectory of 700000 tokens" in line
    assert "tokens to 669251, or set routes" in line
    windows = {"train_on": "windows", "algorithm": critic}
    assert too_many_experts(config(700_000, learner=windows), QWEN3_30B) == ([], [])


def test_a_queue_that_cannot_hold_what_may_wait_is_said():
    refused, (line,) = too_many_experts(config(4_000, batch=256, lag=4), QWEN3_30B)
    assert refused == []
    assert "1280 of 4000 tokens (learner.sampling.max_trajectory_tokens) may wait for the learner" in line
    assert "which are 1958 MiB, but broker.max_queued_bytes is 1024 MiB" in line
    assert "set it to 2053120000" in line
    larger = {"max_queued_bytes": 2_053_120_000}
    assert too_many_experts(config(4_000, batch=256, lag=4, broker=larger), QWEN3_30B) == ([], [])
    lockstep = config(4_000, batch=256, lag=4, run={"mode": "sync"})
    assert too_many_experts(lockstep, QWEN3_30B) == ([], [])

"""Run the methods that change what the roles exchange: windows of growing trajectories, and replay."""

import json

import pytest

pytestmark = pytest.mark.timeout(600)

SHORT = ("learner.evaluation_tasks=32", "run.max_minutes=4")


def test_windows_are_trained_while_their_trajectories_grow(offbeat):
    """Responses have up to 12 tokens and windows 4, so a trajectory is trained in up to three windows."""
    run = offbeat("tppo", *SHORT, "learner.steps=30", "actor.segment_tokens=4")
    result = json.loads((run.folder / "result.json").read_text())
    assert result["ended_by"] == "all steps done"
    warm = [m for m in run.steps if m["step"] <= 10]
    trained = [m for m in run.steps if m["step"] > 10]
    assert all(m["learner/trained_tokens"] == 0 for m in warm), "only the critic learns at first"
    assert all(m["learner/trained_tokens"] > 0 for m in trained)
    lengths = [
        m["rollout/length_trained_mean_tokens"]
        for m in run.steps
        if "rollout/length_trained_mean_tokens" in m
    ]
    assert len(lengths) > 20
    assert max(lengths) <= 4
    assert sum("critic/explained_variance" in m for m in run.steps) > 20
    assert sum(m.get("critic/tokens", 0) for m in run.steps) > 1000
    assert not {"broken", "rejected"} & set(result["trajectories_by_outcome"])
    assert result["policy_lag"]["max_versions"] <= 2
    assert result["tokens_trained"] <= result["tokens_generated"]


def test_replay_keeps_its_share_and_ends_with_the_reincarnation(offbeat):
    run = offbeat(
        "remix",
        *SHORT,
        "learner.steps=16",
        "learner.algorithm.reincarnation.step=10",
        "learner.replay.stop_at_step=10",
    )
    shares = [m["replay/share"] for m in run.steps]
    assert shares[0] == 0, "nothing to replay yet"
    assert sum(shares[2:10]) / 8 == pytest.approx(0.4, abs=0.08)
    assert shares[10:] == [0] * 6
    result = json.loads((run.folder / "result.json").read_text())
    assert result["tokens_replayed"] == sum(m["learner/replayed_tokens"] for m in run.steps) > 0
    assert result["tokens_trained"] + result["tokens_replayed"] == sum(
        m["learner/trained_tokens"] for m in run.steps
    )
